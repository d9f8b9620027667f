//! Made-up weights of any size, for benches: speed does not depend on the values.

use candle_core::{Result, Shape, Tensor};
use candle_gpt2_arithmetic::WeightFormat;
use candle_gpt2_kernels::{Matrix, ParameterSource};
use candle_nn::Init;

use crate::pattern;

/// Spread of the weights, near that of a trained model.
const SCALE: f64 = 0.1;

/// Weights from a pattern, each parameter from its own place of it, packed as a file's are.
#[derive(Debug, Clone, Copy)]
pub struct MadeUpWeights {
    format: WeightFormat,
    offset: u64,
}

impl MadeUpWeights {
    /// Those of a model whose matrices are held so.
    pub fn new(format: WeightFormat) -> Self {
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
