//! Attention of texts that are there as a whole, without a cache: they are laid out as in one, and computed as from one.

use std::ops::Range;

use super::heads::KvSlot;
use super::memory::{KvFormat, KvMemory, KvSizes};
use super::slot_attention;
use crate::training::Attention;

/// Attention of all heads of some texts without dropout, with the same bits as [`slot_attention`] over a cache in f32, in which
/// they may have come token by token. `None` if there is no memory for their keys and values.
///
/// Queries that have no keys in common with those before them begin a text of their own, as one that is alone.
///
/// ```
/// use candle_gpt2_arithmetic::{Attention, text_attention};
///
/// let causal = Attention {
///     texts: 1, queries: 3, keys: 3, heads: 1, head_dim: 2, value_dim: 2, scale: 1.0,
///     visible: &[0..1, 0..2, 0..3], added: None, dropout: None,
/// };
/// let (zeros, values) = ([0f32; 6], [1., 2., 3., 4., 5., 6.]);
/// let context = text_attention(&[&zeros, &zeros, &values], causal).expect("room for three tokens");
/// assert_eq!(context, [1., 2., 2., 3., 3., 4.]);
/// ```
///
/// # Shapes
/// As [`Float::attention`](crate::Float::attention).
///
/// # Panics
/// When the shapes are not these, or something is added to the scores or dropped.
pub fn text_attention(qkv: &[&[f32]], attention: Attention<'_, f32>) -> Option<Vec<f32>> {
    let Attention { texts, heads, head_dim, value_dim, scale, visible, added, dropout, .. } = attention;
    assert!(added.is_none() && dropout.is_none(), "scores and weights as they are");
    let [queries, keys, values] = attention.all_heads(qkv);
    let texts_of_each = texts_of(visible);
    let key_lengths: Vec<usize> = texts_of_each.iter().map(|text| text.keys.len()).collect();
    let query_lengths: Vec<usize> = texts_of_each.iter().map(|text| text.queries.len()).collect();
    let (keys, values) = (keys.cut(&key_lengths), values.cut(&key_lengths));

    let mut tokens = 0usize;
    let mut slots = Vec::with_capacity(texts * key_lengths.len());
    for capacity in std::iter::repeat_n(&key_lengths, texts).flatten() {
        let slot = KvSlot { start: tokens, capacity: *capacity };
        tokens += slot.room();
        slots.push(slot);
    }
    let mut memory = KvMemory::new(KvFormat::F32, KvSizes { heads, key_dim: head_dim, value_dim }, tokens)?;
    memory.write(&slots, [&keys, &values], &vec![0; slots.len()]);

    let in_text = |text: &Text| {
        let first = text.keys.start;
        visible[text.queries.clone()].iter().map(move |seen| seen.start - first..seen.end - first)
    };
    let of_all = std::iter::repeat_n(&texts_of_each, texts).flatten();
    let visible: Vec<_> = of_all.flat_map(in_text).collect();
    #[expect(clippy::cast_possible_truncation, reason = "the scores are f32")]
    let scale = scale as f32;
    Some(slot_attention(&queries.cut(&query_lengths), &memory, &slots, scale, &visible))
}

/// Queries side by side, and the keys that any of them sees, which no others see.
struct Text {
    queries: Range<usize>,
    keys: Range<usize>,
}

/// The queries in texts that have no keys in common. The keys of a text begin where those before it end.
fn texts_of(visible: &[Range<usize>]) -> Vec<Text> {
    let mut texts: Vec<Text> = Vec::new();
    for (query, seen) in visible.iter().enumerate() {
        let end = texts.last().map_or(0, |text| text.keys.end);
        let mut text = Text { queries: query..query + 1, keys: end..seen.end.max(end) };
        while let Some(before) = texts.pop_if(|before| seen.start < before.keys.end) {
            text.queries.start = before.queries.start;
            text.keys.start = before.keys.start;
        }
        texts.push(text);
    }
    texts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::noise;

    const HEADS: usize = 3;

    fn attention(
        [texts, tokens]: [usize; 2],
        [head_dim, value_dim]: [usize; 2],
        visible: &[Range<usize>],
    ) -> Attention<'_, f32> {
        let (queries, keys, scale) = (tokens, tokens, 0.3);
        let (added, dropout) = (None, None);
        Attention { texts, queries, keys, heads: HEADS, head_dim, value_dim, scale, visible, added, dropout }
    }

    #[test]
    fn texts_have_no_keys_in_common() {
        let found = |visible: &[Range<usize>]| -> Vec<_> {
            texts_of(visible).into_iter().map(|text| (text.queries, text.keys)).collect()
        };
        assert_eq!(found(&[0..1, 0..2, 2..3]), [(0..2, 0..2), (2..3, 2..3)]);
        assert_eq!(found(&[0..9, 0..9]), [(0..2, 0..9)], "a text and another one");
        assert_eq!(found(&[0..1, 5..6, 2..3]), [(0..1, 0..1), (1..3, 1..6)]);
        assert_eq!(found(&[0..1, 5..6, 0..1]), [(0..3, 0..6)]);
    }

    /// A query of a packed text has the bits of the text alone, and of a step over a cache that came token by token.
    #[test]
    fn a_text_has_the_same_bits_alone_packed_and_token_by_token() {
        let lengths = [70, 1, 300];
        for [key_dim, value_dim] in [[16, 16], [20, 5]] {
            let tokens: usize = lengths.iter().sum();
            let widths = [key_dim, key_dim, value_dim];
            // Two batches of the three texts, one after the other.
            let qkv =
                [0, 1, 2].map(|index| noise(2 * tokens * HEADS * widths[index], index as u64, 0.0, 2.0));
            let mut visible = Vec::new();
            for length in lengths {
                let first = visible.len();
                visible.extend((first..first + length).map(|query| first..query + 1));
            }
            let slices: Vec<&[f32]> = qkv.iter().map(Vec::as_slice).collect();
            let packed =
                text_attention(&slices, attention([2, tokens], [key_dim, value_dim], &visible)).unwrap();
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
                assert!(text_attention(&slices, alone).unwrap() == expected, "alone, {length} tokens");

                let sizes = KvSizes { heads: HEADS, key_dim, value_dim };
                let mut memory = KvMemory::new(KvFormat::F32, sizes, length).unwrap();
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
