//! Token counts for penalties, updated incrementally.
//!
//! The cost of a new token does not depend on the sequence length, whereas recounting visits every token.

use std::collections::{HashMap, HashSet};

use crate::History;

/// Largest n-gram size that is tracked.
///
/// Each tracked n-gram costs its size in memory, and longer ones rarely repeat. For larger sizes, the
/// history is searched instead.
pub(crate) const LONGEST_COUNTED: usize = 32;

/// Token and n-gram counts of one sequence.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tally {
    /// Tokens counted so far.
    ids: Vec<u32>,
    prompt_len: usize,
    all: HashMap<u32, usize>,
    generated: HashMap<u32, usize>,
    followers: Vec<Followers>,
}

impl Tally {
    /// Creates an empty tally for n-grams of these sizes; sizes above [`LONGEST_COUNTED`] are ignored.
    pub(crate) fn new(sizes: impl Iterator<Item = usize>) -> Self {
        let sizes = sizes.filter(|size| *size <= LONGEST_COUNTED);
        Self { followers: sizes.map(Followers::new).collect(), ..Self::default() }
    }

    /// Counts the history's new tokens; starts over if the history does not extend the previous one.
    pub(crate) fn follow(&mut self, history: History<'_>) {
        // The tokens are compared in one sequential read; its cost is negligible next to a decode step.
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

    /// Returns the number of occurrences of each token in prompt and completion.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u32, usize)> {
        self.all.iter().map(|(id, count)| (*id, *count))
    }

    /// Returns the number of times that each token was generated.
    pub(crate) fn generated(&self) -> impl Iterator<Item = (u32, usize)> {
        self.generated.iter().map(|(id, count)| (*id, *count))
    }

    /// Returns the tokens that would repeat an n-gram of `size` tokens.
    pub(crate) fn repeating_tokens(&self, size: usize) -> impl Iterator<Item = u32> {
        let followers = self.followers.iter().find(|followers| followers.size == size);
        followers.and_then(|followers| followers.of_end(&self.ids)).into_iter().flatten().copied()
    }
}

/// Tokens that followed each sequence of `size - 1` tokens.
#[derive(Debug, Clone)]
struct Followers {
    size: usize,
    after: HashMap<Vec<u32>, HashSet<u32>>,
}

impl Followers {
    fn new(size: usize) -> Self {
        Self { size, after: HashMap::new() }
    }

    /// Records the last token of `ids`.
    fn add_last(&mut self, ids: &[u32]) {
        if let Some(start) = ids.len().checked_sub(self.size)
            && let Some((last, before)) = ids[start..].split_last()
        {
            self.after.entry(before.to_vec()).or_default().insert(*last);
        }
    }

    /// Returns the tokens that followed earlier occurrences of the last `size - 1` tokens.
    fn of_end(&self, ids: &[u32]) -> Option<&HashSet<u32>> {
        let start = ids.len().checked_sub(self.size.checked_sub(1)?)?;
        self.after.get(&ids[start..])
    }
}
