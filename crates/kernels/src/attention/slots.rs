//! Where the rows of a batch have their keys and values in the memory of a cache.

use candle_core::{DType, Device, Result, Tensor};
use half::f16;
use half::vec::HalfBitsVecExt;

use crate::KernelError;

/// Room of one row in a memory `(N, H · D)`, which holds `N` tokens: `capacity` of them from token `start` on, laid out as
/// `(H, capacity, D)`.
///
/// So rows of one memory need not lie side by side or have the same room, and rows that do are a tensor `(B, H, S, D)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvSlot {
    /// The first token.
    pub start: usize,
    /// Tokens.
    pub capacity: usize,
}

impl KvSlot {
    /// The slots of `batch` rows side by side.
    pub fn side_by_side(batch: usize, capacity: usize) -> Vec<Self> {
        (0..batch).map(|row| Self { start: row * capacity, capacity }).collect()
    }

    /// Whether it lies in a memory for so many tokens.
    pub(crate) fn is_in(self, tokens: usize) -> bool {
        self.start.checked_add(self.capacity).is_some_and(|end| end <= tokens)
    }
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

    #[test]
    fn slots_know_where_they_end() {
        assert_eq!(
            KvSlot::side_by_side(2, 3),
            [KvSlot { start: 0, capacity: 3 }, KvSlot { start: 3, capacity: 3 }]
        );
        let slot = KvSlot { start: 3, capacity: 3 };
        assert!(slot.is_in(6) && !slot.is_in(5));
        assert!(!KvSlot { start: 1, capacity: usize::MAX }.is_in(6));
    }
}
