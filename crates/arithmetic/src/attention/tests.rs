//! Every instruction set against the definition in f64, over widths, lengths, types and rows of different lengths.

use super::*;

/// Head widths of GPT-2 and others, and odd ones: of keys, of values.
const WIDTHS: [(usize, usize); 8] =
    [(64, 64), (32, 32), (80, 80), (96, 96), (128, 128), (7, 5), (1, 1), (20, 33)];
/// Queries and keys: a step, in one part and in several; a chunk after a past, as high as each tile, a whole prompt.
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

/// Values `(B, H, S, D)` in one piece.
#[derive(Clone)]
struct Held {
    values: Vec<f32>,
    sizes: [usize; 4],
}

impl Held {
    fn noise(sizes: [usize; 4], seed: u64) -> Self {
        Self { values: crate::random::noise(sizes.iter().product(), seed, 0.0, 4.0), sizes }
    }

    fn heads(&self) -> Heads<'_> {
        self.tokens(0, self.sizes[2])
    }

    /// Some tokens of every row and head.
    fn tokens(&self, first: usize, count: usize) -> Heads<'_> {
        let [batch, heads, tokens, head_dim] = self.sizes;
        let strides = [heads * tokens * head_dim, tokens * head_dim, head_dim];
        Heads::strided(&self.values[first * head_dim..], [batch, heads, count, head_dim], strides)
    }
}

/// `softmax(scale · Q Kᵀ) V` of what is visible, head by head and query by query; `(B, T, H, Dv)`.
fn reference(q: &Held, k: &Held, v: &Held, scale: f64, visible: &[Range<usize>]) -> Vec<f64> {
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

/// Keys and values in the memory of a cache, in slots apart from each other, the later rows first.
fn in_memory(format: KvFormat, k: &Held, v: &Held, instructions: InstructionSet) -> (KvMemory, Vec<KvSlot>) {
    let [batch, heads, tokens, key_dim] = k.sizes;
    let capacity = tokens + 5;
    let mut slots = KvSlot::side_by_side(batch + 1, capacity);
    slots.reverse();
    slots.truncate(batch);
    let sizes = KvSizes { heads, key_dim, value_dim: v.sizes[3] };
    let room = KvSlot { start: 0, capacity }.room();
    let mut memory = KvMemory::new(format, sizes, (batch + 1) * room).unwrap();
    // In pieces, as a cache grows: the first tokens of all rows, then the others.
    let first = tokens / 3;
    for (start, count) in [(0, first), (first, tokens - first)] {
        let [keys, values] = [k, v].map(|held| held.tokens(start, count));
        memory.write_with(&slots, [&keys, &values], &vec![start; batch], instructions);
    }
    (memory, slots)
}

/// What a memory holds of each row, as keys and values.
fn held_in(memory: &KvMemory, slots: &[KvSlot], tokens: usize) -> [Held; 2] {
    let KvSizes { heads, key_dim, value_dim } = memory.sizes();
    let mut both = [Vec::new(), Vec::new()];
    for slot in slots {
        for (all, read) in both.iter_mut().zip(memory.read(*slot, 0..tokens)) {
            all.extend(read);
        }
    }
    let [keys, values] = both;
    [(keys, key_dim), (values, value_dim)]
        .map(|(values, dim)| Held { values, sizes: [slots.len(), heads, tokens, dim] })
}

/// Attention over a memory, with threads that share the keys of a query and without.
fn over_memory(
    q: &Heads<'_>,
    (memory, slots): (&KvMemory, &[KvSlot]),
    scale: f32,
    visible: &[Range<usize>],
    instructions: InstructionSet,
) -> Vec<f32> {
    let [apart, shared] = [false, true].map(|shares_keys| {
        let shares_keys = Some(shares_keys);
        let sizes = memory.sizes();
        memory.with(Attend { q, sizes, slots, scale, visible, instructions, shares_keys })
    });
    assert_eq!(bits(&apart), bits(&shared), "{instructions:?} {memory:?}");
    apart
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// What scores in integers take queries for.
fn in_bytes(q: &Held) -> Held {
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

/// Attention over a memory in f32 of its own.
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
    let mut memory = KvMemory::new(KvFormat::F32, sizes, tokens)?;
    memory.write_with(&slots, [k, v], &vec![0; slots.len()], instructions);
    Some(slot_attention_with(q, &memory, &slots, scale, visible, instructions))
}

#[test]
fn attention_equals_the_reference() {
    for (head_dim, value_dim) in WIDTHS {
        for (query_len, key_len) in LENGTHS {
            let (batch, heads) = (2, 3);
            let q = Held::noise([batch, heads, query_len, head_dim], 1);
            // The same queries as a projection lays them out, (B, T, H, D).
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
            // The second row of the batch is shorter, where there is room for that.
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
                    Held::noise([batch, heads, key_len, head_dim], 2),
                    Held::noise([batch, heads, key_len, value_dim], 3),
                );
                #[expect(clippy::cast_possible_truncation, reason = "the scores are f32")]
                let scale_f32 = scale as f32;
                let of_tensors = reference(&q, &k, &v, scale, visible);
                for instructions in InstructionSet::available() {
                    let check = |y: &[f32], expected: &[f64], what: &str| {
                        assert_eq!(y.len(), expected.len());
                        for (index, (y, expected)) in y.iter().zip(expected).enumerate() {
                            // Values of about unit size, sums and exponentials in another order.
                            assert!(
                                (f64::from(*y) - expected).abs() < 3e-6,
                                "{instructions:?} {what} D {head_dim} Dv {value_dim} T {query_len} S {key_len}, value \
                                 {index}: {y} for {expected}"
                            );
                        }
                    };
                    let y =
                        attention_with(&queries, [&k.heads(), &v.heads()], scale_f32, visible, instructions);
                    let y = y.unwrap();
                    check(&y, &of_tensors, "tensors");
                    for (name, format) in KvFormat::NAMES {
                        let (memory, slots) = in_memory(*format, &k, &v, instructions);
                        let of_slots =
                            over_memory(&queries, (&memory, &slots), scale_f32, visible, instructions);
                        let [held_k, held_v] = held_in(&memory, &slots, key_len);
                        match format {
                            KvFormat::F32 => assert_eq!(bits(&of_slots), bits(&y), "the same as a tensor"),
                            KvFormat::F16 => {
                                let expected = reference(&q, &held_k, &held_v, scale, visible);
                                check(&of_slots, &expected, name);
                            }
                            KvFormat::Q8 => {
                                let expected = reference(&in_bytes(&q), &held_k, &held_v, scale, visible);
                                check(&of_slots, &expected, name);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// What a memory gives back is what was written, as its format rounds it, with every instruction set.
#[test]
fn formats_round_as_they_say() {
    for (key_dim, value_dim) in WIDTHS {
        let sizes = |dim| [2, 3, 21, dim];
        let (k, v) = (Held::noise(sizes(key_dim), 2), Held::noise(sizes(value_dim), 3));
        for instructions in InstructionSet::available() {
            for (_, format) in KvFormat::NAMES {
                let (memory, slots) = in_memory(*format, &k, &v, instructions);
                let held = held_in(&memory, &slots, 21);
                for ((held, written), group) in held.iter().zip([&k, &v]).zip([32, 16]) {
                    let dim = held.sizes[3];
                    let rows = held.values.chunks(dim).zip(written.values.chunks(dim));
                    for (held, written) in rows.flat_map(|(a, b)| a.chunks(group).zip(b.chunks(group))) {
                        let largest = written.iter().fold(0f32, |largest, value| largest.max(value.abs()));
                        for (held, written) in held.iter().zip(written) {
                            let off = (held - written).abs();
                            let bound = match format {
                                KvFormat::F32 => 0.0,
                                KvFormat::F16 => written.abs() / 2048.0,
                                KvFormat::Q8 => largest * (1.0 / 254.0 + 1.0 / 2048.0),
                            };
                            assert!(off <= bound, "{instructions:?} {format:?}: {held} for {written}");
                        }
                    }
                }
            }
        }
    }
}

/// A copy of a text continues as the original does: within a memory, to another one, to another format.
#[test]
fn copies_hold_the_same_tokens() {
    let (heads, tokens, dim) = (2, 40, 20);
    let (k, v) = (Held::noise([2, heads, tokens, dim], 2), Held::noise([2, heads, tokens, dim], 3));
    let instructions = InstructionSet::detected();
    for (_, format) in KvFormat::NAMES {
        let (mut memory, slots) = in_memory(*format, &k, &v, instructions);
        let expected = memory.read(slots[0], 0..tokens);
        let (mut other, other_slots) = in_memory(*format, &v, &k, instructions);
        other.copy(other_slots[1], Some(&memory), slots[0], 0..tokens);
        assert_eq!(other.read(other_slots[1], 0..tokens), expected, "{format:?}");
        let mut exact = KvMemory::new(KvFormat::F32, memory.sizes(), 48).unwrap();
        let place = KvSlot { start: 0, capacity: tokens };
        exact.copy(place, Some(&memory), slots[0], 0..tokens);
        assert_eq!(exact.read(place, 0..tokens), expected, "{format:?}");
        // Of the second row the first 19 tokens are made the same; then the others are copied.
        memory.copy(slots[1], None, slots[0], 0..19);
        assert_eq!(memory.read(slots[1], 0..19), memory.read(slots[0], 0..19));
        memory.copy(slots[1], None, slots[0], 19..tokens);
        assert_eq!(memory.read(slots[1], 0..tokens), expected, "{format:?}");
    }
}

#[test]
fn memory_without_room_is_refused() {
    let sizes = KvSizes { heads: 12, key_dim: 64, value_dim: 64 };
    for (_, format) in KvFormat::NAMES {
        // What can be counted but not allocated there is where addresses have 64 bits only.
        let many = [Some(usize::MAX), Some(usize::MAX / 64), 1_usize.checked_shl(50)];
        for tokens in many.into_iter().flatten() {
            assert!(KvMemory::new(*format, sizes, tokens).is_none(), "{format:?} {tokens}");
        }
    }
    let bytes = KvFormat::NAMES.iter().map(|(_, format)| format.bytes_per_token(sizes));
    assert_eq!(bytes.collect::<Vec<_>>(), [12 * 128 * 4, 12 * 128 * 2, 12 * (2 * 34 + 4 * 18)]);
}

/// A query has the same bits alone and among others of its row, whatever the height of its tile, in every format.
#[test]
fn a_query_has_the_same_bits_alone_and_in_company() {
    let (heads, key_len, head_dim) = (2, 300, 20);
    let all = Held::noise([1, heads, key_len, head_dim], 1);
    let (k, v) =
        (Held::noise([1, heads, key_len, head_dim], 2), Held::noise([1, heads, key_len, head_dim], 3));
    for instructions in InstructionSet::available() {
        for (_, format) in KvFormat::NAMES {
            let (memory, slots) = in_memory(*format, &k, &v, instructions);
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
                            "{instructions:?} {format:?}: {count} from {first}"
                        );
                    }
                }
            }
        }
    }
}

/// Attention over tensors with every instruction set that this processor has.
fn computed(
    q: &Held,
    k: &Held,
    v: &Held,
    scale: f32,
    visible: &[Range<usize>],
) -> Vec<(InstructionSet, Vec<f32>)> {
    let run = |instructions| {
        let y = attention_with(&q.heads(), [&k.heads(), &v.heads()], scale, visible, instructions);
        (instructions, y.unwrap())
    };
    InstructionSet::available().into_iter().map(run).collect()
}

/// What is not finite in a key or a value makes of a query what the definition says, and nothing of a query that does not see
/// it. The lengths put it in the first part, in the last, and after the last key of a query.
#[test]
fn what_is_not_finite_reaches_the_queries_that_see_it() {
    for special in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for (query_len, key_len, place) in
            [(1, 20, 19), (1, 600, 3), (1, 600, 599), (1, 600, 400), (4, 30, 27), (30, 30, 17)]
        {
            for (in_keys, column) in [(true, 0), (false, 5)] {
                let q = Held::noise([1, 1, query_len, 8], 1);
                let spoiled = |seed: u64, spoils: bool| {
                    let mut held = Held::noise([1, 1, key_len, 8], seed);
                    if spoils {
                        held.values[place * 8 + column] = special;
                    }
                    held
                };
                let (k, v) = (spoiled(2, in_keys), spoiled(3, !in_keys));
                // The last query sees all keys, or all but the last ones.
                for hidden in [0, key_len - 1 - place + 1] {
                    let seen = |query: usize| (key_len - query_len + query + 1).saturating_sub(hidden).max(1);
                    let visible: Vec<Range<usize>> = (0..query_len).map(|query| 0..seen(query)).collect();
                    let expected = reference(&q, &k, &v, 1.0, &visible);
                    for (instructions, y) in computed(&q, &k, &v, 1.0, &visible) {
                        for (index, (y, expected)) in y.iter().zip(&expected).enumerate() {
                            let case = format!(
                                "{instructions:?} {special} at {place} of {key_len}, in keys: {in_keys}, value {index}: \
                                 {y} for {expected}"
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

/// Scores that are all `-inf` in one part of the keys weigh nothing there, and NaN where they are all of them.
#[test]
fn a_part_without_weight_counts_for_nothing() {
    let q = Held { values: vec![1.0], sizes: [1; 4] };
    let v = Held::noise([1, 1, 600, 4], 3);
    for (finite, expects_nan) in [(599, false), (0, false), (600, true)] {
        let keys = (0..600).map(|key| if key == finite { 1.0 } else { f32::NEG_INFINITY });
        let k = Held { values: keys.collect(), sizes: [1, 1, 600, 1] };
        for (instructions, y) in computed(&q, &k, &v, 1.0, &[Range { start: 0, end: 600 }]) {
            if expects_nan {
                assert!(y.iter().all(|y| y.is_nan()), "{instructions:?}: {y:?}");
            } else {
                assert_eq!(y, v.values[finite * 4..][..4], "{instructions:?}");
            }
        }
    }
}
