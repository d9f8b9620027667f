//! How probable a model finds a text: the log-probability of every token given those before it.
//!
//! A text longer than the context is scored in windows of the context's length that start every `stride` tokens;
//! each token counts in the first window that reaches it, so behind the first window it sees at least
//! `context - stride` tokens before it.
//! Source: "Perplexity of fixed-length models" in the transformers documentation. The loss here is the mean over all
//! scored tokens. With a stride of the whole context, the first token of each window has nothing before it and is not
//! scored, as there.

use candle_core::{DType, Device, Tensor};
use gpt2::{Gpt2Config, Gpt2LMHead, LogitsFor, Pass};

use crate::GenerationError;
use crate::generate::check_ids;

/// The log-probabilities of a text.
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    /// Natural logarithm of each token's probability; `None` for a token with nothing before it.
    pub logprobs: Vec<Option<f64>>,
    /// Mean negative log-probability of the scored tokens, in nats.
    pub loss: f64,
}

impl Score {
    /// `exp(loss)`.
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

/// Scores a text; `progress` is told how many tokens were scored since the last call.
///
/// # Errors
/// Those of [`check_text`], and when the model's logits are not numbers.
pub fn score(
    model: &Gpt2LMHead,
    ids: &[u32],
    stride: usize,
    device: &Device,
    progress: &dyn Fn(u64),
) -> Result<Score, GenerationError> {
    check_text(ids, stride, model.config())?;
    let context = model.config().n_positions;
    let mut logprobs = vec![None; ids.len()];
    let mut scored = 0;
    for begin in (0..ids.len()).step_by(stride) {
        let end = ids.len().min(begin + context);
        let window = Tensor::from_slice(&ids[begin..end], (1, end - begin), device)?;
        let logits = model.forward(&window, LogitsFor::EveryToken, None, &mut Pass::inference())?;
        // Row r of the logits predicts token begin + r + 1.
        for position in scored.max(begin + 1)..end {
            let row = logits.get(0)?.get(position - begin - 1)?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
            logprobs[position] = Some(log_probability(&row, ids[position])?);
        }
        progress((end - scored) as u64);
        scored = end;
        if end == ids.len() {
            break;
        }
    }
    let known: Vec<f64> = logprobs.iter().flatten().copied().collect();
    let loss = -known.iter().sum::<f64>() / known.len() as f64;
    Ok(Score { logprobs, loss })
}

/// Checks what can be checked of a text before a model is loaded.
///
/// # Errors
/// When there are fewer than two tokens, an id is outside the vocabulary, `stride` is not from 1 to the context's length,
/// or the context has only one position.
pub fn check_text(ids: &[u32], stride: usize, config: &Gpt2Config) -> Result<(), GenerationError> {
    let n_positions = config.n_positions;
    if stride == 0 || stride > n_positions {
        let expected = format!("from 1 to the model's context of {n_positions}");
        return Err(GenerationError::OptionOutOfRange {
            option: "stride",
            expected,
            found: stride.to_string(),
        });
    }
    check_ids(ids, config)?;
    if ids.len() < 2 {
        return Err(GenerationError::TooShortToScore { tokens: ids.len() });
    }
    if n_positions < 2 {
        return Err(GenerationError::ContextTooShortToScore { n_positions });
    }
    Ok(())
}

/// Logarithm of the softmax at `token`, computed in f64.
fn log_probability(logits: &[f32], token: u32) -> Result<f64, GenerationError> {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum();
    let logit = usize::try_from(token).ok().and_then(|token| logits.get(token)).copied().unwrap_or(f32::NAN);
    let log_probability = f64::from(logit) - largest - sum.ln();
    // A probability of zero has the logarithm -inf, which is a number to report; NaN is not.
    if log_probability.is_nan() { Err(GenerationError::NotFinite) } else { Ok(log_probability) }
}
