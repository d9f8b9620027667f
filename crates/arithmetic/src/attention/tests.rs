//! Checks attention on every instruction set against its definition, computed in f64.
//!
//! The tests cover various widths, lengths and storage types, and batches with rows of different lengths.

use super::*;
use crate::{NumberType, uses};

/// Key and value widths of a head: GPT-2's, other models' and unusual ones.
const WIDTHS: [(usize, usize); 8] =
    [(64, 64), (32, 32), (80, 80), (96, 96), (128, 128), (7, 5), (1, 1), (20, 33)];
/// Pairs of query count and key count.
///
/// Covers decoding steps over one part and several, chunks of each tile height
/// after cached tokens, and a whole prompt.
const LENGTHS: [(usize, usize); 12] = [
    (1, 1),
    (1, 1024),
    (1, 37),
    (1, 256),
    (1, 258),
    (2, 2),
    (2, 30),
    (3, 5),
    (13, 13),
    (5, 40),
    (50, 70),
    (100, 100),
];

/// Contiguous values `(B, H, S, D)`.
#[derive(Clone)]
struct TensorData {
    values: Vec<f32>,
    sizes: [usize; 4],
}

impl TensorData {
    fn noise(sizes: [usize; 4], seed: u64) -> Self {
        Self { values: crate::random::noise(sizes.iter().product(), seed, 0.0, 4.0), sizes }
    }

    fn heads(&self) -> Heads<'_> {
        self.tokens(0, self.sizes[2])
    }

    /// Returns a view of `count` tokens in every row and head.
    fn tokens(&self, first: usize, count: usize) -> Heads<'_> {
        let [batch, heads, tokens, head_dim] = self.sizes;
        let strides = [heads * tokens * head_dim, tokens * head_dim, head_dim];
        Heads::strided(&self.values[first * head_dim..], [batch, heads, count, head_dim], strides)
    }
}

/// Computes `softmax(scale · Q Kᵀ) V` over the visible keys, query by query; `(B, T, H, Dv)`.
fn reference(
    q: &TensorData,
    k: &TensorData,
    v: &TensorData,
    scale: f64,
    visible: &[Range<usize>],
) -> Vec<f64> {
    let [batch, heads, query_len, head_dim] = q.sizes;
    let [_, _, key_len, value_dim] = v.sizes;
    let mut output = vec![0.0; batch * query_len * heads * value_dim];
    for (index, query) in q.values.chunks(head_dim).enumerate() {
        let (head, batch, token) = (index / query_len, index / query_len / heads, index % query_len);
        let seen = &visible[batch * query_len + token];
        let keys = &k.values[head * key_len * head_dim..][seen.start * head_dim..seen.end * head_dim];
        let product = |key: &[f32]| query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
        let scores: Vec<f64> =
            keys.chunks(head_dim).map(|key| -> f64 { product(key) }).map(|score| score * scale).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let values = &v.values[(head * key_len + seen.start) * value_dim..];
        let context = &mut output[((batch * query_len + token) * heads + head % heads) * value_dim..];
        for (column, context) in context.iter_mut().take(value_dim).enumerate() {
            let weighted =
                |(key, weight): (usize, &f64)| weight / sum * f64::from(values[key * value_dim + column]);
            *context = weights.iter().enumerate().map(weighted).sum::<f64>();
        }
    }
    output
}

/// Writes keys and values into separate slots of a KV cache, last row first.
fn in_memory(
    dtype: NumberType,
    k: &TensorData,
    v: &TensorData,
    instructions: InstructionSet,
) -> (KvMemory, Vec<KvSlot>) {
    let [batch, heads, tokens, key_dim] = k.sizes;
    let capacity = tokens + 5;
    let mut slots = KvSlot::side_by_side(batch + 1, capacity);
    slots.reverse();
    slots.truncate(batch);
    let sizes = KvSizes { heads, key_dim, value_dim: v.sizes[3] };
    let room = KvSlot { start: 0, capacity }.room();
    let mut memory = KvMemory::new(dtype, sizes, (batch + 1) * room).unwrap();
    // Simulates a growing cache: writes the first third of every row's tokens, then the rest.
    let first = tokens / 3;
    for (start, count) in [(0, first), (first, tokens - first)] {
        let [keys, values] = [k, v].map(|stored| stored.tokens(start, count));
        memory.write_with(&slots, [&keys, &values], &vec![start; batch], instructions);
    }
    (memory, slots)
}

/// Reads each row's keys and values from a memory.
fn read_all(memory: &KvMemory, slots: &[KvSlot], tokens: usize) -> [TensorData; 2] {
    let KvSizes { heads, key_dim, value_dim } = memory.sizes();
    let mut both = [Vec::new(), Vec::new()];
    for slot in slots {
        for (all, read) in both.iter_mut().zip(memory.read(*slot, 0..tokens)) {
            all.extend(read);
        }
    }
    let [keys, values] = both;
    [(keys, key_dim), (values, value_dim)]
        .map(|(values, dim)| TensorData { values, sizes: [slots.len(), heads, tokens, dim] })
}

/// Computes attention over a memory, with and without dividing a query's keys among threads.
fn over_memory(
    q: &Heads<'_>,
    (memory, slots): (&KvMemory, &[KvSlot]),
    scale: f32,
    visible: &[Range<usize>],
    instructions: InstructionSet,
) -> Vec<f32> {
    let [separate, shared] = [false, true].map(|shares_keys| {
        let shares_keys = Some(shares_keys);
        let sizes = memory.sizes();
        memory.attend(&Attend { q, sizes, slots, scale, visible, instructions, shares_keys })
    });
    assert_eq!(bits(&separate), bits(&shared), "{instructions:?} {memory:?}");
    separate
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Rounds queries to 8 bits, like attention with integer scores.
fn rounded_to_bytes(q: &TensorData) -> TensorData {
    let mut rounded = q.clone();
    for query in rounded.values.chunks_mut(q.sizes[3]) {
        for group in query.chunks_mut(32) {
            let largest = group.iter().fold(0f32, |largest, value| largest.max(value.abs()));
            for value in group {
                *value = (*value * (127.0 / largest)).round_ties_even() * (largest / 127.0);
            }
        }
    }
    rounded
}

/// Computes attention over a new f32 memory that holds the keys and values.
fn attention_with(
    q: &Heads<'_>,
    [k, v]: [&Heads<'_>; 2],
    scale: f32,
    visible: &[Range<usize>],
    instructions: InstructionSet,
) -> Option<Vec<f32>> {
    let sizes = KvSizes { heads: k.heads, key_dim: k.head_dim, value_dim: v.head_dim };
    let slots = KvSlot::side_by_side(k.rows.len(), k.tokens);
    let tokens = slots.iter().map(|slot| slot.room()).sum();
    let mut memory = KvMemory::new(NumberType::F32, sizes, tokens)?;
    memory.write_with(&slots, [k, v], &vec![0; slots.len()], instructions);
    Some(slot_attention_with(q, &memory, &slots, scale, visible, instructions))
}

#[test]
fn attention_equals_the_reference() {
    for (head_dim, value_dim) in WIDTHS {
        for (query_len, key_len) in LENGTHS {
            let (batch, heads) = (2, 3);
            let q = TensorData::noise([batch, heads, query_len, head_dim], 1);
            // The same queries in the layout of a projection, (B, T, H, D).
            let mut projected = q.values.clone();
            for (index, query) in q.values.chunks(head_dim).enumerate() {
                let (row, head, token) =
                    (index / query_len / heads, index / query_len % heads, index % query_len);
                projected[((row * query_len + token) * heads + head) * head_dim..][..head_dim]
                    .copy_from_slice(query);
            }
            let strides = [query_len * heads * head_dim, head_dim, heads * head_dim];
            let queries = Heads::strided(&projected, q.sizes, strides);
            let scale = 1.0 / (head_dim as f64).sqrt();
            let causal = |query: usize| key_len - query_len + query + 1;
            // Queries in the second batch row see fewer keys, if the number of keys allows it.
            let shorter = (key_len - query_len).min(2 + key_len / 2);
            let ends =
                || (0..batch).flat_map(|row| (0..query_len).map(move |query| causal(query) - row * shorter));
            let all: Vec<Range<usize>> = ends().map(|end| 0..end).collect();
            // Windows of up to 40 keys, and of 1 to 3.
            let wide = ends().map(|end| end.saturating_sub(40)..end).collect();
            let narrow =
                ends().enumerate().map(|(index, end)| end.saturating_sub(1 + index % 3)..end).collect();
            for visible in [&all, &wide, &narrow] {
                let (k, v) = (
                    TensorData::noise([batch, heads, key_len, head_dim], 2),
                    TensorData::noise([batch, heads, key_len, value_dim], 3),
                );
                #[expect(clippy::cast_possible_truncation, reason = "the scores are f32")]
                let scale_f32 = scale as f32;
                let from_tensors = reference(&q, &k, &v, scale, visible);
                for instructions in InstructionSet::available() {
                    let check = |y: &[f32], expected: &[f64], what: &str| {
                        assert_eq!(y.len(), expected.len());
                        for (index, (y, expected)) in y.iter().zip(expected).enumerate() {
                            // Values are about 1 in magnitude; sums and exponentials use a different order.
                            assert!(
                                (f64::from(*y) - expected).abs() < 3e-6,
                                "{instructions:?} {what} D {head_dim} Dv {value_dim} T {query_len} S {key_len}, value \
                                 {index}: {y} vs. {expected}"
                            );
                        }
                    };
                    let y =
                        attention_with(&queries, [&k.heads(), &v.heads()], scale_f32, visible, instructions);
                    let y = y.unwrap();
                    check(&y, &from_tensors, "tensors");
                    for dtype in NumberType::all(uses::KV_CACHE) {
                        let (memory, slots) = in_memory(dtype, &k, &v, instructions);
                        let from_slots =
                            over_memory(&queries, (&memory, &slots), scale_f32, visible, instructions);
                        let [stored_k, stored_v] = read_all(&memory, &slots, key_len);
                        match dtype {
                            NumberType::F32 => {
                                assert_eq!(
                                    bits(&from_slots),
                                    bits(&y),
                                    "the cache must give the same bits as tensors"
                                )
                            }
                            NumberType::F16 => {
                                let expected = reference(&q, &stored_k, &stored_v, scale, visible);
                                check(&from_slots, &expected, dtype.name());
                            }
                            NumberType::Q8 => {
                                let expected =
                                    reference(&rounded_to_bytes(&q), &stored_k, &stored_v, scale, visible);
                                check(&from_slots, &expected, dtype.name());
                            }
                            _ => panic!("{dtype} has no reference"),
                        }
                    }
                }
            }
        }
    }
}

/// Checks that reads return the written values, rounded to the format, on every instruction set.
#[test]
fn formats_round_within_their_bounds() {
    for (key_dim, value_dim) in WIDTHS {
        let sizes = |dim| [2, 3, 21, dim];
        let (k, v) = (TensorData::noise(sizes(key_dim), 2), TensorData::noise(sizes(value_dim), 3));
        for instructions in InstructionSet::available() {
            for dtype in NumberType::all(uses::KV_CACHE) {
                let (memory, slots) = in_memory(dtype, &k, &v, instructions);
                let stored = read_all(&memory, &slots, 21);
                for ((stored, written), group) in stored.iter().zip([&k, &v]).zip([32, 16]) {
                    let dim = stored.sizes[3];
                    let rows = stored.values.chunks(dim).zip(written.values.chunks(dim));
                    for (stored, written) in rows.flat_map(|(a, b)| a.chunks(group).zip(b.chunks(group))) {
                        let largest = written.iter().fold(0f32, |largest, value| largest.max(value.abs()));
                        for (stored, written) in stored.iter().zip(written) {
                            let off = (stored - written).abs();
                            let bound = match dtype {
                                NumberType::F32 => 0.0,
                                NumberType::F16 => written.abs() / 2048.0,
                                NumberType::Q8 => largest * (1.0 / 254.0 + 1.0 / 2048.0),
                                _ => panic!("{dtype} has no bound"),
                            };
                            assert!(off <= bound, "{instructions:?} {dtype:?}: {stored} vs. {written}");
                        }
                    }
                }
            }
        }
    }
}

/// Checks that a copied sequence equals the original.
///
/// Covers copies within a memory, to another memory and to another format.
#[test]
fn copies_preserve_the_tokens() {
    let (heads, tokens, dim) = (2, 40, 20);
    let (k, v) =
        (TensorData::noise([2, heads, tokens, dim], 2), TensorData::noise([2, heads, tokens, dim], 3));
    let instructions = InstructionSet::detected();
    for dtype in NumberType::all(uses::KV_CACHE) {
        let (mut memory, slots) = in_memory(dtype, &k, &v, instructions);
        let expected = memory.read(slots[0], 0..tokens);
        let (mut other, other_slots) = in_memory(dtype, &v, &k, instructions);
        other.copy(other_slots[1], Some(&memory), slots[0], 0..tokens);
        assert_eq!(other.read(other_slots[1], 0..tokens), expected, "{dtype:?}");
        let mut exact = KvMemory::new(NumberType::F32, memory.sizes(), 48).unwrap();
        let place = KvSlot { start: 0, capacity: tokens };
        exact.copy(place, Some(&memory), slots[0], 0..tokens);
        assert_eq!(exact.read(place, 0..tokens), expected, "{dtype:?}");
        // The first 19 tokens of the second row are copied first, then the others.
        memory.copy(slots[1], None, slots[0], 0..19);
        assert_eq!(memory.read(slots[1], 0..19), memory.read(slots[0], 0..19));
        memory.copy(slots[1], None, slots[0], 19..tokens);
        assert_eq!(memory.read(slots[1], 0..tokens), expected, "{dtype:?}");
    }
}

#[test]
fn oversized_memory_is_rejected() {
    let sizes = KvSizes { heads: 12, key_dim: 64, value_dim: 64 };
    for dtype in NumberType::all(uses::KV_CACHE) {
        // Only 64-bit targets have sizes that fit into a `usize` but cannot be allocated.
        let huge = [Some(usize::MAX), Some(usize::MAX / 64), 1_usize.checked_shl(50)];
        for tokens in huge.into_iter().flatten() {
            assert!(KvMemory::new(dtype, sizes, tokens).is_none(), "{dtype:?} {tokens}");
        }
    }
    let bytes = NumberType::all(uses::KV_CACHE).map(|dtype| sizes.bytes_per_token(dtype));
    assert_eq!(bytes.collect::<Vec<_>>(), [12 * 128 * 4, 12 * 128 * 2, 12 * (2 * 34 + 4 * 18)]);
}

/// Checks batch invariance: a query gives the same bits alone and among other queries of its row.
///
/// The test covers every tile height and every format.
#[test]
fn query_bits_do_not_depend_on_other_queries() {
    let (heads, key_len, head_dim) = (2, 300, 20);
    let all = TensorData::noise([1, heads, key_len, head_dim], 1);
    let (k, v) = (
        TensorData::noise([1, heads, key_len, head_dim], 2),
        TensorData::noise([1, heads, key_len, head_dim], 3),
    );
    for instructions in InstructionSet::available() {
        for dtype in NumberType::all(uses::KV_CACHE) {
            let (memory, slots) = in_memory(dtype, &k, &v, instructions);
            for window in [usize::MAX, 37] {
                let run = |first: usize, count: usize| {
                    let seen = |query: usize| (query + 1).saturating_sub(window)..query + 1;
                    let visible: Vec<Range<usize>> = (first..first + count).map(seen).collect();
                    bits(&over_memory(
                        &all.tokens(first, count),
                        (&memory, &slots),
                        0.3,
                        &visible,
                        instructions,
                    ))
                };
                let whole = run(0, key_len);
                for count in (1..=14).chain([40]) {
                    for first in [0, 3, 250, key_len - count] {
                        let expected = &whole[first * heads * head_dim..(first + count) * heads * head_dim];
                        assert_eq!(
                            run(first, count),
                            expected,
                            "{instructions:?} {dtype:?}: {count} from {first}"
                        );
                    }
                }
            }
        }
    }
}

/// Computes attention over tensors with every instruction set that this processor supports.
fn on_every_instruction_set(
    q: &TensorData,
    k: &TensorData,
    v: &TensorData,
    scale: f32,
    visible: &[Range<usize>],
) -> Vec<(InstructionSet, Vec<f32>)> {
    let run = |instructions| {
        let y = attention_with(&q.heads(), [&k.heads(), &v.heads()], scale, visible, instructions);
        (instructions, y.unwrap())
    };
    InstructionSet::available().into_iter().map(run).collect()
}

/// Checks that non-finite keys and values affect queries exactly as the definition requires.
///
/// They must not affect queries that do not see them. The lengths place them in the first part, in the last
/// part, and after a query's last key.
#[test]
fn non_finite_values_reach_only_queries_that_see_them() {
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (query_len, key_len, place) in
            [(1, 20, 19), (1, 600, 3), (1, 600, 599), (1, 600, 400), (4, 30, 27), (30, 30, 17)]
        {
            for (in_keys, column) in [(true, 0), (false, 5)] {
                let q = TensorData::noise([1, 1, query_len, 8], 1);
                let spoiled = |seed: u64, spoils: bool| {
                    let mut stored = TensorData::noise([1, 1, key_len, 8], seed);
                    if spoils {
                        stored.values[place * 8 + column] = special;
                    }
                    stored
                };
                let (k, v) = (spoiled(2, in_keys), spoiled(3, !in_keys));
                // The last query sees all keys, or all but the last few.
                for hidden in [0, key_len - 1 - place + 1] {
                    let seen = |query: usize| (key_len - query_len + query + 1).saturating_sub(hidden).max(1);
                    let visible: Vec<Range<usize>> = (0..query_len).map(|query| 0..seen(query)).collect();
                    let expected = reference(&q, &k, &v, 1.0, &visible);
                    for (instructions, y) in on_every_instruction_set(&q, &k, &v, 1.0, &visible) {
                        for (index, (y, expected)) in y.iter().zip(&expected).enumerate() {
                            let case = format!(
                                "{instructions:?} {special} at {place} of {key_len}, in keys: {in_keys}, value {index}: \
                                 {y} vs. {expected}"
                            );
                            assert_eq!(y.is_nan(), expected.is_nan(), "{case}");
                            if expected.is_infinite() {
                                assert_eq!(f64::from(*y), *expected, "{case}");
                            } else if !expected.is_nan() {
                                assert!((f64::from(*y) - expected).abs() < 3e-6, "{case}");
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Checks that a part contributes nothing if all its scores are `-inf`.
///
/// If that is true of every part, the result is NaN.
#[test]
fn zero_weight_part_does_not_contribute() {
    let q = TensorData { values: vec![1.0], sizes: [1; 4] };
    let v = TensorData::noise([1, 1, 600, 4], 3);
    for (finite, expects_nan) in [(599, false), (0, false), (600, true)] {
        let keys = (0..600).map(|key| if key == finite { 1.0 } else { f32::NEG_INFINITY });
        let k = TensorData { values: keys.collect(), sizes: [1, 1, 600, 1] };
        for (instructions, y) in on_every_instruction_set(&q, &k, &v, 1.0, &[Range { start: 0, end: 600 }]) {
            if expects_nan {
                assert!(y.iter().all(|y| y.is_nan()), "{instructions:?}: {y:?}");
            } else {
                assert_eq!(y, v.values[finite * 4..][..4], "{instructions:?}");
            }
        }
    }
}
