//! Requests and answers as OpenAI's clients write and read them: functions on bytes and JSON, without a network.
//!
//! A body becomes a [`CompletionRequest`] or a [`ChatRequest`]; with the [`ServedModel`] that becomes a [`Call`]: requests for
//! the scheduler, and an [`Answer`] that puts what happens to their texts together, whole or piece by piece. What cannot be
//! served is an [`ApiError`], as clients expect it. [`ROUTES`] are the paths, which [`OPENAPI`] describes.

mod about;
mod answer;
mod body;
mod call;
mod chat;
mod completion;
mod error;
mod options;
mod pieces;
mod prompts;
mod routes;
mod served;
mod tokens;

pub use about::{health, model, models, props, version};
pub use answer::Answer;
pub use call::Call;
pub use chat::ChatRequest;
pub use completion::CompletionRequest;
pub use error::ApiError;
pub use routes::{Endpoint, OPENAPI, ROUTES, Route, find_route};
pub use served::{ApiOptions, ChatTemplateChoice, Limits, ServedModel, SetupError};
pub use tokens::{detokenize, detokenize_fields, tokenize, tokenize_fields, tokenizer_info};
