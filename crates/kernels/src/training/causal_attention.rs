//! Causal self-attention of all heads from the fused projection, with dropout on the weights and its gradient.

use candle_core::{D, Result, Shape, Tensor};
use gpt2_arithmetic::{AttentionDropout, CausalAttention};

use super::float::{CpuFloat, for_float, on_cpu, with_elements};
use super::is_cpu_float;
use super::operation::{Operation, Sums, record};
use crate::error::KernelError;

/// `softmax(scale · Q Kᵀ) V` over the keys up to each query's own position, for every head of a fused projection.
///
/// # Shapes
/// `qkv` `(B, T, 3 · H · D)`: queries, keys and values side by side, in each the heads side by side; returns
/// `(B, T, H · D)`.
///
/// # Errors
/// When the width of `qkv` is not a multiple of `3 · heads`, or the scale is not greater than 0.
pub fn causal_self_attention(
    qkv: &Tensor,
    heads: usize,
    scale: f64,
    dropout: Option<AttentionDropout>,
) -> Result<Tensor> {
    fn forward<T: CpuFloat>(qkv: &Tensor, attention: Attention) -> Result<Tensor> {
        let sizes = attention.sizes(qkv.shape())?;
        let output = with_elements::<T, 1, _>([qkv], |[qkv]| Ok(T::causal_attention(qkv, sizes)))?;
        let shape = (sizes.batch, sizes.tokens, sizes.heads * sizes.head_dim);
        record(&[qkv], on_cpu(output), shape, attention)
    }
    if !(scale > 0.0 && scale.is_finite()) {
        return Err(KernelError::AttentionScale { found: scale }.into());
    }
    if !is_cpu_float(qkv) {
        return causal_attention_reference(qkv, heads, scale, dropout);
    }
    for_float!(qkv.dtype(), forward(qkv, Attention { heads, scale, dropout }))
}

/// The same as a composition of candle operations.
///
/// # Errors
/// When the width of `qkv` is not a multiple of `3 · heads`.
pub fn causal_attention_reference(
    qkv: &Tensor,
    heads: usize,
    scale: f64,
    dropout: Option<AttentionDropout>,
) -> Result<Tensor> {
    let (batch, tokens, width) = qkv.dims3()?;
    let head_dim = head_dim(width, heads)?;
    let split = |index: usize| -> Result<Tensor> {
        let part = qkv.narrow(D::Minus1, index * width / 3, width / 3)?;
        part.reshape((batch, tokens, heads, head_dim))?.transpose(1, 2)?.contiguous() // (B, H, T, D)
    };
    let (q, k, v) = (split(0)?, split(1)?, split(2)?);
    let mut hidden = vec![0f32; tokens * tokens];
    for (query, row) in hidden.chunks_mut(tokens).enumerate() {
        row[query + 1..].fill(f32::NEG_INFINITY);
    }
    let hidden = Tensor::from_vec(hidden, (tokens, tokens), qkv.device())?.to_dtype(qkv.dtype())?;
    let scores = (q.matmul(&k.t()?)? * scale)?.broadcast_add(&hidden)?; // (B, H, T, T)
    let mut weights = candle_nn::ops::softmax(&scores, D::Minus1)?;
    if let Some(dropout) = dropout {
        let mut factors = vec![0f64; batch * heads * tokens * tokens];
        for (stream, factors) in factors.chunks_mut(tokens * tokens).enumerate() {
            let mut mask = dropout.mask(stream);
            let mut kept = vec![false; tokens];
            for (query, row) in factors.chunks_mut(tokens).enumerate() {
                mask.draw(&mut kept[..=query]);
                for (factor, kept) in row[..=query].iter_mut().zip(&kept) {
                    *factor = if *kept { mask.factor() } else { 0.0 };
                }
            }
        }
        let factors = Tensor::from_vec(factors, weights.shape(), qkv.device())?;
        weights = (weights * factors.to_dtype(qkv.dtype())?)?;
    }
    weights.matmul(&v)?.transpose(1, 2)?.reshape((batch, tokens, width / 3)) // (B, T, H · D)
}

fn head_dim(width: usize, heads: usize) -> Result<usize> {
    if heads == 0 || !width.is_multiple_of(3 * heads) {
        return Err(KernelError::FusedWidth { heads, found: width }.into());
    }
    Ok(width / (3 * heads))
}

struct Attention {
    heads: usize,
    scale: f64,
    dropout: Option<AttentionDropout>,
}

impl Attention {
    fn sizes(&self, shape: &Shape) -> Result<CausalAttention> {
        let Self { heads, scale, dropout } = *self;
        let (batch, tokens, width) = shape.dims3()?;
        Ok(CausalAttention { batch, tokens, heads, head_dim: head_dim(width, heads)?, scale, dropout })
    }
}

impl Operation for Attention {
    fn name(&self) -> &'static str {
        "causal-self-attention"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        fn backward<T: CpuFloat>(qkv: &Tensor, gradient: &Tensor, sizes: CausalAttention) -> Result<Tensor> {
            let values = with_elements::<T, 2, _>([qkv, gradient], |[qkv, gradient]| {
                Ok(T::causal_attention_backward(qkv, gradient, sizes))
            })?;
            Tensor::from_vec(values, qkv.shape(), qkv.device())
        }
        let qkv = &inputs[0];
        let gradient = for_float!(qkv.dtype(), backward(qkv, gradient, self.sizes(qkv.shape())?))?;
        sums.add(qkv, gradient)
    }
}
