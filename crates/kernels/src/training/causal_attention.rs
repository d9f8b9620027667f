//! Causal self-attention of all heads from the fused projection, with dropout on the weights and its gradient.
//!
//! Works head by head in blocks of queries, so that no `(B, H, T, T)` tensor ever exists; what lies beyond the diagonal is
//! never computed. The backward pass computes the weights again from queries and keys (as FlashAttention does,
//! arXiv:2205.14135, section 3.1): with `P` the weights, `M` the dropout mask over its keep rate and `dO` the gradient,
//! `dV = (P∘M)ᵀ dO`, `dW = dO Vᵀ`, `dS = (P∘M)∘dW - P · rowsum((P∘M)∘dW)`, `dQ = dS K`, `dK = dSᵀ Q`.

use candle_core::{D, DType, Result, Shape, Tensor};

use super::arithmetic::{Real, Vectors, Work};
use super::operation::{Operation, Sums, record};
use super::product::{Matrix, Panels, multiply};
use super::{for_real, is_cpu_float, with_elements};
use crate::parallel::{Part, Parts, for_each_part};
use crate::simd::LANES;
use crate::{KernelError, RandomStream};

/// Queries in a block: a multiple of every tile's rows.
const QUERY_BLOCK: usize = 48;

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
    let operation = CausalAttention { heads, scale, dropout };
    match qkv.dtype() {
        DType::F64 => operation.forward::<f64>(qkv),
        _ => operation.forward::<f32>(qkv),
    }
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
        let generator = RandomStream::with_stream(self.seed, stream as u64);
        HeadMask { generator, rate: self.rate, factor: 1.0 / (1.0 - self.rate) }
    }
}

/// The mask of one head, drawn query by query.
struct HeadMask {
    generator: RandomStream,
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

impl CausalAttention {
    fn forward<T: Real>(self, qkv: &Tensor) -> Result<Tensor> {
        let sizes = self.sizes(qkv.shape())?;
        let Sizes { batch, tokens, heads, head_dim } = sizes;
        let row_len = heads * head_dim;
        let output = with_elements::<T, 1, _>([qkv], |[qkv]| {
            let mut output = vec![T::ZERO; batch * tokens * row_len];
            if output.is_empty() {
                return Ok(output);
            }
            // The columns of a head in the rows of a text are a part.
            let parts = Parts { row_len, rows: tokens, columns: head_dim };
            for_each_part(&mut output, parts, |mut part| {
                let head = self.head(qkv, sizes, &part, tokens);
                T::vectorized(Forward { head, output: &mut part });
            });
            Ok(output)
        })?;
        record(&[qkv], output, (batch, tokens, row_len), self)
    }

    fn sizes(&self, shape: &Shape) -> Result<Sizes> {
        let (batch, tokens, width) = shape.dims3()?;
        Ok(Sizes { batch, tokens, heads: self.heads, head_dim: head_dim(width, self.heads)? })
    }

    /// The head whose output a part is, where a text has `rows` rows in the output.
    fn head<'a, T: Real>(&self, qkv: &'a [T], sizes: Sizes, part: &Part<'_, T>, rows: usize) -> Head<'a, T> {
        let (text, head) = (part.first_row / rows, part.first_column / sizes.head_dim);
        let start = text * sizes.tokens * sizes.stride() + part.first_column;
        Head {
            queries: &qkv[start..],
            keys: &qkv[start + sizes.width()..],
            values: &qkv[start + 2 * sizes.width()..],
            sizes,
            scale: T::of(self.scale),
            mask: self.dropout.map(|dropout| dropout.mask(text * sizes.heads + head)),
        }
    }
}

impl Operation for CausalAttention {
    fn name(&self) -> &'static str {
        "causal-self-attention"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        fn backward<T: Real>(op: &CausalAttention, qkv: &Tensor, gradient: &Tensor) -> Result<Tensor> {
            let sizes = op.sizes(qkv.shape())?;
            let values = with_elements::<T, 2, _>([qkv, gradient], |[qkv, gradient]| {
                let mut gradients = vec![T::ZERO; qkv.len()];
                // Three rows for each token: of queries, keys and values.
                let rows = 3 * sizes.tokens;
                let parts = Parts { row_len: sizes.width(), rows, columns: sizes.head_dim };
                for_each_part(&mut gradients, parts, |mut part| {
                    let head = op.head(qkv, sizes, &part, rows);
                    let start = part.first_row / 3 * sizes.width() + part.first_column;
                    let output_gradient = &gradient[start..];
                    T::vectorized(Backward { head, output_gradient, gradients: &mut part });
                });
                Ok(gradients)
            })?;
            Tensor::from_vec(values, qkv.shape(), qkv.device())
        }
        let qkv = &inputs[0];
        let gradient = for_real!(qkv.dtype(), backward(self, qkv, gradient))?;
        sums.add(qkv, gradient)
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
    /// Width of the output.
    fn width(self) -> usize {
        self.heads * self.head_dim
    }

    /// From a token to the next in the projection.
    fn stride(self) -> usize {
        3 * self.width()
    }
}

/// One head of one text. Each slice starts at the head's first value; the next token's stand `3 · H · D` further on.
struct Head<'a, T> {
    queries: &'a [T],
    keys: &'a [T],
    values: &'a [T],
    sizes: Sizes,
    scale: T,
    mask: Option<HeadMask>,
}

impl<'a, T: Real> Head<'a, T> {
    /// `(T, D)`: queries, keys or values.
    #[inline(always)]
    fn rows(&self, values: &'a [T]) -> Matrix<'a, T> {
        Matrix::rows(values, self.sizes.stride())
    }

    /// The weights of the queries `first..first + count` over the keys before `first + count`, each row `T` long; and with
    /// dropout, those that are left of them.
    #[inline(always)]
    fn weights<V: Vectors<Real = T>>(
        &mut self,
        v: V,
        (first, count): (usize, usize),
        keys: &Panels<T>,
        room: &mut Room<T>,
    ) {
        let Sizes { tokens, head_dim, .. } = self.sizes;
        let visible = first + count;
        let Room { weights, dropped, kept, tiles, .. } = room;
        let queries = self.rows(&self.queries[first * self.sizes.stride()..]);
        let scores = Part::of_rows(weights, tokens, (count, visible));
        multiply(v, queries, keys, head_dim, scores, false, tiles);
        for (index, row) in weights.chunks_mut(tokens).take(count).enumerate() {
            let (seen, hidden) = row[..visible].split_at_mut(first + index + 1);
            hidden.fill(T::ZERO);
            softmax(v, seen, self.scale);
            if let Some(mask) = &mut self.mask {
                mask.draw(&mut kept[..seen.len()]);
                let factor = T::of(mask.factor);
                let dropped = &mut dropped[index * tokens..][..visible];
                for ((dropped, weight), kept) in dropped.iter_mut().zip(seen.iter()).zip(kept.iter()) {
                    *dropped = if *kept { *weight * factor } else { T::ZERO };
                }
                dropped[seen.len()..].fill(T::ZERO);
            }
        }
    }
}

/// `softmax(scale · scores)` in place, for a positive scale.
#[inline(always)]
fn softmax<V: Vectors>(v: V, scores: &mut [V::Real], scale: V::Real) {
    let zero = V::Real::ZERO;
    let lowest = V::Real::LOWEST;
    let mut largest = v.splat(lowest);
    for scores in scores.chunks(LANES) {
        largest = v.max(largest, v.load_first(scores, lowest));
    }
    let (largest, scale) = (v.splat(v.largest(largest)), v.splat(scale));
    let mut sum = v.splat(zero);
    for scores in scores.chunks_mut(LANES) {
        // What is missing in the last vector weighs nothing.
        let weights = v.exp(v.mul(v.sub(v.load_first(scores, lowest), largest), scale));
        v.store_first(weights, scores);
        sum = v.add(sum, weights);
    }
    let inverse = v.splat(V::Real::ONE / v.sum(sum));
    for weights in scores.chunks_mut(LANES) {
        v.store_first(v.mul(v.load_first(weights, zero), inverse), weights);
    }
}

/// Memory that the blocks of a head use one after the other.
struct Room<T> {
    weights: Vec<T>,
    /// Of use with dropout only.
    dropped: Vec<T>,
    kept: Vec<bool>,
    tiles: Vec<T>,
}

impl<T: Real> Room<T> {
    fn new(tokens: usize, has_dropout: bool) -> Self {
        let block = vec![T::ZERO; QUERY_BLOCK * tokens];
        let (dropped, kept) = match has_dropout {
            true => (block.clone(), vec![false; tokens]),
            false => (Vec::new(), Vec::new()),
        };
        Self { weights: block, dropped, kept, tiles: Vec::new() }
    }
}

fn query_blocks(tokens: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..tokens).step_by(QUERY_BLOCK).map(move |first| (first, QUERY_BLOCK.min(tokens - first)))
}

struct Forward<'a, 'b, T> {
    head: Head<'a, T>,
    /// `(T, D)`.
    output: &'a mut Part<'b, T>,
}

impl<T: Real> Work<T> for Forward<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        let Self { mut head, output } = self;
        let Sizes { tokens, head_dim, .. } = head.sizes;
        let (mut keys, mut values) = (Panels::new(), Panels::new());
        keys.pack(v, head.rows(head.keys).transposed(), head_dim, tokens);
        values.pack(v, head.rows(head.values), tokens, head_dim);
        let mut room = Room::new(tokens, head.mask.is_some());
        for (first, count) in query_blocks(tokens) {
            head.weights(v, (first, count), &keys, &mut room);
            let weights = if head.mask.is_some() { &room.dropped } else { &room.weights };
            let output = output.stepped(first, 1, count);
            multiply(
                v,
                Matrix::rows(weights, tokens),
                &values,
                first + count,
                output,
                false,
                &mut room.tiles,
            );
        }
    }
}

struct Backward<'a, 'b, T> {
    head: Head<'a, T>,
    /// Starts at the head's first value; the next token's stand `H · D` further on.
    output_gradient: &'a [T],
    /// `(T, 3, D)`, zero: of queries, keys and values.
    gradients: &'a mut Part<'b, T>,
}

impl<T: Real> Work<T> for Backward<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        const QUERY: usize = 0;
        const KEY: usize = 1;
        const VALUE: usize = 2;
        let Self { mut head, output_gradient, gradients } = self;
        let Sizes { tokens, head_dim, .. } = head.sizes;
        let (stride, output_stride) = (head.sizes.stride(), head.sizes.width());
        let [mut key_columns, mut key_rows, mut value_columns, mut block_rows] =
            std::array::from_fn(|_| Panels::new());
        key_columns.pack(v, head.rows(head.keys).transposed(), head_dim, tokens);
        key_rows.pack(v, head.rows(head.keys), tokens, head_dim);
        value_columns.pack(v, head.rows(head.values).transposed(), head_dim, tokens);
        let mut room = Room::new(tokens, head.mask.is_some());
        let mut scores = vec![T::ZERO; QUERY_BLOCK * tokens];
        for (first, count) in query_blocks(tokens) {
            let visible = first + count;
            head.weights(v, (first, count), &key_columns, &mut room);
            let Room { weights, dropped, tiles, .. } = &mut room;
            let dropped = if head.mask.is_some() { &*dropped } else { &*weights };
            let output_gradient = Matrix::rows(&output_gradient[first * output_stride..], output_stride);

            let value_gradient = gradients.stepped(VALUE, 3, visible);
            block_rows.pack(v, output_gradient, count, head_dim);
            let dropped_rows = Matrix::rows(dropped, tokens);
            multiply(v, dropped_rows.transposed(), &block_rows, count, value_gradient, true, tiles);

            // The gradient of the weights that are left, and from it that of the scores, in place.
            let of_weights = Part::of_rows(&mut scores, tokens, (count, visible));
            multiply(v, output_gradient, &value_columns, head_dim, of_weights, false, tiles);
            for index in 0..count {
                let row = index * tokens..index * tokens + visible;
                let (weights, dropped) = (&weights[row.clone()], &dropped[row.clone()]);
                score_gradients(v, weights, dropped, head.scale, &mut scores[row]);
            }

            let score_rows = Matrix::rows(&scores, tokens);
            let query_gradient = gradients.stepped(3 * first + QUERY, 3, count);
            multiply(v, score_rows, &key_rows, visible, query_gradient, false, tiles);

            let key_gradient = gradients.stepped(KEY, 3, visible);
            block_rows.pack(v, head.rows(&head.queries[first * stride..]), count, head_dim);
            multiply(v, score_rows.transposed(), &block_rows, count, key_gradient, true, tiles);
        }
    }
}

/// From the gradient of the weights that dropout left to that of the scores, in place.
#[inline(always)]
fn score_gradients<V: Vectors>(
    v: V,
    weights: &[V::Real],
    dropped: &[V::Real],
    scale: V::Real,
    gradients: &mut [V::Real],
) {
    let zero = V::Real::ZERO;
    let mut dot = v.splat(zero);
    for (gradient, dropped) in gradients.chunks_mut(LANES).zip(dropped.chunks(LANES)) {
        let product = v.mul(v.load_first(gradient, zero), v.load_first(dropped, zero));
        v.store_first(product, gradient);
        dot = v.add(dot, product);
    }
    let (dot, scale) = (v.splat(v.sum(dot)), v.splat(scale));
    for (gradient, weights) in gradients.chunks_mut(LANES).zip(weights.chunks(LANES)) {
        let shared = v.mul(v.load_first(weights, zero), dot);
        v.store_first(v.mul(v.sub(v.load_first(gradient, zero), shared), scale), gradient);
    }
}
