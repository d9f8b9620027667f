//! Tests for the public API, with one module per subject.
//!
//! They are one program, because linking takes longer than compiling.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;
mod config;
mod heads;
mod interrupt;
mod laws;
mod nano_sort;
mod parity;
mod parts;
mod plain;
mod rows;
mod var_builder;
