//! The types of cached keys and values, by their names.

use std::str::FromStr;

use candle_core::DType;

use crate::UnknownName;

/// A type of cached keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    F16,
}

impl KvType {
    /// The type's name: f32 or f16.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
        }
    }
}

impl From<KvType> for DType {
    fn from(kv_type: KvType) -> Self {
        match kv_type {
            KvType::F32 => Self::F32,
            KvType::F16 => Self::F16,
        }
    }
}

impl FromStr for KvType {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "f32" => Ok(Self::F32),
            "f16" => Ok(Self::F16),
            _ => Err(UnknownName { expected: "f32 or f16".into() }),
        }
    }
}
