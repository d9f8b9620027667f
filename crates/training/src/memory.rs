//! How much memory a training takes, so that one that cannot fit is refused before the work.

use gpt2::{Gpt2Config, ParameterCounts};

use crate::Hyperparameters;

/// Bytes that a training takes at most, estimated: weights, gradients and both running means in f32; what the forward pass
/// keeps for the backward pass, of each block its input alone where it `recomputes`; the logits that exist at once.
pub fn estimated_bytes(config: &Gpt2Config, numbers: &Hyperparameters, recomputes: bool) -> u64 {
    /// Weight, gradient, mean, mean of squares.
    const COPIES: u64 = 4;
    /// Values that a block keeps of each token, in widths: norms 2, queries, keys and values 3, attention 1, its projection
    /// and that of the MLP before and after dropout 4, the masks 1, residual stream 2; the MLP's inner values are counted by
    /// themselves.
    const KEPT_WIDTHS: u64 = 13;
    /// Inner values of the MLP: before the activation and after it.
    const KEPT_INNER: u64 = 2;
    /// Logits of a chunk.
    const LOGITS: u64 = 1 << 24;
    const F32_BYTES: u64 = 4;
    let tokens = (numbers.batch_size as u64).saturating_mul(numbers.context as u64);
    let (width, inner, blocks) = (config.n_embd as u64, config.inner_width() as u64, config.n_layer as u64);
    let block = KEPT_WIDTHS * width + KEPT_INNER * inner;
    // The backward pass holds one block's gradients besides, or a block that is computed again.
    let kept = if recomputes { blocks * width + 2 * block } else { (blocks + 1) * block };
    let parameters = ParameterCounts::new(config).unique as u64;
    // From the second batch of a step on, the head's gradient is made beside the sum.
    let head = if numbers.accumulate > 1 { (config.vocab_size * config.n_embd) as u64 } else { 0 };
    let values =
        (COPIES * parameters + head).saturating_add(tokens.saturating_mul(kept)).saturating_add(LOGITS);
    values.saturating_mul(F32_BYTES)
}
