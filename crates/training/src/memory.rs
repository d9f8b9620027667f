//! Memory estimate for training, used to reject a run that does not fit before it starts.

use candle_core::Device;
use candle_gpt2::{Gpt2Config, ParameterCounts};
use candle_gpt2_arithmetic::MAX_CHUNK_LOGITS;
use candle_gpt2_kernels::{LOSS_ROWS, MAX_SCORES_ON_GPU};

use crate::{ComputeDType, Hyperparameters};

/// Returns a conservative estimate of the memory that training needs, in bytes.
///
/// It includes weights, gradients and both running means in f32, the activations stored for the backward
/// pass, and one chunk of logits. With `recomputes`, a block stores only its input. If the CPU kernels are
/// not used, the estimate also includes attention scores, of one block or of the sequences that an
/// NVIDIA GPU processes at a time.
///
/// ```
/// use candle_core::Device;
/// use candle_gpt2::Gpt2Config;
/// use candle_gpt2_training::{Hyperparameters, estimated_bytes};
///
/// let numbers = Hyperparameters { context: 1024, ..Hyperparameters::default() };
/// let bytes = |recomputes| estimated_bytes(&Gpt2Config::gpt2(), &numbers, recomputes, &Device::Cpu);
/// assert!(bytes(true) < bytes(false));
/// assert!(bytes(true) > 4 * 4 * 124_000_000, "weights, gradients and two means in f32");
/// ```
pub fn estimated_bytes(
    config: &Gpt2Config,
    numbers: &Hyperparameters,
    recomputes: bool,
    device: &Device,
) -> u64 {
    /// Copies of each parameter: weight, gradient, running mean, running mean of squares.
    const COPIES: u64 = 4;
    /// Number of values that a block stores per token, in units of the hidden size.
    ///
    /// These are the norms (2), queries, keys and values (3), attention (1), the projections of attention and
    /// MLP before and after dropout (4), the masks (1) and the residual stream (2). Inner values of the MLP
    /// are counted separately.
    const KEPT_WIDTHS: u64 = 13;
    /// Number of values stored per inner MLP unit: before and after the activation.
    const KEPT_INNER: u64 = 2;
    const F32_BYTES: u64 = 4;
    /// Peak number of tensors in composed operations, each as large as scores plus a logits chunk.
    const COMPOSED: u64 = 12;
    /// Peak number of these tensors with the NVIDIA GPU kernels.
    const ON_GPU: u64 = 6;
    let tokens = (numbers.batch_size as u64).saturating_mul(numbers.context as u64);
    if let Some(dictionary) = &numbers.dictionary
        && let (Ok(count), Ok(sites)) = (dictionary.parameter_count(config), dictionary.sites(config))
    {
        // Per token: all latents before the selection; the inputs as recorded, scaled and centered; output
        // and error.
        let of_token = sites.iter().map(|[(_, inputs), (_, outputs)]| {
            let of_inputs = inputs.saturating_mul(3).saturating_add(outputs.saturating_mul(4));
            dictionary.latents.saturating_mul(2).saturating_add(of_inputs) as u64
        });
        let of_token = of_token.fold(0u64, u64::saturating_add);
        // The model's weights are in memory in any case. The trained parameters also have a copy for reading.
        let values =
            (COPIES + 1).saturating_mul(count as u64).saturating_add(tokens.saturating_mul(of_token));
        return values.saturating_mul(F32_BYTES);
    }
    let (width, inner, blocks) = (config.n_embd as u64, config.inner_width() as u64, config.n_layer as u64);
    let block = KEPT_WIDTHS.saturating_mul(width).saturating_add(KEPT_INNER.saturating_mul(inner));
    // The backward pass also stores the gradients of one block, or a recomputed block.
    let kept = match recomputes {
        true => blocks.saturating_mul(width).saturating_add(block.saturating_mul(2)),
        false => blocks.saturating_add(1).saturating_mul(block),
    };
    let parameters = ParameterCounts::new(config).unique as u64;
    // After the first batch of a step, the head's gradient takes memory before it is added to the sum.
    let table = config.vocab_size.saturating_mul(config.n_embd) as u64;
    let head = if numbers.accumulate > 1 { table } else { 0 };
    let of_text = config.n_head.saturating_mul(numbers.context).saturating_mul(numbers.context) as u64;
    let chunk = (LOSS_ROWS as u64).saturating_mul(config.vocab_size as u64);
    let logits = match (device, numbers.compute_dtype) {
        (Device::Cpu, ComputeDType::F32) => MAX_CHUNK_LOGITS as u64,
        // The embedding's and the head's gradients are both in memory before they are added.
        (Device::Cuda(_), _) => {
            let scores =
                of_text.saturating_mul(numbers.batch_size as u64).min(of_text.max(MAX_SCORES_ON_GPU as u64));
            scores.saturating_add(chunk).saturating_mul(ON_GPU).saturating_add(table.saturating_mul(2))
        }
        _ => {
            let scores = of_text.saturating_mul(numbers.batch_size as u64);
            scores.saturating_add(chunk).saturating_mul(COMPOSED)
        }
    };
    let kept_bytes = numbers.compute_dtype.dtype().size_in_bytes() as u64;
    let values = COPIES.saturating_mul(parameters).saturating_add(head).saturating_add(logits);
    values.saturating_mul(F32_BYTES).saturating_add(tokens.saturating_mul(kept).saturating_mul(kept_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Estimates for an unchecked configuration saturate instead of overflowing.
    #[test]
    fn estimates_saturate() {
        const MOST: usize = usize::MAX;
        let small = Gpt2Config { n_embd: 4, n_head: 1, n_layer: 1, ..Gpt2Config::gpt2() };
        let numbers =
            Hyperparameters { context: MOST, batch_size: MOST, accumulate: 2, ..Hyperparameters::default() };
        for config in [
            Gpt2Config { n_layer: MOST, ..small.clone() },
            Gpt2Config { n_embd: MOST, ..small.clone() },
            Gpt2Config { vocab_size: MOST, ..small.clone() },
            Gpt2Config { n_positions: MOST, n_inner: Some(MOST), ..small },
        ] {
            for recomputes in [false, true] {
                assert!(estimated_bytes(&config, &numbers, recomputes, &Device::Cpu) > 1 << 60, "{config:?}");
            }
        }
    }

    /// Covers the smallest published GPT-2 with 8 windows of 1,024 tokens.
    #[test]
    fn bf16_halves_activations_but_stores_scores_and_logits() {
        let (config, numbers) =
            (Gpt2Config::gpt2(), Hyperparameters { context: 1024, ..Hyperparameters::default() });
        let halved = Hyperparameters { compute_dtype: ComputeDType::BF16, ..numbers.clone() };
        let (parameters, tokens) = (124_439_808, 8 * 1024);
        let kept = tokens * 13 * (13 * 768 + 2 * 3072);
        let f32 = estimated_bytes(&config, &numbers, false, &Device::Cpu);
        assert_eq!(f32, 4 * (4 * parameters + kept + (1 << 24)));
        let composed = 12 * (tokens * 12 * 1024 + 1024 * 50_257);
        assert_eq!(
            estimated_bytes(&config, &halved, false, &Device::Cpu),
            4 * (4 * parameters + composed) + 2 * kept
        );
    }
}
