//! Cache of grammar states, keyed by generated tokens, so that each new token needs a single step.
//!
//! The cache serves concurrent sequences, forked beams and rejected drafts.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::Matcher;
use toktrie::SimpleVob;

/// Maximum number of tokens in all cached latest states: 256 sequences of 1,024 tokens.
///
/// A sequence that is no longer cached is parsed again from its start.
const MAX_TOKENS: usize = 1 << 18;
/// Maximum number of cached latest states; exceeds the number of concurrent sequences in a server.
///
/// Finished sequences stay in the cache.
const MAX_TEXTS: usize = 256;
/// Maximum number of cached states with a successor, such as the previous step's beams or a draft.
const MAX_CONTINUED: usize = 128;

/// State of a grammar after a sequence of tokens, with the tokens that may follow.
pub(crate) struct State {
    pub(crate) matcher: Matcher,
    /// Tokens that may follow, including end tokens.
    pub(crate) allowed: SimpleVob,
    /// Whether only the end may follow.
    pub(crate) is_complete: bool,
}

/// Cached states, keyed by their tokens.
#[derive(Default)]
pub(crate) struct States(Mutex<Cache>);

#[derive(Default)]
struct Cache {
    /// States without a successor, oldest first.
    latest: VecDeque<Entry>,
    /// Total number of tokens in `latest`.
    latest_tokens: usize,
    /// States with a successor, oldest first.
    continued: VecDeque<Entry>,
}

#[derive(Clone)]
struct Entry {
    ids: Vec<u32>,
    state: Arc<State>,
}

impl States {
    /// Returns the cached state of the longest known prefix of `ids`, and that prefix's length.
    pub(crate) fn longest(&self, ids: &[u32]) -> Option<(usize, Arc<State>)> {
        let cache = self.cache();
        let entries = cache.latest.iter().rev().chain(cache.continued.iter().rev());
        let beginnings = entries.filter(|entry| ids.starts_with(&entry.ids));
        beginnings
            .max_by_key(|entry| entry.ids.len())
            .map(|entry| (entry.ids.len(), Arc::clone(&entry.state)))
    }

    /// Caches the state after `ids` as the successor of the state after the first `continued` tokens.
    pub(crate) fn keep(&self, ids: &[u32], continued: usize, state: &Arc<State>) {
        let mut cache = self.cache();
        if let Some(place) = cache.latest.iter().position(|entry| entry.ids == ids[..continued])
            && let Some(entry) = cache.latest.remove(place)
        {
            cache.latest_tokens -= entry.ids.len();
            cache.continued.push_back(entry);
        }
        while cache.continued.len() > MAX_CONTINUED {
            cache.continued.pop_front();
        }
        cache.latest_tokens += ids.len();
        cache.latest.push_back(Entry { ids: ids.to_vec(), state: Arc::clone(state) });
        while (cache.latest_tokens > MAX_TOKENS || cache.latest.len() > MAX_TEXTS)
            && cache.latest.len() > 1
            && let Some(oldest) = cache.latest.pop_front()
        {
            cache.latest_tokens -= oldest.ids.len();
        }
    }

    fn cache(&self) -> MutexGuard<'_, Cache> {
        // The cache is consistent at every point, so poisoning is harmless.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
