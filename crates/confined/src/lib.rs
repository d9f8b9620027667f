#![doc = include_str!("../README.md")]
//!
//! # Limits of templates
//!
//! | limit | value |
//! |---|---|
//! | CPU time for parsing, and for each render | 2 s |
//! | wall-clock time | 10 s |
//! | memory, including a stack of 8 MB | 256 MB |
//! | total CPU time for a task's renders, not counting the first 2 ms of each | 3 s |
//! | output | 1 MB for a conversation, 16 MB for a task |
//!
//! Linux limits CPU time and memory. macOS and other Unix systems limit CPU time; they limit memory to the
//! extent that they support `RLIMIT_DATA`. On Windows, only the wall-clock time is limited, and the caller
//! ends the process.
//!
//! On Linux, one process prepares the program and forks for each session, which takes about a millisecond.
//! On other systems, each session starts the program anew. A worker has an empty environment and no open
//! files except its standard streams and its socket, and exits with its caller.
//!
//! # Without a worker
//!
//! If [`Templates::new`] receives no program, templates are rendered on a thread of the calling process.
//! Nesting is checked before a template is parsed, steps and output are limited, and callers wait at most
//! five seconds. A value that contains itself, or is nested 100,000 levels deep, can still overflow the stack
//! and end the process. A render that never ends occupies its thread; there are at most four such threads. A
//! browser has no threads, so a slow template blocks the page's web worker.

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
