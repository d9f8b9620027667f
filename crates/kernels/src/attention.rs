//! `softmax(scale · Q Kᵀ) V` on the CPU where every query sees keys that lie side by side: causal, full and windowed attention,
//! with and without a cache.
//!
//! One query, a step of decoding, is bound by memory: [`one_query`]. Many queries are bound by arithmetic: [`many_queries`].
//! Neither computes what no query sees, and what a query does not see never reaches its result, not even NaN.

mod many_queries;
mod new_tokens;
mod one_query;
#[cfg(test)]
mod tests;

use std::ops::Range;

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor};

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::simd::{InstructionSet, LANES, Simd};
use crate::vector_math::exp;
use crate::{KernelError, cuda};

pub(crate) use many_queries::{RowTile, multiply_rows};
pub use new_tokens::write_tokens;

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
/// in a build without the feature `cuda`, or where a gradient is wanted.
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
    if !fits {
        return Err(KernelError::AttentionShapes {
            q: q.dims().to_vec(),
            k: k.dims().to_vec(),
            v: v.dims().to_vec(),
        }
        .into());
    }
    let held = if k.dtype() == DType::F16 { DType::F16 } else { DType::F32 };
    let is_other = |(x, dtype): &(&Tensor, DType)| x.dtype() != *dtype || !x.device().is_cpu();
    if let Some((other, _)) = [(q, DType::F32), (k, held), (v, held)].into_iter().find(is_other) {
        return Err(KernelError::NotCpuFloats { found: other.dtype() }.into());
    }
    let rows = |x: &Tensor| if x.stride().last() == Some(&1) { Ok(x.clone()) } else { x.contiguous() };
    #[expect(clippy::cast_possible_truncation, reason = "the scores are f32")]
    let op = WindowAttention { scale: scale as f32, visible };
    rows(q)?.apply_op3_no_bwd(&rows(k)?, &rows(v)?, &op)?.transpose(1, 2)
}

struct WindowAttention {
    scale: f32,
    visible: Vec<Range<usize>>,
}

impl CustomOp3 for WindowAttention {
    fn name(&self) -> &'static str {
        "window-attention"
    }

    /// Returns `(B, T, H, Dv)`.
    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let q = Heads::new(q.as_slice::<f32>()?, q_layout)?;
        let (scale, visible, instructions) = (self.scale, &self.visible, InstructionSet::detected());
        let (_, _, _, value_dim) = v_layout.shape().dims4()?;
        let output = match (k, v) {
            (CpuStorage::F16(k), CpuStorage::F16(v)) => {
                let k = Heads::new(k.as_slice().reinterpret_cast(), k_layout)?;
                let v = Heads::new(v.as_slice().reinterpret_cast(), v_layout)?;
                attention(&q, &k, &v, scale, visible, instructions)
            }
            _ => {
                let k = Heads::new(k.as_slice::<f32>()?, k_layout)?;
                let v = Heads::new(v.as_slice::<f32>()?, v_layout)?;
                attention(&q, &k, &v, scale, visible, instructions)
            }
        };
        Ok((CpuStorage::F32(output), (q.batch, q.tokens, q.heads, value_dim).into()))
    }
}

/// What keys and values are held in: f32, or the bits of f16.
trait Element: Copy + Default + Send + Sync {
    fn load<S: Simd>(simd: S, values: &[Self; LANES]) -> S::Floats;
    fn store<S: Simd>(simd: S, values: S::Floats, to: &mut [Self; LANES]);
    fn to_f32(self) -> f32;
    fn from_f32(value: f32) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, values: &[Self; LANES]) -> S::Floats {
        simd.load(values)
    }

    #[inline(always)]
    fn store<S: Simd>(simd: S, values: S::Floats, to: &mut [Self; LANES]) {
        simd.store(values, to);
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for u16 {
    #[inline(always)]
    fn load<S: Simd>(simd: S, values: &[Self; LANES]) -> S::Floats {
        simd.load_f16(values)
    }

    #[inline(always)]
    fn store<S: Simd>(simd: S, values: S::Floats, to: &mut [Self; LANES]) {
        simd.store_f16(values, to);
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::from_bits(self).to_f32()
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        f16::from_f32(value).to_bits()
    }
}

/// A tensor `(B, H, T, D)` whose rows of `D` are in one piece.
struct Heads<'a, E = f32> {
    values: &'a [E],
    batch: usize,
    heads: usize,
    tokens: usize,
    head_dim: usize,
    /// Distances of neighbours along the first three axes.
    strides: [usize; 3],
}

impl<'a, E> Heads<'a, E> {
    fn new(values: &'a [E], layout: &Layout) -> Result<Self> {
        let (batch, heads, tokens, head_dim) = layout.shape().dims4()?;
        let strides = layout.stride();
        Ok(Self {
            values: &values[layout.start_offset()..],
            batch,
            heads,
            tokens,
            head_dim,
            strides: [strides[0], strides[1], strides[2]],
        })
    }

    #[inline(always)]
    fn row(&self, batch: usize, head: usize, token: usize) -> &'a [E] {
        let [batch_stride, head_stride, token_stride] = self.strides;
        let start = batch * batch_stride + head * head_stride + token * token_stride;
        &self.values[start..start + self.head_dim]
    }
}

/// Returns `(B, T, H, Dv)`.
fn attention<E: Element>(
    q: &Heads<'_>,
    k: &Heads<'_, E>,
    v: &Heads<'_, E>,
    scale: f32,
    visible: &[Range<usize>],
    instructions: InstructionSet,
) -> Vec<f32> {
    if q.batch * q.tokens * q.heads * v.head_dim == 0 {
        return Vec::new();
    }
    match q.tokens {
        1 => one_query::attention(q, k, v, scale, visible, instructions),
        _ => many_queries::attention(q, k, v, scale, visible, instructions),
    }
}

/// The largest score.
#[inline(always)]
fn largest<S: Simd>(simd: S, scores: &[f32]) -> f32 {
    let (vectors, rest) = scores.as_chunks::<LANES>();
    let mut largest = simd.splat(f32::NEG_INFINITY);
    for vector in vectors {
        largest = simd.max(largest, simd.load(vector));
    }
    rest.iter().copied().fold(simd.largest(largest), f32::max)
}

/// Replaces scores by `exp(score - shift)` and returns their sum.
#[inline(always)]
fn exponentials<S: Simd>(simd: S, scores: &mut [f32], shift: f32) -> f32 {
    let (vectors, rest) = scores.as_chunks_mut::<LANES>();
    let shift = simd.splat(shift);
    let mut sum = simd.splat(0.0);
    for vector in vectors {
        let weights = exp(simd, simd.sub(simd.load(vector), shift));
        sum = simd.add(sum, weights);
        simd.store(weights, vector);
    }
    let mut sum = simd.sum(sum);
    if !rest.is_empty() {
        let mut last = [f32::NEG_INFINITY; LANES];
        last[..rest.len()].copy_from_slice(rest);
        let weights = exp(simd, simd.sub(simd.load(&last), shift));
        simd.store(weights, &mut last);
        rest.copy_from_slice(&last[..rest.len()]);
        sum += rest.iter().sum::<f32>();
    }
    sum
}
