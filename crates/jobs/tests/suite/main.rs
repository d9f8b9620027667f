//! Integration tests of this crate, with one module per subject.
//!
//! They form a single program, because linking takes longer than compiling.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod activations;
mod data_parallel;
mod dictionaries;
mod interrupter;
mod job;
mod tokens;
