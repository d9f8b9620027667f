//! The program as a worker: a child process that runs an untrusted grammar or template. The program starts it itself, so it is no
//! command, and appears in no help text, completion or manual page.

use std::env;
use std::io::{self, IsTerminal};
use std::process::ExitCode;

use candle_gpt2_confined::{Service, TEMPLATES, WorkerProgram, run_worker};

/// The only argument of a worker.
const ARGUMENT: &str = "confined";

/// What a worker can run.
const SERVICES: &[Service] = &[
    TEMPLATES,
    #[cfg(feature = "serve")]
    candle_gpt2_grammar::GRAMMARS,
];

/// This program as a worker. `None` if the system does not report where it is.
pub(crate) fn program() -> Option<WorkerProgram> {
    WorkerProgram::this(ARGUMENT).ok()
}

/// Whether this process is a worker.
pub(crate) fn is_asked_for() -> bool {
    let mut arguments = env::args_os().skip(1);
    arguments.next().is_some_and(|first| first == ARGUMENT)
        && arguments.next().is_none()
        && !io::stdin().is_terminal()
}

/// Works until the program that started this process ends or needs it no longer.
pub(crate) fn run() -> ExitCode {
    match run_worker(SERVICES) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
