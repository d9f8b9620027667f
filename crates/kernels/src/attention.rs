//! `softmax(scale · Q Kᵀ) V` on the CPU where every query sees keys that lie side by side: causal, full and windowed attention,
//! with and without a cache.
//!
//! One query, a step of decoding, is bound by memory: [`one_query`]. Many queries are bound by arithmetic: [`many_queries`].
//! Neither computes what no query sees, and what a query does not see never reaches its result, not even NaN.

mod many_queries;
mod new_tokens;
mod one_query;
mod slots;
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
pub use new_tokens::{side_by_side, write_tokens};
pub use slots::{KvSlot, zeroed_memory};

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

/// The widest heads for which a GPU has a kernel for one query, which reads the visible keys and values only. Other queries
/// take matrix products, in which a hidden value that is NaN reaches the result.
pub const WIDEST_SINGLE_QUERY: usize = 256;

/// The same on an NVIDIA GPU, for tensors of one type: f32, f16 or bf16. `None` where it does not apply: on another device,
/// in a build without the feature `cuda`, or where a gradient is wanted. Hidden keys and values must be
/// finite, but for one query in heads up to [`WIDEST_SINGLE_QUERY`] wide.
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
    attend(q, k, v, scale, visible, fits.then_some(Held::Tensors))
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
    slots::expect_contiguous([keys, values])?;
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
    attend(q, keys, values, scale, visible, fits.then(|| Held::Slots(slots.to_vec())))
}

/// `held` is `None` where the shapes do not fit.
fn attend(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    visible: Vec<Range<usize>>,
    held: Option<Held>,
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

/// Where keys and values lie.
enum Held {
    /// In tensors `(B, H, S, D)`.
    Tensors,
    /// In memories `(N, H · D)`, the rows of the batch in these slots.
    Slots(Vec<KvSlot>),
}

struct WindowAttention {
    scale: f32,
    visible: Vec<Range<usize>>,
    held: Held,
}

impl WindowAttention {
    /// Keys or values, as the queries have heads.
    fn heads<'a, E>(&self, values: &'a [E], layout: &Layout, q: &Heads<'_>) -> Result<Heads<'a, E>> {
        match &self.held {
            Held::Tensors => Heads::new(values, layout),
            Held::Slots(slots) => {
                // What no query of a row sees may belong to another row, and is not read.
                let seen = |row: usize| {
                    let visible = &self.visible[row * q.tokens..(row + 1) * q.tokens];
                    visible.iter().map(|keys| keys.end).max().unwrap_or(0)
                };
                let values = &values[layout.start_offset()..];
                Ok(Heads::in_slots(values, slots, q.heads, q.head_dim, seen))
            }
        }
    }
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
        let (output, value_dim) = match (k, v) {
            (CpuStorage::F16(k), CpuStorage::F16(v)) => {
                let k = self.heads(k.as_slice().reinterpret_cast(), k_layout, &q)?;
                let v = self.heads(v.as_slice().reinterpret_cast(), v_layout, &q)?;
                (attention(&q, &k, &v, scale, visible, instructions), v.head_dim)
            }
            _ => {
                let k = self.heads(k.as_slice::<f32>()?, k_layout, &q)?;
                let v = self.heads(v.as_slice::<f32>()?, v_layout, &q)?;
                (attention(&q, &k, &v, scale, visible, instructions), v.head_dim)
            }
        };
        Ok((CpuStorage::F32(output), (q.rows.len(), q.tokens, q.heads, value_dim).into()))
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

/// Values of some heads of some rows of a batch, those of a token and head, `D`, in one piece.
struct Heads<'a, E = f32> {
    values: &'a [E],
    /// One for each row of the batch.
    rows: Vec<HeadsOfRow>,
    heads: usize,
    /// Most tokens of a row.
    tokens: usize,
    head_dim: usize,
    /// From one token to the next.
    token_stride: usize,
}

/// Where a row of a batch has its heads.
#[derive(Clone, Copy)]
struct HeadsOfRow {
    start: usize,
    /// From one head to the next.
    head_stride: usize,
    tokens: usize,
}

impl<'a, E> Heads<'a, E> {
    /// Those of a tensor `(B, H, T, D)`.
    fn new(values: &'a [E], layout: &Layout) -> Result<Self> {
        let (batch, heads, tokens, head_dim) = layout.shape().dims4()?;
        let [batch_stride, head_stride, token_stride] =
            [0, 1, 2].map(|axis| layout.stride().get(axis).copied().unwrap_or(0));
        let row = |row| HeadsOfRow { start: layout.start_offset() + row * batch_stride, head_stride, tokens };
        Ok(Self { values, rows: (0..batch).map(row).collect(), heads, tokens, head_dim, token_stride })
    }

    /// Those of rows that have slots in a memory `(N, H · D)`, of each row as many tokens as `tokens` says.
    fn in_slots(
        values: &'a [E],
        slots: &[KvSlot],
        heads: usize,
        head_dim: usize,
        tokens: impl Fn(usize) -> usize,
    ) -> Self {
        let row = |(row, slot): (usize, &KvSlot)| HeadsOfRow {
            start: slot.start * heads * head_dim,
            head_stride: slot.capacity * head_dim,
            tokens: tokens(row),
        };
        let rows: Vec<_> = slots.iter().enumerate().map(row).collect();
        let tokens = rows.iter().map(|row| row.tokens).max().unwrap_or(0);
        Self { values, rows, heads, tokens, head_dim, token_stride: head_dim }
    }

    /// One head of a row of the batch.
    #[inline(always)]
    fn head(&self, batch: usize, head: usize) -> Head<'a, E> {
        let HeadsOfRow { start, head_stride, tokens } = self.rows[batch];
        Head {
            values: &self.values[start + head * head_stride..],
            tokens,
            head_dim: self.head_dim,
            token_stride: self.token_stride,
        }
    }
}

/// The values of a head, token by token.
struct Head<'a, E = f32> {
    values: &'a [E],
    tokens: usize,
    head_dim: usize,
    token_stride: usize,
}

impl<'a, E> Head<'a, E> {
    #[inline(always)]
    fn row(&self, token: usize) -> &'a [E] {
        &self.values[token * self.token_stride..][..self.head_dim]
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
    if q.rows.len() * q.tokens * q.heads * v.head_dim == 0 {
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
