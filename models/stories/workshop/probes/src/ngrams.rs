//! Interpolated Kneser-Ney 5-gram model, a baseline that only counts tokens.
//!
//! Source: Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling" (1998),
//! sections 2.7 and 4.1.1.

use anyhow::{Result, ensure};

/// Length of the longest sequences, in tokens.
const ORDER: usize = 5;
/// Bits per token in a key, so that the longest sequence fits in a `u64`.
const BITS: usize = 12;

/// Token sequences and their counts.
pub(crate) struct KneserNey {
    /// Counts for sequences of one to five tokens, in this order.
    ///
    /// For the longest sequences these are frequencies. For the others they are continuation counts, the
    /// numbers of distinct tokens that precede a sequence.
    counts: Vec<Vec<(u64, u32)>>,
    /// Discount on the counts for each length; a discount shifts probability to shorter sequences.
    discounts: Vec<f64>,
    vocab_size: usize,
}

/// Key of the sequence that ends at `place`.
///
/// A document begins with an end token, which also fills the positions before the document.
fn key(ids: &[u32], place: usize) -> u64 {
    (0..ORDER).rev().fold(0, |key, back| key << BITS | u64::from(ids[place.saturating_sub(back)]))
}

/// Key of the last `tokens` tokens of a sequence.
fn last(key: u64, tokens: usize) -> u64 {
    key & ((1 << (BITS * tokens)) - 1)
}

impl KneserNey {
    /// Counts the token sequences of documents; each document begins with an end token.
    pub(crate) fn new(documents: &[Vec<u32>], vocab_size: usize) -> Result<Self> {
        ensure!(
            vocab_size <= 1 << BITS,
            "expected a vocabulary of at most {} tokens, found {vocab_size}",
            1 << BITS
        );
        let keys = |ids: &Vec<u32>| (1..ids.len()).map(|place| key(ids, place)).collect::<Vec<_>>();
        let mut keys: Vec<u64> = documents.iter().flat_map(keys).collect();
        let (mut counts, mut discounts) = (Vec::new(), Vec::new());
        for order in (0..ORDER).rev() {
            keys.sort_unstable();
            let counted: Vec<(u64, u32)> = keys
                .chunk_by(|one, other| one == other)
                .map(|same| Ok((same[0], u32::try_from(same.len())?)))
                .collect::<Result<_>>()?;
            keys = counted.iter().map(|(key, _)| last(*key, order)).collect();
            let seen = |times| counted.iter().filter(|(_, count)| *count == times).count() as f64;
            discounts.push(seen(1) / (seen(1) + 2.0 * seen(2)).max(1.0));
            counts.push(counted);
        }
        counts.reverse();
        discounts.reverse();
        Ok(Self { counts, discounts, vocab_size })
    }

    /// Probability of the token at `place`, given the tokens before it.
    fn probability(&self, ids: &[u32], place: usize) -> f64 {
        let sequence = key(ids, place);
        let mut probability = 1.0 / self.vocab_size as f64;
        for (order, (counts, discount)) in self.counts.iter().zip(&self.discounts).enumerate() {
            let key = last(sequence, order + 1);
            let after = |(known, _): &(u64, u32)| *known >> BITS;
            let from = counts.partition_point(|known| after(known) < key >> BITS);
            let to = from + counts[from..].partition_point(|known| after(known) == key >> BITS);
            let known = &counts[from..to];
            if known.is_empty() {
                break;
            }
            let total: f64 = known.iter().map(|(_, count)| f64::from(*count)).sum();
            let count =
                known.binary_search_by_key(&key, |(known, _)| *known).map_or(0, |found| known[found].1);
            let left = discount * known.len() as f64 * probability;
            probability = ((f64::from(count) - discount).max(0.0) + left) / total;
        }
        probability
    }

    /// Negative log-likelihood of a document, in nats.
    pub(crate) fn nats(&self, ids: &[u32]) -> f64 {
        (1..ids.len()).map(|place| -self.probability(ids, place).ln()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOLERANCE: f64 = 1e-12; // sums of a few f64

    #[test]
    fn probabilities_sum_to_one_for_seen_and_unseen_contexts() {
        let documents = [vec![0, 1, 2, 3, 1, 2, 4, 1, 2, 3], vec![0, 2, 2, 1], vec![0, 1, 2, 3, 1, 4]];
        let counted = KneserNey::new(&documents, 7).unwrap();
        for context in [[0, 1, 2, 3, 1], [0, 2, 2, 2, 2], [0, 6, 5, 6, 5]] {
            let sum: f64 = (0..7).map(|next| counted.probability(&[&context[..], &[next]].concat(), 5)).sum();
            assert!((sum - 1.0).abs() < TOLERANCE, "{context:?}: {sum}");
        }
    }

    /// Checks continuation counts against values computed by hand.
    ///
    /// Each of the pairs 0 1, 1 2, 2 1 and 1 3 occurs once, so the discounts of longer sequences are 1 and
    /// contribute nothing. A single token is counted by the number of distinct tokens before it: 1 follows 0
    /// and 2, and each of the others follows one token.
    #[test]
    fn short_sequences_use_continuation_counts() {
        let counted = KneserNey::new(&[vec![0, 1, 2, 1, 3]], 4).unwrap();
        // Two of the three distinct tokens follow one token and one follows two: 2 / (2 + 2 · 1).
        assert!((counted.discounts[0] - 0.5).abs() < TOLERANCE);
        assert_eq!(counted.discounts[1..], [1.0; 4]);
        let one = ((2.0 - 0.5) + 0.5 * 3.0 / 4.0) / 4.0;
        let found = counted.probability(&[0, 3, 3, 3, 3, 1], 5);
        assert!((found - one).abs() < TOLERANCE, "{found}, not {one}");
        let never = 0.5 * 3.0 / 4.0 / 4.0;
        assert!((counted.probability(&[0, 3, 3, 3, 3, 0], 5) - never).abs() < TOLERANCE);
    }

    #[test]
    fn large_vocabularies_are_rejected() {
        let error = KneserNey::new(&[], 4097).err().unwrap().to_string();
        assert_eq!(error, "expected a vocabulary of at most 4096 tokens, found 4097");
    }
}
