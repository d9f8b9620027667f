//! Tests the API without a network.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod analysis;
mod chat;
mod classify;
mod common;
mod completion;
mod fields;
mod hostile;
mod inside;
mod lm_eval;
mod logprobs;
mod messages;
mod openapi;
mod small_routes;
mod stream;
mod warnings;
