//! Events from a step, and stop reasons.

use super::request::RequestId;
use crate::{Drafts, GenerationError, TokenLogprobs};

/// Reason why a completion stopped.
///
/// [`Event`]s and [`TokenGenerator::stop_reason`](crate::TokenGenerator::stop_reason) report it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// The model generated an end-of-text token, which is the last id.
    Eos,
    /// A stop string was found; the text ends before it, and the ids include the completing token.
    StopString,
    /// The constraint allows no more tokens; see [`Constraint`](crate::Constraint).
    Complete,
    /// The maximum number of tokens was reached.
    MaxNewTokens,
    /// The model's context is full.
    Context,
    /// The time limit was exceeded.
    MaxTime,
    /// The caller ended the completion.
    Interrupted,
}

impl StopReason {
    /// Returns the reason as a single word, as `--json` prints it.
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

/// Result of a step; see [`Scheduler::step`](crate::Scheduler::step).
#[derive(Debug)]
#[must_use = "events are returned only once"]
pub struct Step {
    /// Events in order; if the step failed, only the events before the failure.
    pub events: Vec<Event>,
    /// Device failure, which ended all requests.
    pub failure: Option<GenerationError>,
}

impl Step {
    /// Returns the events, for callers that discard the events of a failed step.
    ///
    /// # Errors
    /// Returns an error if the device failed.
    pub fn into_result(self) -> Result<Vec<Event>, GenerationError> {
        self.failure.map_or(Ok(self.events), Err)
    }
}

/// Event from a step; returned by [`Scheduler::step`](crate::Scheduler::step).
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// The prompt has been computed.
    ///
    /// This is the first event of each request whose prompt is needed, and occurs once.
    Begun {
        /// Request that the event belongs to.
        request: RequestId,
        /// Number of prompt tokens that were reused from another request.
        cached_tokens: usize,
        /// Log-probabilities of the prompt's tokens, if requested; `None` for the first token.
        prompt: Vec<Option<TokenLogprobs>>,
    },
    /// A completion has one more token.
    Token {
        /// Request that the event belongs to.
        request: RequestId,
        /// Index among the request's `num_return_sequences` completions.
        sequence: usize,
        /// Token id.
        id: u32,
        /// Text that the token completes; empty without a tokenizer.
        text: String,
        /// Log-probability of the token, if requested.
        logprobs: Option<TokenLogprobs>,
        /// Stop reason; `None` while the completion continues.
        stop_reason: Option<StopReason>,
        /// Draft statistics of the completion so far.
        drafts: Drafts,
    },
    /// A completion has ended without a token, because none was requested.
    Empty {
        /// Request that the event belongs to.
        request: RequestId,
        /// Index among the request's completions.
        sequence: usize,
    },
    /// A beam or contrastive search found its completions; the request has no other events.
    Found {
        /// Request that the event belongs to.
        request: RequestId,
        /// Completions, best first.
        texts: Vec<Found>,
    },
    /// A request cannot continue, and all of its completions have ended.
    Failed {
        /// Request that the event belongs to.
        request: RequestId,
        /// Reason for the failure.
        error: GenerationError,
    },
}

/// Completion that a search found.
///
/// [`Scheduler::step`](crate::Scheduler::step) reports them as [`Event::Found`].
#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    /// Tokens, including the one that ended the completion.
    pub ids: Vec<u32>,
    /// Decoded text; empty without a tokenizer.
    pub text: String,
    /// Stop reason.
    pub stop_reason: StopReason,
    /// Beam score: the log-probability, normalized by length.
    pub score: Option<f64>,
}

impl Event {
    /// Returns the request that the event belongs to.
    pub fn request(&self) -> RequestId {
        match self {
            Self::Begun { request, .. }
            | Self::Token { request, .. }
            | Self::Empty { request, .. }
            | Self::Found { request, .. }
            | Self::Failed { request, .. } => *request,
        }
    }

    /// Returns whether the event ends a completion that is decoded token by token.
    ///
    /// [`Event::Found`] and [`Event::Failed`] end all completions of a request.
    pub fn ends_text(&self) -> bool {
        matches!(self, Self::Token { stop_reason: Some(_), .. } | Self::Empty { .. })
    }
}
