//! Integration tests for this crate.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod counts;
mod data;
mod evaluate;
mod kl;
mod log;
mod oracle;
mod plan;
mod protocols;
mod published;
mod report;
