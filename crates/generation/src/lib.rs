#![doc = include_str!("../README.md")]
//!
//! Start with [`TextGenerator`] for one completion, or with [`Scheduler`] for many.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod beam_search;
mod clock;
mod config;
mod contrastive_search;
mod decode;
mod divergence;
mod draft;
mod error;
mod generate;
mod history;
mod logits;
mod logprobs;
mod prefixes;
mod probabilities;
mod processors;
mod sampler;
mod scheduler;
mod score;
mod sequences;
mod stop_strings;
mod tally;
mod text_stream;

pub use beam_search::{Hypothesis, beam_search};
pub use clock::Clock;
pub use config::{
    EarlyStopping, GenerationConfig, GenerationOptions, LongPrompt, MAX_NEW_TOKENS, MAX_TEXTS,
    MIN_TEMPERATURE, OPTIONS, OptionRow, RequestField, SearchMode, WhenFull, samples_at,
};
pub use contrastive_search::contrastive_search;
pub use decode::{decode, is_fallback_byte};
pub use divergence::{Divergence, diverge};
pub use draft::Drafts;
pub use error::GenerationError;
pub use generate::{BatchGenerator, FailedPrompt, GeneratedToken, TextGenerator, TokenGenerator};
pub use history::History;
pub use logprobs::{TokenAlternatives, TokenLogprobs, for_each_row};
pub use probabilities::largest;
pub use processors::{AllowedTokens, Constraint, LogitsFunction, LogitsProcessor};
pub use sampler::Sampler;
pub use scheduler::{
    Event, Found, Request, RequestId, Scheduler, SchedulerOptions, Step, StopReason, TextObserver,
};
pub use score::{
    Continuation, Score, check_continuations, check_text, default_stride, first_best, score,
    score_continuations,
};
pub use sequences::{Sequence, TokenScore, score_sequences};
pub use text_stream::TextStream;
