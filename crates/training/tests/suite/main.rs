//! Tests of the public API, one module per subject.
//!
//! They form a single program, because linking takes longer than compiling.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod devices;
mod dictionary;
mod initialization;
mod lora;
mod positions;
mod pytorch;
mod tasks;
