//! Integration tests of the crate, one module per subject.
//!
//! They form a single program, because linking takes longer than compiling.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod multi_head;
mod positions_and_scale;
mod steps;
mod transformer;
mod window;
mod zero_sizes;
