//! The models that benches measure.

use candle_core::{Result, Shape, Tensor};
use gpt2::{Gpt2Config, Gpt2LMHead};
use gpt2_kernels::{Matrix, ParameterSource, WeightFormat};
use gpt2_testing::pattern;

/// Spread of the weights, near that of a trained model.
const WEIGHT_SCALE: f64 = 0.1;
/// Weights from a pattern, each parameter from its own place of it, in 8-bit blocks.
struct Patterns {
    offset: u64,
}

impl ParameterSource for Patterns {
    fn below(&self, name: impl ToString) -> Self {
        let step = name.to_string().bytes().fold(7, |hash, byte| hash * 31 + u64::from(byte));
        Self { offset: self.offset.wrapping_mul(17).wrapping_add(step) }
    }

    fn parameter(&self, shape: impl Into<Shape>, name: &str) -> Result<Tensor> {
        Ok(pattern(shape.into().dims(), WEIGHT_SCALE, self.below(name).offset % (1 << 32)))
    }

    fn matrix(&self, out_features: usize, in_features: usize, name: &str) -> Result<Matrix> {
        let weight = self.parameter((out_features, in_features), name)?;
        Matrix::pack(&weight, WeightFormat::Q8)
    }
}

/// GPT-2's 124M parameters in q8, with made-up weights: speed does not depend on the values.
pub(crate) fn gpt2_124m() -> Gpt2LMHead {
    let config = Gpt2Config::preset("gpt2").expect("a published model");
    Gpt2LMHead::load(&config, &Patterns { offset: 0 }).expect("a model")
}
