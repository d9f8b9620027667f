//! Decode step for the running sequences: drafts, next tokens, and rows in the KV cache.

use std::iter::once;
use std::mem;
use std::ops::Deref;

use candle_core::Tensor;
use candle_gpt2::{Gpt2Cache, LogitsFor, Pass};
use tokenizers::Tokenizer;

use super::Scheduler;
use super::event::Event;
use super::prefill::Prefill;
use super::request::RequestId;
use super::text::{Accepted, Chosen, SequenceState, sample};
use crate::config::slid_tokens;
use crate::draft::{CACHED_TOKEN_COST, DraftJob, look_up, max_draft_len};
use crate::logits::rows_of;
use crate::{GenerationError, WhenFull};

/// Token axis of hidden states.
const TOKEN_DIM: usize = 1;

/// Prompt tokens that were computed in the same pass as the running sequences.
struct Computed {
    request: RequestId,
    count: usize,
    /// Hidden states of the tokens, `(1, count, C)`.
    hidden: Tensor,
    /// Logits after the last token, if needed.
    logits: Option<Vec<f32>>,
}

impl<T: Deref<Target = Tokenizer> + Clone> Scheduler<T> {
    /// Decodes one token of every running sequence, and accepts correct drafts.
    ///
    /// On a CPU, the same pass prefills the next tokens of a prompt, so the weights are read only once.
    /// Returns the part of the step's prefill budget that was used.
    pub(super) fn decode(&mut self) -> Result<usize, GenerationError> {
        self.slide_full_rows()?;
        self.close_gaps()?;
        self.move_observed_back()?;
        if self.running.is_empty() {
            return Ok(0);
        }
        let (begun, prefill) = self.select_prompt()?;
        let drafts = self.drafts()?;
        let lengths: Vec<usize> = drafts.iter().map(|draft| 1 + draft.len()).collect();
        let ids = self.running.iter().zip(&drafts).flat_map(|(text, draft)| {
            once(text.ids.last().copied().unwrap_or(0)).chain(draft.iter().copied())
        });
        let ids: Vec<u32> = ids.collect();
        let (logits, computed) = match prefill {
            Some(prefill) => {
                let (logits, computed) =
                    self.pass_with_prompt(ids, &lengths, prefill, self.options.chunk_tokens - begun)?;
                (logits, Some(computed))
            }
            None => (self.pass(ids, &lengths)?, None),
        };
        let mut logits = logits.into_iter();
        let of_row = |length: &usize| logits.by_ref().take(*length).collect();
        let mut logits: Vec<Vec<Vec<f32>>> = lengths.iter().map(of_row).collect();
        let chosen = sample(&mut self.running, &drafts, logits.iter_mut().map(Vec::as_mut_slice));
        for (row, (chosen, draft)) in chosen.iter().zip(&drafts).enumerate() {
            // Drop the rejected drafted tokens from the cache.
            let held = self.cache.lengths()[row] - lengths[row] + chosen.tokens.len();
            self.cache.truncate(row, held)?;
            self.running[row].count_draft(draft, &chosen.tokens)?;
        }
        self.extend(0, chosen)?;
        let Some(Computed { request, count, hidden, logits }) = computed else { return Ok(begun) };
        // The request may have ended in the meantime.
        if self.prefilling.front().is_some_and(|prefill| prefill.text.request.id == request)
            && let Some(prefill) = self.prefilling.pop_front()
        {
            self.continue_prefill(prefill, &hidden, logits)?;
        }
        Ok(begun + count)
    }

    /// Selects the prompt to prefill in the same pass, on a CPU.
    ///
    /// This is the first prompt in prefill, or the next waiting sequence's prompt if there is
    /// capacity.
    ///
    /// If a prompt is already computed for another sequence, the sequence begins immediately and counts as
    /// one token. The first returned value is the number of these sequences.
    ///
    /// No prompt is selected if the model has an observer, which must see one row for each sequence and
    /// nothing else. The same holds if the prompt's sequence has an observer, which must see nothing but that
    /// sequence.
    fn select_prompt(&mut self) -> Result<(usize, Option<Prefill<T>>), GenerationError> {
        let (mut begun, most) = (0, self.options.chunk_tokens);
        if self.slot_tokens.is_some() || self.model.is_observed() {
            return Ok((begun, None));
        }
        while begun < most && self.prefilling.is_empty() && self.admit()? {
            begun += usize::from(self.prefilling.is_empty());
        }
        let is_observed = self.prefilling.front().is_some_and(|prefill| prefill.text.is_observed());
        Ok((begun, if begun < most && !is_observed { self.prefilling.pop_front() } else { None }))
    }

    /// Returns the logits after each of `ids`; `lengths` holds each sequence's number of tokens.
    fn pass(&mut self, ids: Vec<u32>, lengths: &[usize]) -> Result<Vec<Vec<f32>>, GenerationError> {
        let (rows, tokens) = (lengths.len(), ids.len());
        let is_even = lengths.iter().all(|length| *length == lengths[0]);
        let (shape, mut pass) = if is_even {
            ((rows, lengths[0]), Pass::inference())
        } else {
            ((1, tokens), Pass::inference().of_rows(lengths.into()))
        };
        let ids = Tensor::from_vec(ids, shape, self.model.device())?;
        let wanted = if tokens == rows { LogitsFor::LastToken } else { LogitsFor::EveryToken };
        rows_of(&self.model.forward_with(&ids, wanted, Some(&mut self.cache), &mut pass)?)
    }

    /// Like `pass`, but also prefills up to `most` tokens of a prompt.
    ///
    /// The prompt returns to the front of the prefill queue.
    fn pass_with_prompt(
        &mut self,
        mut ids: Vec<u32>,
        lengths: &[usize],
        mut prefill: Prefill<T>,
        most: usize,
    ) -> Result<(Vec<Vec<f32>>, Computed), GenerationError> {
        let (request, row, tokens) = (prefill.text.request.id, lengths.len(), ids.len());
        let next = prefill.next(most);
        let count = next.len();
        ids.extend(next);
        self.cache.insert(row, prefill.cache)?;
        let ids = Tensor::from_vec(ids, (1, tokens + count), self.model.device())?;
        let mut pass = Pass::inference().of_rows([lengths, &[count]].concat().into());
        let hidden = self.model.transformer().forward_with(&ids, Some(&mut self.cache), &mut pass)?;
        prefill.cache = self.cache.take(row)?;
        prefill.computed += count;
        let of_texts = hidden.narrow(TOKEN_DIM, 0, tokens)?;
        let has_logits = prefill.wants_logits();
        let wanted = match has_logits {
            true => Tensor::cat(&[of_texts, hidden.narrow(TOKEN_DIM, tokens + count - 1, 1)?], TOKEN_DIM)?,
            false => of_texts,
        };
        let mut rows = rows_of(&self.model.head(&wanted, LogitsFor::EveryToken)?)?;
        let logits = if has_logits { rows.pop() } else { None };
        self.prefilling.push_front(prefill);
        Ok((rows, Computed { request, count, hidden: hidden.narrow(TOKEN_DIM, tokens, count)?, logits }))
    }

    /// Drafts likely next tokens for each running sequence.
    pub(super) fn drafts(&mut self) -> Result<Vec<Vec<u32>>, GenerationError> {
        let mut drafts = vec![Vec::new(); self.running.len()];
        let texts = self.running.len();
        // The model's observer must see one row for each sequence, which rules out drafts of varying lengths.
        if texts > 1 && (self.token_cost >= CACHED_TOKEN_COST || self.model.is_observed()) {
            return Ok(drafts);
        }
        let n_positions = self.model.config().n_positions;
        let rooms = self.cache.free_tokens().into_iter().zip(self.cache.lengths());
        let rooms: Vec<usize> = rooms.map(|(room, length)| room.min(n_positions - length)).collect();
        let (mut asked, mut rows) = (Vec::new(), Vec::new());
        for (row, text) in self.running.iter_mut().enumerate() {
            let Accepted { config, prompt, max_new_tokens, .. } = &*text.request;
            let left = max_new_tokens - (text.ids.len() - prompt.len());
            let most = rooms[row].min(left).saturating_sub(1).min(max_draft_len(texts));
            if let Some(longest) = config.prompt_lookup_num_tokens {
                let length = text.draft_stats.length(most.min(longest), (self.token_cost, 0.0), texts);
                drafts[row] = look_up(&text.ids, length);
            } else if let (Some(assistant), true) = (&self.assistant, text.assisted.is_some()) {
                let most =
                    most.min(config.num_assistant_tokens).min(assistant.max_draft_after(text.ids.len()));
                let most = text.draft_stats.length(most, (self.token_cost, assistant.cost), texts);
                if let Some(cache) = text.assisted.take_if(|_| most > 0) {
                    let (ids, prompt_len) = (text.ids.clone(), prompt.len());
                    asked.push(DraftJob {
                        ids,
                        prompt_len,
                        sampler: text.sampler.clone(),
                        cache,
                        max_len: most,
                    });
                    rows.push(row);
                }
            }
        }
        if let Some(assistant) = self.assistant.as_ref().filter(|_| !asked.is_empty()) {
            assistant.draft(&mut asked, self.options.chunk_tokens)?;
        }
        for (row, DraftJob { ids, cache, .. }) in rows.into_iter().zip(asked) {
            drafts[row] = ids;
            self.running[row].assisted = Some(cache);
        }
        Ok(drafts)
    }

    /// Moves sequences with a full context back to prefill, to recompute the slid window.
    pub(super) fn slide_full_rows(&mut self) -> Result<(), GenerationError> {
        let n_positions = self.model.config().n_positions;
        let mut row = 0;
        while let Some(text) = self.running.get_mut(row) {
            let head = match text.request.config.when_full {
                WhenFull::Slide { head } if self.cache.lengths()[row] >= n_positions => head,
                _ => {
                    row += 1;
                    continue;
                }
            };
            let before = &text.ids[..text.ids.len() - 1];
            let tail = before.len() - (slid_tokens(n_positions) - 1);
            let tokens = [&before[..head], &before[tail..]].concat();
            text.has_slid = true;
            // The assistant would have to read the whole window again, so the sequence gets no more drafts.
            text.assisted = None;
            self.cache.truncate(row, 0)?;
            if tokens.is_empty() {
                row += 1;
                continue;
            }
            let (text, cache) = self.take_row(row)?;
            // Put the window first: a running sequence must not wait for other prompts.
            let window = Prefill { text, cache, tokens, computed: 0, cached: 0, is_window: true };
            self.prefilling.push_front(window);
        }
        Ok(())
    }

    /// Adds a running sequence, in the row that its cache's position in memory determines.
    pub(super) fn run(&mut self, text: SequenceState<T>, cache: Gpt2Cache) -> Result<usize, GenerationError> {
        let row = self.cache.rows_before(&cache);
        self.cache.insert(row, cache)?;
        self.running.insert(row, text);
        Ok(row)
    }

    /// Appends the next tokens to the sequences from row `first`, and ends complete sequences.
    pub(super) fn extend(&mut self, first: usize, chosen: Vec<Chosen>) -> Result<(), GenerationError> {
        let n_positions = self.model.config().n_positions;
        let (mut ended, mut failed) = (Vec::new(), Vec::new());
        for (row, chosen) in (first..).zip(chosen) {
            let (text, held) = (&mut self.running[row], self.cache.lengths()[row]);
            match text.append_tokens(chosen, held, n_positions, &mut self.ready) {
                Ok(has_ended) => ended.extend(has_ended.then_some(row)),
                Err(error) => failed.push((text.request.id, error)),
            }
        }
        // Removals change row numbers, so they come last.
        ended.into_iter().rev().try_for_each(|row| self.remove(row))?;
        failed.into_iter().for_each(|(request, error)| self.fail(request, error));
        Ok(())
    }

    /// Ends a request that cannot continue; its tokens so far have already been reported.
    pub(super) fn fail(&mut self, request: RequestId, error: GenerationError) {
        let events = mem::take(&mut self.ready);
        self.cancel(request);
        self.ready = events;
        let is_this = |event: &Event| matches!(event, Event::Failed { .. }) && event.request() == request;
        if !self.ready.iter().any(is_this) {
            self.ready.push(Event::Failed { request, error });
        }
    }

    /// Ends the sequence in a row, and keeps its memory for reuse or frees it.
    pub(super) fn remove(&mut self, row: usize) -> Result<(), GenerationError> {
        let (text, cache) = self.take_row(row)?;
        self.keep_prefix(text, cache)
    }

    /// Removes a running sequence and returns it with its cache.
    pub(super) fn take_row(&mut self, row: usize) -> Result<(SequenceState<T>, Gpt2Cache), GenerationError> {
        let text = self.running.remove(row);
        Ok((text, self.cache.take(row)?))
    }

    /// Moves the last sequences into gaps in memory, on a GPU.
    ///
    /// With a gap, every step would have to copy all keys and values.
    pub(super) fn close_gaps(&mut self) -> Result<(), GenerationError> {
        let Some(slot_tokens) = self.slot_tokens else { return Ok(()) };
        while let Some(last) = self.running.len().checked_sub(1) {
            let length = self.cache.lengths()[last];
            let capacity = slot_tokens.max(self.running[last].request.capacity);
            let Some(mut free) = self.pool.cache(1, capacity) else { break };
            if self.cache.rows_before(&free) > last {
                break;
            }
            free.copy_row(0, &self.cache, last, length)?;
            let (text, _) = self.take_row(last)?;
            self.run(text, free)?;
        }
        Ok(())
    }
}
