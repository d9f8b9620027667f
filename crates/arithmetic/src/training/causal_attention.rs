//! Causal self-attention of all heads from the fused projection, with dropout on the weights and its gradient.
//!
//! Works head by head in blocks of queries, so that no `(B, H, T, T)` values ever exist; what lies beyond the diagonal is
//! never computed. The backward pass computes the weights again from queries and keys (as FlashAttention does,
//! arXiv:2205.14135, section 3.1): with `P` the weights, `M` the dropout mask over its keep rate and `dO` the gradient,
//! `dV = (P∘M)ᵀ dO`, `dW = dO Vᵀ`, `dS = (P∘M)∘dW - P · rowsum((P∘M)∘dW)`, `dQ = dS K`, `dK = dSᵀ Q`.

use super::product::{LaidOut, MatrixView, multiply};
use crate::random::RandomStream;
use crate::simd::{LANES, Number, Real, Vectors, Work};
use crate::threads::{Part, Parts, computed_in_parts};

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

impl AttentionDropout {
    /// The mask of head `stream`.
    pub fn mask(self, stream: usize) -> AttentionMask {
        let random = RandomStream::with_stream(self.seed, stream as u64);
        AttentionMask { random, rate: self.rate, factor: 1.0 / (1.0 - self.rate) }
    }
}

/// The mask of one head, drawn query by query.
#[derive(Debug, Clone)]
pub struct AttentionMask {
    random: RandomStream,
    rate: f64,
    factor: f64,
}

impl AttentionMask {
    /// What a weight that stays is multiplied by.
    #[inline(always)]
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// Draws which of the next query's weights stay.
    pub fn draw(&mut self, kept: &mut [bool]) {
        self.random.fill_kept(self.rate, kept);
    }
}

/// The attention of all heads of some texts of one length.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CausalAttention {
    /// Number of texts, `B`.
    pub batch: usize,
    /// Length of each, `T`.
    pub tokens: usize,
    /// Number of heads, `H`.
    pub heads: usize,
    /// Width of a head, `D`.
    pub head_dim: usize,
    /// What a product of a query and a key is multiplied by; greater than 0.
    pub scale: f64,
    /// Dropout on the weights.
    pub dropout: Option<AttentionDropout>,
}

impl CausalAttention {
    /// Width of the output.
    fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// From a token to the next in the projection.
    fn stride(&self) -> usize {
        3 * self.width()
    }

    /// The number of values of the output, where they and the projection fit.
    fn output_len(&self, qkv: usize) -> usize {
        let output = self.batch * self.tokens * self.width();
        assert!(qkv == 3 * output, "a projection of {qkv} values for {output} of the output");
        assert!(self.scale > 0.0 && self.scale.is_finite(), "a scale of {}", self.scale);
        output
    }

    /// The head whose output a part is, where a text has `rows` rows in the output.
    fn head<'a, T: Number>(&self, qkv: &'a [T], part: &Part<'_, T>, rows: usize) -> Head<'a, T> {
        let (text, head) = (part.first_row / rows, part.first_column / self.head_dim);
        let start = text * self.tokens * self.stride() + part.first_column;
        Head {
            queries: &qkv[start..],
            keys: &qkv[start + self.width()..],
            values: &qkv[start + 2 * self.width()..],
            tokens: self.tokens,
            head_dim: self.head_dim,
            stride: self.stride(),
            scale: T::of(self.scale),
            mask: self.dropout.map(|dropout| dropout.mask(text * self.heads + head)),
        }
    }
}

pub(super) fn forward<T: Real>(qkv: &[T], attention: CausalAttention) -> Vec<T> {
    let len = attention.output_len(qkv.len());
    if len == 0 {
        return Vec::new();
    }
    // The columns of a head in the rows of a text are a part.
    let CausalAttention { tokens, head_dim, .. } = attention;
    let parts = Parts { row_len: attention.width(), rows: tokens, columns: head_dim };
    computed_in_parts(len, parts, |mut part| {
        let head = attention.head(qkv, &part, tokens);
        T::vectorized(Forward { head, output: &mut part });
    })
}

pub(super) fn backward<T: Real>(qkv: &[T], gradient: &[T], attention: CausalAttention) -> Vec<T> {
    let len = attention.output_len(qkv.len());
    assert!(gradient.len() == len, "a gradient of {} values for {len}", gradient.len());
    if len == 0 {
        return Vec::new();
    }
    // Three rows for each token: of queries, keys and values.
    let rows = 3 * attention.tokens;
    let output_stride = attention.width();
    let parts = Parts { row_len: output_stride, rows, columns: attention.head_dim };
    computed_in_parts(qkv.len(), parts, |mut part| {
        let head = attention.head(qkv, &part, rows);
        let output_gradient = &gradient[part.first_row / 3 * output_stride + part.first_column..];
        T::vectorized(Backward { head, output_gradient, output_stride, gradients: &mut part });
    })
}

/// One head of one text. Each slice starts at the head's first value; the next token's stand `stride` further on.
struct Head<'a, T> {
    queries: &'a [T],
    keys: &'a [T],
    values: &'a [T],
    tokens: usize,
    head_dim: usize,
    stride: usize,
    scale: T,
    mask: Option<AttentionMask>,
}

impl<'a, T: Number> Head<'a, T> {
    /// The rows of some tokens, `(count, D)`: of queries, keys or values.
    #[inline(always)]
    fn rows(&self, values: &'a [T], first: usize, count: usize) -> MatrixView<'a, T> {
        MatrixView::strided(&values[first * self.stride..], (count, self.head_dim), self.stride)
    }

    /// The weights of the queries `first..first + count` over the keys before `first + count`, each row `T` long; and with
    /// dropout, those that are left of them.
    #[inline(always)]
    fn weights<V: Vectors<Real = T>>(
        &mut self,
        v: V,
        (first, count): (usize, usize),
        keys: &LaidOut<T>,
        room: &mut Room<T>,
    ) {
        let (tokens, visible) = (self.tokens, first + count);
        let Room { weights, dropped, kept, tiles, .. } = room;
        let scores = Part::of_rows(weights, tokens, (count, visible));
        multiply(v, self.rows(self.queries, first, count), keys, scores, false, tiles);
        for (index, row) in weights.chunks_mut(tokens).take(count).enumerate() {
            let (seen, hidden) = row[..visible].split_at_mut(first + index + 1);
            hidden.fill(T::ZERO);
            softmax(v, seen, self.scale);
            if let Some(mask) = &mut self.mask {
                mask.draw(&mut kept[..seen.len()]);
                let factor = T::of(mask.factor());
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

impl<T: Number> Room<T> {
    #[inline(always)]
    fn new(tokens: usize, has_dropout: bool) -> Self {
        let block = vec![T::ZERO; QUERY_BLOCK * tokens];
        let (dropped, kept) = match has_dropout {
            true => (block.clone(), vec![false; tokens]),
            false => (Vec::new(), Vec::new()),
        };
        Self { weights: block, dropped, kept, tiles: Vec::new() }
    }
}

struct Forward<'a, 'b, T> {
    head: Head<'a, T>,
    /// `(T, D)`.
    output: &'a mut Part<'b, T>,
}

impl<T: Number> Work<T> for Forward<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        const { assert!(QUERY_BLOCK.is_multiple_of(V::TILE_ROWS), "a block is of whole tiles") };
        let Self { mut head, output } = self;
        let tokens = head.tokens;
        let (mut keys, mut values) = (LaidOut::new(), LaidOut::new());
        keys.fill(head.rows(head.keys, 0, tokens).transposed());
        values.fill(head.rows(head.values, 0, tokens));
        let mut room = Room::new(tokens, head.mask.is_some());
        for first in (0..tokens).step_by(QUERY_BLOCK) {
            let count = QUERY_BLOCK.min(tokens - first);
            head.weights(v, (first, count), &keys, &mut room);
            let weights = if head.mask.is_some() { &room.dropped } else { &room.weights };
            let weights = MatrixView::strided(weights, (count, first + count), tokens);
            multiply(v, weights, &values, output.stepped(first, 1, count), false, &mut room.tiles);
        }
    }
}

struct Backward<'a, 'b, T> {
    head: Head<'a, T>,
    /// Starts at the head's first value; the next token's stand `output_stride` further on.
    output_gradient: &'a [T],
    output_stride: usize,
    /// `(T, 3, D)`, zero: of queries, keys and values.
    gradients: &'a mut Part<'b, T>,
}

impl<T: Number> Work<T> for Backward<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        const QUERY: usize = 0;
        const KEY: usize = 1;
        const VALUE: usize = 2;
        let Self { mut head, output_gradient, output_stride, gradients } = self;
        let (tokens, head_dim) = (head.tokens, head.head_dim);
        let (mut key_columns, mut key_rows) = (LaidOut::new(), LaidOut::new());
        let (mut value_columns, mut block_rows) = (LaidOut::new(), LaidOut::new());
        key_columns.fill(head.rows(head.keys, 0, tokens).transposed());
        key_rows.fill(head.rows(head.keys, 0, tokens));
        value_columns.fill(head.rows(head.values, 0, tokens).transposed());
        let mut room = Room::new(tokens, head.mask.is_some());
        let mut scores = vec![T::ZERO; QUERY_BLOCK * tokens];
        for first in (0..tokens).step_by(QUERY_BLOCK) {
            let count = QUERY_BLOCK.min(tokens - first);
            let visible = first + count;
            head.weights(v, (first, count), &key_columns, &mut room);
            let Room { weights, dropped, tiles, .. } = &mut room;
            let dropped = if head.mask.is_some() { &*dropped } else { &*weights };
            let block = (count, visible);
            let output_gradient = &output_gradient[first * output_stride..];
            let output_gradient = MatrixView::strided(output_gradient, (count, head_dim), output_stride);

            let value_gradient = gradients.stepped(VALUE, 3, visible);
            block_rows.fill(output_gradient);
            let dropped_columns = MatrixView::strided(dropped, block, tokens).transposed();
            multiply(v, dropped_columns, &block_rows, value_gradient, true, tiles);

            // The gradient of the weights that are left, and from it that of the scores, in place.
            let of_weights = Part::of_rows(&mut scores, tokens, block);
            multiply(v, output_gradient, &value_columns, of_weights, false, tiles);
            for index in 0..count {
                let row = index * tokens..index * tokens + visible;
                let (weights, dropped) = (&weights[row.clone()], &dropped[row.clone()]);
                score_gradients(v, weights, dropped, head.scale, &mut scores[row]);
            }

            let score_rows = MatrixView::strided(&scores, block, tokens);
            let query_gradient = gradients.stepped(3 * first + QUERY, 3, count);
            multiply(v, score_rows, &key_rows, query_gradient, false, tiles);

            let key_gradient = gradients.stepped(KEY, 3, visible);
            block_rows.fill(head.rows(head.queries, first, count));
            multiply(v, score_rows.transposed(), &block_rows, key_gradient, true, tiles);
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
    for first in (0..gradients.len()).step_by(LANES) {
        let gradient = v.load_first(&gradients[first..], zero);
        let product = v.mul(gradient, v.load_first(&dropped[first..], zero));
        v.store_first(product, &mut gradients[first..]);
        dot = v.add(dot, product);
    }
    let (dot, scale) = (v.splat(v.sum(dot)), v.splat(scale));
    for first in (0..gradients.len()).step_by(LANES) {
        let shared = v.mul(v.load_first(&weights[first..], zero), dot);
        let gradient = v.sub(v.load_first(&gradients[first..], zero), shared);
        v.store_first(v.mul(gradient, scale), &mut gradients[first..]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::noise;
    use crate::simd::{InstructionSet, OfFloats};

    /// f64 in plain Rust is what gradients are checked in; every instruction set computes the same.
    #[test]
    fn every_instruction_set_attends_and_goes_back_alike() {
        for (tokens, head_dim, dropout) in [
            (1, 3, None),
            (5, 16, None),
            (51, 20, Some(AttentionDropout { rate: 0.3, seed: 5 })),
            (100, 64, None),
        ] {
            let attention = CausalAttention { batch: 1, tokens, heads: 1, head_dim, scale: 0.4, dropout };
            let (width, rows) = (head_dim, 3 * tokens);
            let (qkv, gradient) = (noise(rows * width, 1, 0.0, 2.0), noise(tokens * width, 2, 0.0, 2.0));
            let wide = |values: &[f32]| values.iter().map(|value| f64::from(*value)).collect::<Vec<_>>();
            let (qkv_wide, gradient_wide) = (wide(&qkv), wide(&gradient));
            let expected = [forward(&qkv_wide, attention), backward(&qkv_wide, &gradient_wide, attention)];
            for set in InstructionSet::available() {
                let mut found = [vec![0f32; tokens * width], vec![0f32; rows * width]];
                let [output, gradients] = &mut found;
                let output = &mut Part::of_rows(output, width, (tokens, width));
                set.run(OfFloats(Forward { head: attention.head(&qkv, output, tokens), output }));
                let gradients = &mut Part::of_rows(gradients, width, (rows, width));
                let head = attention.head(&qkv, gradients, rows);
                set.run(OfFloats(Backward {
                    head,
                    output_gradient: &gradient,
                    output_stride: width,
                    gradients,
                }));
                for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                    // Sums of up to 100 products of values below 1, rounded each time.
                    let error = (f64::from(*found) - expected).abs();
                    assert!(error < 2e-5, "{set:?}, {tokens} tokens: {found} for {expected}");
                }
            }
        }
    }
}
