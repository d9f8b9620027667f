//! Builds responses from scheduler events, streamed or not.

mod activations;
mod entries;
mod options;
mod text;
mod write;

use std::ops::Range;
use std::sync::Arc;

use candle_gpt2_generation::{Event, GenerationError, StopReason, TokenLogprobs};

pub(crate) use options::{Head, ResponseOptions, Shape};
pub(crate) use text::PromptAnswer;
use text::Sent;
use write::{Choice, Response, Usage};
pub(crate) use write::{List, json};

use crate::pieces::Pieces;
use crate::{ApiError, Reply, Warnings};

/// Partially built response.
///
/// Part of a [`Call`](crate::Call). A [`Session`](crate::Session) adds the generated tokens.
#[derive(Debug)]
pub struct Answer {
    head: Head,
    options: ResponseOptions,
    pieces: Arc<Pieces>,
    prompts: Vec<PromptAnswer>,
    /// Warnings that have not been sent yet.
    warnings: Warnings,
}

impl Answer {
    pub(crate) fn new(
        head: Head,
        options: ResponseOptions,
        pieces: Arc<Pieces>,
        prompts: Vec<PromptAnswer>,
        warnings: Warnings,
    ) -> Self {
        Self { head, options, pieces, prompts, warnings }
    }

    /// Id of the response, such as `cmpl-…`.
    pub fn id(&self) -> &str {
        &self.head.id
    }

    /// Nonfatal warnings about the request.
    ///
    /// A complete response contains them under `warnings`. A stream sends them in its first chunk, which clears
    /// this list.
    pub fn warnings(&self) -> &Warnings {
        &self.warnings
    }

    /// Processes an event for a prompt; if the response is streamed, returns the JSON chunks to send.
    ///
    /// # Errors
    /// If the request cannot continue.
    pub fn handle_event(&mut self, prompt: usize, event: Event) -> Result<Vec<String>, ApiError> {
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
                scores.iter().flatten().try_for_each(|logprobs| check(logprobs, &self.options))?;
                (state.cached_tokens, state.scores) = (cached_tokens, scores);
                Ok(self.begin(prompt))
            }
            Event::Token { sequence, id, text: piece, logprobs, stop_reason, .. } => {
                logprobs.iter().try_for_each(|logprobs| check(logprobs, &self.options))?;
                if let Some(text) = state.texts.get_mut(sequence) {
                    text.push(id, &piece, logprobs, &self.pieces);
                    if let Some(reason) = stop_reason {
                        text.end(reason, &self.options, &self.pieces);
                        text.collect_activations(&self.options)?;
                    }
                }
                Ok(self.token_chunks(prompt, sequence))
            }
            Event::Empty { sequence, .. } => {
                if let Some(text) = state.texts.get_mut(sequence) {
                    text.add(&state.tail);
                    text.end(StopReason::MaxNewTokens, &self.options, &self.pieces);
                    text.collect_activations(&self.options)?;
                }
                Ok(self.token_chunks(prompt, sequence))
            }
            Event::Failed { error, .. } => Err(self.refused(prompt, &error)),
            _ => Ok(Vec::new()),
        }
    }

    /// Error for a prompt that cannot continue; includes the prompt's path if the prompt is at fault.
    pub fn refused(&self, prompt: usize, error: &GenerationError) -> ApiError {
        if let (GenerationError::NotFinite, true) = (error, self.options.is_steered) {
            return self.options.overflowed("the model's logits are not finite");
        }
        let refusal = ApiError::from(error);
        // These messages name the option at fault rather than a prompt, and reveal no internals.
        let is_of_option =
            matches!(error, GenerationError::Constraint { .. } | GenerationError::NoTokenLeft { .. });
        let is_of_prompt = refusal.cause().is_none() && !is_of_option;
        match self.prompts.get(prompt).filter(|_| is_of_prompt) {
            Some(prompt) => refusal.with_param(&prompt.path),
            None => refusal,
        }
    }

    /// Chunks sent after the last event and before `[DONE]`.
    pub fn last_chunks(&mut self) -> Vec<String> {
        match self.options.stream && self.options.include_usage {
            true => vec![json(&self.response(&[], Some(Some(self.usage()))))],
            false => Vec::new(),
        }
    }

    /// Complete response; all completions must have finished.
    pub fn into_response(self) -> String {
        if self.options.shape == Shape::Activations {
            return self.warnings.added_to(self.activations());
        }
        let mut choices = Vec::new();
        for (prompt, state) in self.prompts.iter().enumerate() {
            for (number, sequence) in self.returned_texts(state).into_iter().enumerate() {
                if let Some(text) = state.texts.get(sequence) {
                    let mut choice = self.choice(prompt * self.options.n + number, state);
                    choice.echo = self.options.echo;
                    choice.text = Some((text, Sent::default()));
                    choices.push(choice);
                }
            }
        }
        self.warnings.added_to(json(&self.response(&choices, Some(Some(self.usage())))))
    }

    /// Complete response with its warnings.
    pub(crate) fn into_reply(self) -> Reply {
        let warnings = self.warnings.clone();
        Reply { json: self.into_response(), warnings }
    }

    /// Sequence indices of the completions returned for a prompt.
    fn returned_texts(&self, state: &PromptAnswer) -> Vec<usize> {
        let ResponseOptions { n, best_of, is_copied, .. } = self.options;
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

    /// Choice indices of a completion; more than one if the completion is returned several times.
    fn indices(&self, prompt: usize, sequence: usize) -> Range<usize> {
        let first = prompt * self.options.n;
        if self.options.is_copied {
            first..first + self.options.n
        } else {
            first + sequence..first + sequence + 1
        }
    }

    /// Chunks sent before the first token of a prompt's completions.
    fn begin(&mut self, prompt: usize) -> Vec<String> {
        let Some(state) = self.prompts.get_mut(prompt) else { return Vec::new() };
        let has_begun = std::mem::replace(&mut state.has_begun, true);
        let echoes_prompt = self.options.echo && !state.reported_ids().is_empty();
        if has_begun || !self.options.stream || !(echoes_prompt || self.options.shape == Shape::Chat) {
            return Vec::new();
        }
        state.texts.iter_mut().for_each(|text| text.sent.has_begun = true);
        let (first, state) = (prompt * self.options.n, &self.prompts[prompt]);
        let chunk = |index| {
            let mut choice = self.choice(index, state);
            (choice.is_first, choice.echo) = (true, self.options.echo);
            self.chunk(choice)
        };
        (first..first + self.options.n).map(chunk).collect()
    }

    /// Chunks for the newest token of a completion.
    fn token_chunks(&mut self, prompt: usize, sequence: usize) -> Vec<String> {
        if !self.options.stream {
            return Vec::new();
        }
        let mut chunks = self.begin(prompt);
        let Some(state) = self.prompts.get(prompt) else { return chunks };
        let Some(text) = state.texts.get(sequence) else { return chunks };
        let sent = text.sent;
        let has_entries = self.options.logprobs && text.reportable_entries() > sent.entries;
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
                entries: text.reportable_entries(),
                ids: text.ids.len(),
            };
        }
        chunks
    }

    /// Creates a choice without content.
    fn choice<'a>(&'a self, index: usize, prompt: &'a PromptAnswer) -> Choice<'a> {
        let (options, pieces) = (&self.options, &*self.pieces);
        Choice { index, options, pieces, prompt, echo: false, is_first: false, text: None }
    }

    fn chunk(&self, choice: Choice<'_>) -> String {
        json(&self.response(&[choice], self.options.include_usage.then_some(None)))
    }

    fn response<'a>(&'a self, choices: &'a [Choice<'a>], usage: Option<Option<Usage>>) -> Response<'a> {
        Response { head: &self.head, options: &self.options, choices, usage }
    }

    fn usage(&self) -> Usage {
        let of_prompts = |count: fn(&PromptAnswer) -> usize| self.prompts.iter().map(count).sum();
        let made: usize = self.prompts.iter().flat_map(|state| &state.texts).map(|text| text.ids.len()).sum();
        let copies = if self.options.is_copied { self.options.best_of } else { 1 };
        Usage {
            prompt_tokens: of_prompts(|state| state.ids.len()),
            completion_tokens: made * copies,
            cached_tokens: self
                .options
                .prompt_tokens_details
                .then(|| of_prompts(|state| state.cached_tokens)),
        }
    }
}

/// Rejects log-probabilities that are NaN.
fn check(logprobs: &TokenLogprobs, options: &ResponseOptions) -> Result<(), ApiError> {
    let mut values = logprobs.alternatives.iter().map(|(_, logprob)| *logprob).chain([logprobs.logprob]);
    match values.any(f64::is_nan) {
        true => Err(options.overflowed("a log-probability is not a number")),
        false => Ok(()),
    }
}
