//! The layers as candle's modules: one tensor in, one tensor out, in inference.

use candle_core::{Result, Tensor};
use candle_nn::Module;

use crate::{AttentionMask, FeedForward, MultiHeadAttention, Pass};

/// Self-attention in which every token sees every other one, as PyTorch's layer without a mask. For another mask, give a
/// `Sequential` the function `move |x| layer.forward_masked(x, &AttentionMask::Causal)`.
///
/// # Shapes
/// `x` `(B, T, d_in)`; returns `(B, T, d_out)`.
impl Module for MultiHeadAttention {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_masked(x, &AttentionMask::Bidirectional)
    }
}

/// # Shapes
/// `x` `(B, T, width)`; returns the same.
impl Module for FeedForward {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_with(x, &mut Pass::inference())
    }
}
