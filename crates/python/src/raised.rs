//! Exceptions raised by Python functions during a call, and the call that each function serves.

use std::cell::RefCell;
use std::iter::successors;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::LocalKey;

use pyo3::prelude::*;

use crate::errors::{Failure, Result, gpt2_error};

thread_local! {
    /// Call that this thread is computing.
    static COMPUTED: RefCell<Option<Raised>> = const { RefCell::new(None) };
    /// Call whose Python function is running on this thread, which may be a helper thread.
    static SERVED: RefCell<Option<Raised>> = const { RefCell::new(None) };
}

/// Exception that a Python function raised during a computation.
///
/// It ends the call, and the thread that waits for the result raises it.
#[derive(Debug, Clone)]
pub(crate) struct Raised(Arc<Call>);

#[derive(Debug)]
struct Call {
    error: Mutex<Option<PyErr>>,
    /// Call whose Python function made this call.
    outer: Option<Raised>,
}

impl Default for Raised {
    fn default() -> Self {
        let outer = SERVED.with_borrow(Option::clone);
        Self(Arc::new(Call { error: Mutex::default(), outer }))
    }
}

impl Raised {
    /// Stores an exception, unless an earlier one is already stored.
    pub(crate) fn store(&self, error: PyErr) {
        self.error().get_or_insert(error);
    }

    /// Takes the exception, if any.
    pub(crate) fn take(&self) -> Option<PyErr> {
        self.error().take()
    }

    /// Returns the exception if there is one, or else `result`.
    pub(crate) fn or<T, E: Into<Failure>>(&self, result: std::result::Result<T, E>) -> Result<T> {
        match self.take() {
            Some(error) => Err(error.into()),
            None => result.map_err(Into::into),
        }
    }

    /// Runs a computation that must end once a Python function has raised an exception.
    pub(crate) fn computing<T>(&self, work: impl FnOnce() -> T) -> T {
        self.with_current(&COMPUTED, work)
    }

    /// Runs a Python function on behalf of this call.
    pub(crate) fn serving<T>(&self, work: impl FnOnce() -> T) -> T {
        self.with_current(&SERVED, work)
    }

    fn with_current<T>(&self, cell: &'static LocalKey<RefCell<Option<Self>>>, work: impl FnOnce() -> T) -> T {
        /// Restores the previous call on drop, even during a panic.
        struct Restore(&'static LocalKey<RefCell<Option<Raised>>>, Option<Raised>);
        impl Drop for Restore {
            fn drop(&mut self) {
                self.0.set(self.1.take());
            }
        }
        let _restore = Restore(cell, cell.replace(Some(self.clone())));
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

/// Whether a Python function raised an exception during this thread's computation.
pub(crate) fn has_raised() -> bool {
    COMPUTED.with_borrow(|call| call.as_ref().is_some_and(|call| call.error().is_some()))
}

/// Value that only one call at a time may use.
///
/// Other calls wait for it. Python functions of the same call get an error instead of waiting for
/// themselves.
pub(crate) struct Exclusive<T> {
    name: &'static str,
    value: Mutex<T>,
    call: Mutex<Option<Raised>>,
}

impl<T> Exclusive<T> {
    /// Creates the value; error messages refer to it as `name`.
    pub(crate) fn new(name: &'static str, value: T) -> Self {
        Self { name, value: Mutex::new(value), call: Mutex::default() }
    }

    /// Runs `work` on the value with the GIL released, because a call that uses the value may need it.
    pub(crate) fn with<R: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut T) -> R + Send) -> Result<R>
    where
        T: Send,
    {
        py.detach(|| Ok(work(&mut *self.lock()?)))
    }

    /// Runs a computation on the value for `call`.
    ///
    /// The caller must have released the GIL.
    pub(crate) fn run_for<R>(&self, call: &Raised, work: impl FnOnce(&mut T) -> R) -> Result<R> {
        /// Clears the current call on drop, even during a panic.
        struct ClearCall<'a>(&'a Mutex<Option<Raised>>);
        impl Drop for ClearCall<'_> {
            fn drop(&mut self) {
                *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
            }
        }
        let mut value = self.lock()?;
        *self.call.lock().unwrap_or_else(PoisonError::into_inner) = Some(call.clone());
        let _clear = ClearCall(&self.call);
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
            return Err(gpt2_error(format!(
                "{} is in use by the call that is running this function",
                self.name
            )));
        }
        Ok(self.value.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
