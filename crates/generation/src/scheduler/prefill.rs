//! Tokens on their way into a cache, chunk by chunk.

use candle_core::Tensor;
use candle_gpt2::{Gpt2Cache, Gpt2LMHeadModel, Pass};

use super::text::Text;
use crate::GenerationError;
use crate::logprobs::{Expected, for_each_row};

/// Tokens on their way into a cache.
pub(super) struct Prefill<T> {
    pub(super) text: Text<T>,
    pub(super) cache: Gpt2Cache,
    pub(super) tokens: Vec<u32>,
    pub(super) computed: usize,
    /// Tokens that had been computed for another text.
    pub(super) cached: usize,
    /// Whether these are the tokens that a sliding window keeps. The text's last token is then not among them, and is read in
    /// the next step like that of any running text.
    pub(super) is_window: bool,
}

impl<T> Prefill<T> {
    /// Computes the next `count` tokens; returns their hidden states, `(1, count, C)`.
    pub(super) fn compute(
        &mut self,
        model: &Gpt2LMHeadModel,
        count: usize,
    ) -> Result<Tensor, GenerationError> {
        let next = &self.tokens[self.computed..][..count];
        let ids = Tensor::from_slice(next, (1, count), model.device())?;
        self.computed += count;
        Ok(model.transformer().forward_with(&ids, Some(&mut self.cache), &mut Pass::inference())?)
    }

    /// Finds how probable the tokens are that come after those of `hidden`, `(1, count, C)`, which were computed last.
    pub(super) fn score(&mut self, model: &Gpt2LMHeadModel, hidden: &Tensor) -> Result<(), GenerationError> {
        let scores = &mut self.text.scores;
        let (Some(wanted), false) = (scores.wanted(), self.is_window) else { return Ok(()) };
        let next = &self.tokens[scores.known().len()..self.tokens.len().min(self.computed + 1)];
        let found = for_each_row(model, hidden, 0..next.len(), |row, logits| {
            Ok(Expected::of(logits, wanted)?.of_token(next[row]))
        })?;
        scores.extend(found);
        Ok(())
    }
}
