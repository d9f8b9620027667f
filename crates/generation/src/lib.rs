//! Tokens in, tokens out: logits processors, the sampler, the generation loop, text streaming, scoring.
//!
//! [`TokenGenerator`] is an iterator of token ids; [`TextStream`] turns ids into text as they come; [`score`] gives the
//! log-probability of every token of a text. Printing, stopping at a time and reading files are the caller's.

mod config;
mod error;
mod generate;
mod sampling;
mod score;
mod text_stream;

pub use config::{GenerationConfig, MIN_TEMPERATURE, Sampling};
pub use error::GenerationError;
pub use generate::{StopReason, TokenGenerator, check_prompt};
pub use sampling::{LogitsProcessor, Sampler};
pub use score::{Score, check_text, score};
pub use text_stream::TextStream;
