//! Checks the book's statements about the repository: its crates, files and options.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod crates;
mod cycles;
mod keywords;
mod options;
mod paths;
mod words;
