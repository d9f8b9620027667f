//! A tensor as a file stores it: name, shape, type, and where its bytes are.

use std::fmt;
use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};

/// The type of a stored tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredDType {
    /// 32-bit floating point.
    F32,
    /// 16-bit floating point.
    F16,
    /// 16-bit floating point with the exponent of F32.
    BF16,
    /// 64-bit floating point.
    F64,
    /// A type that holds no weights, by the file's name for it: fit for buffers only.
    Other(&'static str),
}

impl StoredDType {
    /// The candle type with the same bits, where the type can hold weights.
    pub fn candle(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::BF16 => Some(DType::BF16),
            Self::F64 => Some(DType::F64),
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
    /// Where its bytes are in the file.
    pub(crate) bytes: Range<usize>,
}

impl StoredTensor {
    /// Number of elements.
    pub fn element_count(&self) -> usize {
        self.shape.iter().product()
    }

    /// The values in f32, read from the bytes of the file.
    pub(crate) fn read(&self, file: &[u8], device: &Device) -> Result<Tensor> {
        let failed = |what: &str| candle_core::Error::Msg(format!("tensor `{}`: {what}", self.name));
        let dtype = self
            .dtype
            .candle()
            .ok_or_else(|| failed("its type holds no weights"))?;
        let bytes = file
            .get(self.bytes.clone())
            .ok_or_else(|| failed("its bytes are not in the file"))?;
        let stored = Tensor::from_raw_buffer(bytes, dtype, &self.shape, &Device::Cpu)?;
        stored.to_dtype(DType::F32)?.to_device(device)
    }
}
