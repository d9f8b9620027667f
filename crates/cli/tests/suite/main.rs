//! Integration tests of the program, with one module per subject.
//!
//! They form one binary, because linking takes longer than compiling.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod adapters;
mod built_in;
mod classify;
mod common;
mod compress;
#[cfg(all(feature = "serve", target_os = "linux"))]
mod confined;
mod dictionaries;
mod doctor;
mod encoder_states;
mod eval;
mod generation;
#[cfg(feature = "grammar")]
mod grammar;
#[cfg(feature = "hub")]
mod hub;
mod look;
mod pages;
mod program;
mod same_bits;
#[cfg(all(feature = "serve", unix))]
mod serve;
#[cfg(all(feature = "serve", target_os = "linux"))]
mod serve_grammars;
mod threads;
mod tokenize;
mod train;
