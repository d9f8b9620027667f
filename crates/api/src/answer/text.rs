//! A text in the making, and the prompt that it continues.

use candle_gpt2_generation::{StopReason, TokenLogprobs};
use serde_json::{Value, json};

use super::wants::Wants;
use crate::ApiError;
use crate::pieces::{CharCounter, Pieces};
use crate::seen::{Inspected, Seen};

/// A prompt, with what the answer reports about it.
#[derive(Debug)]
pub(crate) struct PromptAnswer {
    pub(super) ids: Vec<u32>,
    /// First reported token: the token that an empty prompt starts from is not reported.
    pub(super) told_from: usize,
    /// Where the request has it.
    pub(super) path: String,
    /// Text in front of a continuation, if it is echoed: it ends with a whole character.
    pub(super) text: String,
    /// Text of the incomplete character that may follow.
    pub(super) tail: String,
    /// The offset of each reported token, in characters.
    pub(super) offsets: Vec<usize>,
    /// Characters of the text.
    pub(super) chars: usize,
    pub(super) cached_tokens: usize,
    /// The reported log-probabilities of its tokens.
    pub(super) scores: Vec<Option<TokenLogprobs>>,
    pub(super) has_begun: bool,
    pub(super) texts: Vec<TextAnswer>,
}

impl PromptAnswer {
    /// A prompt that `texts` texts continue. With `echo` they complete the character in which it may end.
    ///
    /// # Errors
    /// If the tokenizer cannot decode the prompt.
    pub(crate) fn new(
        ids: Vec<u32>,
        told_from: usize,
        path: String,
        (texts, echo): (usize, bool),
        pieces: &Pieces,
    ) -> Result<Self, ApiError> {
        let told = ids.get(told_from..).unwrap_or_default();
        let mut counter = CharCounter::default();
        let offsets = told.iter().map(|id| counter.push(pieces.bytes(*id))).collect();
        let (mut text, mut tail, mut continued) = (String::new(), String::new(), CharCounter::default());
        if let Some(mut stream) = pieces.stream().filter(|_| echo) {
            text = stream.follow(told).map_err(ApiError::failed)?;
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
            told_from,
            path,
            ids,
            cached_tokens: 0,
            scores: Vec::new(),
            has_begun: false,
            texts,
        })
    }

    /// The same, of whose texts these see the inside: one for each, or none.
    pub(crate) fn inspected(mut self, inspected: Vec<Inspected>) -> Self {
        self.texts.iter_mut().zip(inspected).for_each(|(text, of)| text.inspected = Some(of));
        self
    }

    /// The reported tokens.
    pub(super) fn told(&self) -> &[u32] {
        self.ids.get(self.told_from..).unwrap_or_default()
    }
}

/// Why a text ended, as answers report it.
#[derive(Debug, Clone)]
pub(super) struct Finish {
    /// `stop` or `length`.
    pub(super) reason: &'static str,
    /// The stop string, the token that ended it, or null.
    pub(super) stop_reason: Value,
    /// Where entries behind it are left out: characters of the text in front of a stop string.
    cut: Option<usize>,
}

/// A text in the making.
#[derive(Debug, Default)]
pub(crate) struct TextAnswer {
    pub(super) text: String,
    /// Its characters.
    chars: usize,
    pub(super) ids: Vec<u32>,
    /// One for each token, if they are reported.
    pub(super) logprobs: Vec<TokenLogprobs>,
    logprob_sum: f64,
    /// The place of each token, in characters.
    pub(super) offsets: Vec<usize>,
    counter: CharCounter,
    pub(super) finish: Option<Finish>,
    pub(super) sent: Sent,
    /// What looks inside while it is made.
    inspected: Option<Inspected>,
    /// What was seen inside, once it has ended, if that is shown.
    pub(super) seen: Option<Seen>,
}

/// What of a text went out.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Sent {
    /// Whether anything did.
    pub(super) has_begun: bool,
    /// Bytes of the text.
    pub(super) text: usize,
    /// Tokens with their log-probabilities.
    pub(super) entries: usize,
    /// Tokens as ids.
    pub(super) ids: usize,
}

impl TextAnswer {
    /// Takes a token with the text that it completes.
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

    /// Ends the text.
    pub(super) fn end(&mut self, reason: StopReason, wants: &Wants, pieces: &Pieces) {
        let (told, stop_reason) = match reason {
            StopReason::Eos => ("stop", self.ending_token(wants, pieces)),
            StopReason::StopString => {
                ("stop", self.stop_string(wants, pieces).map_or(Value::Null, Value::from))
            }
            StopReason::Complete => ("stop", Value::Null),
            StopReason::MaxTime | StopReason::Interrupted => ("length", json!(reason.name())),
            _ => ("length", Value::Null),
        };
        if let (StopReason::StopString, true, Some(stop)) = (reason, wants.include_stop, stop_reason.as_str())
        {
            self.add(stop);
        }
        let cut = (reason == StopReason::StopString).then_some(self.chars);
        self.finish = Some(Finish { reason: told, stop_reason, cut });
    }

    /// Takes what was seen inside, once the text has ended. Numbers that are not finite are refused: JSON has none of them.
    pub(super) fn see(&mut self, wants: &Wants) -> Result<(), ApiError> {
        if let (Some(inspected), Some(shown)) = (self.inspected.take(), &wants.shown) {
            let seen = Seen::of(&inspected, shown)?;
            if let Some((site, position, number)) = seen.overflow() {
                return Err(wants.overflowed(format_args!("{site} is {number} at token {position}")));
            }
            self.seen = Some(seen);
        }
        Ok(())
    }

    /// The token that ended the text, if it was asked for: by its id, or as a stop string that is its name.
    fn ending_token(&self, wants: &Wants, pieces: &Pieces) -> Value {
        let Some(id) = self.ids.last() else { return Value::Null };
        if wants.stop_token_ids.contains(id) {
            return json!(id);
        }
        let name = pieces.bytes(*id);
        wants.stops.iter().find(|stop| stop.as_bytes() == name).map_or(Value::Null, |stop| json!(stop))
    }

    /// The stop string that ended the text: its tokens contain it right after the text.
    fn stop_string(&self, wants: &Wants, pieces: &Pieces) -> Option<String> {
        let written = pieces.shown_text(&self.ids).ok()?;
        let rest = written.get(self.text.len()..)?;
        wants.stops.iter().find(|stop| rest.starts_with(stop.as_str())).cloned()
    }

    /// Tokens whose entries may be told: those that show something of the text, and in the end all but those behind a stop
    /// string.
    pub(super) fn told_entries(&self) -> usize {
        match &self.finish {
            Some(Finish { cut: None, .. }) => self.ids.len(),
            _ => self.offsets.partition_point(|offset| *offset < self.chars),
        }
    }

    /// The mean log-probability of its tokens.
    pub(super) fn mean_logprob(&self) -> f64 {
        if self.ids.is_empty() { 0.0 } else { self.logprob_sum / self.ids.len() as f64 }
    }
}
