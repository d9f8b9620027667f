#![doc = include_str!("../README.md")]

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
