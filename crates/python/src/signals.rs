//! Ctrl-C during a computation.
//!
//! Python only records a signal, so the computation must poll for it.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::raised::has_raised;

/// Polling interval, the maximum delay before a signal is noticed.
const INTERVAL: Duration = Duration::from_millis(20);

thread_local! {
    /// Time of this thread's last poll, or `None` if the thread does not poll for signals.
    static LAST_POLL: Cell<Option<Instant>> = const { Cell::new(None) };
    /// Exception raised by a signal since the last poll.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Runs `work` and returns its result and the exception raised by a signal, if any.
///
/// `work` runs on this thread with the GIL released. It must poll [`is_raised`] and end early at a signal.
pub(crate) fn run_with_signals<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send,
) -> PyResult<(T, Option<PyErr>)> {
    /// Saved state of the outer call, if one of its Python functions makes this call.
    struct Outer(Option<Instant>, Option<PyErr>);

    impl Drop for Outer {
        fn drop(&mut self) {
            LAST_POLL.set(self.0);
            RAISED.set(self.1.take());
        }
    }

    // Python delivers signals only to its main thread, so other threads do not poll.
    let threading = py.import(pyo3::intern!(py, "threading"))?;
    let main_thread = threading.call_method0(pyo3::intern!(py, "main_thread"))?;
    let this_thread = threading.call_method0(pyo3::intern!(py, "get_ident"))?;
    let is_main = main_thread.getattr(pyo3::intern!(py, "ident"))?.eq(this_thread)?;
    let outer = Outer(LAST_POLL.replace(is_main.then(Instant::now)), RAISED.take());
    let done = py.detach(work);
    let raised = RAISED.take();
    drop(outer);
    Ok((done, raised.or_else(|| py.check_signals().err())))
}

/// Whether a signal or a Python function has raised an exception, so that work must stop.
///
/// The caller must have released the GIL.
pub(crate) fn is_raised() -> bool {
    if RAISED.with_borrow(Option::is_some) || has_raised() {
        return true;
    }
    if LAST_POLL.get().is_none_or(|last_poll| last_poll.elapsed() < INTERVAL) {
        return false;
    }
    // An interpreter that is shutting down delivers no signals. A signal handler that runs at this point may
    // start another computation.
    let raised = Python::try_attach(|py| py.check_signals()).and_then(Result::err);
    let is_raised = raised.is_some();
    RAISED.set(raised);
    LAST_POLL.set(Some(Instant::now()));
    is_raised
}
