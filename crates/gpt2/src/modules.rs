//! Implements candle's `Module` for the models, with token IDs as input and no dropout.

use candle_core::{Result, Tensor};
use candle_gpt2_attention::Pass;
use candle_nn::Module;

use crate::{Block, Gpt2LMHeadModel, Gpt2Model};

/// Block with a causal mask, as in the model.
///
/// # Shapes
/// `x` `(B, T, C)`; returns the same shape.
impl Module for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_with(x, None, &mut Pass::inference())
    }
}

/// Model without its output head.
///
/// # Shapes
/// IDs `(B, T)` of u32; returns hidden states `(B, T, C)`.
impl Module for Gpt2Model {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.forward(ids)
    }
}

/// Model with its output head.
///
/// # Shapes
/// IDs `(B, T)` of u32; returns logits `(B, T, V)`.
impl Module for Gpt2LMHeadModel {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.forward(ids)
    }
}
