//! Every instruction set against the definition in f64, over widths, lengths, types and rows of different lengths.

use half::f16;
use half::slice::HalfFloatSliceExt;

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
        let [_, heads, tokens, head_dim] = self.sizes;
        let strides = [heads * tokens * head_dim, tokens * head_dim, head_dim];
        Heads::strided(&self.values, self.sizes, strides)
    }

    /// The values that f16 holds.
    fn in_f16(&self) -> (Vec<f16>, Self) {
        let halves: Vec<f16> = self.values.iter().map(|value| f16::from_f32(*value)).collect();
        let values = halves.iter().map(|value| value.to_f32()).collect();
        (halves, Self { values, sizes: self.sizes })
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

/// The kernels with every instruction set that this processor has.
fn computed(
    q: &Heads<'_>,
    kv: &KvHeads<'_>,
    scale: f32,
    visible: &[Range<usize>],
) -> Vec<(InstructionSet, Vec<f32>)> {
    let run = |instructions| (instructions, attention_with(q, kv, scale, visible, instructions));
    InstructionSet::available().into_iter().map(run).collect()
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
            for (is_f16, visible) in [(false, &all), (true, &all), (false, &wide), (true, &narrow)] {
                let (k, v) = (
                    Held::noise([batch, heads, key_len, head_dim], 2),
                    Held::noise([batch, heads, key_len, value_dim], 3),
                );
                let ((k_halves, k_rounded), (v_halves, v_rounded)) = (k.in_f16(), v.in_f16());
                let (expected, kv) = if is_f16 {
                    let k_heads = k.heads().with_values(&k_halves);
                    let v_heads = v.heads().with_values(&v_halves);
                    let expected = reference(&q, &k_rounded, &v_rounded, scale, visible);
                    (expected, KvHeads::F16([k_heads, v_heads]))
                } else {
                    (reference(&q, &k, &v, scale, visible), KvHeads::F32([k.heads(), v.heads()]))
                };
                #[expect(clippy::cast_possible_truncation, reason = "the scores are f32")]
                for (instructions, y) in computed(&queries, &kv, scale as f32, visible) {
                    assert_eq!(y.len(), expected.len());
                    for (index, (y, expected)) in y.iter().zip(&expected).enumerate() {
                        // Values of about unit size, sums and exponentials in another order.
                        assert!(
                            (f64::from(*y) - expected).abs() < 3e-6,
                            "{instructions:?} f16 {is_f16} D {head_dim} Dv {value_dim} T {query_len} S {key_len}, value \
                             {index}: {y} for {expected}"
                        );
                    }
                }
            }
        }
    }
}

/// A query among others of its row has the bits that it has among fewer, whatever the height of its tile.
#[test]
fn many_queries_have_the_same_bits_in_any_company() {
    let (heads, key_len, head_dim) = (2, 70, 20);
    let all = Held::noise([1, heads, key_len, head_dim], 1);
    let (k, v) =
        (Held::noise([1, heads, key_len, head_dim], 2), Held::noise([1, heads, key_len, head_dim], 3));
    let kv = KvHeads::F32([k.heads(), v.heads()]);
    let run = |first: usize, count: usize, instructions| {
        let strides = [all.values.len(), key_len * head_dim, head_dim];
        let q = Heads::strided(&all.values[first * head_dim..], [1, heads, count, head_dim], strides);
        let visible: Vec<Range<usize>> = (first..first + count).map(|query| 0..query + 1).collect();
        let y = attention_with(&q, &kv, 0.3, &visible, instructions);
        y.iter().map(|y| y.to_bits()).collect::<Vec<_>>()
    };
    for instructions in InstructionSet::available() {
        let whole = run(0, key_len, instructions);
        for count in 2..=40 {
            for first in [0, 3, key_len - count] {
                let expected = &whole[first * heads * head_dim..(first + count) * heads * head_dim];
                assert_eq!(
                    run(first, count, instructions),
                    expected,
                    "{instructions:?}: {count} from {first}"
                );
            }
        }
    }
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
                    let kv = KvHeads::F32([k.heads(), v.heads()]);
                    for (instructions, y) in computed(&q.heads(), &kv, 1.0, &visible) {
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
        let kv = KvHeads::F32([k.heads(), v.heads()]);
        for (instructions, y) in computed(&q.heads(), &kv, 1.0, &[Range { start: 0, end: 600 }]) {
            if expects_nan {
                assert!(y.iter().all(|y| y.is_nan()), "{instructions:?}: {y:?}");
            } else {
                assert_eq!(y, v.values[finite * 4..][..4], "{instructions:?}");
            }
        }
    }
}

/// Tokens are rounded to the type of the memory and written to their places, with every instruction set, and nowhere else.
#[test]
fn tokens_are_written_in_place() {
    let (heads, capacity, head_dim, added, position) = (2, 5, 37, 3, 1);
    let tokens = Held::noise([1, heads, added, head_dim], 1);
    let slot = KvSlot { start: 2, capacity };
    for instructions in InstructionSet::available() {
        let mut memory = vec![f16::ONE; (capacity + 4) * heads * head_dim];
        let bits = memory.reinterpret_cast_mut();
        write::write(bits, &tokens.heads(), &[slot], &[position], instructions);
        let mut expected = vec![f16::ONE; memory.len()];
        for head in 0..heads {
            let start = slot.start * heads * head_dim + (head * capacity + position) * head_dim;
            let rows = &tokens.values[head * added * head_dim..][..added * head_dim];
            for (to, value) in expected[start..].iter_mut().zip(rows) {
                *to = f16::from_f32(*value);
            }
        }
        assert_eq!(memory, expected, "{instructions:?}");
    }
}
