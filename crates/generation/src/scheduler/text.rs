//! A single sequence: its request, its tokens so far, and the choice of its next tokens.

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::Arc;

use candle_gpt2::{Gpt2Cache, Pass};
use candle_gpt2_arithmetic::map_items;
use tokenizers::Tokenizer;

use super::event::{Event, StopReason};
use super::request::RequestId;
use super::text_observer::TextObserver;
use crate::clock::Deadline;
use crate::draft::DraftStats;
use crate::logprobs::{Expected, biased};
use crate::prefixes::{PromptScores, ReuseGroup};
use crate::{
    GenerationConfig, GenerationError, History, LogitsProcessor, Sampler, TextStream, TokenLogprobs, WhenFull,
};

/// A request that passed all checks.
pub(super) struct Accepted {
    pub(super) id: RequestId,
    /// Prompt after applying the policy for long prompts.
    pub(super) prompt: Vec<u32>,
    pub(super) max_new_tokens: usize,
    /// Maximum number of tokens in the KV cache of a sequence.
    pub(super) capacity: usize,
    pub(super) config: Arc<GenerationConfig>,
    pub(super) processors: Vec<LogitsProcessor>,
    pub(super) stream: u64,
    pub(super) logprobs: Option<usize>,
    pub(super) prompt_logprobs: Option<usize>,
    /// Sequences that may reuse the computed prefixes.
    pub(super) reuse_group: ReuseGroup,
    pub(super) observers: Vec<TextObserver>,
    pub(super) stop_at_layer: Option<usize>,
    /// Prompt tokens to echo before the completion.
    pub(super) echoed: Option<Vec<u32>>,
}

impl Accepted {
    /// Creates the text stream for a completion.
    pub(super) fn text_stream<T: Deref<Target = Tokenizer>>(
        &self,
        tokenizer: T,
    ) -> Result<TextStream<T>, GenerationError> {
        let mut stream = TextStream::new(tokenizer).with_stop_strings(&self.config.stop_strings);
        stream.follow(self.echoed.as_deref().unwrap_or_default())?;
        Ok(stream)
    }
}

/// Observed sequences that gain a token in each step, each with its KV cache.
pub(super) type Observed<T> = VecDeque<(SequenceState<T>, Gpt2Cache)>;

/// A sequence that has begun and not ended.
pub(super) struct SequenceState<T> {
    pub(super) request: Arc<Accepted>,
    pub(super) sequence: usize,
    /// Prompt and new tokens.
    pub(super) ids: Vec<u32>,
    /// Scores of the prompt's tokens, as far as they are known.
    pub(super) scores: PromptScores,
    /// Time limit; it starts when the prefill begins.
    pub(super) deadline: Deadline,
    pub(super) sampler: Sampler,
    pub(super) stream: Option<TextStream<T>>,
    /// Whether the row of the cache no longer begins with the prompt.
    pub(super) has_slid: bool,
    pub(super) draft_stats: DraftStats,
    /// Number of correct tokens in the last draft that have not been appended yet.
    pub(super) right: usize,
    /// The assistant's KV cache for the sequence.
    pub(super) assisted: Option<Gpt2Cache>,
}

/// Next tokens of a sequence, and the error that prevents further tokens.
pub(super) struct Chosen {
    pub(super) tokens: Vec<ChosenToken>,
    pub(super) error: Option<GenerationError>,
}

pub(super) struct ChosenToken {
    pub(super) id: u32,
    pub(super) logprobs: Option<TokenLogprobs>,
    /// Whether the completion must end after the token.
    pub(super) is_complete: bool,
}

impl<T> SequenceState<T> {
    pub(super) fn is_observed(&self) -> bool {
        !self.request.observers.is_empty()
    }

    /// Calls `compute` with a pass for this sequence only, with its observer if it has one.
    pub(super) fn in_pass<R>(&self, compute: impl FnOnce(&mut Pass) -> R) -> R {
        let pass = Pass::inference();
        let mut pass = match self.request.stop_at_layer {
            // At least one block must run, because a cache counts the tokens in its first layer.
            Some(layer) => pass.stopping_at(layer.max(1)),
            None => pass,
        };
        match self.request.observers.get(self.sequence) {
            Some(observer) => compute(&mut pass.observed_by(&mut *observer.lock())),
            None => compute(&mut pass),
        }
    }
}

impl<T: Deref<Target = Tokenizer>> SequenceState<T> {
    /// Counts the drafted tokens and the correct ones among them, before any are appended.
    pub(super) fn count_draft(
        &mut self,
        draft: &[u32],
        chosen: &[ChosenToken],
    ) -> Result<(), GenerationError> {
        let is_right = |(drafted, chosen): &(&u32, &ChosenToken)| **drafted == chosen.id;
        let accepted = draft.iter().zip(chosen).take_while(is_right).count();
        if !draft.is_empty() {
            self.draft_stats.count(draft.len(), accepted);
        }
        self.right = accepted;
        if let Some(cache) = &mut self.assisted {
            let held = cache.lengths().first().copied().unwrap_or(0);
            cache.truncate(0, held.min(self.ids.len() + accepted))?;
        }
        Ok(())
    }

    /// Appends the next tokens and reports events; returns whether the last token ends the sequence.
    ///
    /// `held` is the number of tokens in the KV cache after these tokens.
    ///
    /// # Errors
    /// Returns an error if the sequence cannot continue.
    pub(super) fn append_tokens(
        &mut self,
        Chosen { tokens, error }: Chosen,
        held: usize,
        n_positions: usize,
        events: &mut Vec<Event>,
    ) -> Result<bool, GenerationError> {
        let (request, sequence) = (self.request.id, self.sequence);
        let mut left = tokens.len();
        for ChosenToken { id, logprobs, is_complete } in tokens {
            left -= 1;
            if self.right > 0 {
                self.right -= 1;
                self.draft_stats.drafts.accepted += 1;
            }
            let drafts = self.draft_stats.drafts;
            let (text, stop_reason) = self.push(id, is_complete, held - left >= n_positions)?;
            events.push(Event::Token { request, sequence, id, text, logprobs, stop_reason, drafts });
            if stop_reason.is_some() {
                return Ok(true);
            }
        }
        error.map_or(Ok(false), Err)
    }

    /// Appends a token; returns the text that it completes, and the stop reason, if any.
    fn push(
        &mut self,
        id: u32,
        is_complete: bool,
        is_full: bool,
    ) -> Result<(String, Option<StopReason>), GenerationError> {
        self.ids.push(id);
        let mut text = self.stream.as_mut().map(|stream| stream.push(id)).transpose()?.unwrap_or_default();
        let Accepted { config, prompt, max_new_tokens, .. } = &*self.request;
        let reasons = [
            (config.eos_token_id.contains(&id), StopReason::Eos),
            (self.stream.as_ref().is_some_and(TextStream::is_stopped), StopReason::StopString),
            (is_complete, StopReason::Complete),
            (self.ids.len() - prompt.len() >= *max_new_tokens, StopReason::MaxNewTokens),
            (config.when_full == WhenFull::Stop && is_full, StopReason::Context),
            (self.deadline.is_over(), StopReason::MaxTime),
        ];
        let reason = reasons.into_iter().find(|(holds, _)| *holds).map(|(_, reason)| reason);
        if reason.is_some() {
            text.push_str(&self.stream.take().map(TextStream::finish).transpose()?.unwrap_or_default());
        }
        Ok((text, reason))
    }
}

/// Chooses the next tokens of each sequence, on all threads.
///
/// One token is chosen after the last token, and one after each correctly drafted token. `logits` has one
/// row for each of them.
pub(super) fn sample<'a, T>(
    texts: &mut [SequenceState<T>],
    drafts: &[Vec<u32>],
    logits: impl IntoIterator<Item = &'a mut [Vec<f32>]>,
) -> Vec<Chosen> {
    let rows = texts.iter_mut().zip(drafts).zip(logits).map(|((text, draft), logits)| {
        let SequenceState { request, ids, sampler, .. } = text;
        (request, ids, sampler, draft, logits)
    });
    map_items(rows, |(request, ids, sampler, draft, logits)| {
        let (start, mut tokens, mut error) = (ids.len(), Vec::new(), None);
        for (place, logits) in logits.iter_mut().enumerate() {
            let token = match choose(request, sampler, ids, logits) {
                Ok(token) => token,
                Err(found) => {
                    error = Some(found);
                    break;
                }
            };
            ids.push(token.id);
            let is_drafted = draft.get(place) == Some(&token.id);
            let is_end = token.is_complete || request.config.eos_token_id.contains(&token.id);
            tokens.push(token);
            if is_end || !is_drafted {
                break;
            }
        }
        ids.truncate(start);
        Chosen { tokens, error }
    })
}

/// Chooses the next token of a sequence.
fn choose(
    request: &Accepted,
    sampler: &mut Sampler,
    ids: &[u32],
    logits: &mut [f32],
) -> Result<ChosenToken, GenerationError> {
    let history = History { ids, prompt_len: request.prompt.len() };
    let before = request.logprobs.map(|_| biased(&request.config, history, logits)).transpose()?;
    let id = sampler.sample(history, logits)?;
    let expected = before.as_deref().map(|logits| Expected::of(logits, request.logprobs.unwrap_or(0)));
    let logprobs = expected.transpose()?.map(|expected| expected.of_token(id));
    let is_complete = !request.config.eos_token_id.contains(&id)
        && LogitsProcessor::is_complete(&request.processors, || [history.generated(), &[id]].concat())?;
    Ok(ChosenToken { id, logprobs, is_complete })
}
