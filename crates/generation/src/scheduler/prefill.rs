//! Tokens on their way into a cache, chunk by chunk.

use candle_core::Tensor;
use candle_gpt2::{Gpt2Cache, Gpt2LMHeadModel};

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
    /// The next tokens, up to so many.
    pub(super) fn next(&self, most: usize) -> &[u32] {
        let rest = &self.tokens[self.computed..];
        &rest[..most.min(rest.len())]
    }

    /// Whether all tokens are computed, and the text begins with the logits after the last one.
    pub(super) fn wants_logits(&self) -> bool {
        self.computed == self.tokens.len() && !self.is_window && self.text.request.max_new_tokens > 0
    }

    /// Computes the next tokens, up to `most`; returns their hidden states, `(1, count, C)`.
    pub(super) fn compute(
        &mut self,
        model: &Gpt2LMHeadModel,
        most: usize,
    ) -> Result<Tensor, GenerationError> {
        let next = self.next(most);
        let ids = Tensor::new(next, model.device())?.unsqueeze(0)?;
        self.computed += next.len();
        let Self { text, cache, .. } = self;
        Ok(text.in_pass(|pass| model.transformer().forward_with(&ids, Some(cache), pass))?)
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
