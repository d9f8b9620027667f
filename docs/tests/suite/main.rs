//! What the book says of the repository, beside the repository: the crates and the files.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod circles;
mod crates;
mod keywords;
mod options;
mod paths;
mod words;
