//! One text: what was asked, what it has so far, and how its next tokens are chosen.

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
use crate::draft::Success;
use crate::logprobs::{Expected, biased};
use crate::prefixes::{PromptScores, Sharers};
use crate::{
    GenerationConfig, GenerationError, History, LogitsProcessor, Sampler, TextStream, TokenLogprobs, WhenFull,
};

/// A request that was checked.
pub(super) struct Accepted {
    pub(super) id: RequestId,
    /// The prompt as the model gets it.
    pub(super) prompt: Vec<u32>,
    pub(super) max_new_tokens: usize,
    /// Tokens whose keys and values a text may have to keep.
    pub(super) capacity: usize,
    pub(super) config: Arc<GenerationConfig>,
    pub(super) processors: Vec<LogitsProcessor>,
    pub(super) stream: u64,
    pub(super) logprobs: Option<usize>,
    pub(super) prompt_logprobs: Option<usize>,
    /// Who may continue what is computed for its texts.
    pub(super) sharers: Sharers,
    pub(super) observers: Vec<TextObserver>,
    pub(super) stop_at_layer: Option<usize>,
    /// Tokens of the prompt that are shown in front of its texts.
    pub(super) echoed: Option<Vec<u32>>,
}

impl Accepted {
    /// Stream of the text after the prompt.
    pub(super) fn text_stream<T: Deref<Target = Tokenizer>>(
        &self,
        tokenizer: T,
    ) -> Result<TextStream<T>, GenerationError> {
        let mut stream = TextStream::new(tokenizer).with_stop_strings(&self.config.stop_strings);
        stream.follow(self.echoed.as_deref().unwrap_or_default())?;
        Ok(stream)
    }
}

/// The observed texts that gain a token in each step, each with its memory.
pub(super) type Observed<T> = VecDeque<(Text<T>, Gpt2Cache)>;

/// A text in the making.
pub(super) struct Text<T> {
    pub(super) request: Arc<Accepted>,
    pub(super) sequence: usize,
    /// Prompt and new tokens.
    pub(super) ids: Vec<u32>,
    /// How probable the tokens of its prompt are, as far as that is known.
    pub(super) scores: PromptScores,
    /// Counted from when its prompt is begun.
    pub(super) deadline: Deadline,
    pub(super) sampler: Sampler,
    pub(super) stream: Option<TextStream<T>>,
    /// Whether its row of the cache no longer begins with the prompt.
    pub(super) has_slid: bool,
    pub(super) success: Success,
    /// Tokens of the last draft that were right, and that the text does not have yet.
    pub(super) right: usize,
    /// What the assistant keeps of it.
    pub(super) assisted: Option<Gpt2Cache>,
}

/// The next tokens of a text, and why there are no more.
pub(super) struct Chosen {
    pub(super) tokens: Vec<ChosenToken>,
    pub(super) error: Option<GenerationError>,
}

pub(super) struct ChosenToken {
    pub(super) id: u32,
    pub(super) logprobs: Option<TokenLogprobs>,
    /// Whether nothing may come after it.
    pub(super) is_complete: bool,
}

impl<T> Text<T> {
    pub(super) fn is_observed(&self) -> bool {
        !self.request.observers.is_empty()
    }

    /// Computes in a pass of its own, which its observer sees if it has one.
    pub(super) fn in_pass<R>(&self, compute: impl FnOnce(&mut Pass) -> R) -> R {
        let pass = Pass::inference();
        let mut pass = match self.request.stop_at_layer {
            // A cache counts the tokens in its first layer.
            Some(layer) => pass.stopping_at(layer.max(1)),
            None => pass,
        };
        match self.request.observers.get(self.sequence) {
            Some(observer) => compute(&mut pass.observed_by(&mut *observer.lock())),
            None => compute(&mut pass),
        }
    }
}

impl<T: Deref<Target = Tokenizer>> Text<T> {
    /// Counts the drafted tokens and those of them that continue the text, before they are added.
    pub(super) fn count_draft(
        &mut self,
        draft: &[u32],
        chosen: &[ChosenToken],
    ) -> Result<(), GenerationError> {
        let is_right = |(drafted, chosen): &(&u32, &ChosenToken)| **drafted == chosen.id;
        let accepted = draft.iter().zip(chosen).take_while(is_right).count();
        if !draft.is_empty() {
            self.success.count(draft.len(), accepted);
        }
        self.right = accepted;
        if let Some(cache) = &mut self.assisted {
            let held = cache.lengths().first().copied().unwrap_or(0);
            cache.truncate(0, held.min(self.ids.len() + accepted))?;
        }
        Ok(())
    }

    /// Adds its next tokens and tells them; says whether it ends with the last of them. Its memory holds so many tokens by then.
    ///
    /// # Errors
    /// When it cannot continue.
    pub(super) fn gain(
        &mut self,
        Chosen { tokens, error }: Chosen,
        held: usize,
        n_positions: usize,
        told: &mut Vec<Event>,
    ) -> Result<bool, GenerationError> {
        let (request, sequence) = (self.request.id, self.sequence);
        let mut left = tokens.len();
        for ChosenToken { id, logprobs, is_complete } in tokens {
            left -= 1;
            if self.right > 0 {
                self.right -= 1;
                self.success.drafts.accepted += 1;
            }
            let drafts = self.success.drafts;
            let (text, stop_reason) = self.push(id, is_complete, held - left >= n_positions)?;
            told.push(Event::Token { request, sequence, id, text, logprobs, stop_reason, drafts });
            if stop_reason.is_some() {
                return Ok(true);
            }
        }
        error.map_or(Ok(false), Err)
    }

    /// Adds a token; returns the text it completes and why the text ends with it, if it does.
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

/// The next tokens of each text, of which one is chosen after its last token and after each that was drafted rightly; on all
/// threads. `logits` has a row for each of them.
pub(super) fn sample<'a, T>(
    texts: &mut [Text<T>],
    drafts: &[Vec<u32>],
    logits: impl IntoIterator<Item = &'a mut [Vec<f32>]>,
) -> Vec<Chosen> {
    let rows = texts.iter_mut().zip(drafts).zip(logits).map(|((text, draft), logits)| {
        let Text { request, ids, sampler, .. } = text;
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

/// The next token of a text.
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
