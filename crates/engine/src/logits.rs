//! Logits of a prompt, with and without a cache.

use candle_core::{Device, Tensor};
use candle_gpt2::{Gpt2Cache, Gpt2LMHeadModel, KvDType, LogitsFor, Pass};
use candle_gpt2_weights::WeightsError;

use crate::Reporter;

/// Computes the logits after each token of a prompt, with one row per token.
pub(crate) fn logits(model: &Gpt2LMHeadModel, prompt: &[u32]) -> Result<Vec<f32>, WeightsError> {
    let ids = Tensor::from_slice(prompt, (1, prompt.len()), &Device::Cpu)?;
    let logits = model.forward_with(&ids, LogitsFor::EveryToken, None, &mut Pass::inference())?;
    Ok(logits.flatten_all()?.to_vec1()?)
}

/// Computes the same logits one token at a time with a KV cache.
pub(crate) fn logits_with_cache(
    model: &Gpt2LMHeadModel,
    prompt: &[u32],
    reporter: &dyn Reporter,
) -> Result<Vec<f32>, WeightsError> {
    let mut cache = Gpt2Cache::new(model.config(), 1, prompt.len(), KvDType::F32, &Device::Cpu)?;
    let mut logits = Vec::new();
    for id in prompt {
        if reporter.is_interrupted() {
            return Err(WeightsError::Interrupted);
        }
        let ids = Tensor::from_slice(&[*id], (1, 1), &Device::Cpu)?;
        let step =
            model.forward_with(&ids, LogitsFor::EveryToken, Some(&mut cache), &mut Pass::inference())?;
        logits.extend(step.flatten_all()?.to_vec1::<f32>()?);
    }
    Ok(logits)
}

/// Returns the largest absolute value, or NaN if any value is NaN.
pub(crate) fn largest(values: impl Iterator<Item = f64>) -> f64 {
    // The total order places a positive NaN after all numbers.
    values.map(f64::abs).max_by(f64::total_cmp).unwrap_or(0.0)
}
