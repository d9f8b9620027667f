//! How much memory a training takes, so that one that cannot fit is refused before the work.

use candle_core::Device;
use candle_gpt2::{Gpt2Config, ParameterCounts};
use candle_gpt2_arithmetic::LOGITS_AT_ONCE;
use candle_gpt2_kernels::{LOSS_ROWS, MOST_SCORES_ON_GPU};

use crate::{ComputeDType, Hyperparameters};

/// Bytes that a training takes at most, estimated: weights, gradients and both running means in f32; what the forward pass
/// keeps for the backward pass, of each block its input alone if it `recomputes`; the logits that exist at once. Where the CPU's
/// kernels do not compute, the scores of one block's attention, or of the texts that an NVIDIA GPU has at once, exist besides.
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
    /// Weight, gradient, mean, mean of squares.
    const COPIES: u64 = 4;
    /// Values that a block keeps of each token, in widths: norms 2, queries, keys and values 3, attention 1, its projection
    /// and that of the MLP before and after dropout 4, the masks 1, residual stream 2; the MLP's inner values are counted by
    /// themselves.
    const KEPT_WIDTHS: u64 = 13;
    /// Inner values of the MLP: before the activation and after it.
    const KEPT_INNER: u64 = 2;
    const F32_BYTES: u64 = 4;
    /// Tensors of the size of the scores, and of a chunk of logits, that a composition holds at once.
    const COMPOSED: u64 = 12;
    /// The same of the kernels of NVIDIA GPUs.
    const ON_GPU: u64 = 6;
    let tokens = (numbers.batch_size as u64).saturating_mul(numbers.context as u64);
    if let Some(dictionary) = &numbers.dictionary
        && let (Ok(count), Ok(sites)) = (dictionary.parameter_count(config), dictionary.sites(config))
    {
        // Of each token all latents before the few are chosen, and its values: as the model has them, scaled, centred; output, error.
        let of_token = sites.iter().map(|[(_, inputs), (_, outputs)]| {
            let of_inputs = inputs.saturating_mul(3).saturating_add(outputs.saturating_mul(4));
            dictionary.latents.saturating_mul(2).saturating_add(of_inputs) as u64
        });
        let of_token = of_token.fold(0u64, u64::saturating_add);
        // The model's weights are there in any case; a copy of the trained ones is read besides.
        let values =
            (COPIES + 1).saturating_mul(count as u64).saturating_add(tokens.saturating_mul(of_token));
        return values.saturating_mul(F32_BYTES);
    }
    let (width, inner, blocks) = (config.n_embd as u64, config.inner_width() as u64, config.n_layer as u64);
    let block = KEPT_WIDTHS.saturating_mul(width).saturating_add(KEPT_INNER.saturating_mul(inner));
    // The backward pass holds one block's gradients besides, or a block that is computed again.
    let kept = match recomputes {
        true => blocks.saturating_mul(width).saturating_add(block.saturating_mul(2)),
        false => blocks.saturating_add(1).saturating_mul(block),
    };
    let parameters = ParameterCounts::new(config).unique as u64;
    // From the second batch of a step on, the head's gradient is made beside the sum.
    let table = config.vocab_size.saturating_mul(config.n_embd) as u64;
    let head = if numbers.accumulate > 1 { table } else { 0 };
    let of_text = config.n_head.saturating_mul(numbers.context).saturating_mul(numbers.context) as u64;
    let chunk = (LOSS_ROWS as u64).saturating_mul(config.vocab_size as u64);
    let logits = match (device, numbers.compute_dtype) {
        (Device::Cpu, ComputeDType::F32) => LOGITS_AT_ONCE as u64,
        // The gradient of the embedding is added to that of the head.
        (Device::Cuda(_), _) => {
            let scores =
                of_text.saturating_mul(numbers.batch_size as u64).min(of_text.max(MOST_SCORES_ON_GPU as u64));
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

    /// A configuration that was not checked is estimated, not an overflow.
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

    /// GPT-2 in its smallest published size, 8 windows of 1,024 tokens.
    #[test]
    fn bf16_halves_what_is_kept_and_compositions_add_scores_and_logits() {
        let (config, numbers) =
            (Gpt2Config::gpt2(), Hyperparameters { context: 1024, ..Hyperparameters::default() });
        let halved = Hyperparameters { compute_dtype: ComputeDType::Bf16, ..numbers.clone() };
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
