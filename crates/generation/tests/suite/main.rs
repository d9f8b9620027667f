//! Integration tests, with one module per subject.
//!
//! They form a single program, because linking takes longer than compiling.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod batch;
mod decode;
mod draft;
mod observed;
mod options;
mod parity;
mod processors;
mod published;
mod requests;
mod scheduler;
mod score;
mod search;
mod sequences;
mod text;
