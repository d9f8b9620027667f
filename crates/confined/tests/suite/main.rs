//! Worker tests. The test program acts as its own worker, so it defines its own `main`.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod templates;
mod workers;

use std::process::ExitCode;

use candle_gpt2_confined::{TEMPLATES, WorkerProgram, run_worker};
use libtest_mimic::{Arguments, Trial};

/// Argument that makes the test program act as a worker.
const WORKER: &str = "worker";

/// The test program as a worker that forks if the system supports forking.
fn forking() -> WorkerProgram {
    WorkerProgram::this(WORKER).unwrap()
}

/// The test program as a worker that restarts for each session, as on systems without `fork`.
fn spawning() -> WorkerProgram {
    WorkerProgram { forks: false, ..forking() }
}

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some(WORKER) {
        let served = run_worker(&[TEMPLATES, workers::OBEDIENT]);
        return if served.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let trials = [workers::TESTS, templates::TESTS].concat().into_iter().map(|(name, test)| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

/// Name and function of a test.
type Test = (&'static str, fn());

/// Lists functions as named tests.
macro_rules! tests {
    ($($test:ident),+ $(,)?) => { &[$((stringify!($test), $test)),+] };
}
pub(crate) use tests;
