//! Attention over tensors.

use std::ops::Range;

use candle_core::{DType, Device, Result, Storage, Tensor};
use gpt2_arithmetic::{Heads, attention};

use crate::error::KernelError;
use crate::kv_dtype::KvDType;

/// A tensor `(B, H, T, D)` in f32 on the CPU, with the values of a token side by side.
pub(crate) struct HeadsTensor(Tensor);

impl HeadsTensor {
    /// The tensor, or a copy of it where the values of a token are apart.
    ///
    /// # Errors
    /// When it is of another type or on another device.
    pub(crate) fn of(x: &Tensor) -> Result<Self> {
        if x.dtype() != DType::F32 || !x.device().is_cpu() {
            return Err(KernelError::NotCpuFloats { found: x.dtype() }.into());
        }
        Ok(Self(if x.stride().last() == Some(&1) { x.clone() } else { x.contiguous()? }))
    }

    /// What `work` makes of its heads.
    pub(crate) fn with<R>(&self, work: impl FnOnce(&Heads<'_>) -> R) -> Result<R> {
        let (batch, heads, tokens, head_dim) = self.0.dims4()?;
        let (storage, layout) = self.0.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else {
            return Err(KernelError::NotCpuFloats { found: self.0.dtype() }.into());
        };
        let stride = |axis: usize| layout.stride().get(axis).copied().unwrap_or(0);
        let values = &storage.as_slice::<f32>()?[layout.start_offset()..];
        let strides = [stride(0), stride(1), stride(2)];
        Ok(work(&Heads::strided(values, [batch, heads, tokens, head_dim], strides)))
    }
}

/// Attention of queries `(B, H, T, D)` over keys and values of tensors; shapes are checked. Returns `(B, T, H, Dv)`.
pub(crate) fn window_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f32,
    visible: &[Range<usize>],
) -> Result<Tensor> {
    let (batch, heads, tokens, _) = q.dims4()?;
    let (_, _, key_len, value_dim) = v.dims4()?;
    let [q, k, v] = [q, k, v].map(HeadsTensor::of);
    let (k, v) = (k?, v?);
    let context =
        q?.with(|q| k.with(|k| v.with(|v| attention(q, [k, v], scale, visible))))???.ok_or_else(|| {
            KernelError::NoMemory { tokens: batch * key_len, width: heads * value_dim, dtype: KvDType::F32 }
        })?;
    Tensor::from_vec(context, (batch, tokens, heads, value_dim), &Device::Cpu)
}
