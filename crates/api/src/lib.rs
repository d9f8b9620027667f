#![doc = include_str!("../README.md")]
//!
//! [`ServedModel`] is a model with its names and limits, without weights. [`ServedModel::read`] parses a
//! request on any thread into [`Work`], or returns an [`ApiError`] that names the invalid field. A
//! [`Session`] runs work on one thread. [`ROUTES`] lists the paths, and [`OPENAPI`] describes them.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod about;
mod analysis;
mod answer;
mod body;
mod call;
mod chat;
mod classify;
mod completion;
#[cfg(test)]
mod description;
mod embeddings;
mod encoding;
mod encoding_memory;
mod error;
mod form;
mod inside;
mod inside_fields;
mod look;
mod options;
mod pieces;
mod plan;
mod prompts;
mod recorded;
mod routes;
mod served;
mod session;
mod setup;
mod tokens;
mod work;

pub use about::model;
pub use analysis::Analysis;
pub use answer::Answer;
pub use body::{Reply, Warnings};
pub use call::Call;
pub use chat::ChatRequest;
pub use completion::CompletionRequest;
pub use error::ApiError;
pub use plan::GRAMMARS_BUSY;
pub use routes::{Endpoint, OPENAPI, ROUTES, Route, find_route};
pub use served::{ApiOptions, ChatTemplateChoice, Limits, ServedModel, SetupError};
pub use session::Session;
pub use work::Work;
