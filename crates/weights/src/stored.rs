//! A tensor as a file stores it: name, shape, type, and where its bytes are.

use std::borrow::Cow;
use std::convert::Infallible;
use std::fmt;
use std::ops::Range;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::ggml_file::qtensor_from_ggml;
use candle_core::{Device, Tensor};
use candle_gpt2_arithmetic::WeightFormat;
use half::{bf16, f16};

use crate::checkpoint_file::CheckpointFile;
use crate::crc32c;
use crate::progress::PIECE;
use crate::{WeightDType, WeightsError};

/// The type of a stored tensor's elements.
/// Part of a [`StoredTensor`], of which [`Checkpoint::tensors`](crate::Checkpoint::tensors) has a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoredDType {
    /// 32-bit floating point.
    F32,
    /// 16-bit floating point.
    F16,
    /// 16-bit floating point with the exponent of F32.
    BF16,
    /// 64-bit floating point.
    F64,
    /// Blocks of small integers with scales, as GGUF files have them.
    Quantized(GgmlDType),
    /// A type that holds no weights, by the file's name for it: fit for buffers only.
    Other(&'static str),
}

impl StoredDType {
    /// Whether values of this type can be weights.
    pub fn holds_weights(self) -> bool {
        !matches!(self, Self::Other(_))
    }

    /// The narrowest format that holds the weights as they are stored. Q5 holds blocks of Q4_0 too, whose integers are a part of
    /// its own; Q4 has another table.
    pub(crate) fn weight_format(self) -> WeightFormat {
        match self {
            Self::F16 => WeightFormat::F16,
            Self::Quantized(GgmlDType::Q8_0) => WeightFormat::Q8,
            Self::Quantized(GgmlDType::Q5_0 | GgmlDType::Q4_0) => WeightFormat::Q5,
            _ => WeightFormat::F32,
        }
    }

    /// The type that users know a quantized type by, if it is computed as it is stored.
    pub(crate) fn quantized_dtype(self) -> Option<WeightDType> {
        match self {
            Self::Quantized(GgmlDType::Q8_0) => Some(WeightDType::Q8),
            Self::Quantized(GgmlDType::Q5_0) => Some(WeightDType::Q5),
            Self::Quantized(GgmlDType::Q4_0) => Some(WeightDType::Q4),
            _ => None,
        }
    }

    /// Whether `format` is asked for by the name of this quantized type, which is then computed as it is stored.
    pub(crate) fn is_computed_in(self, format: WeightFormat) -> bool {
        self.quantized_dtype().is_some_and(|dtype| dtype.format() == Some(format))
    }

    /// Bytes of `elements` values, if the type holds weights and they fill whole blocks.
    pub(crate) fn byte_count(self, elements: usize) -> Option<u64> {
        let elements = elements as u64;
        match self {
            Self::F16 | Self::BF16 => elements.checked_mul(2),
            Self::F32 => elements.checked_mul(4),
            Self::F64 => elements.checked_mul(8),
            Self::Quantized(dtype) => {
                let block = dtype.block_size() as u64;
                let bytes = (elements / block).checked_mul(dtype.type_size() as u64);
                bytes.filter(|_| elements.is_multiple_of(block))
            }
            Self::Other(_) => None,
        }
    }
}

impl fmt::Display for StoredDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::BF16 => "BF16",
            Self::F64 => "F64",
            Self::Quantized(dtype) => match dtype {
                GgmlDType::Q4_0 => "Q4_0",
                GgmlDType::Q4_1 => "Q4_1",
                GgmlDType::Q5_0 => "Q5_0",
                GgmlDType::Q5_1 => "Q5_1",
                GgmlDType::Q8_0 => "Q8_0",
                GgmlDType::Q8_1 => "Q8_1",
                GgmlDType::Q2K => "Q2_K",
                GgmlDType::Q3K => "Q3_K",
                GgmlDType::Q4K => "Q4_K",
                GgmlDType::Q5K => "Q5_K",
                GgmlDType::Q6K => "Q6_K",
                GgmlDType::Q8K => "Q8_K",
                _ => "quantized",
            },
            Self::Other(name) => name,
        })
    }
}

/// A tensor of a checkpoint, as its file stores it. [`Checkpoint::tensors`](crate::Checkpoint::tensors) lists them.
#[derive(Debug, Clone)]
pub struct StoredTensor {
    /// Name in the file.
    pub name: String,
    /// Shape in the file.
    pub shape: Vec<usize>,
    /// Type in the file.
    pub dtype: StoredDType,
    /// Which of the checkpoint's files holds it.
    pub(crate) file: usize,
    /// Where its bytes are in that file.
    pub(crate) bytes: Range<u64>,
    /// Distance of neighbours along each axis, in elements, if they are not in row-major order.
    pub(crate) strides: Option<Vec<usize>>,
    /// CRC-32C of all bytes, if the file records it.
    pub(crate) checksum: Option<u32>,
}

impl StoredTensor {
    /// Number of elements.
    pub fn element_count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes that the tensor takes in its file.
    pub fn stored_bytes(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }

    /// Some of the rows as a tensor of its own; `None` if they do not lie one after the other, or a row does not fill whole
    /// blocks.
    pub(crate) fn rows(&self, rows: Range<usize>) -> Option<Self> {
        let row = self.dtype.byte_count(self.shape.get(1..)?.iter().product())?;
        if self.strides.is_some() {
            return None;
        }
        let mut shape = self.shape.clone();
        shape[0] = rows.len();
        let place = |row_index: usize| self.bytes.start + row_index as u64 * row;
        let bytes = place(rows.start)..place(rows.end);
        let checksum = self.checksum.filter(|_| bytes == self.bytes);
        Some(Self { shape, bytes, checksum, ..self.clone() })
    }

    /// Gives `visit` the tensor in pieces of whole rows of about `piece` elements, one after the other; as a whole if it
    /// cannot be cut.
    pub(crate) fn for_each_piece<E>(
        &self,
        piece: usize,
        visit: &mut dyn FnMut(&Self) -> Result<(), E>,
    ) -> Result<(), E> {
        let rows = self.shape.first().copied().unwrap_or(1);
        let step = (piece / self.shape.iter().skip(1).product::<usize>().max(1)).max(1);
        let ranges = (0..rows).step_by(step).map(|start| start..rows.min(start + step));
        match ranges.map(|rows| self.rows(rows)).collect::<Option<Vec<_>>>() {
            Some(pieces) => pieces.iter().try_for_each(visit),
            None => visit(self),
        }
    }

    /// The bytes of the file.
    pub(crate) fn stored<'a>(&self, files: &'a [CheckpointFile]) -> Result<Cow<'a, [u8]>, WeightsError> {
        let file = files.get(self.file).ok_or_else(|| self.refused(files, "its file is not there"))?;
        file.bytes(self.bytes.clone()).map_err(|error| {
            let (path, name) = (file.path().to_owned(), self.name.clone());
            WeightsError::ReadTensor { path, name, error }
        })
    }

    /// Compares the bytes with the checksum of the file, if it records one.
    pub(crate) fn check_bytes(&self, files: &[CheckpointFile]) -> Result<(), WeightsError> {
        if self.checksum.is_none() {
            return Ok(());
        }
        let mut found = 0;
        let mut start = 0;
        while start < self.stored_bytes() {
            let end = self.stored_bytes().min(start + PIECE as u64);
            let part = self.part(start..end);
            found = crc32c::extended(found, &part.stored(files)?);
            part.forget(files, part.bytes.clone());
            start = end;
        }
        self.check_sum(found, files)
    }

    /// Compares the checksum of all bytes with that of the file, if it records one.
    pub(crate) fn check_sum(&self, found: u32, files: &[CheckpointFile]) -> Result<(), WeightsError> {
        match self.checksum.is_none_or(|expected| expected == found) {
            true => Ok(()),
            false => Err(self.refused(
                files,
                "its bytes do not match the checksum of the index: the data file is damaged; download it again",
            )),
        }
    }

    /// The bytes of memory that [`StoredTensor::stored`] takes: none if the file lies in memory.
    pub(crate) fn copied_bytes(&self, files: &[CheckpointFile]) -> u64 {
        let is_copied = files.get(self.file).is_some_and(CheckpointFile::is_copied);
        if is_copied { self.stored_bytes() } else { 0 }
    }

    /// The most bytes of memory that [`StoredTensor::values`] takes, the values included.
    pub(crate) fn bytes_of_values(&self, files: &[CheckpointFile]) -> u64 {
        let in_f32 = |tensor: &Self| (tensor.element_count() as u64).saturating_mul(size_of::<f32>() as u64);
        let mut beside = 0;
        let Ok(()) = self.for_each_piece(PIECE, &mut |piece| {
            let converted = match piece.dtype {
                // Blocks in candle's memory, and their values once as a tensor and once as a list.
                StoredDType::Quantized(_) => {
                    piece.stored_bytes().saturating_add(in_f32(piece).saturating_mul(2))
                }
                // What lies between the elements is converted too: of the widest type, two bytes give four.
                _ if piece.strides.is_some() => piece.stored_bytes().saturating_mul(2),
                _ => 0,
            };
            beside = beside.max(piece.copied_bytes(files).saturating_add(converted));
            Ok::<_, Infallible>(())
        });
        in_f32(self).saturating_add(beside)
    }

    /// Some of the bytes, for those who read nothing else of it.
    pub(crate) fn part(&self, bytes: Range<u64>) -> Self {
        let bytes = self.bytes.start + bytes.start..self.bytes.start + bytes.end;
        Self { bytes, checksum: None, ..self.clone() }
    }

    /// Lets go of the memory behind some of the tensor's bytes.
    pub(crate) fn forget(&self, files: &[CheckpointFile], bytes: Range<u64>) {
        if let Some(file) = files.get(self.file) {
            file.forget(bytes);
        }
    }

    /// The values in f32 as a tensor.
    pub(crate) fn read(&self, files: &[CheckpointFile], device: &Device) -> Result<Tensor, WeightsError> {
        let values = self.values(files)?;
        Ok(Tensor::from_vec(values, self.shape.as_slice(), &Device::Cpu)?.to_device(device)?)
    }

    /// The values in f32, one after the other. Beside them no more than a piece of the bytes is held.
    pub(crate) fn values(&self, files: &[CheckpointFile]) -> Result<Vec<f32>, WeightsError> {
        let mut values = Vec::new();
        let mut checksum = 0;
        let count = self.element_count();
        values
            .try_reserve_exact(count)
            .map_err(|_| self.refused(files, "there is no memory for its values"))?;
        self.for_each_piece(PIECE, &mut |piece| {
            let bytes = piece.stored(files)?;
            if self.checksum.is_some() {
                checksum = crc32c::extended(checksum, &bytes);
            }
            match &piece.strides {
                None => piece.dtype.append_values(&bytes, &mut values),
                Some(strides) => {
                    let mut in_order_of_file = Vec::new();
                    let read = piece.dtype.append_values(&bytes, &mut in_order_of_file);
                    let places = (0..count).map(|index| place(index, &piece.shape, strides));
                    // The readers have checked that the last place is inside.
                    values.extend(places.filter_map(|place| in_order_of_file.get(place)));
                    read
                }
            }
            .map_err(|what| self.refused(files, &what))?;
            drop(bytes);
            piece.forget(files, piece.bytes.clone());
            Ok::<_, WeightsError>(())
        })?;
        self.check_sum(checksum, files)?;
        Ok(values)
    }

    fn refused(&self, files: &[CheckpointFile], what: &str) -> WeightsError {
        let path = files.get(self.file).map(|file| file.path().to_owned()).unwrap_or_default();
        WeightsError::NotWeights { path, what: format!("tensor `{}`: {what}", self.name) }
    }
}

impl StoredDType {
    /// Appends the values of bytes in f32.
    fn append_values(self, bytes: &[u8], to: &mut Vec<f32>) -> Result<(), String> {
        match self {
            Self::F32 => to.extend(bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value))),
            Self::F16 => {
                to.extend(bytes.as_chunks().0.iter().map(|value| f16::from_le_bytes(*value).to_f32()))
            }
            Self::BF16 => {
                to.extend(bytes.as_chunks().0.iter().map(|value| bf16::from_le_bytes(*value).to_f32()))
            }
            #[expect(clippy::cast_possible_truncation, reason = "to the nearest f32")]
            Self::F64 => to.extend(bytes.as_chunks().0.iter().map(|value| f64::from_le_bytes(*value) as f32)),
            Self::Quantized(dtype) => {
                let elements = bytes.len() / dtype.type_size() * dtype.block_size();
                let aligned = Aligned::new(bytes);
                let values = qtensor_from_ggml(dtype, aligned.bytes(), vec![elements], &Device::Cpu)
                    .and_then(|blocks| blocks.dequantize(&Device::Cpu)?.to_vec1::<f32>());
                to.extend(values.map_err(|error| error.to_string())?);
            }
            Self::Other(_) => return Err("its type holds no weights".into()),
        }
        Ok(())
    }
}

/// Bytes where blocks may lie: candle reads these in their place, and their fields are of up to four bytes.
struct Aligned<'a> {
    bytes: Cow<'a, [u8]>,
    start: usize,
}

impl<'a> Aligned<'a> {
    const ALIGNMENT: usize = align_of::<u32>();

    fn new(bytes: &'a [u8]) -> Self {
        if bytes.as_ptr().align_offset(Self::ALIGNMENT) == 0 {
            return Self { bytes: bytes.into(), start: 0 };
        }
        let mut copy = vec![0; bytes.len() + Self::ALIGNMENT];
        let start = copy.as_ptr().align_offset(Self::ALIGNMENT).min(Self::ALIGNMENT);
        copy[start..start + bytes.len()].copy_from_slice(bytes);
        Self { bytes: copy.into(), start }
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}

/// Where the element of this index, in row-major order of the shape, lies.
fn place(index: usize, shape: &[usize], strides: &[usize]) -> usize {
    let mut rest = index;
    let axes = shape.iter().zip(strides).rev();
    axes.map(|(size, stride)| {
        let step = rest % size;
        rest /= size;
        step * stride
    })
    .sum()
}
