//! What functions of Python's raise while they serve a call, and which call that is.

use std::cell::RefCell;
use std::iter::successors;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::LocalKey;

use pyo3::prelude::*;

use crate::errors::{Failure, Result, failed};

thread_local! {
    /// The call that this thread computes.
    static COMPUTED: RefCell<Option<Raised>> = const { RefCell::new(None) };
    /// The call that a function of Python's serves on this thread, which may be one of those that help.
    static SERVED: RefCell<Option<Raised>> = const { RefCell::new(None) };
}

/// The exception that a Python function raised during a computation, for the thread that waits for the result. It ends the call.
#[derive(Debug, Clone)]
pub(crate) struct Raised(Arc<Call>);

#[derive(Debug)]
struct Call {
    error: Mutex<Option<PyErr>>,
    /// The call whose function made this one.
    outer: Option<Raised>,
}

impl Default for Raised {
    fn default() -> Self {
        let outer = SERVED.with_borrow(Option::clone);
        Self(Arc::new(Call { error: Mutex::default(), outer }))
    }
}

impl Raised {
    /// Keeps an exception; the first one is raised.
    pub(crate) fn keep(&self, error: PyErr) {
        self.error().get_or_insert(error);
    }

    /// The exception, if there was one.
    pub(crate) fn take(&self) -> Option<PyErr> {
        self.error().take()
    }

    /// The exception in place of what became of it below, if there was one.
    pub(crate) fn or<T, E: Into<Failure>>(&self, result: std::result::Result<T, E>) -> Result<T> {
        match self.take() {
            Some(error) => Err(error.into()),
            None => result.map_err(Into::into),
        }
    }

    /// Computes what is to end once a function has raised something.
    pub(crate) fn computing<T>(&self, work: impl FnOnce() -> T) -> T {
        self.set_in(&COMPUTED, work)
    }

    /// Calls a function of Python's for this call.
    pub(crate) fn serving<T>(&self, work: impl FnOnce() -> T) -> T {
        self.set_in(&SERVED, work)
    }

    fn set_in<T>(&self, place: &'static LocalKey<RefCell<Option<Self>>>, work: impl FnOnce() -> T) -> T {
        /// Puts the one before it back, in a panic too.
        struct Restore(&'static LocalKey<RefCell<Option<Raised>>>, Option<Raised>);
        impl Drop for Restore {
            fn drop(&mut self) {
                self.0.set(self.1.take());
            }
        }
        let _restore = Restore(place, place.replace(Some(self.clone())));
        work()
    }

    fn is_served_here(&self) -> bool {
        let served = SERVED.with_borrow(Option::clone);
        successors(served, |call| call.0.outer.clone()).any(|call| Arc::ptr_eq(&call.0, &self.0))
    }

    fn error(&self) -> MutexGuard<'_, Option<PyErr>> {
        self.0.error.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether a function of what this thread computes raised something.
pub(crate) fn has_raised() -> bool {
    COMPUTED.with_borrow(|call| call.as_ref().is_some_and(|call| call.error().is_some()))
}

/// What a call computes with. Others wait for it, but for the functions of that very call, which would wait for themselves.
pub(crate) struct Lent<T> {
    name: &'static str,
    value: Mutex<T>,
    call: Mutex<Option<Raised>>,
}

impl<T> Lent<T> {
    /// `name` says in errors what it is.
    pub(crate) fn new(name: &'static str, value: T) -> Self {
        Self { name, value: Mutex::new(value), call: Mutex::default() }
    }

    /// Does something with it without the interpreter's lock, which its current holder may want.
    pub(crate) fn with<R: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut T) -> R + Send) -> Result<R>
    where
        T: Send,
    {
        py.detach(|| Ok(work(&mut *self.lock()?)))
    }

    /// Computes with it; to be called without the interpreter's lock.
    pub(crate) fn lent_to<R>(&self, call: &Raised, work: impl FnOnce(&mut T) -> R) -> Result<R> {
        /// Takes it back, in a panic too.
        struct Back<'a>(&'a Mutex<Option<Raised>>);
        impl Drop for Back<'_> {
            fn drop(&mut self) {
                *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
            }
        }
        let mut value = self.lock()?;
        *self.call.lock().unwrap_or_else(PoisonError::into_inner) = Some(call.clone());
        let _back = Back(&self.call);
        Ok(work(&mut *value))
    }

    fn lock(&self) -> Result<MutexGuard<'_, T>> {
        match self.value.try_lock() {
            Ok(value) => return Ok(value),
            Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {}
        }
        let call = self.call.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if call.is_some_and(|call| call.is_served_here()) {
            return Err(failed(format!("{} is in use by the call that called this function", self.name)));
        }
        Ok(self.value.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
