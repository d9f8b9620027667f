//! Every instruction set against the definition in f64, over widths, lengths, types and rows of different lengths.

use candle_core::{Device, Storage};

use super::*;

/// Head widths of GPT-2 and others, and odd ones: of keys, of values.
const WIDTHS: [(usize, usize); 8] =
    [(64, 64), (32, 32), (80, 80), (96, 96), (128, 128), (7, 5), (1, 1), (20, 33)];
/// Queries and keys: a step, in one part and in several; a chunk after a past, a whole prompt.
const LENGTHS: [(usize, usize); 10] =
    [(1, 1), (1, 1024), (1, 37), (1, 256), (1, 258), (2, 2), (13, 13), (5, 40), (50, 70), (100, 100)];

fn noise(shape: (usize, usize, usize, usize), seed: u64) -> Tensor {
    let values = crate::random::noise(shape.0 * shape.1 * shape.2 * shape.3, seed, 0.0, 4.0);
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn values(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// `softmax(scale · Q Kᵀ) V` of what is visible, head by head and query by query.
fn reference(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, visible: &[Range<usize>]) -> Vec<f64> {
    let (_, heads, query_len, head_dim) = q.dims4().unwrap();
    let (_, _, key_len, value_dim) = v.dims4().unwrap();
    let (q, k, v) = (values(q), values(k), values(v));
    let mut output = Vec::new();
    for (index, query) in q.chunks(head_dim).enumerate() {
        let (head, batch) = (index / query_len, index / query_len / heads);
        let seen = &visible[batch * query_len + index % query_len];
        let keys = &k[head * key_len * head_dim..][seen.start * head_dim..seen.end * head_dim];
        let product = |key: &[f32]| query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
        let scores: Vec<f64> =
            keys.chunks(head_dim).map(|key| -> f64 { product(key) }).map(|score| score * scale).collect();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let values = &v[(head * key_len + seen.start) * value_dim..];
        output.extend((0..value_dim).map(|column| {
            let weighted =
                |(key, weight): (usize, &f64)| weight / sum * f64::from(values[key * value_dim + column]);
            weights.iter().enumerate().map(weighted).sum::<f64>()
        }));
    }
    output
}

/// The kernels with every instruction set that this processor has.
fn computed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f32,
    visible: &[Range<usize>],
) -> Vec<(InstructionSet, Vec<f32>)> {
    let (q_storage, q_layout) = q.storage_and_layout();
    let (k_storage, k_layout) = k.storage_and_layout();
    let (v_storage, v_layout) = v.storage_and_layout();
    let (Storage::Cpu(q_storage), Storage::Cpu(k_storage), Storage::Cpu(v_storage)) =
        (&*q_storage, &*k_storage, &*v_storage)
    else {
        panic!("on the CPU")
    };
    let (batch, heads, query_len, _) = q.dims4().unwrap();
    let value_dim = v.dim(3).unwrap();
    let run = |instructions| {
        let q = Heads::new(q_storage.as_slice().unwrap(), q_layout).unwrap();
        let output = match (k_storage, v_storage) {
            (CpuStorage::F16(k), CpuStorage::F16(v)) => {
                let k = Heads::new(k.reinterpret_cast(), k_layout).unwrap();
                let v = Heads::new(v.reinterpret_cast(), v_layout).unwrap();
                attention(&q, &k, &v, scale, visible, instructions)
            }
            (k, v) => {
                let k = Heads::new(k.as_slice::<f32>().unwrap(), k_layout).unwrap();
                let v = Heads::new(v.as_slice::<f32>().unwrap(), v_layout).unwrap();
                attention(&q, &k, &v, scale, visible, instructions)
            }
        };
        let output = Tensor::from_vec(output, (batch, query_len, heads, value_dim), &Device::Cpu).unwrap();
        (instructions, values(&output.transpose(1, 2).unwrap()))
    };
    InstructionSet::available().into_iter().map(run).collect()
}

#[test]
fn attention_equals_the_reference() {
    for (head_dim, value_dim) in WIDTHS {
        for (query_len, key_len) in LENGTHS {
            let (batch, heads) = (2, 3);
            let q = noise((batch, query_len, heads, head_dim), 1).transpose(1, 2).unwrap();
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
            let cases = [(DType::F32, &all), (DType::F16, &all), (DType::F32, &wide), (DType::F16, &narrow)];
            for (held, visible) in cases {
                let cached = |width, seed| {
                    let memory = noise((batch, heads, key_len + 3, width), seed).to_dtype(held).unwrap();
                    memory.narrow(2, 0, key_len).unwrap()
                };
                let (k, v) = (cached(head_dim, 2), cached(value_dim, 3));
                let expected = reference(&q, &k, &v, scale, visible);
                #[expect(clippy::cast_possible_truncation, reason = "the scores are f32")]
                for (instructions, y) in computed(&q, &k, &v, scale as f32, visible) {
                    assert_eq!(y.len(), expected.len());
                    for (index, (y, expected)) in y.iter().zip(&expected).enumerate() {
                        // Values of about unit size, sums and exponentials in another order.
                        assert!(
                            (f64::from(*y) - expected).abs() < 3e-6,
                            "{instructions:?} {held:?} D {head_dim} Dv {value_dim} T {query_len} S {key_len}, value \
                             {index}: {y} for {expected}"
                        );
                    }
                }
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
            [(1, 20, 19), (1, 600, 3), (1, 600, 599), (1, 600, 400), (30, 30, 17)]
        {
            for (in_keys, column) in [(true, 0), (false, 5)] {
                let q = noise((1, 1, query_len, 8), 1);
                let spoiled = |seed: u64, spoils: bool| {
                    let mut held = values(&noise((1, 1, key_len, 8), seed));
                    if spoils {
                        held[place * 8 + column] = special;
                    }
                    Tensor::from_vec(held, (1, 1, key_len, 8), &Device::Cpu).unwrap()
                };
                let (k, v) = (spoiled(2, in_keys), spoiled(3, !in_keys));
                // The single query sees all keys, or all but the last ones.
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
    let q = Tensor::ones((1, 1, 1, 1), DType::F32, &Device::Cpu).unwrap();
    let v = noise((1, 1, 600, 4), 3);
    for (finite, expects_nan) in [(599, false), (0, false), (600, true)] {
        let keys = (0..600).map(|key| if key == finite { 1.0 } else { f32::NEG_INFINITY });
        let k = Tensor::from_vec(keys.collect::<Vec<f32>>(), (1, 1, 600, 1), &Device::Cpu).unwrap();
        for (instructions, y) in computed(&q, &k, &v, 1.0, &[Range { start: 0, end: 600 }]) {
            if expects_nan {
                assert!(y.iter().all(|y| y.is_nan()), "{instructions:?}: {y:?}");
            } else {
                assert_eq!(y, values(&v)[finite * 4..][..4], "{instructions:?}");
            }
        }
    }
}

/// Keys and values in f16 give through the public op what the same values in f32 give.
#[test]
fn a_cache_in_f16_is_read_as_it_is() {
    for (query_len, key_len, head_dim) in [(1, 37, 64), (20, 37, 64), (1, 9, 7), (5, 9, 33)] {
        let q = noise((2, 2, query_len, head_dim), 1);
        let half = |seed| noise((2, 2, key_len, head_dim), seed).to_dtype(DType::F16).unwrap();
        let (k, v) = (half(2), half(3));
        let visible: Vec<usize> =
            (0..2).flat_map(|_| (0..query_len).map(|query| key_len - query_len + query + 1)).collect();
        let wide = |x: &Tensor| x.to_dtype(DType::F32).unwrap();
        let expected = prefix_attention(&q, &wide(&k), &wide(&v), 0.3, &visible).unwrap();
        let y = prefix_attention(&q, &k, &v, 0.3, &visible).unwrap();
        assert_eq!(values(&y), values(&expected), "{query_len} {key_len} {head_dim}");
    }
}

/// Rows in slots apart from each other give the bits that the same rows give as one tensor, and what lies outside their own
/// tokens is never read.
#[test]
fn rows_in_slots_equal_rows_in_a_tensor() {
    let (heads, head_dim, key_len) = (3, 20, 300);
    let slots = [KvSlot { start: 310, capacity: 300 }, KvSlot { start: 4, capacity: 302 }];
    for dtype in [DType::F32, DType::F16] {
        for query_len in [1, 2, 7, 60] {
            for shorter in [0, 5, 230] {
                let q = noise((2, query_len, heads, head_dim), 1).transpose(1, 2).unwrap();
                let [k, v] =
                    [2, 3].map(|seed| noise((2, heads, key_len, head_dim), seed).to_dtype(dtype).unwrap());
                let visible: Vec<Range<usize>> = [key_len, key_len - shorter]
                    .iter()
                    .flat_map(|keys| (0..query_len).map(move |query| 0..keys - query_len + query + 1))
                    .collect();
                let lengths = [key_len, key_len - shorter];
                let memory = |tensor: &Tensor| {
                    let memory = Tensor::full(f32::NAN, (620, heads * head_dim), &Device::Cpu).unwrap();
                    let memory = memory.to_dtype(dtype).unwrap();
                    for (row, (slot, length)) in slots.iter().zip(lengths).enumerate() {
                        let place = side_by_side(&memory, &[*slot], heads).unwrap().unwrap();
                        let tokens = tensor.narrow(0, row, 1).unwrap().narrow(2, 0, length).unwrap();
                        place.slice_set(&tokens.contiguous().unwrap(), 2, 0).unwrap();
                    }
                    memory
                };
                let expected = window_attention(&q, &k, &v, 0.3, visible.clone()).unwrap();
                let found =
                    slot_attention(&q, [&memory(&k), &memory(&v)], &slots, 0.3, visible.clone()).unwrap();
                let bits = |x: &Tensor| values(x).into_iter().map(f32::to_bits).collect::<Vec<_>>();
                assert_eq!(bits(&found), bits(&expected), "{dtype:?} {query_len} {shorter}");
            }
        }
    }
    let q = noise((2, 1, heads, head_dim), 1);
    let q = q.reshape((2, heads, 1, head_dim)).unwrap();
    let memory = Tensor::zeros((620, heads * head_dim), DType::F32, &Device::Cpu).unwrap();
    for (slots, visible) in [
        (vec![slots[0]], vec![0..1, 0..1]),
        (vec![slots[0], KvSlot { start: 400, capacity: 221 }], vec![0..1, 0..1]),
        (slots.to_vec(), vec![0..301, 0..1]),
        (slots.to_vec(), vec![0..0, 0..1]),
    ] {
        assert!(slot_attention(&q, [&memory, &memory], &slots, 1.0, visible).is_err(), "{slots:?}");
    }
    let transposed = Tensor::zeros((heads * head_dim, 620), DType::F32, &Device::Cpu).unwrap().t().unwrap();
    for memories in [[&transposed, &memory], [&memory, &transposed]] {
        let error = slot_attention(&q, memories, &slots, 1.0, vec![0..1, 0..1]).unwrap_err().to_string();
        assert!(error.contains("[620, 60]") && error.contains("not contiguous"), "{error}");
    }
}
