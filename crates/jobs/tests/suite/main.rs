//! The crate from outside, a module a subject. One program, because linking takes longer than compiling does.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod activations;
mod dictionaries;
mod interrupter;
mod job;
mod shares;
mod tokens;
