//! The type that a training computes in; weights, gradients and running means are in f32 all the same.

use std::fmt;
use std::str::FromStr;

use candle_core::DType;
use candle_gpt2_weights::UnknownName;
use serde::{Deserialize, Serialize};

/// The type of what lies between the layers, and of the factors of their products.
///
/// In bf16 the same holds a half of the memory, and GPUs multiply faster; each value keeps 8 bits. Parameters, their gradients
/// (but for the roundings of products), the optimizer, norms, softmax and losses stay in f32.
/// Part of the [`Hyperparameters`](crate::Hyperparameters).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeDType {
    /// f32.
    #[default]
    F32,
    /// bf16.
    Bf16,
}

impl ComputeDType {
    /// The type of tensors.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }
}

impl fmt::Display for ComputeDType {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str(self.dtype().as_str())
    }
}

impl FromStr for ComputeDType {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let known = [Self::F32, Self::Bf16].into_iter().find(|dtype| dtype.to_string() == name);
        known.ok_or_else(|| UnknownName { expected: "f32 or bf16".into() })
    }
}
