#![doc = include_str!("../README.md")]
//!
//! # Limits of templates
//!
//! | limit | value |
//! |---|---|
//! | CPU time of parsing, and of each render | 2 s |
//! | wall-clock time | 10 s |
//! | memory, including a stack of 8 MB | 256 MB |
//! | total CPU time of a task's renders, not counting the first 2 ms of each | 3 s |
//! | output | 1 MB for a conversation, 16 MB for a task |
//!
//! Linux limits CPU time and memory. macOS and other Unix systems limit CPU time, and memory as far as they
//! apply `RLIMIT_DATA`. On Windows only the wall-clock time is bounded, and the caller ends the process.
//!
//! On Linux one process prepares the program and forks for each session, which takes about a millisecond.
//! Other systems start the program for each session. A worker has an empty environment and no files except
//! its standard streams and its socket, and ends with its caller.
//!
//! # Without a worker
//!
//! [`Templates::new`] without a program renders on a thread of the calling process. Nesting is bounded before
//! the template is parsed, steps and output are bounded, and callers wait at most five seconds. A value that
//! contains itself, or is nested 100,000 levels deep, can still overflow the stack and end the process. An
//! endless render keeps its thread; there are at most four. A browser has no threads, so a slow template
//! blocks the page's worker.

mod error;
mod host;
mod limits;
mod message;
mod run;
mod spawned;
mod template;
mod worker;

#[cfg(target_os = "linux")]
mod forked;

pub use error::WorkerError;
pub use host::{Prepare, Program, Service};
pub use limits::{Limit, Limits};
pub use run::run_worker;
pub use template::{Style, TEMPLATES, TemplateError, Templates};
pub use worker::{Answer, Session, Worker, WorkerProgram};
