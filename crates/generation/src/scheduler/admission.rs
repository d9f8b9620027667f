//! How texts begin: if there is room, from what was computed for others, and with the tokens of their prompts.

use std::ops::Deref;

use candle_core::Tensor;
use candle_gpt2::{Gpt2Cache, KvSlot, LogitsFor};
use tokenizers::Tokenizer;

use super::event::Event;
use super::prefill::Prefill;
use super::request::RequestId;
use super::text::{Accepted, Text, sample};
use super::{PromptLogits, Scheduler, Waiting};
use crate::clock::Deadline;
use crate::draft::Success;
use crate::logits::rows_of;
use crate::prefixes::{Beginning, PromptScores, Sharers, Source, Wanted};
use crate::{GenerationError, Sampler};

impl<T: Deref<Target = Tokenizer> + Clone> Scheduler<T> {
    /// As many tokens of prompts as a step computes, of which `computed` are; texts begin if there is room.
    pub(super) fn prefill(&mut self, computed: usize) -> Result<(), GenerationError> {
        let mut budget = self.options.chunk_tokens.saturating_sub(computed);
        while budget > 0 && (!self.prefilling.is_empty() || self.admit()?) {
            let Some(mut prefill) = self.prefilling.pop_front() else {
                // A text began at once, from a prompt that it shares: that is work too.
                budget -= 1;
                continue;
            };
            let before = prefill.computed;
            let hidden = prefill.compute(&self.model, budget); // (1, count, C)
            budget -= prefill.computed - before;
            match hidden {
                Ok(hidden) => self.go_on(prefill, &hidden, None)?,
                Err(error) if prefill.text.is_observed() => {
                    self.fail_observed(prefill.text.request.id, error)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// What follows when some tokens of a prompt are computed, whose hidden states these are, `(1, count, C)`. The logits after the last
    /// one are computed if they are wanted and not given.
    pub(super) fn go_on(
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
        self.tell_begun(&text, cached);
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

    /// Begins the next text that waits, if there is room; says whether it did.
    pub(super) fn admit(&mut self) -> Result<bool, GenerationError> {
        let Some(waiting) = self.waiting.front() else { return Ok(false) };
        if self.running() >= self.options.max_texts {
            return Ok(false);
        }
        let capacity = waiting.request.capacity.max(self.slot_tokens.unwrap_or(0));
        let mut beginning = self.beginning_of(waiting);
        let Some(mut cache) = self.room_for(capacity, &mut beginning) else { return Ok(false) };
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
        let mut text = Text {
            // Texts of one prompt differ by their stream; the same prompt in another request is the same text.
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
            success: Success::new(),
            right: 0,
            assisted: assistant.and_then(|assistant| assistant.cache(capacity)),
            sequence,
            request,
        };
        let prompt_len = text.ids.len();
        let sibling = |other: &&Text<T>| other.request.id == id && !other.has_slid;
        if let (Some(own), Some(other)) = (&mut text.assisted, self.running.iter().find(sibling))
            && let Some(other) = &other.assisted
            && other.lengths() >= &[prompt_len][..]
        {
            own.copy_row(0, other, 0, prompt_len)?;
        }
        let cached = self.take_over(beginning, &mut text, &mut cache)?;
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

    /// The longest beginning of a prompt that was computed for a text that runs, or for one that has ended: all of it for a
    /// further sequence of a request, whose logits after the prompt are known.
    fn beginning_of(&self, Waiting { request, sequence }: &Waiting) -> Option<Beginning> {
        let is_known = self.prompt_logits.as_ref().is_some_and(|prompt| prompt.request == request.id);
        let wanted = Wanted {
            sharers: request.sharers,
            prompt: &request.prompt,
            most: request.prompt.len() - usize::from(!is_known),
            logprobs: prompt_logprobs_of(request, *sequence),
        };
        let rows = self.running.iter().zip(self.cache.lengths()).enumerate();
        let rows = rows.filter(|(_, (text, _))| text.request.sharers == request.sharers && !text.has_slid);
        let running = rows.map(|(row, (text, held))| Beginning {
            tokens: wanted.usable(&text.ids[..*held], &text.scores),
            source: Source::Running(row),
        });
        let kept = self.prefixes.longest(&wanted);
        let kept = kept.map(|(number, tokens)| Beginning { tokens, source: Source::Kept(number) });
        running.chain(kept).filter(|beginning| beginning.tokens > 0).max_by_key(|beginning| beginning.tokens)
    }

    /// Room for a text. Kept prefixes are dropped if that makes room, the beginning that the text continues last.
    fn room_for(&mut self, capacity: usize, beginning: &mut Option<Beginning>) -> Option<Gpt2Cache> {
        let used = self.kv_tokens_in_use();
        if used + KvSlot::room_of(capacity) > self.pool.tokens() {
            return None;
        }
        let needed = match beginning {
            Some(Beginning { source: Source::Kept(number), .. }) => Some(*number),
            _ => None,
        };
        // What only sequences of one request can continue becomes the next one's row.
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
        if let (Some(number), Some(found)) = (needed, beginning.as_mut()) {
            if let Some((cache, scores)) = self.prefixes.give(number, capacity) {
                found.source = Source::Taken(scores);
                return Some(cache);
            }
            *beginning = None;
        }
        self.pool.cache(1, capacity)
    }

    /// Gives a text the beginning of its prompt that is computed already; returns how many tokens that is.
    fn take_over(
        &mut self,
        beginning: Option<Beginning>,
        text: &mut Text<T>,
        cache: &mut Gpt2Cache,
    ) -> Result<usize, GenerationError> {
        let Some(Beginning { tokens, source }) = beginning else { return Ok(0) };
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

    /// Leaves what was computed for a text that has ended to those that share with it.
    pub(super) fn leave(&mut self, text: Text<T>, mut cache: Gpt2Cache) -> Result<(), GenerationError> {
        let held = cache.lengths().first().copied().unwrap_or(0);
        let kept = match text.request.sharers {
            Sharers::Reuse(_) => held,
            Sharers::Sequences(_) if self.is_shared(&text) => held.min(text.request.prompt.len()),
            Sharers::Sequences(_) => 0,
        };
        if kept > 0 && !text.has_slid {
            cache.truncate(0, kept)?;
            let mut ids = text.ids;
            ids.truncate(kept);
            self.prefixes.keep(text.request.sharers, ids, cache, text.scores);
        }
        Ok(())
    }

    /// Forgets what only further sequences of this request could continue.
    pub(super) fn forget_prompt(&mut self, request: RequestId) {
        self.prompt_logits.take_if(|prompt| prompt.request == request);
        self.prefixes.forget(Sharers::Sequences(request.0));
    }

    /// Says that the prompt of a request is computed, with its first text.
    pub(super) fn tell_begun(&mut self, text: &Text<T>, cached_tokens: usize) {
        if text.sequence == 0 {
            let (request, prompt) = (text.request.id, text.scores.known().to_vec());
            self.ready.push(Event::Begun { request, cached_tokens, prompt });
        }
    }

    /// Ends a request of which only the prompt was asked for.
    fn end_without_tokens(&mut self, text: Text<T>, cache: Gpt2Cache) -> Result<(), GenerationError> {
        let request = text.request.id;
        let texts = match text.is_observed() {
            // The others have observers of their own.
            true => text.sequence..text.sequence + 1,
            false => {
                self.waiting.retain(|waiting| waiting.request.id != request);
                0..text.request.config.num_return_sequences
            }
        };
        self.ready.extend(texts.map(|sequence| Event::Empty { request, sequence }));
        self.leave(text, cache)
    }

    /// Whether the next waiting text continues the same prompt, and may reuse what was computed for this one.
    pub(super) fn is_shared(&self, text: &Text<T>) -> bool {
        let next = self.waiting.front().filter(|_| !text.is_observed());
        next.is_some_and(|next| next.request.id == text.request.id)
    }

    /// Gives a text its next token by these logits, and a place among the running ones.
    pub(super) fn begin(
        &mut self,
        text: Text<T>,
        cache: Gpt2Cache,
        logits: Vec<f32>,
    ) -> Result<(), GenerationError> {
        if text.is_observed() {
            return self.begin_apart(text, cache, logits);
        }
        let row = self.run(text, cache)?;
        let chosen = sample(&mut self.running[row..=row], &[Vec::new()], [&mut [logits][..]]);
        self.extend(row, chosen)
    }
}

/// The alternatives that are wanted for each token of the prompt. They are found once for all sequences.
fn prompt_logprobs_of(request: &Accepted, sequence: usize) -> Option<usize> {
    request.prompt_logprobs.filter(|_| sequence == 0)
}
