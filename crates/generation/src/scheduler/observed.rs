//! Sequences with observers; each of them runs in its own pass.

use std::ops::Deref;
use std::slice;

use candle_core::Tensor;
use candle_gpt2::{Gpt2Cache, LogitsFor};
use candle_gpt2_kernels::is_interrupted;
use tokenizers::Tokenizer;

use super::Scheduler;
use super::request::RequestId;
use super::text::{SequenceState, sample};
use crate::GenerationError;
use crate::logits::rows_of;

impl<T: Deref<Target = Tokenizer> + Clone> Scheduler<T> {
    /// Decodes one token of each observed sequence.
    pub(super) fn observe(&mut self) -> Result<(), GenerationError> {
        for _ in 0..self.observed.len() {
            // The queue may have become shorter if a request failed.
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

    /// Chooses the next token of an observed sequence from these logits.
    ///
    /// The sequence never enters the common rows, because a GPU replays a recorded step while these rows
    /// stay the same.
    pub(super) fn begin_observed(
        &mut self,
        mut text: SequenceState<T>,
        cache: Gpt2Cache,
        logits: Vec<f32>,
    ) -> Result<(), GenerationError> {
        let chosen = sample(slice::from_mut(&mut text), &[Vec::new()], [&mut [logits][..]]);
        let (held, n_positions) = (cache.lengths().iter().sum(), self.model.config().n_positions);
        for chosen in chosen {
            match text.append_tokens(chosen, held, n_positions, &mut self.ready) {
                Ok(false) => {}
                // Drop the KV cache, because no other sequence may reuse it.
                Ok(true) => return Ok(()),
                Err(error) => {
                    self.fail(text.request.id, error);
                    return Ok(());
                }
            }
        }
        self.observed.push_back((text, cache));
        Ok(())
    }

    /// Moves observed sequences behind the running ones, on a GPU.
    ///
    /// The rows of a step must be adjacent, so no observed sequence may lie between them.
    pub(super) fn move_observed_back(&mut self) -> Result<(), GenerationError> {
        let Some(slot_tokens) = self.slot_tokens else { return Ok(()) };
        for _ in 0..self.observed.len() {
            let Some((text, cache)) = self.observed.pop_front() else { break };
            let before = self.cache.rows_before(&cache);
            let cache = match before == 0 || before == self.running.len() {
                true => cache,
                false => {
                    let aside = cache.fork(&[0])?;
                    drop(cache);
                    self.close_gaps()?;
                    let (held, capacity) =
                        (aside.lengths().iter().sum(), slot_tokens.max(text.request.capacity));
                    match self.pool.cache(1, capacity) {
                        Some(mut cache) => {
                            cache.copy_row(0, &aside, 0, held)?;
                            cache
                        }
                        // The free memory is fragmented, and no piece is large enough.
                        None => aside,
                    }
                }
            };
            self.observed.push_back((text, cache));
        }
        Ok(())
    }

    /// Ends an observed request after its own pass failed.
    ///
    /// The observer may have caused the failure, and no other request was part of the pass.
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
