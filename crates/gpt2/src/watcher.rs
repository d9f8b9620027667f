//! Observer attached to a model.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{ThreadId, current};

use candle_gpt2_attention::Observer;

/// Attached observer; sees every pass of a model, one pass at a time.
#[derive(Clone)]
pub(crate) struct Watcher {
    observer: Arc<Mutex<dyn Observer + Send>>,
    /// Thread whose pass is being observed.
    observed: Arc<Mutex<Option<ThreadId>>>,
}

impl Watcher {
    pub(crate) fn new(observer: Arc<Mutex<dyn Observer + Send>>) -> Self {
        Self { observer, observed: Arc::default() }
    }

    /// Calls `compute` with the observer.
    ///
    /// If the observer itself runs this pass, `compute` receives none, because it cannot observe both passes.
    pub(crate) fn with<T>(&self, compute: impl FnOnce(Option<&mut dyn Observer>) -> T) -> T {
        if self.thread() == Some(current().id()) {
            return compute(None);
        }
        let mut observer = self.observer.lock().unwrap_or_else(PoisonError::into_inner);
        let _observing = Observing::begin(self);
        compute(Some(&mut *observer))
    }

    fn thread(&self) -> Option<ThreadId> {
        *self.observed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_thread(&self, thread: Option<ThreadId>) {
        *self.observed.lock().unwrap_or_else(PoisonError::into_inner) = thread;
    }
}

/// RAII guard that marks this thread's pass as observed.
struct Observing<'a>(&'a Watcher);

impl<'a> Observing<'a> {
    fn begin(watcher: &'a Watcher) -> Self {
        watcher.set_thread(Some(current().id()));
        Self(watcher)
    }
}

impl Drop for Observing<'_> {
    fn drop(&mut self) {
        self.0.set_thread(None);
    }
}

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watcher")
    }
}
