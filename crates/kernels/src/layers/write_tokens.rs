//! Writing the keys or values of new tokens into the memory of a cache, in its type, where they are.

use candle_core::{DType, Result, Tensor};
use gpt2_arithmetic::KvSlot;

use super::slots::{expect_contiguous, side_by_side};
use crate::cpu::WriteTokens;
use crate::cuda;
use crate::error::KernelError;

/// Axis of the batch in a `(B, H, T, D)` tensor.
const FIRST_DIM: usize = 0;
/// Axis of the tokens in a `(B, H, T, D)` tensor.
const TOKEN_DIM: usize = 2;

/// Writes the keys and values of new tokens into two memories in place, those of row `b` into its slot from place
/// `positions[b]` on, rounded to the type of the memory. No gradient goes through it.
///
/// # Shapes
/// Memories `(N, H · D)`, contiguous; `keys` and `values` `(B, H, T, D)` with any strides; a slot and a position for each of
/// the `B` rows.
///
/// # Errors
/// When the shapes are not these, a memory is not contiguous, or the tokens of a row do not fit into its slot from its position
/// on.
pub fn write_tokens(
    memories: [&Tensor; 2],
    slots: &[KvSlot],
    [keys, values]: [&Tensor; 2],
    positions: &[usize],
) -> Result<()> {
    expect_contiguous(memories)?;
    check(memories[0], slots, keys, positions)?;
    check(memories[1], slots, values, positions)?;
    if keys.device().is_cuda()
        && let [Some(key_memory), Some(value_memory)] = [
            side_by_side(memories[0], slots, keys.dims4()?.1)?,
            side_by_side(memories[1], slots, values.dims4()?.1)?,
        ]
        && cuda::write_tokens([&key_memory, &value_memory], [keys, values], positions)?
    {
        return Ok(());
    }
    write_each(memories[0], slots, keys, positions)?;
    write_each(memories[1], slots, values, positions)
}

fn check(memory: &Tensor, slots: &[KvSlot], tokens: &Tensor, positions: &[usize]) -> Result<()> {
    let (held, width) = memory.dims2()?;
    let (batch, heads, added, head_dim) = tokens.dims4()?;
    let has_room = |(slot, position): (&KvSlot, &usize)| {
        slot.is_in(held) && position.checked_add(added).is_some_and(|end| end <= slot.capacity)
    };
    let fits = heads * head_dim == width
        && [slots.len(), positions.len()] == [batch; 2]
        && slots.iter().zip(positions).all(has_room);
    if !fits {
        let (memory, tokens) = (memory.dims().to_vec(), tokens.dims().to_vec());
        return Err(KernelError::TokensDoNotFit { memory, tokens, positions: positions.to_vec() }.into());
    }
    Ok(())
}

/// The keys or the values.
fn write_each(memory: &Tensor, slots: &[KvSlot], tokens: &Tensor, positions: &[usize]) -> Result<()> {
    let is_kernels = [memory, tokens].into_iter().all(|x| x.device().is_cpu())
        && matches!(memory.dtype(), DType::F32 | DType::F16)
        && tokens.dtype() == DType::F32
        && tokens.stride().last() == Some(&1);
    if is_kernels {
        return memory.inplace_op2(tokens, &WriteTokens { slots, positions });
    }
    write_with_candle(memory, slots, tokens, positions)
}

/// The same from candle's own operations: any device and type.
fn write_with_candle(memory: &Tensor, slots: &[KvSlot], tokens: &Tensor, positions: &[usize]) -> Result<()> {
    let heads = tokens.dims4()?.1;
    let tokens = tokens.to_dtype(memory.dtype())?;
    for (row, (slot, position)) in slots.iter().zip(positions).enumerate() {
        if let Some(memory) = side_by_side(memory, &[*slot], heads)? {
            memory.slice_set(&tokens.narrow(FIRST_DIM, row, 1)?.contiguous()?, TOKEN_DIM, *position)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// The kernel, from a strided view, leaves in memory what candle's operations leave.
    #[test]
    fn tokens_are_written_in_place_and_nowhere_else() {
        let shapes = [(2, 3, 9, 64, 2), (1, 2, 5, 7, 1), (3, 1, 4, 33, 1), (2, 12, 40, 64, 30)];
        for (batch, heads, capacity, head_dim, added) in shapes {
            let tokens = crate::noise::noise(batch * added * heads * head_dim, 1, 0.0, 4.0);
            let tokens = Tensor::from_vec(tokens, (batch, added, heads, head_dim), &Device::Cpu).unwrap();
            let tokens = tokens.transpose(1, 2).unwrap();
            let ragged: Vec<usize> = (0..batch).map(|row| row % (capacity - added + 1)).collect();
            // Side by side, and in another order with other rooms.
            let regular = KvSlot::side_by_side(batch, capacity);
            let apart: Vec<KvSlot> = (0..batch)
                .rev()
                .map(|place| KvSlot { start: place * (capacity + 2), capacity: capacity + place % 2 })
                .collect();
            for (positions, slots) in
                [(vec![1; batch], &regular), (ragged.clone(), &regular), (ragged.clone(), &apart)]
            {
                for dtype in [DType::F32, DType::F16] {
                    let memory = || {
                        let shape = (batch * (capacity + 2), heads * head_dim);
                        Tensor::ones(shape, dtype, &Device::Cpu).unwrap()
                    };
                    let (written, expected) = ([memory(), memory()], [memory(), memory()]);
                    let others = tokens.neg().unwrap();
                    write_tokens(written.each_ref(), slots, [&tokens, &others], &positions).unwrap();
                    write_with_candle(&expected[0], slots, &tokens, &positions).unwrap();
                    write_with_candle(&expected[1], slots, &others, &positions).unwrap();
                    let values = |x: &Tensor| {
                        x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
                    };
                    for (written, expected) in written.iter().zip(&expected) {
                        assert_eq!(values(written), values(expected), "{dtype:?} {positions:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn tokens_that_do_not_fit_are_refused() {
        let zeros =
            |shape: (usize, usize, usize, usize)| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
        let memory = Tensor::zeros((10, 12), DType::F32, &Device::Cpu).unwrap();
        let slots = KvSlot::side_by_side(2, 5);
        for (tokens, slots, positions) in [
            (zeros((2, 3, 2, 4)), slots.clone(), vec![0, 4]),
            (zeros((2, 3, 2, 4)), slots.clone(), vec![0, usize::MAX]),
            (zeros((2, 3, 2, 4)), slots.clone(), vec![0]),
            (zeros((2, 2, 2, 4)), slots, vec![0, 0]),
            (zeros((2, 3, 2, 4)), KvSlot::side_by_side(2, 6), vec![0, 0]),
            (zeros((2, 3, 2, 4)), KvSlot::side_by_side(1, 5), vec![0]),
        ] {
            let error = write_tokens([&memory; 2], &slots, [&tokens; 2], &positions).unwrap_err().to_string();
            assert!(error.contains("[10, 12]"), "{error}");
        }
    }

    /// Written into a copy, the tokens would be lost without an error.
    #[test]
    fn a_memory_in_another_order_is_refused() {
        let memory = Tensor::zeros((10, 12), DType::F32, &Device::Cpu).unwrap();
        let transposed = Tensor::zeros((12, 10), DType::F32, &Device::Cpu).unwrap().t().unwrap();
        let tokens = Tensor::ones((2, 3, 2, 4), DType::F32, &Device::Cpu).unwrap();
        let slots = KvSlot::side_by_side(2, 5);
        for memories in [[&transposed, &memory], [&memory, &transposed]] {
            let error = write_tokens(memories, &slots, [&tokens; 2], &[0, 0]).unwrap_err().to_string();
            assert!(error.contains("[10, 12]") && error.contains("not contiguous"), "{error}");
        }
        let written = memory.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(written, [0.0; 120], "nothing is written before the check");
    }
}
