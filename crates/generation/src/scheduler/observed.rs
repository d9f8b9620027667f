//! Texts with an observer: each has passes of its own, beside the common one of all others.

use std::ops::Deref;

use candle_core::Tensor;
use candle_gpt2::LogitsFor;
use candle_gpt2_kernels::is_interrupted;
use tokenizers::Tokenizer;

use super::Scheduler;
use super::request::RequestId;
use super::text::Text;
use crate::GenerationError;
use crate::logits::rows_of;

impl<T: Deref<Target = Tokenizer> + Clone> Scheduler<T> {
    /// One token of each observed text.
    pub(super) fn observe(&mut self) -> Result<(), GenerationError> {
        for _ in 0..self.observed.len() {
            // Fewer are left where a request has failed.
            let Some((text, mut cache)) = self.observed.pop_front() else { break };
            let last = text.ids.last().copied().unwrap_or(0);
            let ids = Tensor::from_slice(&[last], (1, 1), self.model.device())?;
            let computed = text
                .in_pass(|pass| self.model.forward_with(&ids, LogitsFor::LastToken, Some(&mut cache), pass));
            match computed {
                Ok(logits) => self.begin(text, cache, rows_of(&logits)?.swap_remove(0))?,
                Err(error) => self.fail_observed(text.request.id, error.into())?,
            }
        }
        Ok(())
    }

    /// Takes a text that has an observer out of the common rows, where it is only while it gains its token.
    pub(super) fn set_apart(&mut self) -> Result<(), GenerationError> {
        if let Some(row) = self.running.iter().position(Text::is_observed) {
            let observed = self.take_row(row)?;
            self.observed.push_back(observed);
        }
        Ok(())
    }

    /// Ends a request whose own pass has failed: its observer may be to blame, and no other request was in it.
    pub(super) fn fail_observed(
        &mut self,
        request: RequestId,
        error: GenerationError,
    ) -> Result<(), GenerationError> {
        if is_interrupted() {
            return Err(error);
        }
        self.fail(request, error);
        Ok(())
    }
}
