//! Implementations of candle's `Module`: one tensor in, one tensor out, without dropout.

use candle_core::{Result, Tensor};
use candle_nn::Module;

use crate::{FeedForward, MultiHeadAttention, Pass};

/// Computes self-attention under the mask set by [`MultiHeadAttention::with_mask`].
///
/// By default every token sees every other, as in PyTorch's layer.
///
/// # Shapes
/// `x` `(B, T, d_in)`; returns `(B, T, d_out)`.
impl Module for MultiHeadAttention {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_masked(x, &self.mask)
    }
}

/// Runs the feed-forward network in inference, without dropout.
///
/// # Shapes
/// `x` `(B, T, width)`; returns the same shape.
impl Module for FeedForward {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_with(x, &mut Pass::inference())
    }
}
