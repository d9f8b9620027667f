//! Causal self-attention of all heads from the fused projection, with dropout on the weights and its gradient.
//!
//! Works head by head in blocks of queries, so that no `(B, H, T, T)` tensor ever exists; what lies behind the diagonal is
//! never computed. The backward pass computes the weights again from queries and keys (as FlashAttention does,
//! arXiv:2205.14135, section 3.1): with `P` the weights, `M` the dropout mask over its keep rate and `dO` the gradient,
//! `dV = (P∘M)ᵀ dO`, `dW = dO Vᵀ`, `dS = (P∘M)∘dW - P · rowsum((P∘M)∘dW)`, `dQ = dS K`, `dK = dSᵀ Q`.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, D, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::arithmetic::{Real, Vectorized, vectorized};
use super::product::{Matrix, add_product};
use super::{elements, for_real, is_cpu_float, with_elements};
use crate::{Generator, KernelError};

/// Queries in a block.
const QUERY_BLOCK: usize = 32;

/// Dropout on attention weights: the mask is drawn anew from the seed wherever it is needed, and stored nowhere.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionDropout {
    /// Share of the weights that become zero, below 1.
    pub rate: f64,
    /// Seed of the masks; head `h` of row `b` takes stream `b · H + h`.
    pub seed: u64,
}

/// `softmax(scale · Q Kᵀ) V` over the keys up to each query's own position, for every head of a fused projection.
///
/// # Shapes
/// `qkv` `(B, T, 3 · H · D)`: queries, keys and values side by side, in each the heads side by side; returns
/// `(B, T, H · D)`.
///
/// # Errors
/// When the width of `qkv` is not a multiple of `3 · heads`.
pub fn causal_self_attention(
    qkv: &Tensor,
    heads: usize,
    scale: f64,
    dropout: Option<AttentionDropout>,
) -> Result<Tensor> {
    if !is_cpu_float(qkv) {
        return causal_attention_reference(qkv, heads, scale, dropout);
    }
    head_dim(qkv.dim(D::Minus1)?, heads)?;
    qkv.contiguous()?.apply_op1(CausalAttention { heads, scale, dropout })
}

/// The same as a composition of candle operations.
///
/// # Errors
/// As [`causal_self_attention`].
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
                    *factor = if *kept { mask.factor } else { 0.0 };
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

impl AttentionDropout {
    fn mask(self, stream: usize) -> HeadMask {
        let generator = Generator::with_stream(self.seed, stream as u64);
        HeadMask { generator, rate: self.rate, factor: 1.0 / (1.0 - self.rate) }
    }
}

/// The mask of one head, drawn query by query.
struct HeadMask {
    generator: Generator,
    rate: f64,
    /// What a weight that stays is multiplied by.
    factor: f64,
}

impl HeadMask {
    fn draw(&mut self, kept: &mut [bool]) {
        self.generator.fill_kept(self.rate, kept);
    }
}

struct CausalAttention {
    heads: usize,
    scale: f64,
    dropout: Option<AttentionDropout>,
}

impl CustomOp1 for CausalAttention {
    fn name(&self) -> &'static str {
        "causal-self-attention"
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        fn forward<T: Real>(
            op: &CausalAttention,
            qkv: &CpuStorage,
            layout: &Layout,
            sizes: Sizes,
        ) -> Result<CpuStorage> {
            let qkv = elements::<T>(qkv, layout)?;
            let mut by_head = vec![T::zero(); sizes.batch * sizes.tokens * sizes.width()];
            by_head.par_chunks_mut(sizes.head_len()).enumerate().for_each(|(index, output)| {
                vectorized(Forward { head: op.head(qkv, sizes, index), output });
            });
            Ok(T::to_cpu_storage_owned(side_by_side(&by_head, sizes, 1)))
        }
        let sizes = self.sizes(layout.shape())?;
        let output = for_real!(qkv.dtype(), forward(self, qkv, layout, sizes))?;
        Ok((output, (sizes.batch, sizes.tokens, sizes.width()).into()))
    }

    fn bwd(&self, qkv: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        fn backward<T: Real>(
            op: &CausalAttention,
            qkv: &Tensor,
            gradient: &Tensor,
            sizes: Sizes,
        ) -> Result<Tensor> {
            let values = with_elements::<T, 2, _>([qkv, gradient], |[qkv, gradient]| {
                let mut by_head = vec![T::zero(); qkv.len()];
                by_head.par_chunks_mut(3 * sizes.head_len()).enumerate().for_each(|(index, gradients)| {
                    let (row, head) = (index / sizes.heads, index % sizes.heads);
                    let start = row * sizes.tokens * sizes.width() + head * sizes.head_dim;
                    let head = op.head(qkv, sizes, index);
                    vectorized(Backward { head, output_gradient: &gradient[start..], gradients });
                });
                Ok(side_by_side(&by_head, sizes, 3))
            })?;
            Tensor::from_vec(values, qkv.shape(), qkv.device())
        }
        let sizes = self.sizes(qkv.shape())?;
        for_real!(qkv.dtype(), backward(self, qkv, gradient, sizes)).map(Some)
    }
}

impl CausalAttention {
    fn sizes(&self, shape: &Shape) -> Result<Sizes> {
        let (batch, tokens, width) = shape.dims3()?;
        Ok(Sizes { batch, tokens, heads: self.heads, head_dim: head_dim(width, self.heads)? })
    }

    /// Head `index % H` of row `index / H`.
    fn head<'a, T: Real>(&self, qkv: &'a [T], sizes: Sizes, index: usize) -> Head<'a, T> {
        let (row, head) = (index / sizes.heads, index % sizes.heads);
        let start = row * sizes.tokens * 3 * sizes.width() + head * sizes.head_dim;
        Head {
            queries: &qkv[start..],
            keys: &qkv[start + sizes.width()..],
            values: &qkv[start + 2 * sizes.width()..],
            sizes,
            scale: T::from_f64(self.scale),
            mask: self.dropout.map(|dropout| dropout.mask(index)),
        }
    }
}

#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    tokens: usize,
    heads: usize,
    head_dim: usize,
}

impl Sizes {
    fn width(self) -> usize {
        self.heads * self.head_dim
    }

    fn head_len(self) -> usize {
        self.tokens * self.head_dim
    }
}

/// Brings `(B, H, parts, T, D)` to `(B, T, parts, H, D)`.
fn side_by_side<T: Real>(by_head: &[T], sizes: Sizes, parts: usize) -> Vec<T> {
    let Sizes { tokens, heads, head_dim, .. } = sizes;
    let mut output = vec![T::zero(); by_head.len()];
    let row_len = parts * sizes.width();
    output.par_chunks_mut(row_len).enumerate().for_each(|(token, output)| {
        let (row, token) = (token / tokens, token % tokens);
        for (index, output) in output.chunks_mut(head_dim).enumerate() {
            let (part, head) = (index / heads, index % heads);
            let start = (((row * heads + head) * parts + part) * tokens + token) * head_dim;
            output.copy_from_slice(&by_head[start..start + head_dim]);
        }
    });
    output
}

/// One head of one row. Each slice starts at the head's first value; the next token's stand `3 · H · D` behind.
struct Head<'a, T> {
    queries: &'a [T],
    keys: &'a [T],
    values: &'a [T],
    sizes: Sizes,
    scale: T,
    mask: Option<HeadMask>,
}

impl<T: Real> Head<'_, T> {
    fn stride(&self) -> usize {
        3 * self.sizes.width()
    }

    /// The weights of the queries `first..first + count` over the keys before `first + count`, each row `T` long: in
    /// `weights` without dropout, in `dropped` with it.
    #[inline(always)]
    fn weights<const FMA: bool>(
        &mut self,
        (first, count): (usize, usize),
        transposed_keys: &[T],
        room: &mut Room<T>,
    ) {
        let tokens = self.sizes.tokens;
        let Room { weights, dropped, kept, panel, .. } = room;
        weights[..count * tokens].fill(T::zero());
        let queries = Matrix::rows(&self.queries[first * self.stride()..], self.stride());
        let size = (count, self.sizes.head_dim, first + count);
        add_product::<T, FMA>(queries, transposed_keys, tokens, weights, tokens, size, panel);
        for (index, row) in weights[..count * tokens].chunks_mut(tokens).enumerate() {
            let (visible, hidden) = row[..first + count].split_at_mut(first + index + 1);
            hidden.fill(T::zero());
            let largest = visible.iter().fold(visible[0], |largest, score| largest.larger(*score));
            let mut sum = T::zero();
            for score in visible.iter_mut() {
                *score = ((*score - largest) * self.scale).exponential();
            }
            for weight in visible.iter() {
                sum += *weight;
            }
            let inverse = T::one() / sum;
            for weight in visible.iter_mut() {
                *weight *= inverse;
            }
            let dropped = &mut dropped[index * tokens..][..first + count];
            dropped.copy_from_slice(&row[..first + count]);
            if let Some(mask) = &mut self.mask {
                let kept = &mut kept[..=first + index];
                mask.draw(kept);
                let factors = [T::zero(), T::from_f64(mask.factor)];
                for (weight, kept) in dropped.iter_mut().zip(kept) {
                    *weight *= factors[usize::from(*kept)];
                }
            }
        }
    }

    /// `(T, D)` to `(D, T)`.
    #[inline(always)]
    fn transposed(&self, rows: &[T]) -> Vec<T> {
        let Sizes { tokens, head_dim, .. } = self.sizes;
        let mut columns = vec![T::zero(); tokens * head_dim];
        for (token, row) in rows.chunks(self.stride()).take(tokens).enumerate() {
            for (dim, value) in row[..head_dim].iter().enumerate() {
                columns[dim * tokens + token] = *value;
            }
        }
        columns
    }
}

/// Memory that the blocks of a head use one after the other.
struct Room<T> {
    weights: Vec<T>,
    dropped: Vec<T>,
    gradients: Vec<T>,
    kept: Vec<bool>,
    panel: Vec<[T; 4]>,
}

impl<T: Real> Room<T> {
    fn new(tokens: usize) -> Self {
        let block = || vec![T::zero(); QUERY_BLOCK * tokens];
        Self {
            weights: block(),
            dropped: block(),
            gradients: block(),
            kept: vec![false; tokens],
            panel: Vec::with_capacity(tokens),
        }
    }
}

fn query_blocks(tokens: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..tokens).step_by(QUERY_BLOCK).map(move |first| (first, QUERY_BLOCK.min(tokens - first)))
}

struct Forward<'a, T> {
    head: Head<'a, T>,
    /// `(T, D)`, zero.
    output: &'a mut [T],
}

impl<T: Real> Vectorized for Forward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Self { mut head, output } = self;
        let Sizes { tokens, head_dim, .. } = head.sizes;
        let transposed_keys = head.transposed(head.keys);
        let mut room = Room::new(tokens);
        for (first, count) in query_blocks(tokens) {
            head.weights::<FMA>((first, count), &transposed_keys, &mut room);
            let weights = Matrix::rows(&room.dropped, tokens);
            let output = &mut output[first * head_dim..];
            let size = (count, first + count, head_dim);
            let (values, stride) = (head.values, head.stride());
            add_product::<T, FMA>(weights, values, stride, output, head_dim, size, &mut room.panel);
        }
    }
}

struct Backward<'a, T> {
    head: Head<'a, T>,
    /// Starts at the head's first value; the next token's stand `H · D` behind.
    output_gradient: &'a [T],
    /// `(3, T, D)`, zero: of queries, keys and values.
    gradients: &'a mut [T],
}

impl<T: Real> Vectorized for Backward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Self { mut head, output_gradient, gradients } = self;
        let Sizes { tokens, head_dim, .. } = head.sizes;
        let (stride, output_stride) = (head.stride(), head.sizes.width());
        let (query_gradient, rest) = gradients.split_at_mut(tokens * head_dim);
        let (key_gradient, value_gradient) = rest.split_at_mut(tokens * head_dim);
        let transposed_keys = head.transposed(head.keys);
        let transposed_values = head.transposed(head.values);
        let mut room = Room::new(tokens);
        for (first, count) in query_blocks(tokens) {
            let keys = first + count;
            head.weights::<FMA>((first, count), &transposed_keys, &mut room);
            let Room { weights, dropped, gradients, panel, .. } = &mut room;
            let output_gradient = &output_gradient[first * output_stride..];

            let dropped_t = Matrix::transposed(dropped, tokens);
            let size = (keys, count, head_dim);
            add_product::<T, FMA>(
                dropped_t,
                output_gradient,
                output_stride,
                value_gradient,
                head_dim,
                size,
                panel,
            );

            gradients[..count * tokens].fill(T::zero());
            let rows = Matrix::rows(output_gradient, output_stride);
            let size = (count, head_dim, keys);
            add_product::<T, FMA>(rows, &transposed_values, tokens, gradients, tokens, size, panel);

            // From the weights' gradient to that of the scores, in place.
            for index in 0..count {
                let row = index * tokens..index * tokens + keys;
                let (weights, dropped) = (&weights[row.clone()], &dropped[row.clone()]);
                let gradients = &mut gradients[row];
                let mut dot = T::zero();
                for (gradient, dropped) in gradients.iter_mut().zip(dropped) {
                    *gradient *= *dropped;
                    dot += *gradient;
                }
                for (gradient, weight) in gradients.iter_mut().zip(weights) {
                    *gradient = (*gradient - *weight * dot) * head.scale;
                }
            }

            let scores = Matrix::rows(gradients, tokens);
            let query_gradient = &mut query_gradient[first * head_dim..];
            let size = (count, keys, head_dim);
            add_product::<T, FMA>(scores, head.keys, stride, query_gradient, head_dim, size, panel);

            let scores_t = Matrix::transposed(gradients, tokens);
            let queries = &head.queries[first * stride..];
            let size = (keys, count, head_dim);
            add_product::<T, FMA>(scores_t, queries, stride, key_gradient, head_dim, size, panel);
        }
    }
}
