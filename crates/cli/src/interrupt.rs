//! Ctrl-C handling.
//!
//! In interactive generation, Ctrl-C ends the current completion, or the program if there is none. In a job
//! that saves its progress, the first Ctrl-C ends the job and the second ends the program.

use std::process::exit;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

use crate::output;

/// Exit code after an interrupt, as shells report it: 128 plus the signal number.
pub(crate) const EXIT_INTERRUPTED: u8 = 130;

static IS_GENERATING: AtomicBool = AtomicBool::new(false);
static IS_REQUESTED: AtomicBool = AtomicBool::new(false);

/// Installs a handler that ends the current completion, or the program if there is none.
pub(crate) fn end_texts() -> Result<()> {
    ctrlc::set_handler(|| {
        if !IS_GENERATING.load(Ordering::SeqCst) {
            exit(EXIT_INTERRUPTED.into());
        }
        IS_REQUESTED.store(true, Ordering::SeqCst);
    })
    .context("cannot install the Ctrl-C handler")
}

/// Installs a handler that ends the job; the job polls [`is_requested`].
///
/// A second Ctrl-C ends the program.
pub(crate) fn end_job() -> Result<()> {
    end_job_after("\nstopping and saving progress; press Ctrl-C again to quit immediately")
}

/// Same as [`end_job`], for a job that writes its complete result or nothing.
pub(crate) fn end_job_without_result() -> Result<()> {
    end_job_after("\nstopping; no output is written")
}

fn end_job_after(status: &'static str) -> Result<()> {
    ctrlc::set_handler(move || {
        if IS_REQUESTED.swap(true, Ordering::SeqCst) {
            exit(EXIT_INTERRUPTED.into());
        }
        output::print_status(status);
    })
    .context("cannot install the Ctrl-C handler")
}

/// Runs `work` so that Ctrl-C can end it; `work` polls [`is_requested`].
pub(crate) fn while_generating<T>(work: impl FnOnce() -> T) -> T {
    IS_REQUESTED.store(false, Ordering::SeqCst);
    IS_GENERATING.store(true, Ordering::SeqCst);
    let result = work();
    IS_GENERATING.store(false, Ordering::SeqCst);
    result
}

/// Whether Ctrl-C has been pressed since the completion or the job began.
pub(crate) fn is_requested() -> bool {
    IS_REQUESTED.load(Ordering::SeqCst)
}
