//! What texts that have ended leave behind: keys and values, with what was found about the prompt, for later texts whose prompts
//! begin alike. It is kept as long as nothing else needs the memory; the longest unused goes first.

use std::collections::VecDeque;

use candle_gpt2::{Gpt2Cache, KvSlot};

use crate::TokenLogprobs;

/// Most rows that are kept: each is compared with every prompt.
const MOST_ROWS: usize = 256;

/// The rows that are kept, the longest unused first.
#[derive(Default)]
pub(crate) struct Prefixes {
    rows: VecDeque<Prefix>,
    /// The number of the next one.
    next: u64,
}

/// The texts that may continue what was computed for one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharers {
    /// Those of all requests with this [`Request::reuse`](crate::Request::reuse).
    Reuse(u64),
    /// Those of one request, by its number: its sequences have one prompt.
    Sequences(u64),
}

/// A row of a text that has ended.
pub(crate) struct Prefix {
    number: u64,
    sharers: Sharers,
    /// The tokens whose keys and values it holds.
    ids: Vec<u32>,
    cache: Gpt2Cache,
    scores: PromptScores,
}

/// How probable the tokens of a prompt are, from the first one on and as far as that is known.
#[derive(Debug, Clone, Default)]
pub(crate) struct PromptScores {
    /// Alternatives of each; `None` if no scores are wanted.
    wanted: Option<usize>,
    known: Vec<Option<TokenLogprobs>>,
}

/// The computed beginning that a prompt continues.
pub(crate) struct Beginning {
    /// Tokens that are computed already.
    pub(crate) tokens: usize,
    pub(crate) source: Source,
}

#[derive(Debug)]
pub(crate) enum Source {
    /// A row of the texts that run.
    Running(usize),
    /// A row that is kept, by its number.
    Kept(u64),
    /// A row that was kept, which the text has taken over as its own.
    Taken(PromptScores),
}

impl PromptScores {
    /// Nothing known, with so many alternatives to find.
    pub(crate) fn new(wanted: Option<usize>) -> Self {
        // The first token has nothing before it.
        Self { wanted, known: wanted.map(|_| None).into_iter().collect() }
    }

    pub(crate) fn wanted(&self) -> Option<usize> {
        self.wanted
    }

    /// What is known of the tokens one after the other.
    pub(crate) fn known(&self) -> &[Option<TokenLogprobs>] {
        &self.known
    }

    pub(crate) fn extend(&mut self, found: impl IntoIterator<Item = TokenLogprobs>) {
        self.known.extend(found.into_iter().map(Some));
    }

    /// Takes what another knows of the first tokens, if this one asks for it.
    pub(crate) fn take_over(&mut self, other: &Self, tokens: usize) {
        let Some(wanted) = self.wanted else { return };
        let shortened = |scored: &TokenLogprobs| TokenLogprobs {
            logprob: scored.logprob,
            alternatives: scored.alternatives.iter().take(wanted).copied().collect(),
        };
        self.known = other.known.iter().take(tokens).map(|scored| scored.as_ref().map(shortened)).collect();
    }

    /// How many of the first `equal` tokens of a source that knows these need not be computed for a prompt that asks for
    /// `wanted`: each whose successor is not known has to be.
    fn usable(&self, equal: usize, wanted: Option<usize>) -> usize {
        let known = match (wanted, self.wanted) {
            (None, _) => usize::MAX,
            (Some(wanted), Some(has)) if has >= wanted => self.known.len().min(equal),
            _ => 0,
        };
        equal.min(known.saturating_sub(1))
    }
}

/// What a text looks for among those that share with it.
pub(crate) struct Wanted<'a> {
    pub(crate) sharers: Sharers,
    pub(crate) prompt: &'a [u32],
    /// Tokens of it that may come from another: the last one is computed for the logits after it, unless they are known.
    pub(crate) most: usize,
    /// Alternatives for each token of the prompt.
    pub(crate) logprobs: Option<usize>,
}

impl Wanted<'_> {
    /// How many tokens need not be computed beside a row that holds `ids`.
    pub(crate) fn usable(&self, ids: &[u32], scores: &PromptScores) -> usize {
        let equal = self.prompt.iter().zip(ids).take_while(|(wanted, held)| wanted == held).count();
        scores.usable(equal, self.logprobs).min(self.most)
    }
}

impl Prefixes {
    /// The row with the longest beginning of a prompt, and how long that is; the newest of equals.
    pub(crate) fn longest(&self, wanted: &Wanted<'_>) -> Option<(u64, usize)> {
        let rows = self.rows.iter().filter(|row| row.sharers == wanted.sharers);
        rows.map(|row| (row.number, wanted.usable(&row.ids, &row.scores)))
            .filter(|(_, tokens)| *tokens > 0)
            .max_by_key(|(_, tokens)| *tokens)
    }

    /// Keeps a row of a text that has ended, in the place of those that it makes needless.
    pub(crate) fn keep(&mut self, sharers: Sharers, ids: Vec<u32>, cache: Gpt2Cache, scores: PromptScores) {
        let is_in = |inner: (&[u32], &PromptScores), outer: (&[u32], &PromptScores)| {
            outer.0.starts_with(inner.0)
                && outer.1.known.len() >= inner.1.known.len()
                && outer.1.wanted >= inner.1.wanted
        };
        let same = |row: &&Prefix| row.sharers == sharers;
        let new = (&ids[..], &scores);
        let known = self.rows.iter().filter(same).find(|row| is_in(new, (&row.ids, &row.scores)));
        if let Some(number) = known.map(|row| row.number) {
            self.touch(number);
            return;
        }
        self.rows.retain(|row| row.sharers != sharers || !is_in((&row.ids, &row.scores), new));
        if self.rows.len() >= MOST_ROWS {
            self.rows.pop_front();
        }
        self.rows.push_back(Prefix { number: self.next, sharers, ids, cache, scores });
        self.next += 1;
    }

    /// The row of this number, which is now the last used.
    pub(crate) fn touch(&mut self, number: u64) -> Option<(&Gpt2Cache, &PromptScores)> {
        let row = self.take(number)?;
        self.rows.push_back(row);
        self.rows.back().map(|row| (&row.cache, &row.scores))
    }

    /// Frees the memory of all rows of these.
    pub(crate) fn forget(&mut self, sharers: Sharers) {
        self.rows.retain(|row| row.sharers != sharers);
    }

    /// Frees the memory of the row that was not used for longest, but for this one; says whether there was one.
    pub(crate) fn forget_oldest(&mut self, but: Option<u64>) -> bool {
        let place = self.rows.iter().position(|row| Some(row.number) != but);
        place.and_then(|place| self.rows.remove(place)).is_some()
    }

    /// Whether the row of this number is for the sequences of one request alone.
    pub(crate) fn is_of_sequences(&self, number: u64) -> bool {
        self.rows.iter().any(|row| row.number == number && matches!(row.sharers, Sharers::Sequences(_)))
    }

    /// Gives the row of this number away, if it has room for so many tokens; otherwise its memory is free.
    pub(crate) fn give(&mut self, number: u64, capacity: usize) -> Option<(Gpt2Cache, PromptScores)> {
        let row = self.take(number)?;
        (row.capacity() >= capacity).then_some((row.cache, row.scores))
    }

    /// Tokens whose memory is taken.
    pub(crate) fn kv_tokens(&self) -> usize {
        self.rows.iter().map(|row| KvSlot::room_of(row.capacity())).sum()
    }

    fn take(&mut self, number: u64) -> Option<Prefix> {
        let place = self.rows.iter().position(|row| row.number == number)?;
        self.rows.remove(place)
    }
}

impl Prefix {
    /// Tokens that its row has room for.
    fn capacity(&self) -> usize {
        self.cache.rooms().iter().zip(self.cache.lengths()).map(|(room, length)| room + length).sum()
    }
}
