//! Where the rows of a batch have their keys and values in the memory of a cache.

use candle_core::{DType, Device, Result, Tensor};
use gpt2_arithmetic::KvSlot;
use half::f16;
use half::vec::HalfBitsVecExt;

use crate::error::KernelError;

/// Axis of the tokens in a memory `(N, H · D)`.
const TOKEN_DIM: usize = 0;

/// The slots as one tensor `(B, H, S, D)`, a view of a memory `(N, H · D)`, where they have the same room side by side; `None`
/// where they do not.
///
/// # Errors
/// When the memory is smaller than its slots, or its width is not that of `heads`.
pub fn side_by_side(memory: &Tensor, slots: &[KvSlot], heads: usize) -> Result<Option<Tensor>> {
    let Some(KvSlot { start, capacity }) = slots.first().copied() else { return Ok(None) };
    let places = KvSlot::side_by_side(slots.len(), capacity).into_iter();
    if !places.map(|slot| KvSlot { start: start + slot.start, ..slot }).eq(slots.iter().copied()) {
        return Ok(None);
    }
    let batch = slots.len();
    let head_dim = memory.dim(1)? / heads.max(1);
    let rows = memory.narrow(TOKEN_DIM, start, batch * capacity)?;
    rows.reshape((batch, heads, capacity, head_dim)).map(Some)
}

/// Memory `(N, H · D)` of zeros. On a CPU the system gives a page of it once something is written there, so room that is never
/// used costs nothing.
///
/// # Errors
/// When there is no memory for it.
pub fn zeroed_memory(shape: (usize, usize), dtype: DType, device: &Device) -> Result<Tensor> {
    let values = shape.0.checked_mul(shape.1);
    let bytes = values.and_then(|values| values.checked_mul(dtype.size_in_bytes()));
    // Where the allocation of a vector fails, the process ends; this asks first.
    let is_there = |bytes| !device.is_cpu() || Vec::<u8>::new().try_reserve_exact(bytes).is_ok();
    match values.zip(bytes.filter(|bytes| is_there(*bytes))) {
        None => Err(KernelError::NoMemory { tokens: shape.0, width: shape.1, dtype }.into()),
        // candle's zeros of f16 are written one by one.
        Some((values, _)) if device.is_cpu() && dtype == DType::F16 => {
            Tensor::from_vec(vec![0u16; values].reinterpret_into::<f16>(), shape, device)
        }
        Some(_) => Tensor::zeros(shape, dtype, device),
    }
}

/// Refuses memories that are no tensors of their own: slots are places in one piece of memory.
pub(super) fn expect_contiguous(memories: [&Tensor; 2]) -> Result<()> {
    match memories.into_iter().find(|memory| !memory.is_contiguous()) {
        Some(memory) => Err(KernelError::MemoryNotContiguous { memory: memory.dims().to_vec() }.into()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zero_and_too_much_is_refused() {
        for dtype in [DType::F32, DType::F16] {
            let memory = zeroed_memory((5, 12), dtype, &Device::Cpu).unwrap();
            assert_eq!((memory.dtype(), memory.dims()), (dtype, &[5, 12][..]));
            let values =
                memory.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(values, [0.0; 60]);
            for tokens in [usize::MAX, usize::MAX / 64, 1 << 50] {
                let error = zeroed_memory((tokens, 12), dtype, &Device::Cpu).unwrap_err().to_string();
                assert!(error.contains(&tokens.to_string()), "{error}");
            }
        }
    }
}
