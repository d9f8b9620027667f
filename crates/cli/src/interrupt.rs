//! Ctrl-C while texts are generated interactively: it ends the text, and outside a text the program.

use std::process::exit;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

/// How a program that an interrupt ended is seen by a shell: 128 and the number of the signal.
const EXIT_INTERRUPTED: i32 = 130;

static IS_GENERATING: AtomicBool = AtomicBool::new(false);
static IS_REQUESTED: AtomicBool = AtomicBool::new(false);

/// Makes Ctrl-C end texts from here on.
pub(crate) fn end_texts() -> Result<()> {
    ctrlc::set_handler(|| {
        if !IS_GENERATING.load(Ordering::SeqCst) {
            exit(EXIT_INTERRUPTED);
        }
        IS_REQUESTED.store(true, Ordering::SeqCst);
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

/// Whether Ctrl-C was pressed since the text began.
pub(crate) fn is_requested() -> bool {
    IS_REQUESTED.load(Ordering::SeqCst)
}
