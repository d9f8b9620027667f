//! Test suite for the interpretability crate.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
mod circuits;
mod common;
mod dictionary;
mod features;
mod graphs;
mod inspection;
mod laws;
mod plain_circuits;
mod published;
mod published_circuits;
mod recording;
mod transformer_lens;
mod tuned_lens;
