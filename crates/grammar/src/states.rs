//! What is remembered of a grammar after some tokens, so that one more token costs one step: for several texts at once, beams
//! that fork, and drafts that are dropped.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::Matcher;
use toktrie::SimpleVob;

/// Most tokens of all texts whose last state is kept: 256 texts of 1,024 tokens. A text beyond that is read again.
const MAX_TOKENS: usize = 1 << 18;
/// Most texts whose last state is kept: more than a server generates at the same time. Texts that have ended leave theirs here.
const MAX_TEXTS: usize = 256;
/// Most states that are kept of those that another one continues: the beams of the step before, and a draft.
const MAX_CONTINUED: usize = 128;

/// Where a grammar is after some tokens, and what may follow.
pub(crate) struct State {
    pub(crate) matcher: Matcher,
    /// The tokens that may follow, with those that end the text.
    pub(crate) allowed: SimpleVob,
    /// Whether nothing but the end may follow.
    pub(crate) is_complete: bool,
}

/// States by their tokens, those that were asked for last.
#[derive(Default)]
pub(crate) struct States(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    /// Those that nothing continues, the last ones last.
    latest: VecDeque<Entry>,
    /// Tokens of all of them.
    latest_tokens: usize,
    /// Those that another one continues, the last ones last.
    continued: VecDeque<Entry>,
}

#[derive(Clone)]
struct Entry {
    ids: Vec<u32>,
    state: Arc<State>,
}

impl States {
    /// The state after as many of the tokens as any that is kept, and how many those are.
    pub(crate) fn longest(&self, ids: &[u32]) -> Option<(usize, Arc<State>)> {
        let kept = self.kept();
        let entries = kept.latest.iter().rev().chain(kept.continued.iter().rev());
        let beginnings = entries.filter(|entry| ids.starts_with(&entry.ids));
        beginnings
            .max_by_key(|entry| entry.ids.len())
            .map(|entry| (entry.ids.len(), Arc::clone(&entry.state)))
    }

    /// Keeps the state after these tokens, which continues the one after the first `continued` of them.
    pub(crate) fn keep(&self, ids: &[u32], continued: usize, state: &Arc<State>) {
        let mut kept = self.kept();
        if let Some(place) = kept.latest.iter().position(|entry| entry.ids == ids[..continued])
            && let Some(entry) = kept.latest.remove(place)
        {
            kept.latest_tokens -= entry.ids.len();
            kept.continued.push_back(entry);
        }
        while kept.continued.len() > MAX_CONTINUED {
            kept.continued.pop_front();
        }
        kept.latest_tokens += ids.len();
        kept.latest.push_back(Entry { ids: ids.to_vec(), state: Arc::clone(state) });
        while (kept.latest_tokens > MAX_TOKENS || kept.latest.len() > MAX_TEXTS)
            && kept.latest.len() > 1
            && let Some(oldest) = kept.latest.pop_front()
        {
            kept.latest_tokens -= oldest.ids.len();
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        // What is kept is whole at any moment.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
