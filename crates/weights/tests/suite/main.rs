//! The crate from outside, a module a subject. One program, because linking takes longer than compiling does.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod adapters;
mod checkpoint;
mod choice;
// WASI does not know the permissions of files, which written ones are given.
#[cfg(not(target_os = "wasi"))]
mod companions;
#[cfg(not(target_os = "wasi"))]
mod convert;
mod damaged;
mod formats;
mod given;
mod heads;
mod interrupted;
mod packed;
mod text_encoder;
mod tokenizer_limits;
mod vocabularies;
