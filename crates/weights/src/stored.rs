//! Stored tensors: name, shape, dtype and location of the bytes in a file.

use std::borrow::Cow;
use std::convert::Infallible;
use std::fmt;
use std::ops::Range;

use candle_core::quantized::ggml_file::qtensor_from_ggml;
use candle_core::{Device, Tensor};
use candle_gpt2_arithmetic::NumberType;
use half::{bf16, f16};

use crate::checkpoint_file::CheckpointFile;
use crate::crc32c;
use crate::ggml::GgmlType;
use crate::progress::PIECE;
use crate::{WeightDType, WeightsError};

/// Element type of a stored tensor.
///
/// Part of a [`StoredTensor`]; see [`Checkpoint::tensors`](crate::Checkpoint::tensors).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoredDType {
    /// Element type that can hold weights.
    Weights(NumberType),
    /// Type that cannot hold weights, named as in the file; valid only for buffers.
    Other(&'static str),
}

impl StoredDType {
    /// Whether this type can hold weights.
    pub fn holds_weights(self) -> bool {
        !matches!(self, Self::Other(_))
    }

    /// Whether values are stored as blocks of small integers with scales, as in GGUF files.
    pub(crate) fn is_blocks(self) -> bool {
        matches!(self, Self::Weights(dtype) if dtype.is_blocks())
    }

    /// Returns the narrowest packed type that represents the stored weights exactly.
    ///
    /// Q5 also represents Q4_0 blocks, because its integer range includes theirs. Q4 uses a different
    /// value table.
    pub(crate) fn packed_dtype(self) -> NumberType {
        match self {
            Self::Weights(NumberType::F16) => NumberType::F16,
            Self::Weights(NumberType::Q8_0) => NumberType::Q8,
            Self::Weights(NumberType::Q5_0 | NumberType::Q4_0) => NumberType::Q5,
            _ => NumberType::F32,
        }
    }

    /// Returns the user-facing integer dtype that represents this quantized type exactly.
    pub(crate) fn quantized_dtype(self) -> Option<WeightDType> {
        match self {
            Self::Weights(NumberType::Q8_0) => Some(WeightDType::Q8),
            Self::Weights(NumberType::Q5_0) => Some(WeightDType::Q5),
            Self::Weights(NumberType::Q4_0) => Some(WeightDType::Q4),
            _ => None,
        }
    }

    /// Whether weights of this quantized type load as `dtype` without further rounding.
    pub(crate) fn is_computed_in(self, dtype: NumberType) -> bool {
        self.quantized_dtype().is_some_and(|quantized| quantized.number_type() == dtype)
    }

    /// Returns the size of `elements` values in bytes.
    ///
    /// `None` if the type cannot hold weights, or the values do not fill whole blocks.
    pub(crate) fn byte_count(self, elements: usize) -> Option<u64> {
        match self {
            Self::Weights(dtype) => dtype.bytes(elements as u64),
            Self::Other(_) => None,
        }
    }
}

impl fmt::Display for StoredDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Weights(dtype) => f.write_str(&dtype.name().to_uppercase()),
            Self::Other(name) => f.write_str(name),
        }
    }
}

/// Tensor of a checkpoint as stored in its file.
///
/// [`Checkpoint::tensors`](crate::Checkpoint::tensors) lists them.
#[derive(Debug, Clone)]
pub struct StoredTensor {
    /// Name in the file.
    pub name: String,
    /// Shape in the file.
    pub shape: Vec<usize>,
    /// Dtype in the file.
    pub dtype: StoredDType,
    /// Index of the checkpoint file that contains the tensor.
    pub(crate) file: usize,
    /// Byte range in that file.
    pub(crate) bytes: Range<u64>,
    /// Strides in elements; `None` for row-major order.
    pub(crate) strides: Option<Vec<usize>>,
    /// CRC-32C of all bytes, if the file records it.
    pub(crate) checksum: Option<u32>,
}

impl StoredTensor {
    /// Returns the number of elements.
    pub fn element_count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the size of the tensor in its file, in bytes.
    pub fn stored_bytes(&self) -> u64 {
        self.bytes.end - self.bytes.start
    }

    /// Returns a range of rows as a tensor.
    ///
    /// `None` if the rows are not consecutive, or a row does not fill whole blocks.
    pub(crate) fn rows(&self, rows: Range<usize>) -> Option<Self> {
        let row = self.dtype.byte_count(self.shape.get(1..)?.iter().product())?;
        if self.strides.is_some() {
            return None;
        }
        let mut shape = self.shape.clone();
        shape[0] = rows.len();
        let offset = |row_index: usize| self.bytes.start + row_index as u64 * row;
        let bytes = offset(rows.start)..offset(rows.end);
        let checksum = self.checksum.filter(|_| bytes == self.bytes);
        Some(Self { shape, bytes, checksum, ..self.clone() })
    }

    /// Calls `visit` with consecutive chunks of whole rows, about `piece` elements each.
    ///
    /// A tensor that cannot be split is passed as a whole.
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

    /// Returns the tensor's bytes as stored in the file.
    pub(crate) fn stored<'a>(&self, files: &'a [CheckpointFile]) -> Result<Cow<'a, [u8]>, WeightsError> {
        let file = files.get(self.file).ok_or_else(|| self.refused(files, "its file is missing"))?;
        file.bytes(self.bytes.clone()).map_err(|error| {
            let (path, name) = (file.path().to_owned(), self.name.clone());
            WeightsError::ReadTensor { path, name, error }
        })
    }

    /// Verifies the bytes against the file's checksum, if the file records one.
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

    /// Compares a checksum of all bytes with the file's checksum, if the file records one.
    pub(crate) fn check_sum(&self, found: u32, files: &[CheckpointFile]) -> Result<(), WeightsError> {
        match self.checksum.is_none_or(|expected| expected == found) {
            true => Ok(()),
            false => Err(self.refused(
                files,
                "its bytes do not match the checksum of the index: the data file is damaged; download it again",
            )),
        }
    }

    /// Returns the memory required by [`StoredTensor::stored`], in bytes; 0 if the file is in memory.
    pub(crate) fn copied_bytes(&self, files: &[CheckpointFile]) -> u64 {
        let is_copied = files.get(self.file).is_some_and(CheckpointFile::is_copied);
        if is_copied { self.stored_bytes() } else { 0 }
    }

    /// Returns the peak memory of [`StoredTensor::values`], in bytes, including the values.
    pub(crate) fn bytes_of_values(&self, files: &[CheckpointFile]) -> u64 {
        let in_f32 = |tensor: &Self| (tensor.element_count() as u64).saturating_mul(size_of::<f32>() as u64);
        let mut extra = 0;
        let Ok(()) = self.for_each_piece(PIECE, &mut |piece| {
            let converted = match piece.dtype {
                // Blocks in candle's memory, plus their values as a tensor and as a vector.
                dtype if dtype.is_blocks() => {
                    piece.stored_bytes().saturating_add(in_f32(piece).saturating_mul(2))
                }
                // Gaps between the elements are converted too; at worst, two bytes become four.
                _ if piece.strides.is_some() => piece.stored_bytes().saturating_mul(2),
                _ => 0,
            };
            extra = extra.max(piece.copied_bytes(files).saturating_add(converted));
            Ok::<_, Infallible>(())
        });
        in_f32(self).saturating_add(extra)
    }

    /// Returns a tensor that covers only a byte range, for callers that ignore its shape.
    pub(crate) fn part(&self, bytes: Range<u64>) -> Self {
        let bytes = self.bytes.start + bytes.start..self.bytes.start + bytes.end;
        Self { bytes, checksum: None, ..self.clone() }
    }

    /// Releases the memory behind some of the tensor's bytes.
    pub(crate) fn forget(&self, files: &[CheckpointFile], bytes: Range<u64>) {
        if let Some(file) = files.get(self.file) {
            file.forget(bytes);
        }
    }

    /// Reads the values as an f32 tensor.
    pub(crate) fn read(&self, files: &[CheckpointFile], device: &Device) -> Result<Tensor, WeightsError> {
        let values = self.values(files)?;
        Ok(Tensor::from_vec(values, self.shape.as_slice(), &Device::Cpu)?.to_device(device)?)
    }

    /// Reads the values in f32, in row-major order.
    ///
    /// Apart from the values, only one chunk of bytes is in memory at a time.
    pub(crate) fn values(&self, files: &[CheckpointFile]) -> Result<Vec<f32>, WeightsError> {
        let mut values = Vec::new();
        let mut checksum = 0;
        let count = self.element_count();
        values
            .try_reserve_exact(count)
            .map_err(|_| self.refused(files, "cannot allocate memory for its values"))?;
        self.for_each_piece(PIECE, &mut |piece| {
            let bytes = piece.stored(files)?;
            if self.checksum.is_some() {
                checksum = crc32c::extended(checksum, &bytes);
            }
            match &piece.strides {
                None => piece.dtype.append_values(&bytes, &mut values),
                Some(strides) => {
                    let mut in_file_order = Vec::new();
                    let read = piece.dtype.append_values(&bytes, &mut in_file_order);
                    let indices = (0..count).map(|index| storage_index(index, &piece.shape, strides));
                    // The readers have verified that the last element is within the bytes.
                    values.extend(indices.filter_map(|index| in_file_order.get(index)));
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
    /// Converts bytes to f32 values and appends them.
    fn append_values(self, bytes: &[u8], to: &mut Vec<f32>) -> Result<(), String> {
        let no_weights = "its dtype cannot hold weights";
        let Self::Weights(dtype) = self else { return Err(no_weights.into()) };
        match dtype {
            NumberType::F32 => to.extend(bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value))),
            NumberType::F16 => {
                to.extend(bytes.as_chunks().0.iter().map(|value| f16::from_le_bytes(*value).to_f32()))
            }
            NumberType::BF16 => {
                to.extend(bytes.as_chunks().0.iter().map(|value| bf16::from_le_bytes(*value).to_f32()))
            }
            #[expect(clippy::cast_possible_truncation, reason = "to the nearest f32")]
            NumberType::F64 => {
                to.extend(bytes.as_chunks().0.iter().map(|value| f64::from_le_bytes(*value) as f32))
            }
            _ => {
                let dtype = GgmlType::of(dtype).map(|ggml| ggml.candle).ok_or(no_weights)?;
                let elements = bytes.len() / dtype.type_size() * dtype.block_size();
                let aligned = Aligned::new(bytes);
                let values = qtensor_from_ggml(dtype, aligned.bytes(), vec![elements], &Device::Cpu)
                    .and_then(|blocks| blocks.dequantize(&Device::Cpu)?.to_vec1::<f32>());
                to.extend(values.map_err(|error| error.to_string())?);
            }
        }
        Ok(())
    }
}

/// Bytes aligned for quantized blocks.
///
/// candle reads the blocks in place, and their fields are up to four bytes wide.
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

/// Returns the storage position of an element, given its row-major index.
fn storage_index(index: usize, shape: &[usize], strides: &[usize]) -> usize {
    let mut rest = index;
    let axes = shape.iter().zip(strides).rev();
    axes.map(|(size, stride)| {
        let step = rest % size;
        rest /= size;
        step * stride
    })
    .sum()
}
