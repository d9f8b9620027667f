//! Tokens in, tokens out: logits processors, the sampler, generation of one text or many, searches, scoring.
//!
//! [`Scheduler`] makes all texts: requests come and go while others run. [`TokenGenerator`] and [`TextGenerator`] are iterators
//! of one text's ids or pieces, [`BatchGenerator`] of many texts' tokens;
//! [`beam_search`] and [`contrastive_search`] return whole texts; [`score`] gives the log-probability of every token of
//! a text, [`score_continuations`] that of continuations, [`score_sequences`] those of many sequences at once; [`diverge`] says how
//! far two models are apart. Printing and reading files are the caller's.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod beam_search;
mod clock;
mod config;
mod contrastive_search;
mod divergence;
mod draft;
mod error;
mod generate;
mod logits;
mod logprobs;
mod prefixes;
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
    EarlyStopping, GenerationConfig, LongPrompt, MAX_TEXTS, MIN_TEMPERATURE, SearchMode, WhenFull,
};
pub use contrastive_search::contrastive_search;
pub use divergence::{Divergence, diverge};
pub use draft::Drafts;
pub use error::GenerationError;
pub use generate::{BatchGenerator, FailedPrompt, GeneratedToken, TextGenerator, TokenGenerator};
pub use logprobs::{TokenAlternatives, TokenLogprobs};
pub use processors::{AllowedTokens, Constraint, History, LogitsFunction, LogitsProcessor};
pub use sampler::Sampler;
pub use scheduler::{Event, Events, Request, RequestId, Scheduler, SchedulerOptions, StopReason};
pub use score::{
    Continuation, Score, check_continuations, check_text, default_stride, first_best, score,
    score_continuations,
};
pub use sequences::{Sequence, TokenScore, score_sequences};
pub use text_stream::TextStream;
