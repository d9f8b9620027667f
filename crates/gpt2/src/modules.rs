//! The models as candle's modules: ids in, in inference.

use candle_core::{Result, Tensor};
use candle_nn::Module;

use crate::{Gpt2LMHeadModel, Gpt2Model};

/// # Shapes
/// Ids `(B, T)` of u32; returns hidden states `(B, T, C)`.
impl Module for Gpt2Model {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.forward(ids)
    }
}

/// # Shapes
/// Ids `(B, T)` of u32; returns logits `(B, T, V)`.
impl Module for Gpt2LMHeadModel {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.forward(ids)
    }
}
