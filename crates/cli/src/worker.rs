//! Worker mode: a child process that runs an untrusted grammar or template.
//!
//! Only the program itself starts a worker. The mode is not a command and appears in no help text, completion
//! script or manual page.

use std::env;
use std::io::{self, IsTerminal};
use std::process::ExitCode;

use candle_gpt2_confined::{Service, TEMPLATES, WorkerProgram, run_worker};

/// A worker's only argument.
const ARGUMENT: &str = "confined";

/// Services that a worker can run.
const SERVICES: &[Service] = &[
    TEMPLATES,
    #[cfg(feature = "serve")]
    candle_gpt2_grammar::GRAMMARS,
];

/// Returns this program as a worker, or `None` if the system does not report its path.
pub(crate) fn program() -> Option<WorkerProgram> {
    WorkerProgram::this(ARGUMENT).ok()
}

/// Whether this process is a worker.
pub(crate) fn is_worker() -> bool {
    let mut arguments = env::args_os().skip(1);
    arguments.next().is_some_and(|first| first == ARGUMENT)
        && arguments.next().is_none()
        && !io::stdin().is_terminal()
}

/// Serves requests until the parent process ends or no longer needs the worker.
pub(crate) fn run() -> ExitCode {
    match run_worker(SERVICES) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
