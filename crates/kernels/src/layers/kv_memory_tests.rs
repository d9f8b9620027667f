//! Tests of the tensor-level operations; `candle-gpt2-arithmetic` tests the arithmetic itself.

use super::*;

fn all_types() -> [KvDType; 5] {
    [KvDType::F32, KvDType::F16, KvDType::Q8, DType::BF16.into(), DType::F64.into()]
}

fn noise(shape: (usize, usize, usize, usize), seed: u64) -> Tensor {
    let values = crate::noise::noise(shape.0 * shape.1 * shape.2 * shape.3, seed, 0.0, 4.0);
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn values(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

fn memory(tokens: usize, dtype: KvDType) -> KvMemory {
    KvMemory::new(3, 20, tokens, dtype, &Device::Cpu).unwrap()
}

/// Slots with a gap between them; the first row has the later slot.
const SLOTS: [KvSlot; 2] = [KvSlot { start: 320, capacity: 300 }, KvSlot { start: 0, capacity: 302 }];

/// Strided tokens are read back rounded to the storage type, and no other token is written.
#[test]
fn write_changes_only_its_own_tokens() {
    for dtype in all_types() {
        // Integer values that q8 stores with a small error.
        let exact =
            |seed| (noise((2, 9, 3, 20), seed) * 8.0).unwrap().round().unwrap().transpose(1, 2).unwrap();
        let (keys, new_values) = (exact(1), exact(2));
        let memory = memory(624, dtype);
        memory.write(&SLOTS, [&keys, &new_values], &[3, 40]).unwrap();
        for (row, (slot, position)) in SLOTS.iter().zip([3, 40]).enumerate() {
            let read = memory.read(*slot, position..position + 9).unwrap();
            for (read, written) in read.iter().zip([&keys, &new_values]) {
                let written = values(&written.narrow(0, row, 1).unwrap());
                for (read, written) in values(read).into_iter().zip(written) {
                    assert!((read - written).abs() <= 0.07, "{dtype}: {read} vs. {written}");
                }
            }
            for tokens in [0..position, position + 9..slot.capacity] {
                let read = memory.read(*slot, tokens).unwrap();
                assert!(read.iter().all(|x| values(x).iter().all(|value| *value == 0.0)), "{dtype}");
            }
        }
    }
}

#[test]
fn invalid_shapes_and_ranges_are_rejected() {
    let tokens = |shape| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    for dtype in all_types() {
        let memory = memory(96, dtype);
        let slots = KvSlot::side_by_side(2, 40);
        for (tokens, slots, positions) in [
            (tokens((2, 3, 2, 20)), slots.clone(), vec![0, 39]),
            (tokens((2, 3, 2, 20)), slots.clone(), vec![0, usize::MAX]),
            (tokens((2, 3, 2, 20)), slots.clone(), vec![0]),
            (tokens((2, 2, 2, 20)), slots.clone(), vec![0, 0]),
            (tokens((2, 3, 2, 4)), slots.clone(), vec![0, 0]),
            (tokens((2, 3, 2, 20)), KvSlot::side_by_side(2, 60), vec![0, 0]),
            (tokens((2, 3, 2, 20)), KvSlot::side_by_side(1, 40), vec![0]),
        ] {
            let error = memory.write(&slots, [&tokens; 2], &positions).unwrap_err().to_string();
            assert!(error.contains("cache has shape [96, 60]"), "{error}");
        }
        assert!(memory.read(slots[0], 30..41).is_err());
        assert!(memory.read(KvSlot { start: 8, capacity: 4 }, 0..1).is_err());
        assert!(memory.copy(slots[0], &memory, slots[1], 0..41).is_err());
        let others = KvMemory::new(3, 21, 96, dtype, &Device::Cpu).unwrap();
        assert!(memory.copy(slots[0], &others, slots[1], 0..1).is_err());
        // Only 64-bit targets have sizes that fit into a `usize` but cannot be allocated.
        let huge = [Some(usize::MAX), Some(usize::MAX / 64), 1_usize.checked_shl(50)];
        for tokens in huge.into_iter().flatten() {
            let error = KvMemory::new(12, 64, tokens, dtype, &Device::Cpu).unwrap_err().to_string();
            assert!(error.contains(&tokens.to_string()) && error.contains(dtype.name()), "{error}");
        }
    }
}

/// Copies between storages of one type are exact; copies to another type round.
#[test]
fn copies_preserve_the_tokens() {
    for dtype in all_types() {
        let (source, target) = (memory(624, dtype), memory(624, dtype));
        source.write(&SLOTS, [&noise((2, 3, 70, 20), 1), &noise((2, 3, 70, 20), 2)], &[0, 0]).unwrap();
        let expected = source.read(SLOTS[1], 0..70).unwrap();
        let same = |memory: &KvMemory, slot, expected: &[Tensor; 2]| {
            let read = memory.read(slot, 0..70).unwrap();
            read.iter().zip(expected).all(|(read, expected)| values(read) == values(expected))
        };
        target.copy(SLOTS[0], &source, SLOTS[1], 0..70).unwrap();
        assert!(same(&target, SLOTS[0], &expected), "{dtype}");
        for tokens in [0..21, 21..70] {
            source.copy(SLOTS[0], &source, SLOTS[1], tokens).unwrap();
        }
        assert!(same(&source, SLOTS[0], &expected), "{dtype}");
        let exact = memory(624, KvDType::F32);
        exact.copy(SLOTS[1], &source, SLOTS[0], 0..70).unwrap();
        assert!(same(&exact, SLOTS[1], &expected), "{dtype} to f32");
        // Copying the values back leaves them unchanged, or nearly so if the scales are recomputed.
        target.copy(SLOTS[1], &exact, SLOTS[1], 0..70).unwrap();
        let back = target.read(SLOTS[1], 0..70).unwrap();
        for (back, expected) in back.iter().zip(&expected) {
            for (back, expected) in values(back).into_iter().zip(values(expected)) {
                assert!((back - expected).abs() <= 4e-3, "{dtype}: {back} vs. {expected}");
            }
        }
    }
}

/// Rows in separate slots give the same bits as each row alone, in f32 storage of the same values.
///
/// Memory outside a row's own tokens never affects its result.
#[test]
fn rows_in_slots_equal_single_rows() {
    let key_len = 300;
    for dtype in [KvDType::F32, KvDType::F16] {
        for query_len in [1, 2, 7, 60] {
            for shorter in [0, 5, 230] {
                let q = noise((2, query_len, 3, 20), 1).transpose(1, 2).unwrap();
                let lengths = [key_len, key_len - shorter];
                let visible: Vec<Range<usize>> = lengths
                    .iter()
                    .flat_map(|keys| (0..query_len).map(move |query| 0..keys - query_len + query + 1))
                    .collect();
                let memory = memory(624, dtype);
                let poison = Tensor::full(f32::NAN, (2, 3, key_len, 20), &Device::Cpu).unwrap();
                memory.write(&SLOTS, [&poison; 2], &[0, 0]).unwrap();
                let tokens = [noise((2, 3, key_len, 20), 2), noise((2, 3, key_len, 20), 3)];
                for row in 0..2 {
                    let of_row =
                        |x: &Tensor| x.narrow(0, row, 1).unwrap().narrow(2, 0, lengths[row]).unwrap();
                    let [k, v] = tokens.each_ref().map(of_row);
                    memory.write(&SLOTS[row..=row], [&k, &v], &[0]).unwrap();
                }
                let found = memory.attention(&q, &SLOTS, 0.3, &visible).unwrap();
                for row in 0..2 {
                    let [k, v] = memory.read(SLOTS[row], 0..lengths[row]).unwrap();
                    let visible = &visible[row * query_len..(row + 1) * query_len];
                    let q = q.narrow(0, row, 1).unwrap();
                    let alone = [KvSlot { start: 0, capacity: 302 }];
                    let plain = KvMemory::new(3, 20, 302, KvDType::F32, &Device::Cpu).unwrap();
                    plain.write(&alone, [&k, &v], &[0]).unwrap();
                    let expected = plain.attention(&q, &alone, 0.3, visible).unwrap();
                    let bits = |x: &Tensor| values(x).into_iter().map(f32::to_bits).collect::<Vec<_>>();
                    let found = found.narrow(0, row, 1).unwrap();
                    assert_eq!(bits(&found), bits(&expected), "{dtype} {query_len} {shorter}");
                }
            }
        }
    }
    let (q, memory) = (noise((2, 3, 1, 20), 1), memory(624, KvDType::F32));
    for (slots, visible) in [
        (vec![SLOTS[0]], vec![0..1, 0..1]),
        (vec![SLOTS[0], KvSlot { start: 320, capacity: 320 }], vec![0..1, 0..1]),
        (SLOTS.to_vec(), vec![0..301, 0..1]),
        (SLOTS.to_vec(), vec![0..0, 0..1]),
    ] {
        assert!(memory.attention(&q, &slots, 1.0, &visible).is_err(), "{slots:?}");
    }
}

#[test]
fn dtype_names_round_trip() {
    for dtype in KvDType::all() {
        assert_eq!(dtype.name().parse(), Ok(dtype));
    }
    let error = "q4".parse::<KvDType>().unwrap_err().to_string();
    assert!(error.contains("`q4`") && error.contains("f32, f16, q8"), "{error}");
    assert_eq!(KvDType::Q8.bytes_per_token(12, 64), 12 * 140);
    assert_eq!(KvDType::from(DType::BF16).bytes_per_token(12, 64), 12 * 64 * 4);
    assert_eq!(KvDType::from(DType::U32), KvDType::F32);
}

/// A slot has one owner: overlapping slots are rejected, and a released slot can be taken again.
#[test]
fn overlapping_slots_are_rejected() {
    for dtype in all_types() {
        let memory = memory(96, dtype);
        let slot = |start, capacity| KvSlot { start, capacity };
        let middle = memory.claim(slot(32, 20)).unwrap();
        for (start, capacity) in [(32, 20), (32, 1), (48, 1), (48, 48), (16, 17), (0, 96), (0, 33)] {
            let error = memory.claim(slot(start, capacity)).unwrap_err().to_string();
            assert!(error.contains("overlaps tokens 32..64"), "{start}, {capacity}: {error}");
        }
        for (start, capacity) in [(96, 1), (80, 17), (8, 4), (0, 97), (16, usize::MAX), (usize::MAX - 15, 16)]
        {
            let error = memory.claim(slot(start, capacity)).unwrap_err().to_string();
            assert!(error.contains("for a cache of 96"), "{start}, {capacity}: {error}");
        }
        let neighbors = [memory.claim(slot(0, 32)).unwrap(), memory.claim(slot(64, 32)).unwrap()];
        assert!(memory.take(1).is_none() && memory.take(usize::MAX).is_none());
        assert_eq!((memory.take(0).unwrap().place().capacity, memory.tokens_taken()), (0, 96));
        assert!(memory.claim(slot(32, 0)).is_ok(), "an empty slot occupies no memory");
        drop(middle);
        let again = memory.take(30).unwrap();
        assert_eq!((again.place(), memory.tokens_taken()), (slot(32, 30), 96));
        assert!(neighbors.iter().all(|slot| memory.has(slot)) && !self::memory(16, dtype).has(&again));
    }
}

#[test]
fn out_of_range_slots_are_rejected() {
    for dtype in all_types() {
        let memory = memory(96, dtype);
        for (start, capacity) in [(80, 17), (usize::MAX - 15, 16), (16, usize::MAX), (usize::MAX, usize::MAX)]
        {
            let slots = vec![KvSlot { start, capacity }; 2];
            let found = memory.side_by_side(&slots);
            // Storage in the layout of the CPU kernel does not consist of tensors.
            assert!(matches!(found, Err(_) | Ok(None)), "{dtype}: {start}, {capacity}");
            assert_eq!(found.is_err(), !memory.has_kernel(), "{dtype}: {start}, {capacity}");
        }
    }
    assert_eq!(KvSlot::side_by_side(3, usize::MAX).len(), 3);
}
