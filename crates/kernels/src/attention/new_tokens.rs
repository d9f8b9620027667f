//! Writing the keys or values of new tokens into the memory of a cache, in its type, where they are.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, InplaceOp2, Layout, Result, Tensor};
use half::slice::HalfFloatSliceExt;

use super::{Element, Heads};
use crate::parallel::{Parts, for_each_part};
use crate::simd::{InstructionSet, Job, LANES, Simd};
use crate::{KernelError, cuda};

/// Fewest values that are worth the threads.
const MIN_SHARED_VALUES: usize = 1 << 15;
/// Axis of the batch in a `(B, H, T, D)` tensor.
const BATCH_DIM: usize = 0;
/// Axis of the tokens in a `(B, H, T, D)` tensor.
const TOKEN_DIM: usize = 2;

/// Writes the keys and values of new tokens into two memories in place, those of row `b` from place `positions[b]` on, rounded
/// to the type of the memory. No gradient goes through it.
///
/// # Shapes
/// Memories `(B, H, S, D)`, contiguous; `keys` and `values` `(B, H, T, D)` with any strides.
///
/// # Errors
/// When the shapes are not these, or the tokens of a row do not fit behind its position.
pub fn write_tokens(memories: [&Tensor; 2], [keys, values]: [&Tensor; 2], positions: &[usize]) -> Result<()> {
    check(memories[0], keys, positions)?;
    check(memories[1], values, positions)?;
    if keys.device().is_cuda() && cuda::write_tokens(memories, [keys, values], positions)? {
        return Ok(());
    }
    write_each(memories[0], keys, positions)?;
    write_each(memories[1], values, positions)
}

fn check(memory: &Tensor, tokens: &Tensor, positions: &[usize]) -> Result<()> {
    let (batch, heads, capacity, head_dim) = memory.dims4()?;
    let (_, _, added, _) = tokens.dims4()?;
    let has_room = |position: &usize| position.checked_add(added).is_some_and(|end| end <= capacity);
    let fits = tokens.dims() == [batch, heads, added, head_dim]
        && positions.len() == batch
        && positions.iter().all(has_room);
    if !fits {
        let (memory, tokens) = (memory.dims().to_vec(), tokens.dims().to_vec());
        return Err(KernelError::TokensDoNotFit { memory, tokens, positions: positions.to_vec() }.into());
    }
    Ok(())
}

/// The keys or the values.
fn write_each(memory: &Tensor, tokens: &Tensor, positions: &[usize]) -> Result<()> {
    let is_kernels = memory.is_contiguous()
        && [memory, tokens].into_iter().all(|x| x.device().is_cpu())
        && matches!(memory.dtype(), DType::F32 | DType::F16)
        && tokens.dtype() == DType::F32
        && tokens.stride().last() == Some(&1);
    if is_kernels {
        return memory.inplace_op2(tokens, &WriteTokens { positions });
    }
    write_with_candle(memory, tokens, positions)
}

/// The same from candle's own operations: any device and type.
fn write_with_candle(memory: &Tensor, tokens: &Tensor, positions: &[usize]) -> Result<()> {
    let tokens = tokens.to_dtype(memory.dtype())?;
    if let [first, rest @ ..] = positions
        && rest.iter().all(|position| position == first)
    {
        return memory.slice_set(&tokens.contiguous()?, TOKEN_DIM, *first);
    }
    for (row, position) in positions.iter().enumerate() {
        let memory = memory.narrow(BATCH_DIM, row, 1)?;
        memory.slice_set(&tokens.narrow(BATCH_DIM, row, 1)?.contiguous()?, TOKEN_DIM, *position)?;
    }
    Ok(())
}

/// The kernel; shapes and types are checked.
struct WriteTokens<'a> {
    positions: &'a [usize],
}

impl InplaceOp2 for WriteTokens<'_> {
    fn name(&self) -> &'static str {
        "write-tokens"
    }

    fn cpu_fwd(
        &self,
        memory: &mut CpuStorage,
        memory_layout: &Layout,
        tokens: &CpuStorage,
        tokens_layout: &Layout,
    ) -> Result<()> {
        let tokens = Heads::new(tokens.as_slice::<f32>()?, tokens_layout)?;
        let (_, _, capacity, _) = memory_layout.shape().dims4()?;
        let (start, end) = memory_layout.contiguous_offsets().unwrap_or_default();
        let instructions = InstructionSet::detected();
        match memory {
            CpuStorage::F16(memory) => {
                let memory = &mut memory[start..end];
                write(memory.reinterpret_cast_mut(), capacity, &tokens, self.positions, instructions);
            }
            CpuStorage::F32(memory) => {
                write(&mut memory[start..end], capacity, &tokens, self.positions, instructions);
            }
            _ => return Err(KernelError::NotCpuFloats { found: memory.dtype() }.into()),
        }
        Ok(())
    }
}

fn write<E: Element>(
    memory: &mut [E],
    capacity: usize,
    tokens: &Heads<'_>,
    positions: &[usize],
    instructions: InstructionSet,
) {
    let row_len = capacity * tokens.head_dim;
    if row_len == 0 {
        return;
    }
    let write_head = |index: usize, memory: &mut [E]| {
        let (batch, head) = (index / tokens.heads, index % tokens.heads);
        let to = &mut memory[positions[batch] * tokens.head_dim..];
        instructions.run(WriteHead { tokens, batch, head, to });
    };
    if tokens.batch * tokens.heads * tokens.tokens * tokens.head_dim < MIN_SHARED_VALUES {
        memory.chunks_mut(row_len).enumerate().for_each(|(index, memory)| write_head(index, memory));
        return;
    }
    for_each_part(memory, Parts { row_len, rows: 1, columns: row_len }, |mut part| {
        write_head(part.first_row, part.row(0));
    });
}

/// The tokens of one head.
struct WriteHead<'a, E> {
    tokens: &'a Heads<'a>,
    batch: usize,
    head: usize,
    to: &'a mut [E],
}

impl<E: Element> Job for WriteHead<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { tokens, batch, head, to } = self;
        for (token, to) in to.chunks_mut(tokens.head_dim).take(tokens.tokens).enumerate() {
            let (from, from_rest) = tokens.row(batch, head, token).as_chunks::<LANES>();
            let (to, to_rest) = to.as_chunks_mut::<LANES>();
            for (from, to) in from.iter().zip(to) {
                E::store(simd, simd.load(from), to);
            }
            for (from, to) in from_rest.iter().zip(to_rest) {
                *to = E::from_f32(*from);
            }
        }
    }
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
            let tokens = crate::random::noise(batch * added * heads * head_dim, 1, 0.0, 4.0);
            let tokens = Tensor::from_vec(tokens, (batch, added, heads, head_dim), &Device::Cpu).unwrap();
            let tokens = tokens.transpose(1, 2).unwrap();
            let ragged: Vec<usize> = (0..batch).map(|row| row % (capacity - added + 1)).collect();
            for positions in [vec![1; batch], ragged] {
                for dtype in [DType::F32, DType::F16] {
                    let memory =
                        || Tensor::ones((batch, heads, capacity, head_dim), dtype, &Device::Cpu).unwrap();
                    let (written, expected) = ([memory(), memory()], [memory(), memory()]);
                    let others = tokens.neg().unwrap();
                    write_tokens(written.each_ref(), [&tokens, &others], &positions).unwrap();
                    write_with_candle(&expected[0], &tokens, &positions).unwrap();
                    write_with_candle(&expected[1], &others, &positions).unwrap();
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
        let memory = zeros((2, 3, 5, 4));
        for (tokens, positions) in [
            (zeros((2, 3, 2, 4)), vec![0, 4]),
            (zeros((2, 3, 2, 4)), vec![0, usize::MAX]),
            (zeros((2, 3, 2, 4)), vec![0]),
            (zeros((2, 2, 2, 4)), vec![0, 0]),
        ] {
            let error = write_tokens([&memory; 2], [&tokens; 2], &positions).unwrap_err().to_string();
            assert!(error.contains("[2, 3, 5, 4]"), "{error}");
        }
    }
}
