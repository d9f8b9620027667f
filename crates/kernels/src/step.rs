//! A step of one new token for each row whose places are read from the device's memory, where other functions take numbers:
//! so a [`Recording`](crate::Recording) of a step serves all steps.

use candle_core::{DType, Result, Tensor};

use crate::attention::{prefix_attention, write_tokens};
use crate::{KernelError, cuda};

/// Writes the key and the value of a new token of each row behind the `lengths[b]` tokens in memory, where there is room.
///
/// # Shapes
/// Memories `(B, H, S, D)`, contiguous; `keys` and `values` `(B, H, 1, D)`; `lengths` `(B)` of u32.
///
/// # Errors
/// When the shapes are not these, or an NVIDIA GPU is given types that differ or are other than f32, f16 and bf16.
pub fn write_step(memories: [&Tensor; 2], [keys, values]: [&Tensor; 2], lengths: &Tensor) -> Result<()> {
    if keys.device().is_cuda() {
        return match cuda::write_step(memories, [keys, values], lengths)? {
            true => Ok(()),
            false => Err(not_a_step(keys, memories[0])),
        };
    }
    write_tokens(memories, [keys, values], &places(lengths, 0)?)
}

/// Attention of the new token of each row over the `lengths[b]` tokens before it and itself, as
/// [`prefix_attention`] and [`prefix_attention_on_gpu`](crate::prefix_attention_on_gpu) compute it.
///
/// # Shapes
/// `q` `(B, H, 1, D)`, `k` and `v` `(B, H, S, D)`, `lengths` `(B)` of u32; returns `(B, H, 1, D)`.
///
/// # Errors
/// When the shapes are not these; on an NVIDIA GPU also for heads wider than 256, and for types that differ or are other
/// than f32, f16 and bf16.
pub fn step_attention(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, lengths: &Tensor) -> Result<Tensor> {
    if q.device().is_cuda() {
        return cuda::step_attention(q, k, v, scale, lengths)?.ok_or_else(|| not_a_step(q, k));
    }
    prefix_attention(q, k, v, scale, &places(lengths, 1)?)
}

/// `lengths`, each plus `more`.
fn places(lengths: &Tensor, more: usize) -> Result<Vec<usize>> {
    let lengths = lengths.to_dtype(DType::U32)?.to_vec1::<u32>()?;
    Ok(lengths.into_iter().map(|length| length as usize + more).collect())
}

fn not_a_step(token: &Tensor, memory: &Tensor) -> candle_core::Error {
    let (token, memory) = ((token.dims().to_vec(), token.dtype()), (memory.dims().to_vec(), memory.dtype()));
    KernelError::NotAStep { token, memory }.into()
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// Lengths in a tensor do what the same lengths as numbers do.
    #[test]
    fn a_step_from_memory_is_that_from_numbers() {
        const LENGTHS: [u32; 2] = [3, 7];
        let places = LENGTHS.map(|length| length as usize);
        let noise = |shape: (usize, usize, usize, usize), seed| {
            let values = crate::random::noise(shape.0 * shape.1 * shape.2 * shape.3, seed, 0.0, 1.0);
            Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
        };
        let memories = || [noise((2, 3, 9, 16), 1), noise((2, 3, 9, 16), 2)];
        let [q, k, v] = [3, 4, 5].map(|seed| noise((2, 3, 1, 16), seed));
        let lengths = Tensor::new(&LENGTHS, &Device::Cpu).unwrap();
        let (found, expected) = (memories(), memories());
        write_step(found.each_ref(), [&k, &v], &lengths).unwrap();
        write_tokens(expected.each_ref(), [&k, &v], &places).unwrap();
        let values = |x: &Tensor| x.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(values(found), values(expected));
        }
        let context = step_attention(&q, &found[0], &found[1], 0.25, &lengths).unwrap();
        let seen = places.map(|length| length + 1);
        let expected = prefix_attention(&q, &expected[0], &expected[1], 0.25, &seen).unwrap();
        assert_eq!(values(&context), values(&expected));
        assert!(write_step(found.each_ref(), [&k, &v], &lengths.narrow(0, 0, 1).unwrap()).is_err());
    }
}
