//! Prefix cache: keys, values and prompt scores of finished sequences.
//!
//! Later prompts with the same prefix reuse this data. Rows are kept until other sequences need the
//! memory. The least recently used row is dropped first.

use std::collections::VecDeque;

use candle_gpt2::{Gpt2Cache, KvSlot};

use crate::TokenLogprobs;

/// Maximum number of kept rows; every prompt is compared with each of them.
const MAX_ROWS: usize = 256;

/// Kept rows, least recently used first.
#[derive(Default)]
pub(crate) struct Prefixes {
    rows: VecDeque<Prefix>,
    /// Number of the next row.
    next: u64,
}

/// Sequences that may reuse each other's prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReuseGroup {
    /// Sequences of all requests with this [`Request::reuse`](crate::Request::reuse).
    Reuse(u64),
    /// Sequences of the request with this number; all have the same prompt.
    Sequences(u64),
}

/// A row of a finished sequence.
pub(crate) struct Prefix {
    number: u64,
    reuse_group: ReuseGroup,
    /// Tokens whose keys and values the row holds.
    ids: Vec<u32>,
    cache: Gpt2Cache,
    scores: PromptScores,
}

/// Scores for the first tokens of a prompt, up to the last token with a known score.
#[derive(Debug, Clone, Default)]
pub(crate) struct PromptScores {
    /// Number of alternatives for each token; `None` if no scores are wanted.
    wanted: Option<usize>,
    known: Vec<Option<TokenLogprobs>>,
}

/// Computed prefix that a prompt can reuse.
pub(crate) struct CachedPrefix {
    /// Number of computed tokens.
    pub(crate) tokens: usize,
    pub(crate) source: Source,
}

#[derive(Debug)]
pub(crate) enum Source {
    /// Row of a running sequence.
    Running(usize),
    /// A kept row, by its number.
    Kept(u64),
    /// A kept row that the new sequence has taken over.
    Taken(PromptScores),
}

impl PromptScores {
    /// Creates empty scores that will hold `wanted` alternatives for each token.
    pub(crate) fn new(wanted: Option<usize>) -> Self {
        // No token precedes the first one, so it has no score.
        Self { wanted, known: wanted.map(|_| None).into_iter().collect() }
    }

    pub(crate) fn wanted(&self) -> Option<usize> {
        self.wanted
    }

    /// Returns the known scores of the tokens, in order.
    pub(crate) fn known(&self) -> &[Option<TokenLogprobs>] {
        &self.known
    }

    pub(crate) fn extend(&mut self, found: impl IntoIterator<Item = TokenLogprobs>) {
        self.known.extend(found.into_iter().map(Some));
    }

    /// Copies the known scores of the first `tokens` tokens, if scores are wanted.
    pub(crate) fn take_over(&mut self, other: &Self, tokens: usize) {
        let Some(wanted) = self.wanted else { return };
        let shortened = |scored: &TokenLogprobs| TokenLogprobs {
            logprob: scored.logprob,
            alternatives: scored.alternatives.iter().take(wanted).copied().collect(),
        };
        self.known = other.known.iter().take(tokens).map(|scored| scored.as_ref().map(shortened)).collect();
    }

    /// Returns the number of reusable tokens among the `equal` shared ones.
    ///
    /// `wanted` is the number of alternatives that the prompt requests. A token whose next-token scores are
    /// missing must be recomputed.
    fn usable(&self, equal: usize, wanted: Option<usize>) -> usize {
        let known = match (wanted, self.wanted) {
            (None, _) => usize::MAX,
            (Some(wanted), Some(has)) if has >= wanted => self.known.len().min(equal),
            _ => 0,
        };
        equal.min(known.saturating_sub(1))
    }
}

/// Requirements for a computed prefix that a new sequence can reuse.
pub(crate) struct PrefixQuery<'a> {
    pub(crate) reuse_group: ReuseGroup,
    pub(crate) prompt: &'a [u32],
    /// Maximum number of tokens to reuse.
    ///
    /// The last token is recomputed to get the logits after it, unless they are known.
    pub(crate) most: usize,
    /// Number of alternatives for each prompt token; `None` if no log-probabilities are requested.
    pub(crate) logprobs: Option<usize>,
}

impl PrefixQuery<'_> {
    /// Returns the number of tokens that can be reused from a row that holds `ids`.
    pub(crate) fn usable(&self, ids: &[u32], scores: &PromptScores) -> usize {
        let equal = self.prompt.iter().zip(ids).take_while(|(wanted, held)| wanted == held).count();
        scores.usable(equal, self.logprobs).min(self.most)
    }
}

impl Prefixes {
    /// Finds the row with the longest prefix of a prompt; returns its number and the prefix length.
    ///
    /// If several prefixes are equally long, the newest row is returned.
    pub(crate) fn longest(&self, wanted: &PrefixQuery<'_>) -> Option<(u64, usize)> {
        let rows = self.rows.iter().filter(|row| row.reuse_group == wanted.reuse_group);
        rows.map(|row| (row.number, wanted.usable(&row.ids, &row.scores)))
            .filter(|(_, tokens)| *tokens > 0)
            .max_by_key(|(_, tokens)| *tokens)
    }

    /// Keeps the row of a finished sequence and drops the rows that this row makes redundant.
    pub(crate) fn keep(
        &mut self,
        reuse_group: ReuseGroup,
        ids: Vec<u32>,
        cache: Gpt2Cache,
        scores: PromptScores,
    ) {
        let is_in = |inner: (&[u32], &PromptScores), outer: (&[u32], &PromptScores)| {
            outer.0.starts_with(inner.0)
                && outer.1.known.len() >= inner.1.known.len()
                && outer.1.wanted >= inner.1.wanted
        };
        let same = |row: &&Prefix| row.reuse_group == reuse_group;
        let new = (&ids[..], &scores);
        let known = self.rows.iter().filter(same).find(|row| is_in(new, (&row.ids, &row.scores)));
        if let Some(number) = known.map(|row| row.number) {
            self.touch(number);
            return;
        }
        self.rows.retain(|row| row.reuse_group != reuse_group || !is_in((&row.ids, &row.scores), new));
        if self.rows.len() >= MAX_ROWS {
            self.rows.pop_front();
        }
        self.rows.push_back(Prefix { number: self.next, reuse_group, ids, cache, scores });
        self.next += 1;
    }

    /// Returns row `number` and marks it as most recently used.
    pub(crate) fn touch(&mut self, number: u64) -> Option<(&Gpt2Cache, &PromptScores)> {
        let row = self.take(number)?;
        self.rows.push_back(row);
        self.rows.back().map(|row| (&row.cache, &row.scores))
    }

    /// Frees all rows that belong to this reuse group.
    pub(crate) fn forget(&mut self, reuse_group: ReuseGroup) {
        self.rows.retain(|row| row.reuse_group != reuse_group);
    }

    /// Frees the least recently used row, except for row `but`; returns whether it freed one.
    pub(crate) fn forget_oldest(&mut self, but: Option<u64>) -> bool {
        let place = self.rows.iter().position(|row| Some(row.number) != but);
        place.and_then(|place| self.rows.remove(place)).is_some()
    }

    /// Returns whether row `number` is reserved for the sequences of a single request.
    pub(crate) fn is_of_sequences(&self, number: u64) -> bool {
        self.rows
            .iter()
            .any(|row| row.number == number && matches!(row.reuse_group, ReuseGroup::Sequences(_)))
    }

    /// Removes and returns row `number` if it has this capacity; otherwise frees its memory.
    pub(crate) fn take_row(&mut self, number: u64, capacity: usize) -> Option<(Gpt2Cache, PromptScores)> {
        let row = self.take(number)?;
        (row.capacity() >= capacity).then_some((row.cache, row.scores))
    }

    /// Returns the total capacity of the kept rows, in tokens.
    pub(crate) fn kv_tokens(&self) -> usize {
        self.rows.iter().map(|row| KvSlot::room_of(row.capacity())).sum()
    }

    fn take(&mut self, number: u64) -> Option<Prefix> {
        let place = self.rows.iter().position(|row| row.number == number)?;
        self.rows.remove(place)
    }
}

impl Prefix {
    /// Returns the capacity of the row in tokens.
    fn capacity(&self) -> usize {
        self.cache.free_tokens().iter().zip(self.cache.lengths()).map(|(room, length)| room + length).sum()
    }
}
