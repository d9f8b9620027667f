//! Integration tests of the crate, one module for each subject.
//!
//! All are in one program, because linking takes longer than compiling.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod devices;
mod embedding;
mod interrupted;
mod operations;
mod training;
mod training_devices;
mod zero_sizes;
