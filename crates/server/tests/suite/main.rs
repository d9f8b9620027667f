//! Tests the server from outside, over sockets.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod activations;
mod classify;
mod clients;
mod common;
mod embeddings;
mod grammar;
mod limits;
mod page;
mod same_bytes;
mod security;
mod shutdown;
mod threads;
mod wire;
