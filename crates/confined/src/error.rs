//! Reasons why a worker has no answer.

use thiserror::Error;

use crate::{Limit, Limits};

/// Failure of a worker. Its session is over.
///
/// [`Session::ask`](crate::Session::ask) returns it; see [`Worker`](crate::Worker) for an example.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The program went beyond a limit.
    #[error("{}", exceeded(*limit, limits))]
    Exceeded {
        /// The limit.
        limit: Limit,
        /// All limits of this answer.
        limits: Limits,
    },
    /// The worker cannot prepare the program.
    #[error("{what}")]
    Refused {
        /// What is wrong with it.
        what: String,
    },
    /// The worker ended, or panicked, without an answer.
    #[error("its process ended without an answer")]
    Ended,
    /// The system has no process for it.
    #[error("no process can be started: {what}")]
    Unavailable {
        /// The system's message.
        what: String,
    },
}

impl WorkerError {
    pub(crate) fn unavailable(error: impl ToString) -> Self {
        Self::Unavailable { what: error.to_string() }
    }
}

fn exceeded(limit: Limit, limits: &Limits) -> String {
    match limit {
        Limit::CpuTime => format!("it takes more than {:?} of CPU time", limits.cpu),
        Limit::WallTime => format!("it takes longer than {:?}", limits.wall),
        Limit::Memory => format!("it takes more than {} MB of memory", limits.memory_bytes >> 20),
        Limit::Stack => "it is nested too deeply".into(),
    }
}
