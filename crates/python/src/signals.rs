//! Ctrl-C while something computes: Python only notes a signal, and whoever computes has to ask.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// How long a signal waits at most before it is asked for.
const INTERVAL: Duration = Duration::from_millis(20);

/// Asks for signals now and then, and keeps the exception that one of them raised.
#[derive(Debug)]
pub(crate) struct Signals(Mutex<State>);

#[derive(Debug)]
struct State {
    asked: Instant,
    raised: Option<PyErr>,
}

impl Signals {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(State { asked: Instant::now(), raised: None }))
    }

    /// Whether to stop; to be called without the interpreter's lock.
    pub(crate) fn is_raised(&self) -> bool {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.raised.is_none() && state.asked.elapsed() >= INTERVAL {
            // An interpreter that ends has no more signals to tell of.
            state.raised = Python::try_attach(|py| py.check_signals()).and_then(Result::err);
            state.asked = Instant::now();
        }
        state.raised.is_some()
    }

    /// The exception.
    pub(crate) fn take(&self) -> Option<PyErr> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).raised.take()
    }
}
