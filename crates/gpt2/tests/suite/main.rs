//! The crate from outside, a module a subject. One program, because linking takes longer than compiling does.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod common;
mod config;
mod heads;
mod interrupt;
mod laws;
mod nano_sort;
mod parity;
mod plain;
mod rows;
mod var_builder;
