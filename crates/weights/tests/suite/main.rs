//! Integration tests of the crate, one module per subject.
//!
//! They are a single program, because linking takes longer than compiling.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod adapters;
mod checkpoint;
mod choice;
// WASI does not support the file permissions that written files receive.
#[cfg(not(target_os = "wasi"))]
mod companions;
#[cfg(not(target_os = "wasi"))]
mod convert;
mod damaged;
mod formats;
mod heads;
mod interrupted;
mod packed;
mod supplied_files;
mod text_encoder;
mod tokenizer_limits;
mod vocabularies;
