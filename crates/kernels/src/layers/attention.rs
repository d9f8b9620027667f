//! `softmax(scale · Q Kᵀ) V` where every query sees the first keys, on an NVIDIA GPU.

use candle_core::{Result, Tensor};

use crate::cuda;

/// Attention on an NVIDIA GPU where each query sees the first keys: causal and full attention, for tensors of one type: f32, f16
/// or bf16. `None` if it does not apply: on another device, in a build without the feature `cuda`, or if a gradient is
/// wanted. Hidden keys and values must be finite, but for one query in heads up to
/// [`WIDEST_SINGLE_QUERY`](crate::WIDEST_SINGLE_QUERY) wide.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_kernels::prefix_attention_on_gpu;
///
/// let q = Tensor::zeros((1, 3, 5, 4), DType::F32, &Device::Cpu)?;
/// assert!(prefix_attention_on_gpu(&q, &q, &q, 0.5, &[1, 2, 3, 4, 5])?.is_none(), "this is no GPU");
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Shapes
/// `q` `(B, H, T, D)`, `k` `(B, H, S, D)` and `v` `(B, H, S, Dv)` with any strides. `visible` has for each of the `B · T` queries
/// the number of keys that it sees, from 1 to `S`. Returns `(B, H, T, Dv)`, with any strides.
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
