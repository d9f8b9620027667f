//! The types of numbers that a model is held in, by their names.

use std::str::FromStr;

use candle_core::DType;
use gpt2_weights::WeightFormat;

use crate::{EngineError, UnknownName};

/// A type of weights: how the CPU holds it, and how a GPU does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightType {
    name: &'static str,
    cpu: Option<WeightFormat>,
    gpu: Option<DType>,
}

const WEIGHT_TYPES: [WeightType; 6] = [
    WeightType { name: "f32", cpu: Some(WeightFormat::F32), gpu: Some(DType::F32) },
    WeightType { name: "f16", cpu: Some(WeightFormat::F16), gpu: Some(DType::F16) },
    WeightType { name: "bf16", cpu: None, gpu: Some(DType::BF16) },
    WeightType { name: "q8", cpu: Some(WeightFormat::Q8), gpu: None },
    WeightType { name: "q6", cpu: Some(WeightFormat::Q6), gpu: None },
    WeightType { name: "q4", cpu: Some(WeightFormat::Q4), gpu: None },
];

impl WeightType {
    /// The type's name: f32, f16, bf16, q8, q6 or q4.
    pub fn name(self) -> &'static str {
        self.name
    }

    pub(crate) fn on_cpu(self) -> Result<WeightFormat, EngineError> {
        self.cpu.ok_or(EngineError::NotOnCpu { name: self.name })
    }

    pub(crate) fn on_gpu(self) -> Result<DType, EngineError> {
        self.gpu.ok_or(EngineError::NotOnGpu { name: self.name })
    }
}

impl FromStr for WeightType {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let known = WEIGHT_TYPES.iter().find(|known| known.name == name);
        known.copied().ok_or_else(|| UnknownName {
            expected: format!("one of {}", WEIGHT_TYPES.map(|known| known.name).join(", ")),
        })
    }
}

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
