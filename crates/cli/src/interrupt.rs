//! Ctrl-C: while texts are generated interactively it ends the text, and outside a text the program; in a job that saves what it
//! has done, the first one ends the job, and the second the program.

use std::process::exit;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

use crate::output;

/// How a program that an interrupt ended is seen by a shell: 128 and the number of the signal.
pub(crate) const EXIT_INTERRUPTED: u8 = 130;

static IS_GENERATING: AtomicBool = AtomicBool::new(false);
static IS_REQUESTED: AtomicBool = AtomicBool::new(false);

/// Makes Ctrl-C end texts from here on.
pub(crate) fn end_texts() -> Result<()> {
    ctrlc::set_handler(|| {
        if !IS_GENERATING.load(Ordering::SeqCst) {
            exit(EXIT_INTERRUPTED.into());
        }
        IS_REQUESTED.store(true, Ordering::SeqCst);
    })
    .context("Ctrl-C cannot be handled")
}

/// Makes Ctrl-C end the job, which asks [`is_requested`], and once more the program.
pub(crate) fn end_job() -> Result<()> {
    end_job_after("\nending, with what is done saved; Ctrl-C again ends at once")
}

/// The same for a job whose result appears whole or not at all.
pub(crate) fn end_job_without_result() -> Result<()> {
    end_job_after("\nending; no output is written")
}

fn end_job_after(status: &'static str) -> Result<()> {
    ctrlc::set_handler(move || {
        if IS_REQUESTED.swap(true, Ordering::SeqCst) {
            exit(EXIT_INTERRUPTED.into());
        }
        output::print_status(status);
    })
    .context("Ctrl-C cannot be handled")
}

/// Runs what Ctrl-C ends; it asks [`is_requested`].
pub(crate) fn while_generating<T>(work: impl FnOnce() -> T) -> T {
    IS_REQUESTED.store(false, Ordering::SeqCst);
    IS_GENERATING.store(true, Ordering::SeqCst);
    let result = work();
    IS_GENERATING.store(false, Ordering::SeqCst);
    result
}

/// Whether Ctrl-C was pressed since the text, or the job, began.
pub(crate) fn is_requested() -> bool {
    IS_REQUESTED.load(Ordering::SeqCst)
}
