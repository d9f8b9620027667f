//! The operations over tensors and over slots; the arithmetic itself is tested where it is.

use candle_core::Device;

use super::*;
use crate::side_by_side;

fn noise(shape: (usize, usize, usize, usize), seed: u64) -> Tensor {
    let values = crate::noise::noise(shape.0 * shape.1 * shape.2 * shape.3, seed, 0.0, 4.0);
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn values(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
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
