//! `softmax(scale · Q Kᵀ) V` where every query sees keys that lie side by side: causal, full and windowed attention, with and
//! without a cache. What a query does not see never reaches its result on a CPU, not even NaN.

#[cfg(test)]
#[path = "attention_tests.rs"]
mod tests;

use std::ops::Range;

use candle_core::{DType, Result, Tensor};
use gpt2_arithmetic::KvSlot;

use super::slots::expect_contiguous;
use crate::cpu::{HeldIn, WindowAttention};
use crate::cuda;
use crate::error::KernelError;

/// Attention in f32 on the CPU where each query sees the first keys: causal and full attention. No gradient goes through it.
///
/// # Shapes
/// As [`window_attention`]; `visible` has for each query the number of keys that it sees, from 1 to `S`.
///
/// # Errors
/// As [`window_attention`].
pub fn prefix_attention(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, visible: &[usize]) -> Result<Tensor> {
    window_attention(q, k, v, scale, visible.iter().map(|keys| 0..*keys).collect())
}

/// The same on an NVIDIA GPU, for tensors of one type: f32, f16 or bf16. `None` where it does not apply: on another device,
/// in a build without the feature `cuda`, or where a gradient is wanted. Hidden keys and values must be
/// finite, but for one query in heads up to [`WIDEST_SINGLE_QUERY`](crate::WIDEST_SINGLE_QUERY) wide.
///
/// # Shapes
/// As [`prefix_attention`].
///
/// # Errors
/// When the GPU fails.
pub fn prefix_attention_on_gpu(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    visible: &[usize],
) -> Result<Option<Tensor>> {
    cuda::prefix_attention(q, k, v, scale, visible)
}

/// Attention in f32 on the CPU where each query sees some keys side by side. No gradient goes through it.
///
/// # Shapes
/// `q` `(B, H, T, D)` in f32; `k` `(B, H, S, D)` and `v` `(B, H, S, Dv)`, both in f32 or both in f16, as a cache may hold
/// them; with any strides. `visible` has for each of the `B · T` queries the keys that it sees, at least one of the `S`.
/// Returns `(B, H, T, Dv)`, laid out as `(B, T, H, Dv)`.
///
/// # Errors
/// When the shapes or types are not these, or the tensors are not on the CPU.
pub fn window_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    visible: Vec<Range<usize>>,
) -> Result<Tensor> {
    let (batch, heads, query_len, head_dim) = q.dims4()?;
    let (_, _, key_len, value_dim) = v.dims4()?;
    let fits = head_dim > 0
        && k.dims() == [batch, heads, key_len, head_dim]
        && v.dims() == [batch, heads, key_len, value_dim]
        && visible.len() == batch * query_len
        && visible.iter().all(|keys| !keys.is_empty() && keys.end <= key_len);
    attend(q, k, v, scale, visible, fits.then_some(HeldIn::Tensors))
}

/// The same over the keys and values that a cache holds in memory, where the rows of a batch have slots of their own.
///
/// # Shapes
/// `q` `(B, H, T, D)` in f32; `memories`, of the keys and of the values, `(N, H · D)`, contiguous, both in f32 or both in
/// f16; `slots` one for each row. `visible` has for each of the `B · T` queries the keys that it sees, at least one of those
/// that its slot has room for. Returns `(B, H, T, D)`, laid out as `(B, T, H, D)`.
///
/// # Errors
/// As [`window_attention`], and when a memory is not contiguous.
pub fn slot_attention(
    q: &Tensor,
    [keys, values]: [&Tensor; 2],
    slots: &[KvSlot],
    scale: f64,
    visible: Vec<Range<usize>>,
) -> Result<Tensor> {
    let (batch, heads, query_len, head_dim) = q.dims4()?;
    let (tokens, width) = keys.dims2()?;
    expect_contiguous([keys, values])?;
    let is_seen = |(query, seen): (usize, &Range<usize>)| {
        let capacity = slots.get(query / query_len).map_or(0, |slot| slot.capacity);
        !seen.is_empty() && seen.end <= capacity
    };
    let fits = head_dim > 0
        && width == heads * head_dim
        && values.dims() == keys.dims()
        && slots.len() == batch
        && slots.iter().all(|slot| slot.is_in(tokens))
        && visible.len() == batch * query_len
        && visible.iter().enumerate().all(is_seen);
    attend(q, keys, values, scale, visible, fits.then(|| HeldIn::Slots(slots.to_vec())))
}

/// `held` is `None` where the shapes do not fit.
fn attend(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    visible: Vec<Range<usize>>,
    held: Option<HeldIn>,
) -> Result<Tensor> {
    let Some(held) = held else {
        let [q, k, v] = [q, k, v].map(|x| x.dims().to_vec());
        return Err(KernelError::AttentionShapes { q, k, v }.into());
    };
    let dtype = if k.dtype() == DType::F16 { DType::F16 } else { DType::F32 };
    let is_other = |(x, dtype): &(&Tensor, DType)| x.dtype() != *dtype || !x.device().is_cpu();
    if let Some((other, _)) = [(q, DType::F32), (k, dtype), (v, dtype)].into_iter().find(is_other) {
        return Err(KernelError::NotCpuFloats { found: other.dtype() }.into());
    }
    let rows = |x: &Tensor| if x.stride().last() == Some(&1) { Ok(x.clone()) } else { x.contiguous() };
    #[expect(clippy::cast_possible_truncation, reason = "the scores are f32")]
    let op = WindowAttention { scale: scale as f32, visible, held };
    rows(q)?.apply_op3_no_bwd(&rows(k)?, &rows(v)?, &op)?.transpose(1, 2)
}
