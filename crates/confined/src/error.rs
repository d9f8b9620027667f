//! Worker errors.

use thiserror::Error;

use crate::{Limit, Limits};

/// Failure of a worker, which also ends the session.
///
/// Returned by [`Session::ask`](crate::Session::ask); see [`Worker`](crate::Worker) for an example.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The program exceeded a limit.
    #[error("{}", exceeded(*limit, limits))]
    Exceeded {
        /// Limit that was exceeded.
        limit: Limit,
        /// All limits on this answer.
        limits: Limits,
    },
    /// The worker could not prepare the program.
    #[error("{what}")]
    Refused {
        /// Reason for the rejection.
        what: String,
    },
    /// The worker exited or panicked before it sent an answer.
    #[error("the worker process exited without an answer")]
    Ended,
    /// The system could not start a process for the worker.
    #[error("cannot start a process: {what}")]
    Unavailable {
        /// Error message from the system.
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
        Limit::CpuTime => format!("exceeded the CPU time limit of {:?}", limits.cpu),
        Limit::WallTime => format!("exceeded the time limit of {:?}", limits.wall),
        Limit::Memory => format!("exceeded the memory limit of {} MB", limits.memory_bytes >> 20),
        Limit::Stack => "nested too deeply".into(),
    }
}
