//! Progress bars, warnings and Ctrl-C for long jobs in Python.
//!
//! Bars appear on standard error if it is a terminal.

use std::sync::{Mutex, PoisonError};

use candle_gpt2_engine::{Progress, Reporter, Silent, Terminal, Unit};
use pyo3::prelude::*;

use crate::errors::{Failure, Result, warn};
use crate::process::interruptible;
use crate::signals;

/// Reporter that shows progress bars, collects notes for warnings, and stops at a signal.
#[derive(Debug)]
pub(crate) struct Listener {
    has_bars: bool,
    notes: Mutex<Vec<String>>,
}

impl Listener {
    /// Creates a reporter that shows bars if Python's `sys.stderr` is a terminal.
    ///
    /// A notebook's standard error is not a terminal, even if the process has one.
    pub(crate) fn new(py: Python<'_>) -> Self {
        let stderr = py.import("sys").and_then(|sys| sys.getattr("stderr"));
        let is_terminal = stderr.and_then(|stderr| stderr.call_method0("isatty")?.extract());
        Self { has_bars: is_terminal.unwrap_or(false), notes: Mutex::default() }
    }

    /// Raises the collected notes as warnings.
    pub(crate) fn warn(&self, py: Python<'_>) -> Result<()> {
        let notes = std::mem::take(&mut *self.notes.lock().unwrap_or_else(PoisonError::into_inner));
        notes.iter().try_for_each(|note| warn(py, note))
    }
}

impl Reporter for Listener {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        if self.has_bars { Terminal.start(what, total, unit) } else { Silent.start(what, total, unit) }
    }

    fn note(&self, note: &str) {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner).push(note.to_owned());
    }

    fn is_interrupted(&self) -> bool {
        signals::is_raised()
    }
}

/// Runs a long job with the GIL released and raises its notes as warnings.
///
/// Ctrl-C soon ends the job.
pub(crate) fn reporting<T: Send, E: Into<Failure> + Send>(
    py: Python<'_>,
    work: impl FnOnce(&Listener) -> std::result::Result<T, E> + Send,
) -> Result<T> {
    let listener = Listener::new(py);
    let done = interruptible(py, || work(&listener))?;
    listener.warn(py)?;
    Ok(done)
}
