//! Tests of the crate that can share a process.
#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod checkpoints;
mod classifier;
mod encoder_states;
mod engine;
#[cfg(feature = "hub")]
mod hub;
mod published;
mod rows;
