//! Shares one process among equal grammars.
//!
//! All sequences with an equal grammar reuse the states that the process has cached, and the memory of the
//! process counts only once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use crate::GrammarError;
use crate::process::{CompileRequest, RemoteConstraint};

/// Maximum number of requests per process.
///
/// After that, a new process replaces the old one, which still stores the states of finished sequences.
const MAX_REQUESTS: usize = 64;

/// Constraints in use, keyed by the grammar and the end tokens as JSON.
#[derive(Default)]
pub(crate) struct Shared(Mutex<HashMap<String, Entry>>);

/// Outcome of a compilation; empty while it runs.
type Compilation = OnceLock<Result<Arc<RemoteConstraint>, GrammarError>>;

#[derive(Default)]
struct Entry {
    /// Current compilation; dropped when no request waits for it.
    compilation: Weak<Compilation>,
    constraint: Weak<RemoteConstraint>,
    requests: usize,
}

impl Shared {
    /// Returns the existing constraint for an equal grammar, or compiles a new one with `read`.
    ///
    /// For concurrent requests with equal grammars, `read` runs once, and the requests share the outcome,
    /// even if it is an error. No request therefore waits longer than one `read` takes.
    pub(crate) fn read_with(
        &self,
        request: &CompileRequest,
        read: impl FnOnce() -> Result<RemoteConstraint, GrammarError>,
    ) -> Result<Arc<RemoteConstraint>, GrammarError> {
        let key = serde_json::to_string(request).map_err(|error| GrammarError::Grammar {
            kind: request.grammar.kind(),
            what: error.to_string(),
        })?;
        let compilation = {
            let mut entries = lock(&self.0);
            entries.retain(|known, entry| *known == key || entry.is_in_use());
            let entry = entries.entry(key.clone()).or_default();
            let constraint = entry.constraint.upgrade().filter(|constraint| constraint.is_alive());
            if let Some(constraint) = constraint.filter(|_| entry.requests < MAX_REQUESTS) {
                entry.requests += 1;
                return Ok(constraint);
            }
            let compilation = entry.compilation.upgrade().unwrap_or_else(|| {
                let compilation = Arc::default();
                *entry = Entry { compilation: Arc::downgrade(&compilation), ..Entry::default() };
                compilation
            });
            entry.requests += 1;
            compilation
        };
        let read = || {
            let constraint = Arc::new(read()?);
            if let Some(entry) = lock(&self.0).get_mut(&key) {
                entry.constraint = Arc::downgrade(&constraint);
            }
            Ok(constraint)
        };
        compilation.get_or_init(read).clone()
    }
}

impl Entry {
    /// Whether a sequence uses the constraint or a request is waiting for it.
    fn is_in_use(&self) -> bool {
        self.compilation.strong_count() > 0 || self.constraint.strong_count() > 0
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The value is consistent at every point, so poisoning is harmless.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::Grammar;

    const REQUESTS: usize = 5;
    /// Maximum time to wait for the other requests, in milliseconds.
    const PATIENCE: usize = 60_000;

    #[test]
    fn concurrent_equal_grammars_share_one_failed_compilation() {
        let (shared, compilations) = (Shared::default(), AtomicUsize::new(0));
        let request = CompileRequest { grammar: Grammar::Regex("a".into()), end_tokens: Vec::new() };
        let waiting =
            || lock(&shared.0).values().map(|entry| entry.compilation.strong_count()).sum::<usize>();
        let busy = GrammarError::Busy { kind: request.grammar.kind() };
        let read = || {
            compilations.fetch_add(1, Ordering::Relaxed);
            let have_joined = (0..PATIENCE).any(|_| {
                thread::sleep(Duration::from_millis(1));
                waiting() == REQUESTS
            });
            assert!(have_joined, "the other requests do not join");
            Err(busy.clone())
        };
        thread::scope(|scope| {
            let started = || scope.spawn(|| shared.read_with(&request, read));
            let requests: Vec<_> = (0..REQUESTS).map(|_| started()).collect();
            for request in requests {
                assert_eq!(request.join().unwrap().unwrap_err(), busy);
            }
        });
        assert_eq!(compilations.into_inner(), 1);
        // A later request compiles again.
        assert_eq!(shared.read_with(&request, || Err(GrammarError::NoEnd)).unwrap_err(), GrammarError::NoEnd);
    }
}
