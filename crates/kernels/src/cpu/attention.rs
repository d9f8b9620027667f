//! Head views of tensors, for attention over KV caches.

use candle_core::{DType, Result, Storage, Tensor};
use candle_gpt2_arithmetic::Heads;

use crate::error::KernelError;

/// An f32 tensor `(B, H, T, D)` on the CPU whose last axis is contiguous.
pub(crate) struct HeadsTensor(Tensor);

impl HeadsTensor {
    /// Wraps the tensor, copying it if its last axis is not contiguous.
    ///
    /// # Errors
    /// If the tensor is not f32 or not on the CPU.
    pub(crate) fn of(x: &Tensor) -> Result<Self> {
        if x.dtype() != DType::F32 || !x.device().is_cpu() {
            return Err(KernelError::not_cpu_floats(x).into());
        }
        Ok(Self(if x.stride().last() == Some(&1) { x.clone() } else { x.contiguous()? }))
    }

    /// Calls `work` with the tensor's heads and returns its result.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&Heads<'_>) -> R) -> Result<R> {
        let (batch, heads, tokens, head_dim) = self.0.dims4()?;
        let (storage, layout) = self.0.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else {
            return Err(KernelError::not_cpu_floats(&self.0).into());
        };
        let stride = |axis: usize| layout.stride().get(axis).copied().unwrap_or(0);
        let values = &storage.as_slice::<f32>()?[layout.start_offset()..];
        let strides = [stride(0), stride(1), stride(2)];
        Ok(work(&Heads::strided(values, [batch, heads, tokens, head_dim], strides)))
    }
}
