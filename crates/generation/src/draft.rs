//! Speculative decoding: drafts likely next tokens and verifies them in one pass of the model.
//!
//! A draft comes from a smaller model, as in assisted generation (Leviathan et al., arXiv:2211.17192).
//! Prompt lookup instead copies the tokens that followed an earlier occurrence of the last tokens.
//!
//! The same sampler chooses the tokens with and without a draft. The chosen token always continues the
//! sequence, and each drafted token that equals the chosen one saves a pass. On a CPU, a pass over
//! several tokens gives the same bits as separate passes. Completions are therefore byte-identical with
//! and without drafts, greedy or sampled with a seed. The smaller model samples with the same random
//! numbers, so it often samples the same tokens.

use std::ops::RangeInclusive;

use candle_core::Tensor;
use candle_gpt2::{Gpt2Cache, Gpt2LMHeadModel, KvPool, LogitsFor, Pass};
use candle_gpt2_arithmetic::map_items;
use serde::Serialize;

use crate::logits::rows_of;
use crate::{GenerationError, History, Sampler};

/// Cost of an additional token in a pass, relative to a pass over a single token.
///
/// A pass over a single token mostly reads the weights.
const TOKEN_COST: f64 = 0.15;
/// Cost of an additional token if the model's weights stay in the processor's caches.
///
/// A pass is then mostly arithmetic. At this cost or above, only a sequence that runs alone gets drafts. A
/// pass over several sequences costs as much per token, so even correct drafts slow it down.
pub(crate) const CACHED_TOKEN_COST: f64 = 0.4;
/// Maximum size of weights that stay in the processor's caches, in bytes.
const CACHED_BYTES: usize = 32 << 20;
/// Minimum estimated speedup that justifies a draft.
///
/// Costs are estimates, and a rejected draft costs as much as an accepted one.
const MIN_GAIN: f64 = 1.1;
/// Decay factor for a sequence's acceptance statistics, applied at each draft.
const STATS_DECAY: f64 = 0.8;
/// Exponential back-off: number of steps without a draft before a single token is drafted again.
///
/// The number starts at the lower limit and doubles after each rejected draft, up to the upper limit.
const BACKOFF_STEPS: RangeInclusive<usize> = 16..=256;
/// Maximum number of positions in a pass, over all sequences.
///
/// Each position produces a row of logits.
const MAX_POSITIONS: usize = 256;
/// N-gram sizes that prompt lookup tries; the largest comes first.
const NGRAM_SIZES: RangeInclusive<usize> = 2..=4;

/// Estimates the cost of an additional token in a pass, relative to a pass over a single token.
///
/// The estimate depends on the model's size only, so timing never affects the events of a sequence.
pub(crate) fn token_cost_of(model: &Gpt2LMHeadModel) -> f64 {
    let is_cached = model.device().is_cpu() && model.weight_bytes() <= CACHED_BYTES;
    if is_cached { CACHED_TOKEN_COST } else { TOKEN_COST }
}

/// Returns the maximum draft length if `texts` sequences are computed together.
pub(crate) fn max_draft_len(texts: usize) -> usize {
    (MAX_POSITIONS / texts.max(1)).saturating_sub(1)
}

/// Counts of a sequence's drafted and accepted tokens.
///
/// The events of a [`Scheduler`](crate::Scheduler) report them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Drafts {
    /// Number of drafted tokens that the model verified.
    pub drafted: usize,
    /// Number of drafted tokens that became part of the sequence.
    pub accepted: usize,
}

/// Acceptance statistics of one sequence; they determine the length of its next draft.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DraftStats {
    pub(crate) drafts: Drafts,
    /// Accepted tokens, with exponentially decaying weights; `tried` counts verified tokens likewise.
    accepted: f64,
    tried: f64,
    /// Number of steps since the last draft.
    steps_since_draft: usize,
    /// Number of steps without a draft before the next attempt.
    backoff: usize,
}

impl DraftStats {
    /// Creates the statistics for a sequence without drafts so far.
    pub(crate) fn new() -> Self {
        Self {
            drafts: Drafts::default(),
            accepted: 1.4,
            tried: 2.0,
            steps_since_draft: 0,
            backoff: *BACKOFF_STEPS.start(),
        }
    }

    /// Returns the draft length with the largest estimated speedup, at most `max_len`.
    ///
    /// `token_cost` is the cost of verifying a drafted token and `draft_cost` the cost of drafting it. Both
    /// are relative to a pass. `texts` is the number of sequences that are computed together.
    pub(crate) fn length(
        &mut self,
        max_len: usize,
        (token_cost, draft_cost): (f64, f64),
        texts: usize,
    ) -> usize {
        // A pass over many sequences is bound by arithmetic, so each token costs as much as the first.
        let token_cost = token_cost * texts as f64 / (1.0 + token_cost * (texts as f64 - 1.0));
        let rate = self.accepted / self.tried;
        // A draft of n tokens yields 1 + rate + … + rateⁿ tokens on average.
        let (mut best, mut best_gain, mut tokens, mut power) = (0, MIN_GAIN, 1.0, 1.0);
        for length in 1..=max_len {
            power *= rate;
            tokens += power;
            let gain = tokens / (1.0 + length as f64 * (token_cost + draft_cost));
            if gain > best_gain {
                (best, best_gain) = (length, gain);
            }
        }
        self.steps_since_draft += 1;
        if best == 0 && self.steps_since_draft >= self.backoff { max_len.min(1) } else { best }
    }

    /// Records the length of a draft and its number of correct tokens.
    ///
    /// `Drafts::accepted` is updated later, when the tokens are added to the sequence.
    pub(crate) fn count(&mut self, drafted: usize, accepted: usize) {
        self.drafts.drafted += drafted;
        let tried = if accepted < drafted { accepted + 1 } else { drafted };
        self.accepted = self.accepted * STATS_DECAY + accepted as f64;
        self.tried = self.tried * STATS_DECAY + tried as f64;
        if accepted > 0 {
            self.backoff = *BACKOFF_STEPS.start();
        } else if self.steps_since_draft >= self.backoff {
            self.backoff = (2 * self.backoff).min(*BACKOFF_STEPS.end());
        }
        self.steps_since_draft = 0;
    }
}

/// Drafts `max_len` tokens by prompt lookup.
///
/// Copies the tokens after the last earlier occurrence of the longest matching suffix. At the end of
/// `ids`, the copy continues with the draft itself, as if the repetition continued. Returns no tokens
/// if no suffix occurs earlier.
pub(crate) fn look_up(ids: &[u32], max_len: usize) -> Vec<u32> {
    for size in NGRAM_SIZES.rev() {
        let Some(start) = ids.len().checked_sub(size) else { continue };
        let (before, last) = (&ids[..ids.len() - 1], &ids[start..]);
        if let Some(place) = before.windows(size).rposition(|window| window == last) {
            let mut draft = Vec::with_capacity(max_len);
            for next in (place + size..).take(max_len) {
                draft.push(ids.get(next).copied().unwrap_or_else(|| draft[next - ids.len()]));
            }
            return draft;
        }
    }
    Vec::new()
}

/// Maximum number of unread tokens that the pass for the first drafted token can read.
///
/// After a fully accepted draft, two tokens are unread: the draft's last token, and the token that the
/// model chose after the draft.
const READ_TOGETHER: usize = 2;

/// A smaller model that drafts tokens.
pub(crate) struct Assistant {
    model: Gpt2LMHeadModel,
    pool: KvPool,
    /// Cost of drafting a token, relative to a pass of the assisted model.
    pub(crate) cost: f64,
}

/// A sequence for which an assistant drafts tokens.
pub(crate) struct DraftJob {
    /// Prompt and completion; `Assistant::draft` replaces them with the draft.
    pub(crate) ids: Vec<u32>,
    pub(crate) prompt_len: usize,
    /// Copy of the sequence's sampler; it draws the random numbers that the sequence will draw next.
    pub(crate) sampler: Sampler,
    /// The assistant's KV cache for the sequence; drafting extends it.
    pub(crate) cache: Gpt2Cache,
    /// Maximum number of tokens to draft.
    pub(crate) max_len: usize,
}

impl DraftJob {
    /// Returns the number of tokens that the assistant has already read.
    fn read(&self) -> usize {
        self.cache.lengths().first().copied().unwrap_or(0)
    }

    /// Returns the number of tokens that the assistant has not read yet.
    fn unread(&self) -> usize {
        self.ids.len() - self.read()
    }
}

impl Assistant {
    /// Creates an assistant for `model`, with a KV cache for `kv_tokens` tokens.
    pub(crate) fn new(
        assistant: &Gpt2LMHeadModel,
        model: &Gpt2LMHeadModel,
        kv_tokens: usize,
    ) -> Result<Self, GenerationError> {
        let cost = assistant.parameter_count() as f64 / model.parameter_count() as f64;
        Ok(Self { model: assistant.clone(), pool: assistant.new_pool(kv_tokens)?, cost })
    }

    /// Allocates a KV cache for a sequence; `None` if memory runs out.
    pub(crate) fn cache(&self, capacity: usize) -> Option<Gpt2Cache> {
        self.pool.cache(1, capacity.min(self.model.config().n_positions))
    }

    /// Returns the maximum number of tokens that the assistant can draft after `tokens` tokens.
    pub(crate) fn max_draft_after(&self, tokens: usize) -> usize {
        self.model.config().n_positions.saturating_sub(tokens)
    }

    /// Replaces the tokens of each sequence with its draft.
    ///
    /// The context must have capacity for the draft; see [`Assistant::max_draft_after`]. At most `budget`
    /// unread tokens are read first. A sequence with more unread tokens gets an empty draft for now.
    pub(crate) fn draft(&self, texts: &mut [DraftJob], mut budget: usize) -> Result<(), GenerationError> {
        for text in texts.iter_mut() {
            let count = budget.min(text.unread().saturating_sub(1));
            // Up to `READ_TOGETHER` unread tokens are read later, by the pass for the first drafted token.
            if count > 0 && text.unread() > READ_TOGETHER {
                let read = text.read();
                self.read(&text.ids[read..read + count], 1, &mut text.cache)?;
                budget -= count;
            }
        }
        let (mut ready, waiting): (Vec<_>, Vec<_>) =
            texts.iter_mut().partition(|text| (1..=READ_TOGETHER).contains(&text.unread()));
        waiting.into_iter().for_each(|text| text.ids.clear());
        self.draft_together(&mut ready)
    }

    fn draft_together(&self, texts: &mut [&mut DraftJob]) -> Result<(), GenerationError> {
        let unread = texts.iter().map(|text| text.unread()).min().unwrap_or(0);
        let mut cache = self.pool.empty_cache();
        for (row, text) in texts.iter_mut().enumerate() {
            // Leave the same number of unread tokens in every sequence, so that one pass can read them.
            let (read, end) = (text.read(), text.ids.len() - unread);
            if read < end {
                self.read(&text.ids[read..end], 1, &mut text.cache)?;
            }
            cache.insert(row, std::mem::replace(&mut text.cache, self.pool.empty_cache()))?;
        }
        let mut drafting: Vec<(&mut DraftJob, usize)> = texts
            .iter_mut()
            .map(|text| {
                let length = text.ids.len();
                (&mut **text, length)
            })
            .collect();
        let mut tokens = unread;
        loop {
            // A sequence whose draft is complete does not wait for the others.
            let mut row = 0;
            while let Some((text, length)) = drafting.get_mut(row) {
                if text.ids.len() - *length < text.max_len {
                    row += 1;
                    continue;
                }
                text.cache = cache.take(row)?;
                text.ids.drain(..*length);
                drafting.remove(row);
            }
            if drafting.is_empty() {
                return Ok(());
            }
            let next = drafting.iter().flat_map(|(text, _)| &text.ids[text.ids.len() - tokens..]).copied();
            let hidden = self.read(&next.collect::<Vec<_>>(), drafting.len(), &mut cache)?;
            let mut logits = rows_of(&self.model.head(&hidden, LogitsFor::LastToken)?)?;
            let rows = drafting.iter_mut().zip(&mut logits);
            map_items(rows, |((text, _), logits)| {
                let history = History { ids: &text.ids, prompt_len: text.prompt_len };
                // If the sampler fails, any token will do: it is verified, and most likely rejected.
                let id = text.sampler.sample(history, logits).unwrap_or(0);
                text.ids.push(id);
            });
            tokens = 1;
        }
    }

    /// Reads the same number of tokens in each row; returns hidden states `(rows, T, C)`.
    fn read(&self, ids: &[u32], rows: usize, cache: &mut Gpt2Cache) -> Result<Tensor, GenerationError> {
        let ids = Tensor::from_slice(ids, (rows, ids.len() / rows), self.model.device())?;
        Ok(self.model.transformer().forward_with(&ids, Some(cache), &mut Pass::inference())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookup_prefers_the_longest_then_latest_match() {
        let ids = [1, 2, 3, 4, 9, 2, 3, 4, 7, 8, 3, 4, 5, 6, 2, 3, 4];
        assert_eq!(look_up(&ids, 3), [7, 8, 3], "follows 2 3 4, not the later 3 4");
        assert_eq!(look_up(&ids, 1), [7]);
        let after = [7, 8, 3, 4, 5, 6, 2, 3, 4];
        assert_eq!(look_up(&ids, 20), [&after[..], &after, &[7, 8]].concat(), "the copy repeats");
        assert_eq!(look_up(&[5, 6, 7], 4), [] as [u32; 0]);
        assert_eq!(look_up(&[5, 5, 5], 4), [5; 4], "an overlapping repetition");
        assert_eq!(look_up(&[5], 4), [] as [u32; 0]);
        assert_eq!(look_up(&[], 4), [] as [u32; 0]);
    }

    #[test]
    fn draft_length_adapts_to_acceptance() {
        let mut good = DraftStats::new();
        for _ in 0..20 {
            let length = good.length(8, (0.15, 0.1), 1);
            good.count(length, length);
        }
        assert_eq!(good.length(8, (0.15, 0.1), 1), 8);
        assert!(DraftStats::new().length(8, (0.15, 0.1), 1) > 1);
        assert_eq!(
            DraftStats::new().length(8, (0.15, 0.1), 32),
            0,
            "each token costs nearly as much as a pass"
        );
        let mut bad = DraftStats::new();
        let lengths: Vec<usize> = (0..200)
            .map(|_| {
                let length = bad.length(8, (0.15, 0.1), 1);
                if length > 0 {
                    bad.count(length, 0);
                }
                length
            })
            .collect();
        assert!(lengths[0] > 1 && lengths[10..].iter().all(|length| *length <= 1), "{lengths:?}");
        let tried = lengths[100..].iter().sum::<usize>();
        assert!((1..=7).contains(&tried), "a draft is retried occasionally: {tried} times");
        assert_eq!(DraftStats::new().length(0, (0.15, 0.0), 1), 0);
    }

    /// Drafts that are always rejected cost few extra tokens, whether tokens are cheap or expensive.
    ///
    /// Drafts that are always correct grow long in both cases.
    #[test]
    fn rejected_drafts_cost_few_tokens() {
        for (token_cost, most_rejected) in [(TOKEN_COST, 14), (CACHED_TOKEN_COST, 8)] {
            let mut rejected = DraftStats::new();
            let mut read = 0;
            for _ in 0..200 {
                let length = rejected.length(10, (token_cost, 0.0), 1);
                if length > 0 {
                    rejected.count(length, 0);
                }
                read += length;
            }
            assert!((2..=most_rejected).contains(&read), "{read} tokens at {token_cost}");
            let mut correct = DraftStats::new();
            for _ in 0..20 {
                let length = correct.length(10, (token_cost, 0.0), 1);
                correct.count(length, length);
            }
            assert!(correct.length(10, (token_cost, 0.0), 1) >= 8, "at {token_cost}");
        }
    }
}
