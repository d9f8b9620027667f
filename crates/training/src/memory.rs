//! How much memory a training takes, so that one that cannot fit is refused before the work.

use gpt2::{Gpt2Config, ParameterCounts};

use crate::Hyperparameters;

/// Bytes that a training takes at most, estimated: weights, gradients and both running means in f32; what the forward pass
/// keeps for the backward pass; the logits that exist at once.
pub fn estimated_bytes(config: &Gpt2Config, numbers: &Hyperparameters) -> u64 {
    /// Weight, gradient, mean, mean of squares.
    const COPIES: u64 = 4;
    /// Values that a block keeps of each token, in widths: norms 2, queries, keys and values before and behind the bias 6,
    /// attention 1, projections, their biases and their dropout 6, residual stream 2; the MLP's inner values are counted
    /// by themselves.
    const KEPT_WIDTHS: u64 = 17;
    /// Inner values of the MLP: before the bias, behind it, behind the activation.
    const KEPT_INNER: u64 = 3;
    /// Logits of a chunk, and the gradient that its product makes.
    const LOGITS: u64 = 2 << 23;
    const F32_BYTES: u64 = 4;
    let tokens = (numbers.batch_size as u64).saturating_mul(numbers.context as u64);
    let (width, inner) = (config.n_embd as u64, config.inner_width() as u64);
    let block = KEPT_WIDTHS * width + KEPT_INNER * inner;
    // The backward pass holds the gradients of about one block besides.
    let activations = tokens.saturating_mul(block).saturating_mul(config.n_layer as u64 + 1);
    let parameters = ParameterCounts::new(config).unique as u64;
    (COPIES * parameters).saturating_add(activations).saturating_add(LOGITS).saturating_mul(F32_BYTES)
}
