//! A tensor as a file stores it: name, shape, type, and where its bytes are.

use std::fmt;
use std::ops::Range;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::ggml_file::qtensor_from_ggml;
use candle_core::{DType, Device, Result, Tensor};
use gpt2_kernels::WeightFormat;

use crate::mapped_file::MappedFile;

/// The type of a stored tensor's elements.
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

    /// The format in which nothing is lost: GGUF's small integers too are computed exactly only as f32.
    pub(crate) fn weight_format(self) -> WeightFormat {
        match self {
            Self::F16 => WeightFormat::F16,
            _ => WeightFormat::F32,
        }
    }

    /// Bytes of `elements` values, where the type holds weights and they fill whole blocks.
    pub(crate) fn byte_count(self, elements: usize) -> Option<usize> {
        match self {
            Self::F16 | Self::BF16 => elements.checked_mul(2),
            Self::F32 => elements.checked_mul(4),
            Self::F64 => elements.checked_mul(8),
            Self::Quantized(dtype) => {
                let whole_blocks = elements.is_multiple_of(dtype.block_size());
                let blocks = elements / dtype.block_size();
                whole_blocks.then(|| blocks.checked_mul(dtype.type_size()))?
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

/// A tensor of a checkpoint, as its file stores it.
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
    pub(crate) bytes: Range<usize>,
    /// Distance of neighbours along each axis, in elements, where they are not in row-major order.
    pub(crate) strides: Option<Vec<usize>>,
}

impl StoredTensor {
    /// Number of elements.
    pub fn element_count(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes that the tensor takes in its file.
    pub fn stored_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Some of the rows as a tensor of its own; `None` where they do not lie one after the other, or a row does not fill whole
    /// blocks.
    pub(crate) fn rows(&self, rows: Range<usize>) -> Option<Self> {
        let row = self.dtype.byte_count(self.shape.get(1..)?.iter().product())?;
        if self.strides.is_some() {
            return None;
        }
        let mut shape = self.shape.clone();
        shape[0] = rows.len();
        let bytes = self.bytes.start + rows.start * row..self.bytes.start + rows.end * row;
        Some(Self { shape, bytes, ..self.clone() })
    }

    /// Gives `visit` the tensor in pieces of whole rows of about `piece` elements, one after the other; as a whole where it
    /// cannot be cut.
    pub(crate) fn for_each_piece<E>(
        &self,
        piece: usize,
        visit: &mut dyn FnMut(&Self) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let rows = self.shape.first().copied().unwrap_or(1);
        let step = (piece / self.shape.iter().skip(1).product::<usize>().max(1)).max(1);
        let ranges = (0..rows).step_by(step).map(|start| start..rows.min(start + step));
        match ranges.map(|rows| self.rows(rows)).collect::<Option<Vec<_>>>() {
            Some(pieces) => pieces.iter().try_for_each(visit),
            None => visit(self),
        }
    }

    /// The values in f32, read from the bytes of the file.
    pub(crate) fn read(&self, files: &[MappedFile], device: &Device) -> Result<Tensor> {
        let tensor = self.read_mapped(files, device)?;
        self.forget(files, self.bytes.clone());
        Ok(tensor)
    }

    /// Lets go of the memory behind some of the tensor's bytes.
    pub(crate) fn forget(&self, files: &[MappedFile], bytes: Range<usize>) {
        if let Some(file) = files.get(self.file) {
            file.forget(bytes);
        }
    }

    /// The values in f32, one after the other.
    pub(crate) fn values(&self, files: &[MappedFile]) -> Result<Vec<f32>> {
        self.read(files, &Device::Cpu)?.flatten_all()?.to_vec1()
    }

    fn read_mapped(&self, files: &[MappedFile], device: &Device) -> Result<Tensor> {
        let failed = |what: &str| candle_core::Error::Msg(format!("tensor `{}`: {what}", self.name));
        let bytes = files.get(self.file).and_then(|file| file.get(self.bytes.clone()));
        let bytes = bytes.ok_or_else(|| failed("its bytes are not in the file"))?;
        let dtype = match self.dtype {
            StoredDType::F32 => DType::F32,
            StoredDType::F16 => DType::F16,
            StoredDType::BF16 => DType::BF16,
            StoredDType::F64 => DType::F64,
            StoredDType::Quantized(dtype) => {
                return qtensor_from_ggml(dtype, bytes, self.shape.clone(), &Device::Cpu)?
                    .dequantize(&Device::Cpu)?
                    .to_device(device);
            }
            StoredDType::Other(_) => return Err(failed("its type holds no weights")),
        };
        let stored = match &self.strides {
            None => Tensor::from_raw_buffer(bytes, dtype, &self.shape, &Device::Cpu)?,
            Some(strides) => {
                let elements = bytes.len() / dtype.size_in_bytes();
                let flat = Tensor::from_raw_buffer(bytes, dtype, &[elements], &Device::Cpu)?;
                flat.index_select(&Tensor::new(positions(&self.shape, strides), &Device::Cpu)?, 0)?
                    .reshape(self.shape.as_slice())?
            }
        };
        stored.to_dtype(DType::F32)?.to_device(device)
    }
}

/// The place of every element, in row-major order of the shape.
fn positions(shape: &[usize], strides: &[usize]) -> Vec<i64> {
    let mut positions = vec![0];
    for (size, stride) in shape.iter().zip(strides) {
        positions = positions
            .into_iter()
            .flat_map(|start| (0..*size).map(move |step| start + (step * stride) as i64))
            .collect();
    }
    positions
}
