//! Made-up weights of any size for benchmarks, because speed does not depend on the values.

use candle_core::{Result, Shape, Tensor};
use candle_gpt2_arithmetic::NumberType;
use candle_gpt2_kernels::{Matrix, ParameterSource};
use candle_nn::Init;

use crate::pattern;

/// Range of the weights, close to a trained model's.
const SCALE: f64 = 0.1;

/// Weights from a pattern, packed like weights from a file.
///
/// Each parameter has its own offset in the pattern.
#[derive(Debug, Clone, Copy)]
pub struct MadeUpWeights {
    format: NumberType,
    offset: u64,
}

impl MadeUpWeights {
    /// Creates weights with matrices in this format.
    pub fn new(format: NumberType) -> Self {
        Self { format, offset: 0 }
    }
}

impl ParameterSource for MadeUpWeights {
    fn below(&self, name: impl ToString) -> Self {
        let step = name.to_string().bytes().fold(7, |hash, byte| hash * 31 + u64::from(byte));
        Self { offset: self.offset.wrapping_mul(17).wrapping_add(step), ..*self }
    }

    fn parameter(&self, shape: impl Into<Shape>, name: &str, _: Init) -> Result<Tensor> {
        Ok(pattern(shape.into().dims(), SCALE, self.below(name).offset % (1 << 32)))
    }

    fn matrix(&self, out_features: usize, in_features: usize, name: &str, init: Init) -> Result<Matrix> {
        Matrix::pack(&self.parameter((out_features, in_features), name, init)?, self.format)
    }
}
