//! Tests of the API without a network.

mod chat;
mod common;
mod completion;
mod described;
mod fields;
mod hostile;
mod lm_eval;
mod logprobs;
mod small_routes;
mod stream;
