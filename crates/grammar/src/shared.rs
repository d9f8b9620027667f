//! Equal grammars share a process: what it has learned of a grammar serves all texts, and its memory counts once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::GrammarError;
use crate::process::{Order, RemoteConstraint};

/// Requests that a process serves in its life. States of texts that have ended stay in it, so it is replaced now and then.
const MOST_REQUESTS: usize = 64;

/// The constraints that texts follow, by grammar and end tokens, as JSON.
#[derive(Default)]
pub(crate) struct Shared(Mutex<HashMap<String, Arc<Mutex<Entry>>>>);

#[derive(Default)]
struct Entry {
    constraint: Weak<RemoteConstraint>,
    requests: usize,
}

impl Shared {
    /// The constraint of an equal grammar, or else that of a new process. Equal grammars that come together are read once.
    pub(crate) fn read_with(
        &self,
        order: &Order,
        read: impl FnOnce() -> Result<RemoteConstraint, GrammarError>,
    ) -> Result<Arc<RemoteConstraint>, GrammarError> {
        let key = serde_json::to_string(order)
            .map_err(|error| GrammarError::Grammar { kind: order.grammar.kind(), what: error.to_string() })?;
        let entry = {
            let mut entries = locked(&self.0);
            entries.retain(|known, entry| *known == key || is_in_use(entry));
            Arc::clone(entries.entry(key).or_default())
        };
        // Others with this grammar wait here until it is read.
        let mut entry = locked(&entry);
        let shared = entry.constraint.upgrade().filter(|shared| shared.is_alive());
        if let Some(shared) = shared.filter(|_| entry.requests < MOST_REQUESTS) {
            entry.requests += 1;
            return Ok(shared);
        }
        let constraint = Arc::new(read()?);
        *entry = Entry { constraint: Arc::downgrade(&constraint), requests: 1 };
        Ok(constraint)
    }
}

/// Whether a text follows the grammar, or someone reads it.
fn is_in_use(entry: &Arc<Mutex<Entry>>) -> bool {
    Arc::strong_count(entry) > 1 || locked(entry).constraint.strong_count() > 0
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each value is whole at any moment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
