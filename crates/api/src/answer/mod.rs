//! Responses from the events of texts, whole or in pieces.

mod activations;
mod entries;
mod text;
mod wants;
mod write;

use std::ops::Range;
use std::sync::Arc;

use candle_gpt2_generation::{Event, GenerationError, StopReason, TokenLogprobs};

pub(crate) use text::PromptAnswer;
use text::Sent;
pub(crate) use wants::{Head, Shape, Wants};
use write::{Choice, Response, Usage};
pub(crate) use write::{List, json};

use crate::pieces::Pieces;
use crate::{ApiError, Reply, Warnings};

/// A response in the making.
///
/// A field of a [`Call`](crate::Call); a [`Session`](crate::Session) fills it.
#[derive(Debug)]
pub struct Answer {
    head: Head,
    wants: Wants,
    pieces: Arc<Pieces>,
    prompts: Vec<PromptAnswer>,
    /// Those that were not sent.
    warnings: Warnings,
}

impl Answer {
    pub(crate) fn new(
        head: Head,
        wants: Wants,
        pieces: Arc<Pieces>,
        prompts: Vec<PromptAnswer>,
        warnings: Warnings,
    ) -> Self {
        Self { head, wants, pieces, prompts, warnings }
    }

    /// The number of the response, such as `cmpl-…`.
    pub fn id(&self) -> &str {
        &self.head.id
    }

    /// What is wrong with the request though it is answered. The whole response has it under `warnings`, and so has the first chunk of
    /// a stream, with which it leaves this list.
    pub fn warnings(&self) -> &Warnings {
        &self.warnings
    }

    /// Takes what happened to a text of a prompt. In a stream, returns the JSON objects to send; else nothing.
    ///
    /// # Errors
    /// When the request cannot continue.
    pub fn take(&mut self, prompt: usize, event: Event) -> Result<Vec<String>, ApiError> {
        let mut chunks = self.chunks(prompt, event)?;
        if let Some(first) = chunks.first_mut() {
            *first = std::mem::take(&mut self.warnings).added_to(std::mem::take(first));
        }
        Ok(chunks)
    }

    fn chunks(&mut self, prompt: usize, event: Event) -> Result<Vec<String>, ApiError> {
        let Some(state) = self.prompts.get_mut(prompt) else { return Ok(Vec::new()) };
        match event {
            Event::Begun { cached_tokens, prompt: scores, .. } => {
                scores.iter().flatten().try_for_each(|logprobs| check(logprobs, &self.wants))?;
                (state.cached_tokens, state.scores) = (cached_tokens, scores);
                Ok(self.begin(prompt))
            }
            Event::Token { sequence, id, text: piece, logprobs, stop_reason, .. } => {
                logprobs.iter().try_for_each(|logprobs| check(logprobs, &self.wants))?;
                if let Some(text) = state.texts.get_mut(sequence) {
                    text.push(id, &piece, logprobs, &self.pieces);
                    if let Some(reason) = stop_reason {
                        text.end(reason, &self.wants, &self.pieces);
                        text.see(&self.wants)?;
                    }
                }
                Ok(self.go_on(prompt, sequence))
            }
            Event::Empty { sequence, .. } => {
                if let Some(text) = state.texts.get_mut(sequence) {
                    text.add(&state.tail);
                    text.end(StopReason::MaxNewTokens, &self.wants, &self.pieces);
                    text.see(&self.wants)?;
                }
                Ok(self.go_on(prompt, sequence))
            }
            Event::Failed { error, .. } => Err(self.refused(prompt, &error)),
            _ => Ok(Vec::new()),
        }
    }

    /// Why the request ends whose prompt cannot be continued, with the prompt's path if that is at fault.
    pub fn refused(&self, prompt: usize, error: &GenerationError) -> ApiError {
        if let (GenerationError::NotFinite, true) = (error, self.wants.is_steered) {
            return self.wants.overflowed("the model's logits are not finite");
        }
        let refusal = ApiError::from(error);
        // The message names the grammar's kind, and nothing internal.
        let is_of_option =
            matches!(error, GenerationError::Constraint { .. } | GenerationError::NoTokenLeft { .. });
        let is_of_prompt = refusal.cause().is_none() && !is_of_option;
        match self.prompts.get(prompt).filter(|_| is_of_prompt) {
            Some(prompt) => refusal.with_param(&prompt.path),
            None => refusal,
        }
    }

    /// What comes in a stream after the last event and in front of `[DONE]`.
    pub fn last_chunks(&mut self) -> Vec<String> {
        match self.wants.stream && self.wants.include_usage {
            true => vec![json(&self.response(&[], Some(Some(self.usage()))))],
            false => Vec::new(),
        }
    }

    /// The whole response, once all texts have ended.
    pub fn into_response(self) -> String {
        if self.wants.shape == Shape::Activations {
            return self.warnings.added_to(self.activations());
        }
        let mut choices = Vec::new();
        for (prompt, state) in self.prompts.iter().enumerate() {
            for (number, sequence) in self.told_texts(state).into_iter().enumerate() {
                if let Some(text) = state.texts.get(sequence) {
                    let mut choice = self.choice(prompt * self.wants.n + number, state);
                    choice.echo = self.wants.echo;
                    choice.text = Some((text, Sent::default()));
                    choices.push(choice);
                }
            }
        }
        self.warnings.added_to(json(&self.response(&choices, Some(Some(self.usage())))))
    }

    /// The same, with its warnings beside it.
    pub(crate) fn into_reply(self) -> Reply {
        let warnings = self.warnings.clone();
        Reply { json: self.into_response(), warnings }
    }

    /// The reported texts of a prompt, by their sequence.
    fn told_texts(&self, state: &PromptAnswer) -> Vec<usize> {
        let Wants { n, best_of, is_copied, .. } = self.wants;
        if is_copied {
            return vec![0; n];
        }
        let mut order: Vec<usize> = (0..state.texts.len()).collect();
        if best_of > n {
            let mean = |sequence: &usize| state.texts.get(*sequence).map_or(0.0, |text| text.mean_logprob());
            order.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
        }
        order.truncate(n);
        order
    }

    /// The indices of the choices that tell a text.
    fn indices(&self, prompt: usize, sequence: usize) -> Range<usize> {
        let first = prompt * self.wants.n;
        if self.wants.is_copied {
            first..first + self.wants.n
        } else {
            first + sequence..first + sequence + 1
        }
    }

    /// The chunks that come before the first token of a prompt's texts.
    fn begin(&mut self, prompt: usize) -> Vec<String> {
        let Some(state) = self.prompts.get_mut(prompt) else { return Vec::new() };
        let has_begun = std::mem::replace(&mut state.has_begun, true);
        let tells_prompt = self.wants.echo && !state.told().is_empty();
        if has_begun || !self.wants.stream || !(tells_prompt || self.wants.shape == Shape::Chat) {
            return Vec::new();
        }
        state.texts.iter_mut().for_each(|text| text.sent.has_begun = true);
        let (first, state) = (prompt * self.wants.n, &self.prompts[prompt]);
        let chunk = |index| {
            let mut choice = self.choice(index, state);
            (choice.is_first, choice.echo) = (true, self.wants.echo);
            self.chunk(choice)
        };
        (first..first + self.wants.n).map(chunk).collect()
    }

    /// The chunks that a text has for its last token.
    fn go_on(&mut self, prompt: usize, sequence: usize) -> Vec<String> {
        if !self.wants.stream {
            return Vec::new();
        }
        let mut chunks = self.begin(prompt);
        let Some(state) = self.prompts.get(prompt) else { return chunks };
        let Some(text) = state.texts.get(sequence) else { return chunks };
        let sent = text.sent;
        let has_entries = self.wants.logprobs && text.told_entries() > sent.entries;
        if text.text.len() == sent.text && text.finish.is_none() && !has_entries {
            return chunks;
        }
        chunks.extend(self.indices(prompt, sequence).map(|index| {
            let mut choice = self.choice(index, state);
            choice.is_first = !sent.has_begun;
            choice.text = Some((text, sent));
            self.chunk(choice)
        }));
        if let Some(text) = self.prompts.get_mut(prompt).and_then(|state| state.texts.get_mut(sequence)) {
            text.sent = Sent {
                has_begun: true,
                text: text.text.len(),
                entries: text.told_entries(),
                ids: text.ids.len(),
            };
        }
        chunks
    }

    /// A choice that tells nothing yet.
    fn choice<'a>(&'a self, index: usize, prompt: &'a PromptAnswer) -> Choice<'a> {
        let (wants, pieces) = (&self.wants, &*self.pieces);
        Choice { index, wants, pieces, prompt, echo: false, is_first: false, text: None }
    }

    fn chunk(&self, choice: Choice<'_>) -> String {
        json(&self.response(&[choice], self.wants.include_usage.then_some(None)))
    }

    fn response<'a>(&'a self, choices: &'a [Choice<'a>], usage: Option<Option<Usage>>) -> Response<'a> {
        Response { head: &self.head, wants: &self.wants, choices, usage }
    }

    fn usage(&self) -> Usage {
        let of_prompts = |count: fn(&PromptAnswer) -> usize| self.prompts.iter().map(count).sum();
        let made: usize = self.prompts.iter().flat_map(|state| &state.texts).map(|text| text.ids.len()).sum();
        let copies = if self.wants.is_copied { self.wants.best_of } else { 1 };
        Usage {
            prompt_tokens: of_prompts(|state| state.ids.len()),
            completion_tokens: made * copies,
            cached_tokens: self.wants.prompt_tokens_details.then(|| of_prompts(|state| state.cached_tokens)),
        }
    }
}

/// What is no number is never told.
fn check(logprobs: &TokenLogprobs, wants: &Wants) -> Result<(), ApiError> {
    let mut told = logprobs.alternatives.iter().map(|(_, logprob)| *logprob).chain([logprobs.logprob]);
    match told.any(f64::is_nan) {
        true => Err(wants.overflowed("a log-probability is not a number")),
        false => Ok(()),
    }
}
