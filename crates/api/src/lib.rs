//! Requests and answers as OpenAI's clients write and read them: functions on bytes and JSON, without a network.
//!
//! A body becomes a [`CompletionRequest`] or a [`ChatRequest`]; with the [`ServedModel`] that becomes a [`Call`]: requests for
//! the scheduler, and an [`Answer`] that puts what happens to their texts together, whole or piece by piece. What cannot be
//! served is an [`ApiError`], as clients expect it. [`ROUTES`] are the paths, which [`OPENAPI`] describes.
//!
//! ```
//! use gpt2_api::{ApiOptions, Call, CompletionRequest, ServedModel};
//! use gpt2_engine::{ModelOptions, Silent};
//! use gpt2_generation::{Scheduler, SchedulerOptions};
//!
//! let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
//! let served = ServedModel::new(&model, ApiOptions { name: "built-in".into(), ..ApiOptions::default() })?;
//! let body = br#"{"model": "built-in", "prompt": "ROMEO:", "max_tokens": 5, "temperature": 0}"#;
//! let Call { requests, mut answer, .. } = Call::of_completion(CompletionRequest::parse(body)?, &served, None)?;
//!
//! let options = SchedulerOptions { max_texts: 1, kv_tokens: 64, chunk_tokens: 64 };
//! let mut scheduler = Scheduler::new(model.model(), model.vocabulary().tokenizer().cloned(), options)?;
//! for request in requests {
//!     scheduler.submit(request)?;
//! }
//! for event in scheduler.into_events() {
//!     answer.take(0, event?)?;
//! }
//! assert!(answer.into_response().contains("\"completion_tokens\":5"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod about;
mod answer;
mod body;
mod call;
mod chat;
mod classify;
mod completion;
mod error;
mod look;
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
pub use classify::{ClassifyAnswer, ClassifyCall, classify_fields};
pub use completion::CompletionRequest;
pub use error::ApiError;
pub use look::{AttentionRequest, HeadRequest, LensRequest, NextRequest, look_fields};
pub use routes::{Endpoint, OPENAPI, ROUTES, Route, find_route};
pub use served::{ApiOptions, ChatTemplateChoice, Limits, ServedModel, SetupError};
pub use tokens::{detokenize, detokenize_fields, tokenize, tokenize_fields, tokenizer_info};
