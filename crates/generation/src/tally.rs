//! What the penalties ask of the tokens so far, kept from token to token: a new token costs the same however long the text
//! is, where counting anew costs its whole length.

use std::collections::{HashMap, HashSet};

use crate::History;

/// Longest sequences that are remembered: each costs its length in memory, and longer ones hardly ever repeat, so the text
/// is searched for them.
pub(crate) const LONGEST_COUNTED: usize = 32;

/// The tokens of one text as processors count them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tally {
    /// The tokens counted so far.
    ids: Vec<u32>,
    prompt_len: usize,
    all: HashMap<u32, usize>,
    generated: HashMap<u32, usize>,
    followers: Vec<Followers>,
}

impl Tally {
    /// A tally of nothing, for sequences of these lengths that may not repeat; longer than [`LONGEST_COUNTED`] are left out.
    pub(crate) fn new(sizes: impl Iterator<Item = usize>) -> Self {
        let sizes = sizes.filter(|size| *size <= LONGEST_COUNTED);
        Self { followers: sizes.map(Followers::new).collect(), ..Self::default() }
    }

    /// Counts what the history has gained; anew if it does not continue the one before.
    pub(crate) fn follow(&mut self, history: History<'_>) {
        // Comparing the tokens reads them once, in order, which costs next to nothing beside a decode step.
        if history.prompt_len != self.prompt_len || !history.ids.starts_with(&self.ids) {
            self.restart(history.prompt_len);
        }
        for id in &history.ids[self.ids.len()..] {
            if self.ids.len() >= self.prompt_len {
                *self.generated.entry(*id).or_default() += 1;
            }
            *self.all.entry(*id).or_default() += 1;
            self.ids.push(*id);
            self.followers.iter_mut().for_each(|followers| followers.add_last(&self.ids));
        }
    }

    fn restart(&mut self, prompt_len: usize) {
        let followers = self.followers.iter().map(|followers| Followers::new(followers.size)).collect();
        *self = Self { prompt_len, followers, ..Self::default() };
    }

    /// How often each token occurs in prompt and text.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u32, usize)> {
        self.all.iter().map(|(id, count)| (*id, *count))
    }

    /// How often each token was generated.
    pub(crate) fn generated(&self) -> impl Iterator<Item = (u32, usize)> {
        self.generated.iter().map(|(id, count)| (*id, *count))
    }

    /// The tokens that would complete a sequence of `size` tokens a second time.
    pub(crate) fn repeating_tokens(&self, size: usize) -> impl Iterator<Item = u32> {
        let followers = self.followers.iter().find(|followers| followers.size == size);
        followers.and_then(|followers| followers.of_end(&self.ids)).into_iter().flatten().copied()
    }
}

/// The tokens after each sequence of `size - 1` tokens of a text.
#[derive(Debug, Clone)]
struct Followers {
    size: usize,
    after: HashMap<Vec<u32>, HashSet<u32>>,
}

impl Followers {
    fn new(size: usize) -> Self {
        Self { size, after: HashMap::new() }
    }

    /// Adds the last token.
    fn add_last(&mut self, ids: &[u32]) {
        if let Some(start) = ids.len().checked_sub(self.size)
            && let Some((last, before)) = ids[start..].split_last()
        {
            self.after.entry(before.to_vec()).or_default().insert(*last);
        }
    }

    /// What came after the sequence that the text ends with.
    fn of_end(&self, ids: &[u32]) -> Option<&HashSet<u32>> {
        let start = ids.len().checked_sub(self.size.checked_sub(1)?)?;
        self.after.get(&ids[start..])
    }
}
