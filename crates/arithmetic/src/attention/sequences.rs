//! Attention over whole sequences, computed from a temporary KV cache.

use std::ops::Range;

use super::heads::KvSlot;
use super::memory::KvMemory;
use super::slot_attention;
use super::units::KvSizes;
use crate::NumberType;
use crate::training::Attention;

/// Computes attention for all heads in a batch of sequences, without dropout.
///
/// The result has the same bits as [`slot_attention`] over an f32 cache that was filled token by token.
/// Returns `None` if there is not enough memory for keys and values.
///
/// A query that shares no keys with the queries before it starts a new sequence, which is computed
/// independently.
///
/// ```
/// use candle_gpt2_arithmetic::{Attention, sequence_attention};
///
/// let causal = Attention {
///     batch: 1, queries: 3, keys: 3, heads: 1, head_dim: 2, value_dim: 2, scale: 1.0,
///     visible: &[0..1, 0..2, 0..3], added: None, dropout: None,
/// };
/// let (zeros, values) = ([0f32; 6], [1., 2., 3., 4., 5., 6.]);
/// let context = sequence_attention(&[&zeros, &zeros, &values], causal).expect("enough memory");
/// assert_eq!(context, [1., 2., 2., 3., 3., 4.]);
/// ```
///
/// # Shapes
/// See [`Float::attention`](crate::Float::attention).
///
/// # Panics
/// Panics if the shapes do not match, or if `added` or `dropout` is set.
pub fn sequence_attention(qkv: &[&[f32]], attention: Attention<'_, f32>) -> Option<Vec<f32>> {
    let Attention { batch, heads, head_dim, value_dim, scale, visible, added, dropout, .. } = attention;
    assert!(added.is_none() && dropout.is_none(), "added scores and dropout are not supported");
    let [queries, keys, values] = attention.all_heads(qkv);
    let sequences = sequences_of(visible);
    let key_lengths: Vec<usize> = sequences.iter().map(|sequence| sequence.keys.len()).collect();
    let query_lengths: Vec<usize> = sequences.iter().map(|sequence| sequence.queries.len()).collect();
    let (keys, values) = (keys.cut(&key_lengths), values.cut(&key_lengths));

    let mut tokens = 0usize;
    let mut slots = Vec::with_capacity(batch * key_lengths.len());
    for capacity in std::iter::repeat_n(&key_lengths, batch).flatten() {
        let slot = KvSlot { start: tokens, capacity: *capacity };
        tokens += slot.room();
        slots.push(slot);
    }
    let mut memory = KvMemory::new(NumberType::F32, KvSizes { heads, key_dim: head_dim, value_dim }, tokens)?;
    memory.write(&slots, [&keys, &values], &vec![0; slots.len()]);

    let in_sequence = |sequence: &Sequence| {
        let first = sequence.keys.start;
        visible[sequence.queries.clone()].iter().map(move |seen| seen.start - first..seen.end - first)
    };
    let of_all = std::iter::repeat_n(&sequences, batch).flatten();
    let visible: Vec<_> = of_all.flat_map(in_sequence).collect();
    #[expect(clippy::cast_possible_truncation, reason = "the scores are f32")]
    let scale = scale as f32;
    Some(slot_attention(&queries.cut(&query_lengths), &memory, &slots, scale, &visible))
}

/// Consecutive queries, and the keys that only they see.
struct Sequence {
    queries: Range<usize>,
    keys: Range<usize>,
}

/// Divides the queries into sequences that share no keys.
///
/// Each sequence's keys begin where the previous sequence's keys end.
fn sequences_of(visible: &[Range<usize>]) -> Vec<Sequence> {
    let mut sequences: Vec<Sequence> = Vec::new();
    for (query, seen) in visible.iter().enumerate() {
        let end = sequences.last().map_or(0, |sequence| sequence.keys.end);
        let mut sequence = Sequence { queries: query..query + 1, keys: end..seen.end.max(end) };
        while let Some(before) = sequences.pop_if(|before| seen.start < before.keys.end) {
            sequence.queries.start = before.queries.start;
            sequence.keys.start = before.keys.start;
        }
        sequences.push(sequence);
    }
    sequences
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::noise;

    const HEADS: usize = 3;

    fn attention(
        [batch, tokens]: [usize; 2],
        [head_dim, value_dim]: [usize; 2],
        visible: &[Range<usize>],
    ) -> Attention<'_, f32> {
        let (queries, keys, scale) = (tokens, tokens, 0.3);
        let (added, dropout) = (None, None);
        Attention { batch, queries, keys, heads: HEADS, head_dim, value_dim, scale, visible, added, dropout }
    }

    #[test]
    fn sequences_share_no_keys() {
        let found = |visible: &[Range<usize>]| -> Vec<_> {
            sequences_of(visible).into_iter().map(|sequence| (sequence.queries, sequence.keys)).collect()
        };
        assert_eq!(found(&[0..1, 0..2, 2..3]), [(0..2, 0..2), (2..3, 2..3)]);
        assert_eq!(found(&[0..9, 0..9]), [(0..2, 0..9)], "one sequence");
        assert_eq!(found(&[0..1, 5..6, 2..3]), [(0..1, 0..1), (1..3, 1..6)]);
        assert_eq!(found(&[0..1, 5..6, 0..1]), [(0..3, 0..6)]);
    }

    /// Checks that a sequence gives the same bits packed, alone, and token by token over a cache.
    #[test]
    fn sequence_bits_do_not_depend_on_packing_or_steps() {
        let lengths = [70, 1, 300];
        for [key_dim, value_dim] in [[16, 16], [20, 5]] {
            let tokens: usize = lengths.iter().sum();
            let widths = [key_dim, key_dim, value_dim];
            // Two batch rows, each with the three sequences one after the other.
            let qkv =
                [0, 1, 2].map(|index| noise(2 * tokens * HEADS * widths[index], index as u64, 0.0, 2.0));
            let mut visible = Vec::new();
            for length in lengths {
                let first = visible.len();
                visible.extend((first..first + length).map(|query| first..query + 1));
            }
            let slices: Vec<&[f32]> = qkv.iter().map(Vec::as_slice).collect();
            let packed =
                sequence_attention(&slices, attention([2, tokens], [key_dim, value_dim], &visible)).unwrap();
            assert_eq!(packed.len(), 2 * tokens * HEADS * value_dim);

            let mut first = 0;
            for length in [lengths, lengths].concat() {
                let slices: Vec<&[f32]> = (0..3)
                    .map(|index| {
                        &slices[index][first * HEADS * widths[index]..][..length * HEADS * widths[index]]
                    })
                    .collect();
                let causal: Vec<_> = (0..length).map(|query| 0..query + 1).collect();
                let expected = &packed[first * HEADS * value_dim..][..length * HEADS * value_dim];
                let alone = attention([1, length], [key_dim, value_dim], &causal);
                assert!(sequence_attention(&slices, alone).unwrap() == expected, "alone, {length} tokens");

                let sizes = KvSizes { heads: HEADS, key_dim, value_dim };
                let mut memory = KvMemory::new(NumberType::F32, sizes, length).unwrap();
                let slots = [KvSlot { start: 0, capacity: length }];
                let [queries, keys, values] = alone.all_heads(&slices);
                for token in 0..length {
                    let [query, key, value] = [&queries, &keys, &values].map(|heads| heads.token(token));
                    memory.write(&slots, [&key, &value], &[token]);
                    let step = slot_attention(&query, &memory, &slots, 0.3, &causal[token..=token]);
                    let width = HEADS * value_dim;
                    assert!(step == expected[token * width..][..width], "token {token} of {length}");
                }
                first += length;
            }
        }
    }
}
