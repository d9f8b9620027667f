//! Ctrl-C during a computation: Python only notes a signal, and the computation has to ask.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::raised::has_raised;

/// How long a signal waits at most before it is asked for.
const INTERVAL: Duration = Duration::from_millis(20);

thread_local! {
    /// When this thread, which computes, asked last; `None` if no caller waits for a signal.
    static ASKED: Cell<Option<Instant>> = const { Cell::new(None) };
    /// The exception that a signal raised since.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Does something that is to end early at a signal, and gives the exception that the signal raised. `work` runs on this thread
/// without the interpreter's lock, and asks [`is_raised`].
pub(crate) fn watched<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send,
) -> PyResult<(T, Option<PyErr>)> {
    /// The state of the outer call, whose Python function calls this one.
    struct Outer(Option<Instant>, Option<PyErr>);

    impl Drop for Outer {
        fn drop(&mut self) {
            ASKED.set(self.0);
            RAISED.set(self.1.take());
        }
    }

    // Python hands signals to its main thread alone, and for others asking is in vain.
    let threading = py.import(pyo3::intern!(py, "threading"))?;
    let main_thread = threading.call_method0(pyo3::intern!(py, "main_thread"))?;
    let this_thread = threading.call_method0(pyo3::intern!(py, "get_ident"))?;
    let is_main = main_thread.getattr(pyo3::intern!(py, "ident"))?.eq(this_thread)?;
    let outer = Outer(ASKED.replace(is_main.then(Instant::now)), RAISED.take());
    let done = py.detach(work);
    let raised = RAISED.take();
    drop(outer);
    Ok((done, raised.or_else(|| py.check_signals().err())))
}

/// Whether to stop; to be called without the interpreter's lock.
pub(crate) fn is_raised() -> bool {
    if RAISED.with_borrow(Option::is_some) || has_raised() {
        return true;
    }
    if ASKED.get().is_none_or(|asked| asked.elapsed() < INTERVAL) {
        return false;
    }
    // An interpreter that ends has no more signals to tell of. What it calls here may compute too.
    let raised = Python::try_attach(|py| py.check_signals()).and_then(Result::err);
    let is_raised = raised.is_some();
    RAISED.set(raised);
    ASKED.set(Some(Instant::now()));
    is_raised
}
