//! The types in which a cache holds keys and values.

use std::fmt;
use std::str::FromStr;

use candle_core::DType;
use candle_gpt2_arithmetic::{KvFormat, KvSizes};

/// The type in which a cache holds keys and values.
///
/// ```
/// use candle_core::DType;
/// use candle_gpt2_kernels::KvDType;
///
/// assert_eq!("f16".parse(), Ok(KvDType::F16));
/// assert_eq!(KvDType::from(DType::F32), KvDType::F32);
/// assert_eq!(KvDType::F32.bytes_per_token(12, 64), 2 * 12 * 64 * 4);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KvDType {
    /// 32-bit floating point.
    F32,
    /// 16-bit floating point: the nearest of 11 significant bits, up to 65,504.
    F16,
    /// 8-bit integers with scales in f16, 8.75 bits a number, on the CPU; see [`KvFormat::Q8`].
    Q8,
    /// Another type of tensors: what a model's weights are held in on a GPU.
    Other(DType),
}

impl KvDType {
    /// Those that a user may choose, with their names.
    pub const NAMES: [(&str, Self); 3] = [("f32", Self::F32), ("f16", Self::F16), ("q8", Self::Q8)];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Q8 => "q8",
            Self::Other(dtype) => dtype.as_str(),
        }
    }

    /// Bytes that the keys and values of a token take in one layer, without what fills up heads to a multiple of 16.
    pub fn bytes_per_token(self, num_heads: usize, head_dim: usize) -> usize {
        let sizes = KvSizes { heads: num_heads, key_dim: head_dim, value_dim: head_dim };
        match self {
            Self::Q8 => KvFormat::Q8.bytes_per_token(sizes),
            Self::F32 | Self::F16 | Self::Other(_) => {
                self.of_tensors().map_or(0, |dtype| dtype.size_in_bytes()) * 2 * num_heads * head_dim
            }
        }
    }

    /// How the CPU's kernel holds it.
    pub(crate) fn on_cpu(self) -> Option<KvFormat> {
        match self {
            Self::F32 => Some(KvFormat::F32),
            Self::F16 => Some(KvFormat::F16),
            Self::Q8 => Some(KvFormat::Q8),
            Self::Other(_) => None,
        }
    }

    /// The type of tensors that hold it.
    pub(crate) fn of_tensors(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::Q8 => None,
            Self::Other(dtype) => Some(dtype),
        }
    }
}

impl fmt::Display for KvDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<DType> for KvDType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::F16 => Self::F16,
            other => Self::Other(other),
        }
    }
}

/// A name that is none of [`KvDType::NAMES`]. What parsing a [`KvDType`] returns then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{found}` is not a type of the KV cache; choose one of f32, f16 and q8")]
pub struct UnknownKvDType {
    /// The name.
    pub found: String,
}

impl FromStr for KvDType {
    type Err = UnknownKvDType;

    fn from_str(name: &str) -> Result<Self, UnknownKvDType> {
        let known = Self::NAMES.iter().find(|(known, _)| *known == name);
        known.map(|(_, dtype)| *dtype).ok_or_else(|| UnknownKvDType { found: name.to_owned() })
    }
}
