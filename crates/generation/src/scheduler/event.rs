//! What happens to requests in a step, and why texts end.

use super::request::RequestId;
use crate::{Drafts, GenerationError, TokenLogprobs};

/// Why a text ended. [`Event`]s and [`TokenGenerator::stop_reason`](crate::TokenGenerator::stop_reason) tell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// The model produced an end-of-text token, which is the last id.
    Eos,
    /// A stop string came up; the text ends in front of it, the ids with the token that completed it.
    StopString,
    /// What the text must conform to allows nothing after it; see [`Constraint`](crate::Constraint).
    Complete,
    /// As many tokens as were asked for.
    MaxNewTokens,
    /// The model's context is full.
    Context,
    /// The time is over.
    MaxTime,
    /// The caller ended the text.
    Interrupted,
}

impl StopReason {
    /// The reason in one word, as `--json` prints it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eos => "eos",
            Self::StopString => "stop_string",
            Self::Complete => "complete",
            Self::MaxNewTokens => "max_new_tokens",
            Self::Context => "context",
            Self::MaxTime => "max_time",
            Self::Interrupted => "interrupted",
        }
    }
}

/// The result of a step. [`Scheduler::step`](crate::Scheduler::step) returns it.
#[derive(Debug)]
#[must_use = "events are returned once"]
pub struct Step {
    /// What happened, in order; if the step failed, until then.
    pub events: Vec<Event>,
    /// Why the device failed. All requests have then ended.
    pub failure: Option<GenerationError>,
}

impl Step {
    /// The events, for callers that discard those of a failed step.
    ///
    /// # Errors
    /// When the device failed.
    pub fn into_result(self) -> Result<Vec<Event>, GenerationError> {
        self.failure.map_or(Ok(self.events), Err)
    }
}

/// An event of a step. [`Scheduler::step`](crate::Scheduler::step) returns them.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// The prompt is computed; comes once for each request whose prompt is needed, before anything else of it.
    Begun {
        /// The request.
        request: RequestId,
        /// Tokens of the prompt that had been computed for another request.
        cached_tokens: usize,
        /// How probable its tokens are, if that was asked for; `None` for the first one, which has nothing before it.
        prompt: Vec<Option<TokenLogprobs>>,
    },
    /// A text has one more token.
    Token {
        /// The request.
        request: RequestId,
        /// Which of the request's `num_return_sequences` texts it is.
        sequence: usize,
        /// The token.
        id: u32,
        /// The text that it completes; empty without a tokenizer.
        text: String,
        /// How probable it is, if that was asked for.
        logprobs: Option<TokenLogprobs>,
        /// Why the text ends with it; `None` while it continues.
        stop_reason: Option<StopReason>,
        /// What was drafted for the text so far.
        drafts: Drafts,
    },
    /// A text has ended without a token, since none was asked for.
    Empty {
        /// The request.
        request: RequestId,
        /// Which of its texts it is.
        sequence: usize,
    },
    /// The texts of a request that are searched for, best first: beam and contrastive search. Nothing comes before or after it.
    Found {
        /// The request.
        request: RequestId,
        /// Its texts.
        texts: Vec<Found>,
    },
    /// A request cannot continue; all its texts have ended.
    Failed {
        /// The request.
        request: RequestId,
        /// Why.
        error: GenerationError,
    },
}

/// A text that was searched for. [`Scheduler::step`](crate::Scheduler::step) tells them, as [`Event::Found`].
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// Its tokens, with the one that ended it.
    pub ids: Vec<u32>,
    /// What they say; empty without a tokenizer.
    pub text: String,
    /// Why it ended.
    pub stop_reason: StopReason,
    /// Of a beam: its log-probability over its length.
    pub score: Option<f64>,
}

impl Event {
    /// The request that it is about.
    pub fn request(&self) -> RequestId {
        match self {
            Self::Begun { request, .. }
            | Self::Token { request, .. }
            | Self::Empty { request, .. }
            | Self::Found { request, .. }
            | Self::Failed { request, .. } => *request,
        }
    }

    /// Whether a text that is made token by token has ended with it. [`Event::Found`] and [`Event::Failed`] end all of a request.
    pub fn ends_text(&self) -> bool {
        matches!(self, Self::Token { stop_reason: Some(_), .. } | Self::Empty { .. })
    }
}
