//! Partially generated completion and its prompt.

use candle_gpt2_generation::{StopReason, TokenLogprobs};
use serde_json::{Value, json};

use super::options::ResponseOptions;
use crate::ApiError;
use crate::pieces::{CharCounter, Pieces};
use crate::recorded::{Inspected, SequenceActivations};

/// Prompt and everything that the response reports about it.
#[derive(Debug)]
pub(crate) struct PromptAnswer {
    pub(super) ids: Vec<u32>,
    /// Index of the first reported token; skips the start token that replaces an empty prompt.
    pub(super) echo_start: usize,
    /// Path of the prompt in the request.
    pub(super) path: String,
    /// Echoed text in front of a completion; ends with a complete character.
    pub(super) text: String,
    /// Text of the incomplete character at the end of the prompt.
    pub(super) tail: String,
    /// Character offset of each reported token.
    pub(super) offsets: Vec<usize>,
    /// Number of characters in the reported tokens.
    pub(super) chars: usize,
    pub(super) cached_tokens: usize,
    /// Log-probabilities of all prompt tokens, if reported.
    pub(super) scores: Vec<Option<TokenLogprobs>>,
    pub(super) has_begun: bool,
    pub(super) texts: Vec<TextAnswer>,
}

impl PromptAnswer {
    /// Creates a prompt with `texts` completions.
    ///
    /// If `echo` is set and the prompt ends in the middle of a character, the completions finish it.
    ///
    /// # Errors
    /// If the tokenizer cannot decode the prompt.
    pub(crate) fn new(
        ids: Vec<u32>,
        echo_start: usize,
        path: String,
        (texts, echo): (usize, bool),
        pieces: &Pieces,
    ) -> Result<Self, ApiError> {
        let reported = ids.get(echo_start..).unwrap_or_default();
        let mut counter = CharCounter::default();
        let offsets = reported.iter().map(|id| counter.push(pieces.bytes(*id))).collect();
        let (mut text, mut tail, mut continued) = (String::new(), String::new(), CharCounter::default());
        if let Some(mut stream) = pieces.stream().filter(|_| echo) {
            text = stream.follow(reported).map_err(ApiError::failed)?;
            (tail, continued) = (stream.finish().map_err(ApiError::failed)?, counter.continued());
        }
        let chars = if echo { counter.chars() } else { counter.finish() };
        let answer = || TextAnswer { counter: continued.clone(), ..TextAnswer::default() };
        let texts = std::iter::repeat_with(answer).take(texts).collect();
        Ok(Self {
            text,
            tail,
            offsets,
            chars,
            echo_start,
            path,
            ids,
            cached_tokens: 0,
            scores: Vec::new(),
            has_begun: false,
            texts,
        })
    }

    /// Attaches an inspection to each completion; `inspected` may be empty.
    pub(crate) fn inspected(mut self, inspected: Vec<Inspected>) -> Self {
        self.texts.iter_mut().zip(inspected).for_each(|(text, of)| text.inspected = Some(of));
        self
    }

    /// Ids of the reported tokens.
    pub(super) fn reported_ids(&self) -> &[u32] {
        self.ids.get(self.echo_start..).unwrap_or_default()
    }
}

/// Reason why a completion finished, as reported in answers.
#[derive(Debug, Clone)]
pub(super) struct Finish {
    /// `stop` or `length`.
    pub(super) reason: &'static str,
    /// Stop string or token that ended the completion, or null.
    pub(super) stop_reason: Value,
    /// Text length in characters, if a stop string ended it; later log-probability entries are omitted.
    cut: Option<usize>,
}

/// Partially generated completion.
#[derive(Debug, Default)]
pub(crate) struct TextAnswer {
    pub(super) text: String,
    /// Number of characters in `text`.
    chars: usize,
    pub(super) ids: Vec<u32>,
    /// One entry per token, if log-probabilities are reported.
    pub(super) logprobs: Vec<TokenLogprobs>,
    logprob_sum: f64,
    /// Character offset of each token.
    pub(super) offsets: Vec<usize>,
    counter: CharCounter,
    pub(super) finish: Option<Finish>,
    pub(super) sent: Sent,
    /// Inspection that records activations during generation.
    inspected: Option<Inspected>,
    /// Activations collected when the completion ended, if requested.
    pub(super) activations: Option<SequenceActivations>,
}

/// Streaming progress of a completion.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Sent {
    /// Whether the first chunk was sent.
    pub(super) has_begun: bool,
    /// Number of text bytes sent.
    pub(super) text: usize,
    /// Number of log-probability entries sent.
    pub(super) entries: usize,
    /// Number of token ids sent.
    pub(super) ids: usize,
}

impl TextAnswer {
    /// Adds a token and the text that it completes.
    pub(super) fn push(&mut self, id: u32, text: &str, logprobs: Option<TokenLogprobs>, pieces: &Pieces) {
        self.ids.push(id);
        self.offsets.push(self.counter.push(pieces.shown(id)));
        self.add(text);
        if let Some(logprobs) = logprobs {
            self.logprob_sum += logprobs.logprob;
            self.logprobs.push(logprobs);
        }
    }

    pub(super) fn add(&mut self, text: &str) {
        self.text.push_str(text);
        self.chars += text.chars().count();
    }

    /// Finishes the completion.
    pub(super) fn end(&mut self, reason: StopReason, options: &ResponseOptions, pieces: &Pieces) {
        let (finish_reason, stop_reason) = match reason {
            StopReason::Eos => ("stop", self.ending_token(options, pieces)),
            StopReason::StopString => {
                ("stop", self.stop_string(options, pieces).map_or(Value::Null, Value::from))
            }
            StopReason::Complete => ("stop", Value::Null),
            StopReason::MaxTime | StopReason::Interrupted => ("length", json!(reason.name())),
            _ => ("length", Value::Null),
        };
        if let (StopReason::StopString, true, Some(stop)) =
            (reason, options.include_stop, stop_reason.as_str())
        {
            self.add(stop);
        }
        let cut = (reason == StopReason::StopString).then_some(self.chars);
        self.finish = Some(Finish { reason: finish_reason, stop_reason, cut });
    }

    /// Collects the recorded activations once the completion has ended.
    ///
    /// Non-finite values are an error, because JSON cannot represent them.
    pub(super) fn collect_activations(&mut self, options: &ResponseOptions) -> Result<(), ApiError> {
        if let (Some(inspected), Some(shown)) = (self.inspected.take(), &options.shown) {
            let activations = SequenceActivations::collect(&inspected, shown)?;
            if let Some((site, position, number)) = activations.overflow() {
                return Err(options.overflowed(format_args!("{site} is {number} at token {position}")));
            }
            self.activations = Some(activations);
        }
        Ok(())
    }

    /// Stop token that ended the completion: the token's id, or the stop string that equals its name.
    fn ending_token(&self, options: &ResponseOptions, pieces: &Pieces) -> Value {
        let Some(id) = self.ids.last() else { return Value::Null };
        if options.stop_token_ids.contains(id) {
            return json!(id);
        }
        let name = pieces.bytes(*id);
        options.stops.iter().find(|stop| stop.as_bytes() == name).map_or(Value::Null, |stop| json!(stop))
    }

    /// Stop string that ended the completion, decoded from the tokens after the completion's text.
    fn stop_string(&self, options: &ResponseOptions, pieces: &Pieces) -> Option<String> {
        let written = pieces.shown_text(&self.ids).ok()?;
        let rest = written.get(self.text.len()..)?;
        options.stops.iter().find(|stop| rest.starts_with(stop.as_str())).cloned()
    }

    /// Number of tokens whose entries may be reported.
    ///
    /// Before the end, these are the tokens that start within the available text. At the end, they are all
    /// tokens except those after a stop string.
    pub(super) fn reportable_entries(&self) -> usize {
        match &self.finish {
            Some(Finish { cut: None, .. }) => self.ids.len(),
            _ => self.offsets.partition_point(|offset| *offset < self.chars),
        }
    }

    /// Mean log-probability of the tokens.
    pub(super) fn mean_logprob(&self) -> f64 {
        if self.ids.is_empty() { 0.0 } else { self.logprob_sum / self.ids.len() as f64 }
    }
}
