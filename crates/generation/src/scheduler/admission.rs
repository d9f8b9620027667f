//! Admission of sequences: capacity check, reuse of computed prefixes, and prefill of the prompt.

use std::ops::Deref;

use candle_core::Tensor;
use candle_gpt2::{Gpt2Cache, KvSlot, LogitsFor};
use tokenizers::Tokenizer;

use super::event::Event;
use super::prefill::Prefill;
use super::request::RequestId;
use super::text::{Accepted, SequenceState, sample};
use super::{PromptLogits, Scheduler, Waiting};
use crate::clock::Deadline;
use crate::draft::DraftStats;
use crate::logits::rows_of;
use crate::prefixes::{CachedPrefix, PrefixQuery, PromptScores, ReuseGroup, Source};
use crate::{GenerationError, Sampler};

impl<T: Deref<Target = Tokenizer> + Clone> Scheduler<T> {
    /// Prefills up to the remaining token budget of the step, and admits sequences if they fit.
    ///
    /// `computed` tokens of the budget are already used.
    pub(super) fn prefill(&mut self, computed: usize) -> Result<(), GenerationError> {
        let mut budget = self.options.chunk_tokens.saturating_sub(computed);
        while budget > 0 && (!self.prefilling.is_empty() || self.admit()?) {
            let Some(mut prefill) = self.prefilling.pop_front() else {
                // The sequence began immediately because its prompt is already computed. It still counts as
                // one token of work.
                budget -= 1;
                continue;
            };
            let before = prefill.computed;
            let hidden = prefill.compute(&self.model, budget); // (1, count, C)
            budget -= prefill.computed - before;
            match hidden {
                Ok(hidden) => self.continue_prefill(prefill, &hidden, None)?,
                Err(error) if prefill.text.is_observed() => {
                    self.fail_observed(prefill.text.request.id, error)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Continues a prefill after a chunk of tokens with hidden states `hidden`, `(1, count, C)`.
    ///
    /// Computes the logits after the last token if they are needed and `logits` is `None`.
    pub(super) fn continue_prefill(
        &mut self,
        mut prefill: Prefill<T>,
        hidden: &Tensor,
        logits: Option<Vec<f32>>,
    ) -> Result<(), GenerationError> {
        if let Err(error) = prefill.score(&self.model, hidden) {
            let request = prefill.text.request.id;
            drop(prefill);
            return match error {
                GenerationError::NotFinite => {
                    self.fail(request, error);
                    Ok(())
                }
                error => Err(error),
            };
        }
        if prefill.computed < prefill.tokens.len() {
            self.prefilling.push_front(prefill);
            return Ok(());
        }
        let Prefill { text, cache, is_window, cached, .. } = prefill;
        if is_window {
            self.run(text, cache)?;
            return Ok(());
        }
        self.report_begun(&text, cached);
        if text.request.max_new_tokens == 0 {
            return self.end_without_tokens(text, cache);
        }
        let logits = match logits {
            Some(logits) => logits,
            None => rows_of(&self.model.head(hidden, LogitsFor::LastToken)?)?.swap_remove(0),
        };
        if self.is_shared(&text) {
            let (request, logits) = (text.request.id, logits.clone());
            self.prompt_logits = Some(PromptLogits { request, logits });
        }
        self.begin(text, cache, logits)
    }

    /// Begins the next waiting sequence if there is capacity; returns whether it began.
    pub(super) fn admit(&mut self) -> Result<bool, GenerationError> {
        let Some(waiting) = self.waiting.front() else { return Ok(false) };
        if self.running() >= self.options.max_texts {
            return Ok(false);
        }
        let capacity = waiting.request.capacity.max(self.slot_tokens.unwrap_or(0));
        let mut prefix = self.cached_prefix_of(waiting);
        let Some(mut cache) = self.room_for(capacity, &mut prefix) else { return Ok(false) };
        let Some(Waiting { request, sequence }) = self.waiting.pop_front() else { return Ok(false) };
        let id = request.id;
        let deadline = match Deadline::new(&request.config, self.clock.as_ref()) {
            Ok(deadline) => deadline,
            Err(error) => {
                self.fail(id, error);
                return Ok(true);
            }
        };
        let stream =
            self.tokenizer.as_ref().map(|tokenizer| request.text_stream(tokenizer.clone())).transpose()?;
        let assistant = self.assistant.as_ref().filter(|_| request.observers.is_empty());
        let mut text = SequenceState {
            // Completions for one prompt use different streams. The same prompt in another request uses the
            // same streams, and so gives the same completions.
            sampler: Sampler::new(
                &request.config,
                request.processors.clone(),
                request.stream.wrapping_add(sequence as u64),
            ),
            stream,
            deadline,
            ids: request.prompt.clone(),
            scores: PromptScores::new(prompt_logprobs_of(&request, sequence)),
            has_slid: false,
            draft_stats: DraftStats::new(),
            right: 0,
            assisted: assistant.and_then(|assistant| assistant.cache(capacity)),
            sequence,
            request,
        };
        let prompt_len = text.ids.len();
        let sibling = |other: &&SequenceState<T>| other.request.id == id && !other.has_slid;
        if let (Some(own), Some(other)) = (&mut text.assisted, self.running.iter().find(sibling))
            && let Some(other) = &other.assisted
            && other.lengths() >= &[prompt_len][..]
        {
            own.copy_row(0, other, 0, prompt_len)?;
        }
        let cached = self.take_over(prefix, &mut text, &mut cache)?;
        let is_known = |prompt: &PromptLogits| prompt.request == id && cached == prompt_len;
        let logits = match self.is_shared(&text) {
            true => {
                let known = self.prompt_logits.as_ref().filter(|prompt| is_known(prompt));
                known.map(|prompt| prompt.logits.clone())
            }
            false => {
                let last = self.prompt_logits.take_if(|prompt| is_known(prompt));
                self.forget_prompt(id);
                last.map(|prompt| prompt.logits)
            }
        };
        match logits {
            Some(logits) => self.begin(text, cache, logits)?,
            None => {
                let tokens = text.ids.clone();
                let prefill = Prefill { text, cache, tokens, computed: cached, cached, is_window: false };
                self.prefilling.push_back(prefill);
            }
        }
        Ok(true)
    }

    /// Finds the longest computed prefix of a prompt, in a running sequence or a kept row.
    ///
    /// For further sequences of a request, this is the whole prompt, because the logits after it are known.
    fn cached_prefix_of(&self, Waiting { request, sequence }: &Waiting) -> Option<CachedPrefix> {
        let is_known = self.prompt_logits.as_ref().is_some_and(|prompt| prompt.request == request.id);
        let wanted = PrefixQuery {
            reuse_group: request.reuse_group,
            prompt: &request.prompt,
            most: request.prompt.len() - usize::from(!is_known),
            logprobs: prompt_logprobs_of(request, *sequence),
        };
        let rows = self.running.iter().zip(self.cache.lengths()).enumerate();
        let rows =
            rows.filter(|(_, (text, _))| text.request.reuse_group == request.reuse_group && !text.has_slid);
        let running = rows.map(|(row, (text, held))| CachedPrefix {
            tokens: wanted.usable(&text.ids[..*held], &text.scores),
            source: Source::Running(row),
        });
        let kept = self.prefixes.longest(&wanted);
        let kept = kept.map(|(number, tokens)| CachedPrefix { tokens, source: Source::Kept(number) });
        running.chain(kept).filter(|prefix| prefix.tokens > 0).max_by_key(|prefix| prefix.tokens)
    }

    /// Allocates a KV cache for a sequence and drops kept prefixes if necessary.
    ///
    /// The prefix that the sequence continues is dropped last.
    fn room_for(&mut self, capacity: usize, prefix: &mut Option<CachedPrefix>) -> Option<Gpt2Cache> {
        let used = self.kv_tokens_in_use();
        if used + KvSlot::room_of(capacity) > self.pool.tokens() {
            return None;
        }
        let needed = match prefix {
            Some(CachedPrefix { source: Source::Kept(number), .. }) => Some(*number),
            _ => None,
        };
        // A prefix that is reserved for one request's sequences becomes the row of the next sequence.
        if !needed.is_some_and(|number| self.prefixes.is_of_sequences(number)) {
            loop {
                if let Some(cache) = self.pool.cache(1, capacity) {
                    return Some(cache);
                }
                if !self.prefixes.forget_oldest(needed) {
                    break;
                }
            }
        }
        if let (Some(number), Some(found)) = (needed, prefix.as_mut()) {
            if let Some((cache, scores)) = self.prefixes.take_row(number, capacity) {
                found.source = Source::Taken(scores);
                return Some(cache);
            }
            *prefix = None;
        }
        self.pool.cache(1, capacity)
    }

    /// Copies the computed prefix to a new sequence and returns the prefix length.
    fn take_over(
        &mut self,
        prefix: Option<CachedPrefix>,
        text: &mut SequenceState<T>,
        cache: &mut Gpt2Cache,
    ) -> Result<usize, GenerationError> {
        let Some(CachedPrefix { tokens, source }) = prefix else { return Ok(0) };
        match source {
            Source::Running(row) => {
                cache.copy_row(0, &self.cache, row, tokens)?;
                text.scores.take_over(&self.running[row].scores, tokens + 1);
            }
            Source::Kept(number) => {
                let Some((kept, scores)) = self.prefixes.touch(number) else { return Ok(0) };
                cache.copy_row(0, kept, 0, tokens)?;
                text.scores.take_over(scores, tokens + 1);
            }
            Source::Taken(scores) => {
                cache.truncate(0, tokens)?;
                text.scores.take_over(&scores, tokens + 1);
            }
        }
        Ok(tokens)
    }

    /// Keeps the computed prefix of a finished sequence for the sequences that may reuse it.
    pub(super) fn keep_prefix(
        &mut self,
        text: SequenceState<T>,
        mut cache: Gpt2Cache,
    ) -> Result<(), GenerationError> {
        let held = cache.lengths().first().copied().unwrap_or(0);
        let kept = match text.request.reuse_group {
            ReuseGroup::Reuse(_) => held,
            ReuseGroup::Sequences(_) if self.is_shared(&text) => held.min(text.request.prompt.len()),
            ReuseGroup::Sequences(_) => 0,
        };
        if kept > 0 && !text.has_slid {
            cache.truncate(0, kept)?;
            let mut ids = text.ids;
            ids.truncate(kept);
            self.prefixes.keep(text.request.reuse_group, ids, cache, text.scores);
        }
        Ok(())
    }

    /// Drops the data that only further sequences of this request could use.
    pub(super) fn forget_prompt(&mut self, request: RequestId) {
        self.prompt_logits.take_if(|prompt| prompt.request == request);
        self.prefixes.forget(ReuseGroup::Sequences(request.0));
    }

    /// Reports that the prompt of a request is computed, for the first sequence only.
    pub(super) fn report_begun(&mut self, text: &SequenceState<T>, cached_tokens: usize) {
        if text.sequence == 0 {
            let (request, prompt) = (text.request.id, text.scores.known().to_vec());
            self.ready.push(Event::Begun { request, cached_tokens, prompt });
        }
    }

    /// Ends a request that asks for no new tokens, once its prompt is computed.
    fn end_without_tokens(
        &mut self,
        text: SequenceState<T>,
        cache: Gpt2Cache,
    ) -> Result<(), GenerationError> {
        let request = text.request.id;
        let texts = match text.is_observed() {
            // Every sequence has its own observer, so this event ends only one of them.
            true => text.sequence..text.sequence + 1,
            false => {
                self.waiting.retain(|waiting| waiting.request.id != request);
                0..text.request.config.num_return_sequences
            }
        };
        self.ready.extend(texts.map(|sequence| Event::Empty { request, sequence }));
        self.keep_prefix(text, cache)
    }

    /// Returns whether the next waiting sequence belongs to the same request and may reuse the prompt.
    pub(super) fn is_shared(&self, text: &SequenceState<T>) -> bool {
        let next = self.waiting.front().filter(|_| !text.is_observed());
        next.is_some_and(|next| next.request.id == text.request.id)
    }

    /// Adds a sequence to the running sequences and chooses its next token from these logits.
    pub(super) fn begin(
        &mut self,
        text: SequenceState<T>,
        cache: Gpt2Cache,
        logits: Vec<f32>,
    ) -> Result<(), GenerationError> {
        if text.is_observed() {
            return self.begin_observed(text, cache, logits);
        }
        let row = self.run(text, cache)?;
        let chosen = sample(&mut self.running[row..=row], &[Vec::new()], [&mut [logits][..]]);
        self.extend(row, chosen)
    }
}

/// Returns the number of alternatives for each token of the prompt.
///
/// Only the first sequence of a request computes them.
fn prompt_logprobs_of(request: &Accepted, sequence: usize) -> Option<usize> {
    request.prompt_logprobs.filter(|_| sequence == 0)
}
