//! The log-probability of a token, and what else the model expected in its place.

use std::ops::Range;

use candle_core::{D, DType, Tensor};
use gpt2::{Gpt2LMHead, LogitsFor};
use gpt2_kernels::map_items;

use crate::processors::{log_sum_exp, most_probable};
use crate::{GenerationConfig, GenerationError, History, LogitsProcessor};

/// The most probable tokens of a position with their log-probabilities, most probable first.
pub type TokenAlternatives = Vec<(u32, f64)>;

/// How probable the model finds a token: natural logarithms, in f64. A token that is among its alternatives has the same number
/// there.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// That of the token; `-inf` for a probability of zero.
    pub logprob: f64,
    /// Those of the most probable tokens in its place, with the token itself where it is one of them.
    pub alternatives: TokenAlternatives,
}

/// What the model expects after a token.
#[derive(Debug)]
pub(crate) struct Expected<'a> {
    logits: &'a [f32],
    /// What is subtracted from a logit to make it a log-probability.
    normalizer: f64,
    alternatives: TokenAlternatives,
}

impl<'a> Expected<'a> {
    /// By these logits, with the `alternatives` most probable tokens; an error where they are not numbers.
    pub(crate) fn of(logits: &'a [f32], alternatives: usize) -> Result<Self, GenerationError> {
        let normalizer = log_sum_exp(logits);
        if !normalizer.is_finite() {
            return Err(GenerationError::NotFinite);
        }
        let best = most_probable(logits, alternatives).into_iter();
        let alternatives = best.map(|(token, logit)| (token, f64::from(logit) - normalizer)).collect();
        Ok(Self { logits, normalizer, alternatives })
    }

    /// Logarithm of the softmax at `token`; `-inf` for a token that the vocabulary does not have.
    pub(crate) fn logprob(&self, token: u32) -> f64 {
        let logit = usize::try_from(token).ok().and_then(|token| self.logits.get(token));
        f64::from(logit.copied().unwrap_or(f32::NEG_INFINITY)) - self.normalizer
    }

    /// What is told of `token`.
    pub(crate) fn of_token(self, token: u32) -> TokenLogprobs {
        TokenLogprobs { logprob: self.logprob(token), alternatives: self.alternatives }
    }
}

/// The logits as the user's biases change them, before anything else does.
pub(crate) fn biased(
    config: &GenerationConfig,
    history: History<'_>,
    logits: &[f32],
) -> Result<Vec<f32>, GenerationError> {
    let mut biased = logits.to_vec();
    LogitsProcessor::biases_of(config).map_or(Ok(()), |biases| biases.process(history, &mut biased))?;
    Ok(biased)
}

/// What `look` finds in the logits after each of these rows of hidden states `(1, T, C)`; on all threads, and in pieces, so that
/// the logits of a long window are never held all at once.
pub(crate) fn for_each_row<R: Send>(
    model: &Gpt2LMHead,
    hidden: &Tensor,
    rows: Range<usize>,
    look: impl Fn(usize, &[f32]) -> Result<R, GenerationError> + Sync,
) -> Result<Vec<R>, GenerationError> {
    /// Rows whose logits are held at once: 26 MB of GPT-2's.
    const PIECE_ROWS: usize = 128;
    let mut found = Vec::with_capacity(rows.len());
    for first in rows.clone().step_by(PIECE_ROWS) {
        let count = PIECE_ROWS.min(rows.end - first);
        let logits = model.logits(hidden, LogitsFor::Tokens { first, count })?; // (1, count, V)
        let vocab_size = logits.dim(D::Minus1)?;
        let logits = logits.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        for row in map_items(logits.chunks(vocab_size).zip(first..), |(logits, row)| look(row, logits)) {
            found.push(row?);
        }
    }
    Ok(found)
}
