//! Compute dtype of training; weights, gradients and running means are always f32.

use candle_core::DType;
use candle_gpt2_arithmetic::{number_type_for, uses};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

number_type_for! {
    /// Dtype of the activations between layers and of the operands of matrix products.
    ///
    /// In bf16, activations use half of the memory and GPUs multiply faster, but each value has only 8
    /// significant bits. Parameters, their gradients (up to rounding in products), the optimizer, norms,
    /// softmax and losses stay in f32. Part of the [`Hyperparameters`](crate::Hyperparameters).
    ComputeDType, uses::COMPUTE, [F32, BF16]
}

impl ComputeDType {
    /// Returns candle's dtype for tensors of this type.
    pub fn dtype(self) -> DType {
        match self {
            Self::BF16 => DType::BF16,
            _ => DType::F32,
        }
    }
}

impl Default for ComputeDType {
    fn default() -> Self {
        Self::F32
    }
}

impl Serialize for ComputeDType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for ComputeDType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}
