//! Integration tests, one module per subject.
//!
//! A single program, because linking takes longer than compiling.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod browser;
mod page;
mod picture;
mod report;
mod samples;
mod table;
