//! Prefill: computes tokens into a KV cache, chunk by chunk.

use candle_core::Tensor;
use candle_gpt2::{Gpt2Cache, Gpt2LMHeadModel};

use super::text::SequenceState;
use crate::GenerationError;
use crate::logprobs::{Expected, for_each_row};

/// A sequence whose tokens are being computed into a KV cache.
pub(super) struct Prefill<T> {
    pub(super) text: SequenceState<T>,
    pub(super) cache: Gpt2Cache,
    pub(super) tokens: Vec<u32>,
    pub(super) computed: usize,
    /// Number of tokens that were reused from another sequence.
    pub(super) cached: usize,
    /// Whether these are the tokens of a sliding window.
    ///
    /// They exclude the last token of the sequence. The next step reads it, as for any running
    /// sequence.
    pub(super) is_window: bool,
}

impl<T> Prefill<T> {
    /// Returns the next tokens, up to `most`.
    pub(super) fn next(&self, most: usize) -> &[u32] {
        let rest = &self.tokens[self.computed..];
        &rest[..most.min(rest.len())]
    }

    /// Returns whether all tokens are computed and the logits after the last one are needed.
    pub(super) fn wants_logits(&self) -> bool {
        self.computed == self.tokens.len() && !self.is_window && self.text.request.max_new_tokens > 0
    }

    /// Computes the next tokens, up to `most`, and returns their hidden states `(1, count, C)`.
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

    /// Scores the tokens that follow the last computed ones.
    ///
    /// `hidden` contains the hidden states of the computed tokens, `(1, count, C)`.
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
