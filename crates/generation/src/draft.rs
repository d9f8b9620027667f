//! Drafts: tokens that a text probably has next, so that one pass of the model looks at several places at once.
//!
//! A draft comes from a smaller model, as in assisted generation (Leviathan et al., arXiv:2211.17192), or from what followed the
//! text's last tokens where they stood before (prompt lookup). It is checked by the very sampler that would choose the tokens
//! without it: the sampler's token continues the text, and a drafted token that equals it saves a pass. So on a CPU, where
//! a pass over several tokens gives the bits of several passes, a text is the same bytes with drafts and without, greedy or
//! sampled with a seed. The smaller model samples with the same random numbers, so it often samples the same tokens.

use std::ops::RangeInclusive;

use candle_core::Tensor;
use candle_gpt2::{Gpt2Cache, Gpt2LMHeadModel, KvPool, LogitsFor, Pass};
use candle_gpt2_arithmetic::map_items;
use serde::Serialize;

use crate::logits::rows_of;
use crate::{GenerationError, History, Sampler};

/// What one more token costs a pass over one token of one text, as a share of it: most of that pass is reading the weights.
const TOKEN_COST: f64 = 0.15;
/// The same of a model whose weights stay in the caches of a processor: most of its pass is arithmetic. From this cost on, a text beside
/// others gets no draft: a pass of several texts is nothing else, and even right drafts slow it down.
pub(crate) const CACHED_TOKEN_COST: f64 = 0.4;
/// Most bytes of weights that stay in the caches of a processor.
const CACHED_BYTES: usize = 32 << 20;
/// The least gain that is worth a draft. Costs are estimates, and a draft that is refused costs all the same.
const LEAST_GAIN: f64 = 1.1;
/// How much of what is known of a text's drafts still counts after the next one.
const MEMORY: f64 = 0.8;
/// Steps without a draft after which one token is tried again: so many at first, twice as many after each that was refused, and at
/// most so many.
const PATIENCE: RangeInclusive<usize> = 16..=256;
/// Places of all texts together that a pass looks at, at most: of each there are logits.
const MOST_PLACES: usize = 256;
/// Longest and shortest sequences that are looked up.
const LOOKED_UP: RangeInclusive<usize> = 2..=4;

/// What one more token costs a pass of this model over one token of one text, as a share of it: an estimate from its size, so that no
/// clock has a part in a text's events.
pub(crate) fn token_cost_of(model: &Gpt2LMHeadModel) -> f64 {
    let is_cached = model.device().is_cpu() && model.weight_bytes() <= CACHED_BYTES;
    if is_cached { CACHED_TOKEN_COST } else { TOKEN_COST }
}

/// Most tokens of a draft if so many texts are computed together.
pub(crate) fn longest_beside(texts: usize) -> usize {
    (MOST_PLACES / texts.max(1)).saturating_sub(1)
}

/// Tokens that were drafted for a text, and how many of them it has.
/// The events of a [`Scheduler`](crate::Scheduler) with an assistant tell them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Drafts {
    /// Tokens that were looked at.
    pub drafted: usize,
    /// Tokens among them that the text has.
    pub accepted: usize,
}

/// How well drafts do for one text, and so how long the next one is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Success {
    pub(crate) drafts: Drafts,
    /// Tokens that were accepted and tokens that were looked at, the last ones counting most.
    accepted: f64,
    tried: f64,
    /// Steps since the last draft.
    rested: usize,
    /// Steps without a draft after which one is tried.
    patience: usize,
}

impl Success {
    /// Of a text without a draft so far.
    pub(crate) fn new() -> Self {
        Self { drafts: Drafts::default(), accepted: 1.4, tried: 2.0, rested: 0, patience: *PATIENCE.start() }
    }

    /// The length of a draft, at most `most`, that promises the most tokens for what it costs, where a token of it costs
    /// `draft_cost` of a pass and reading it `token_cost`, and `texts` are computed together.
    pub(crate) fn length(
        &mut self,
        most: usize,
        (token_cost, draft_cost): (f64, f64),
        texts: usize,
    ) -> usize {
        // Of many texts a pass is arithmetic, and each token costs what the first did.
        let token_cost = token_cost * texts as f64 / (1.0 + token_cost * (texts as f64 - 1.0));
        let rate = self.accepted / self.tried;
        // A draft of n tokens gives 1 + rate + … + rateⁿ of them.
        let (mut best, mut best_gain, mut tokens, mut power) = (0, LEAST_GAIN, 1.0, 1.0);
        for length in 1..=most {
            power *= rate;
            tokens += power;
            let gain = tokens / (1.0 + length as f64 * (token_cost + draft_cost));
            if gain > best_gain {
                (best, best_gain) = (length, gain);
            }
        }
        self.rested += 1;
        if best == 0 && self.rested >= self.patience { most.min(1) } else { best }
    }

    /// Counts a draft, of which so many tokens were right. How many of them the text has is counted when it has them.
    pub(crate) fn count(&mut self, drafted: usize, accepted: usize) {
        self.drafts.drafted += drafted;
        let tried = if accepted < drafted { accepted + 1 } else { drafted };
        self.accepted = self.accepted * MEMORY + accepted as f64;
        self.tried = self.tried * MEMORY + tried as f64;
        if accepted > 0 {
            self.patience = *PATIENCE.start();
        } else if self.rested >= self.patience {
            self.patience = (2 * self.patience).min(*PATIENCE.end());
        }
        self.rested = 0;
    }
}

/// What followed the last tokens where they last stood before, and what would follow that if it went on so: `most` tokens, or none
/// if no sequence is found; of the longest sequence that is.
pub(crate) fn look_up(ids: &[u32], most: usize) -> Vec<u32> {
    for size in LOOKED_UP.rev() {
        let Some(start) = ids.len().checked_sub(size) else { continue };
        let (before, last) = (&ids[..ids.len() - 1], &ids[start..]);
        if let Some(place) = before.windows(size).rposition(|window| window == last) {
            let mut draft = Vec::with_capacity(most);
            for next in (place + size..).take(most) {
                draft.push(ids.get(next).copied().unwrap_or_else(|| draft[next - ids.len()]));
            }
            return draft;
        }
    }
    Vec::new()
}

/// Unread tokens that are read with the first one of a draft: those of the last one, if it was right to the end.
const READ_TOGETHER: usize = 2;

/// A smaller model that drafts.
pub(crate) struct Assistant {
    model: Gpt2LMHeadModel,
    pool: KvPool,
    /// What a token of it costs, as a share of a pass of the model that it assists.
    pub(crate) cost: f64,
}

/// A text for which an assistant drafts.
pub(crate) struct Drafted {
    /// Prompt and text, then the draft too.
    pub(crate) ids: Vec<u32>,
    pub(crate) prompt_len: usize,
    /// As the text's own, whose random numbers it uses before the text does.
    pub(crate) sampler: Sampler,
    /// What the assistant keeps of the text, and then of the draft.
    pub(crate) cache: Gpt2Cache,
    /// Most tokens to draft.
    pub(crate) most: usize,
}

impl Drafted {
    /// Tokens that the assistant has read.
    fn read(&self) -> usize {
        self.cache.lengths().first().copied().unwrap_or(0)
    }

    /// Tokens that it has not read.
    fn unread(&self) -> usize {
        self.ids.len() - self.read()
    }
}

impl Assistant {
    /// An assistant of `model` with memory for as many tokens.
    pub(crate) fn new(
        assistant: &Gpt2LMHeadModel,
        model: &Gpt2LMHeadModel,
        kv_tokens: usize,
    ) -> Result<Self, GenerationError> {
        let cost = assistant.parameter_count() as f64 / model.parameter_count() as f64;
        Ok(Self { model: assistant.clone(), pool: assistant.new_pool(kv_tokens)?, cost })
    }

    /// Room for what it keeps of a text; `None` if there is none.
    pub(crate) fn cache(&self, capacity: usize) -> Option<Gpt2Cache> {
        self.pool.cache(1, capacity.min(self.model.config().n_positions))
    }

    /// Most tokens that it can draft after so many.
    pub(crate) fn most_after(&self, tokens: usize) -> usize {
        self.model.config().n_positions.saturating_sub(tokens)
    }

    /// Puts drafts in the place of texts, for which there is room ([`Assistant::most_after`]). At most `budget` tokens are read
    /// besides; a text that is not read to its end by then has no draft yet.
    pub(crate) fn draft(&self, texts: &mut [Drafted], mut budget: usize) -> Result<(), GenerationError> {
        for text in texts.iter_mut() {
            let count = budget.min(text.unread().saturating_sub(1));
            // A few tokens are read with the first one of the draft.
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

    fn draft_together(&self, texts: &mut [&mut Drafted]) -> Result<(), GenerationError> {
        let unread = texts.iter().map(|text| text.unread()).min().unwrap_or(0);
        let mut cache = self.pool.empty_cache();
        for (row, text) in texts.iter_mut().enumerate() {
            // All are to have as many tokens left to read.
            let (read, end) = (text.read(), text.ids.len() - unread);
            if read < end {
                self.read(&text.ids[read..end], 1, &mut text.cache)?;
            }
            cache.insert(row, std::mem::replace(&mut text.cache, self.pool.empty_cache()))?;
        }
        let mut drafting: Vec<(&mut Drafted, usize)> = texts
            .iter_mut()
            .map(|text| {
                let length = text.ids.len();
                (&mut **text, length)
            })
            .collect();
        let mut tokens = unread;
        loop {
            // A text that has its draft does not wait for the others.
            let mut row = 0;
            while let Some((text, length)) = drafting.get_mut(row) {
                if text.ids.len() - *length < text.most {
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
                // Where it cannot choose, anything will do: it is looked at, and most likely refused.
                let id = text.sampler.sample(history, logits).unwrap_or(0);
                text.ids.push(id);
            });
            tokens = 1;
        }
    }

    /// Reads as many tokens of each row; returns their hidden states, `(rows, T, C)`.
    fn read(&self, ids: &[u32], rows: usize, cache: &mut Gpt2Cache) -> Result<Tensor, GenerationError> {
        let ids = Tensor::from_slice(ids, (rows, ids.len() / rows), self.model.device())?;
        Ok(self.model.transformer().forward_with(&ids, Some(cache), &mut Pass::inference())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_and_last_repetition_is_looked_up() {
        let ids = [1, 2, 3, 4, 9, 2, 3, 4, 7, 8, 3, 4, 5, 6, 2, 3, 4];
        assert_eq!(look_up(&ids, 3), [7, 8, 3], "after 2 3 4, and not after 3 4 alone, which is nearer");
        assert_eq!(look_up(&ids, 1), [7]);
        let after = [7, 8, 3, 4, 5, 6, 2, 3, 4];
        assert_eq!(look_up(&ids, 20), [&after[..], &after, &[7, 8]].concat(), "and so on");
        assert_eq!(look_up(&[5, 6, 7], 4), [] as [u32; 0]);
        assert_eq!(look_up(&[5, 5, 5], 4), [5; 4], "a repetition that overlaps itself");
        assert_eq!(look_up(&[5], 4), [] as [u32; 0]);
        assert_eq!(look_up(&[], 4), [] as [u32; 0]);
    }

    #[test]
    fn drafts_become_longer_where_they_do_well_and_end_where_not() {
        let mut good = Success::new();
        for _ in 0..20 {
            let length = good.length(8, (0.15, 0.1), 1);
            good.count(length, length);
        }
        assert_eq!(good.length(8, (0.15, 0.1), 1), 8);
        assert!(Success::new().length(8, (0.15, 0.1), 1) > 1);
        assert_eq!(Success::new().length(8, (0.15, 0.1), 32), 0, "each token costs nearly what a pass does");
        let mut bad = Success::new();
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
        assert!((1..=7).contains(&tried), "now and then one is tried again: {tried} times");
        assert_eq!(Success::new().length(0, (0.15, 0.0), 1), 0);
    }

    /// Drafts that are always refused read few tokens more than there are, whether another token costs little or much; those that are
    /// always right are long even so.
    #[test]
    fn refused_drafts_read_few_tokens() {
        for (token_cost, most_refused) in [(TOKEN_COST, 14), (CACHED_TOKEN_COST, 8)] {
            let mut refused = Success::new();
            let mut read = 0;
            for _ in 0..200 {
                let length = refused.length(10, (token_cost, 0.0), 1);
                if length > 0 {
                    refused.count(length, 0);
                }
                read += length;
            }
            assert!((2..=most_refused).contains(&read), "{read} tokens at {token_cost}");
            let mut right = Success::new();
            for _ in 0..20 {
                let length = right.length(10, (token_cost, 0.0), 1);
                right.count(length, length);
            }
            assert!(right.length(10, (token_cost, 0.0), 1) >= 8, "at {token_cost}");
        }
    }
}
