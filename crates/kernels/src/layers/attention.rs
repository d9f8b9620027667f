//! Attention on NVIDIA GPUs over a prefix of the keys: `softmax(scale · Q Kᵀ) V`.

use candle_core::{Result, Tensor};

use crate::cuda;

/// Attention on an NVIDIA GPU where each query sees a prefix of the keys.
///
/// This covers causal and full attention. All tensors must have one dtype: f32, f16 or bf16. Returns `None`
/// on other devices, without the feature `cuda`, or if a gradient is needed.
///
/// Hidden keys and values must be finite. The exception is a single query in heads up to
/// [`WIDEST_SINGLE_QUERY`](crate::WIDEST_SINGLE_QUERY) wide, whose kernel does not read them.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_kernels::prefix_attention_on_gpu;
///
/// let q = Tensor::zeros((1, 3, 5, 4), DType::F32, &Device::Cpu)?;
/// assert!(prefix_attention_on_gpu(&q, &q, &q, 0.5, &[1, 2, 3, 4, 5])?.is_none(), "the tensors are not on a GPU");
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Shapes
/// `q` `(B, H, T, D)`, `k` `(B, H, S, D)` and `v` `(B, H, S, Dv)`, with any strides. `visible` has the number
/// of visible keys, from 1 to `S`, for each of the `B · T` queries. Returns `(B, H, T, Dv)`, with any
/// strides.
///
/// # Errors
/// If the GPU fails.
pub fn prefix_attention_on_gpu(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    visible: &[usize],
) -> Result<Option<Tensor>> {
    cuda::prefix_attention(q, k, v, scale, visible)
}
