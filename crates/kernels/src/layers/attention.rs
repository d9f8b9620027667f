//! `softmax(scale · Q Kᵀ) V` where every query sees keys that lie side by side: causal, full and windowed attention, with and
//! without a cache. What a query does not see never reaches its result on a CPU, not even NaN.

use std::ops::Range;

use candle_core::{Result, Tensor};

use crate::error::KernelError;
use crate::{cpu, cuda};

/// Attention in f32 on the CPU where each query sees the first keys: causal and full attention. No gradient goes through it.
///
/// # Shapes
/// As [`window_attention`]; `visible` has for each query the number of keys that it sees, from 1 to `S`.
///
/// # Errors
/// As [`window_attention`].
pub fn prefix_attention(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, visible: &[usize]) -> Result<Tensor> {
    window_attention(q, k, v, scale, &visible.iter().map(|keys| 0..*keys).collect::<Vec<_>>())
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
/// `q` `(B, H, T, D)`, `k` `(B, H, S, D)` and `v` `(B, H, S, Dv)` in f32 with any strides. `visible` has for each of the `B · T` queries the keys that it sees, at least one of the `S`.
/// Returns `(B, H, T, Dv)`, laid out as `(B, T, H, Dv)`.
///
/// # Errors
/// When the shapes or types are not these, or the tensors are not on the CPU.
pub fn window_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    visible: &[Range<usize>],
) -> Result<Tensor> {
    let (batch, heads, query_len, head_dim) = q.dims4()?;
    let (_, _, key_len, value_dim) = v.dims4()?;
    let fits = head_dim > 0
        && k.dims() == [batch, heads, key_len, head_dim]
        && v.dims() == [batch, heads, key_len, value_dim]
        && visible.len() == batch * query_len
        && visible.iter().all(|keys| !keys.is_empty() && keys.end <= key_len);
    if !fits {
        let [q, k, v] = [q, k, v].map(|x| x.dims().to_vec());
        return Err(KernelError::AttentionShapes { q, k, v }.into());
    }
    #[expect(clippy::cast_possible_truncation, reason = "the scores are f32")]
    cpu::window_attention(q, k, v, scale as f32, visible)?.transpose(1, 2)
}
