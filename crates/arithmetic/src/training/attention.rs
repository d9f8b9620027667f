//! Multi-head attention over a batch of sequences, with dropout on the weights, and its gradients.
//!
//! Works head by head in blocks of queries, so that the full `(B, H, T, S)` scores never exist. Keys that no
//! query in a block sees are not read. The backward pass recomputes the weights from queries and keys, as in
//! FlashAttention (arXiv:2205.14135, section 3.1). Let `P` be the weights, `M` the dropout mask
//! over its keep rate, and `dO` the output gradient. Then `dV = (P∘M)ᵀ dO`, `dW = dO Vᵀ`,
//! `dS = (P∘M)∘dW - P · rowsum((P∘M)∘dW)`, `dQ = dS K` and `dK = dSᵀ Q`.

use std::ops::Range;

use super::dropout::Dropout;
use super::matrix_view::MatrixView;
use super::product::{LaidOut, multiply};
use crate::attention::Heads;
use crate::simd::{LANES, Number, Real, Vectors, Work};
use crate::threads::{Part, Parts, computed_in_parts, computed_together};

/// Queries per block, a multiple of every tile height.
const QUERY_BLOCK: usize = 48;

/// Values added to the scores, `(B, H, T, S)`; each query's values are contiguous.
///
/// This is a field of [`Attention`].
#[derive(Debug, Clone, Copy)]
pub struct AddedScores<'a, T> {
    /// Values, starting with the first one.
    pub values: &'a [T],
    /// Distances between sequences, heads and queries, in values; 0 if they share the same values.
    pub strides: [usize; 3],
}

/// Multi-head attention over a batch; every sequence has `queries` queries and `keys` keys.
///
/// ```
/// use candle_gpt2_arithmetic::{Attention, Float};
///
/// let causal = Attention {
///     batch: 1, queries: 3, keys: 3, heads: 1, head_dim: 2, value_dim: 2, scale: 1.0,
///     visible: &[0..1, 0..2, 0..3], added: None, dropout: None,
/// };
/// let (zeros, values) = ([0f64; 6], [1., 2., 3., 4., 5., 6.]);
/// assert_eq!(Float::attention(&[&zeros, &zeros, &values], causal), [1., 2., 2., 3., 3., 4.]);
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Attention<'a, T> {
    /// Number of sequences, `B`.
    pub batch: usize,
    /// Queries per sequence, `T`.
    pub queries: usize,
    /// Keys per sequence, `S`.
    pub keys: usize,
    /// Number of heads, `H`.
    pub heads: usize,
    /// Width of a head's queries and keys, `D`.
    pub head_dim: usize,
    /// Width of a head's values, `Dv`.
    pub value_dim: usize,
    /// Factor for the products of queries and keys; greater than 0.
    pub scale: f64,
    /// Range of keys that each query of a sequence sees; at least one key.
    pub visible: &'a [Range<usize>],
    /// Values to add to the scaled products.
    pub added: Option<AddedScores<'a, T>>,
    /// Dropout on the weights.
    ///
    /// Query `t` of head `h` of sequence `b` uses the samples of stream `(b · H + h) · T + t`.
    /// Each key uses the sample at its index.
    pub dropout: Option<Dropout>,
}

/// Location of the queries, keys or values: an array, and an index among each token's `count` rows.
#[derive(Debug, Clone, Copy)]
struct Place {
    array: usize,
    index: usize,
    count: usize,
}

/// Returns the locations of queries, keys and values for the given number of arrays.
#[inline(always)]
fn places(arrays: usize) -> [Place; 3] {
    let place = |array, index, count| Place { array, index, count };
    match arrays {
        1 => [place(0, 0, 3), place(0, 1, 3), place(0, 2, 3)],
        2 => [place(0, 0, 1), place(1, 0, 2), place(1, 1, 2)],
        3 => [place(0, 0, 1), place(1, 0, 1), place(2, 0, 1)],
        other => panic!("expected queries, keys and values in one to three arrays, found {other}"),
    }
}

impl<'a, T: Number> Attention<'a, T> {
    /// Returns the head width and the number of tokens per sequence, for queries, keys and values.
    fn sizes(&self) -> [(usize, usize); 3] {
        let Self { queries, keys, head_dim, value_dim, .. } = *self;
        [(head_dim, queries), (head_dim, keys), (value_dim, keys)]
    }

    /// Returns the number of output values; panics if the sizes do not match.
    fn output_len(&self, qkv: &[&[T]]) -> usize {
        let Self { batch, queries, keys, heads, value_dim, scale, visible, added, .. } = *self;
        for (place, (width, tokens)) in places(qkv.len()).into_iter().zip(self.sizes()) {
            let expected = batch * tokens * place.count * heads * width;
            let found = qkv[place.array].len();
            assert!(
                found == expected,
                "expected {expected} elements in an array of queries, keys or values, found {found}"
            );
        }
        assert!(scale > 0.0 && scale.is_finite(), "expected a finite scale greater than 0, found {scale}");
        assert!(
            visible.len() == queries,
            "expected one range of visible keys for each of {queries} queries, found {}",
            visible.len()
        );
        assert!(
            visible.iter().all(|seen| !seen.is_empty() && seen.end <= keys),
            "a range of visible keys is empty or ends past the last of {keys} keys"
        );
        if let Some(AddedScores { values, strides }) = added {
            let last = |count: usize, stride: usize| count.saturating_sub(1) * stride;
            let last = last(batch, strides[0]) + last(heads, strides[1]) + last(queries, strides[2]);
            assert!(last + keys <= values.len(), "too few added scores: found only {} values", values.len());
        }
        batch * queries * heads * value_dim
    }

    /// Returns one head of one sequence.
    fn head(&self, qkv: &[&'a [T]], sequence: usize, head: usize) -> Head<'a, T> {
        let mut rows = [Rows { values: &[], stride: 0, width: 0 }; 3];
        for (rows, (place, (width, tokens))) in
            rows.iter_mut().zip(places(qkv.len()).into_iter().zip(self.sizes()))
        {
            let stride = place.count * self.heads * width;
            let start = sequence * tokens * stride + (place.index * self.heads + head) * width;
            *rows = Rows { values: &qkv[place.array][start..], stride, width };
        }
        let [queries, keys, values] = rows;
        let added = self.added.map(|AddedScores { values, strides }| {
            (&values[sequence * strides[0] + head * strides[1]..], strides[2])
        });
        Head {
            queries,
            keys,
            values,
            key_count: self.keys,
            visible: self.visible,
            added,
            scale: T::of(self.scale),
            dropout: self.dropout.map(|dropout| (dropout, (sequence * self.heads + head) * self.queries)),
        }
    }
}

impl Attention<'_, f32> {
    /// Returns queries, keys and values of all heads.
    ///
    /// # Panics
    /// Panics if the sizes do not match.
    pub(crate) fn all_heads<'q>(&self, qkv: &[&'q [f32]]) -> [Heads<'q>; 3] {
        self.output_len(qkv);
        let (places, sizes) = (places(qkv.len()), self.sizes());
        [0, 1, 2].map(|index| {
            let (place, (width, tokens)) = (places[index], sizes[index]);
            let (of_token, beside) = (place.count * self.heads * width, place.index * self.heads * width);
            let values = qkv[place.array].get(beside..).unwrap_or(&[]);
            Heads::strided(
                values,
                [self.batch, self.heads, tokens, width],
                [tokens * of_token, width, of_token],
            )
        })
    }
}

pub(super) fn forward<T: Real>(qkv: &[&[T]], attention: Attention<'_, T>) -> Vec<T> {
    let len = attention.output_len(qkv);
    if len == 0 {
        return Vec::new();
    }
    // A part consists of one head's columns in one sequence's rows.
    let Attention { queries, heads, value_dim, .. } = attention;
    let parts = Parts { row_len: heads * value_dim, rows: queries, columns: value_dim };
    computed_in_parts(len, parts, |mut part| {
        let head = attention.head(qkv, part.first_row / queries, part.first_column / value_dim);
        T::vectorized(Forward { head, output: &mut part });
    })
}

pub(super) fn backward<T: Real>(qkv: &[&[T]], gradient: &[T], attention: Attention<'_, T>) -> Vec<Vec<T>> {
    let len = attention.output_len(qkv);
    assert!(
        gradient.len() == len,
        "the output gradient has {} values, but the output has {len}",
        gradient.len()
    );
    if len == 0 {
        return qkv.iter().map(|values| vec![T::ZERO; values.len()]).collect();
    }
    let Attention { queries, heads, value_dim, .. } = attention;
    let mut outputs = Vec::with_capacity(qkv.len());
    for (place, (width, tokens)) in places(qkv.len()).into_iter().zip(attention.sizes()) {
        if place.index == 0 {
            // For each token, the array has one row for each kind that it holds: query, key or
            // value.
            let parts = Parts { row_len: heads * width, rows: tokens * place.count, columns: width };
            outputs.push((qkv[place.array].len(), parts));
        }
    }
    let output_stride = heads * value_dim;
    computed_together(&outputs, |mut gradients| {
        let Part { first_row, first_column, .. } = gradients[0];
        let (sequence, head) = (first_row / outputs[0].1.rows, first_column / attention.head_dim);
        let output_gradient = &gradient[sequence * queries * output_stride + head * value_dim..];
        let head = attention.head(qkv, sequence, head);
        T::vectorized(Backward { head, output_gradient, output_stride, gradients: &mut gradients });
    })
}

/// Queries, keys or values of a head; consecutive tokens are `stride` values apart.
#[derive(Debug, Clone, Copy)]
struct Rows<'a, T> {
    values: &'a [T],
    stride: usize,
    width: usize,
}

impl<'a, T: Number> Rows<'a, T> {
    /// Returns the rows of `count` tokens as a `(count, width)` matrix.
    #[inline(always)]
    fn some(&self, first: usize, count: usize) -> MatrixView<'a, T> {
        MatrixView::strided(&self.values[first * self.stride..], (count, self.width), self.stride)
    }
}

/// One head of one sequence.
struct Head<'a, T> {
    queries: Rows<'a, T>,
    keys: Rows<'a, T>,
    values: Rows<'a, T>,
    key_count: usize,
    visible: &'a [Range<usize>],
    /// Values added to the scores, and the distance between consecutive queries in them.
    added: Option<(&'a [T], usize)>,
    scale: T,
    /// Dropout on the weights, and the random stream of the first query.
    dropout: Option<(Dropout, usize)>,
}

/// Block of queries, and the range of keys that they see, extended to a panel boundary.
#[derive(Clone, Copy)]
struct Block {
    first: usize,
    count: usize,
    first_key: usize,
    keys: usize,
}

impl<T: Number> Head<'_, T> {
    /// Returns the block of queries that starts at `first`.
    #[inline(always)]
    fn block(&self, first: usize) -> Block {
        let count = QUERY_BLOCK.min(self.visible.len() - first);
        let (mut start, mut end) = (usize::MAX, 0);
        for seen in &self.visible[first..first + count] {
            start = start.min(seen.start);
            end = end.max(seen.end);
        }
        let first_key = start / LANES * LANES;
        Block { first, count, first_key, keys: end - first_key }
    }

    /// Allocates enough memory for any block.
    #[inline(always)]
    fn scratch(&self) -> Scratch<T> {
        let mut keys = 0;
        let mut first = 0;
        while first < self.visible.len() {
            keys = keys.max(self.block(first).keys);
            first += QUERY_BLOCK;
        }
        let block = vec![T::ZERO; QUERY_BLOCK.min(self.visible.len()) * keys];
        let dropped = if self.dropout.is_some() { block.clone() } else { Vec::new() };
        Scratch { stride: keys, weights: block, dropped, tiles: Vec::new() }
    }

    /// Computes a query block's attention weights over its keys, with dropout if set.
    #[inline(always)]
    fn weights<V: Vectors<Real = T>>(&self, v: V, block: Block, keys: &LaidOut<T>, scratch: &mut Scratch<T>) {
        let Block { first, count, first_key, keys: width } = block;
        let Scratch { stride, weights, dropped, tiles } = scratch;
        let scores = Part::of_rows(weights, *stride, (count, width));
        multiply(
            v,
            self.queries.some(first, count),
            keys.all().columns_from(first_key),
            scores,
            false,
            tiles,
        );
        for index in 0..count {
            let seen = &self.visible[first + index];
            let (start, end) = (seen.start - first_key, seen.end - first_key);
            let row = &mut weights[index * *stride..][..width];
            row[..start].fill(T::ZERO);
            row[end..].fill(T::ZERO);
            let row = &mut row[start..end];
            match self.added {
                Some((added, step)) => {
                    add_scaled(
                        v,
                        row,
                        self.scale,
                        &added[(first + index) * step + seen.start..][..end - start],
                    );
                    softmax(v, row, T::ONE);
                }
                None => softmax(v, row, self.scale),
            }
            if let Some((dropout, stream)) = self.dropout {
                let dropped = &mut dropped[index * *stride..][..width];
                dropped[..start].fill(T::ZERO);
                dropped[end..].fill(T::ZERO);
                let stream = (stream + first + index) as u64;
                dropout.apply(stream, seen.start as u64, row, &mut dropped[start..end]);
            }
        }
    }
}

/// Computes `scale · scores + added` in place.
#[inline(always)]
fn add_scaled<V: Vectors>(v: V, scores: &mut [V::Real], scale: V::Real, added: &[V::Real]) {
    let (zero, scale) = (V::Real::ZERO, v.splat(scale));
    for first in (0..scores.len()).step_by(LANES) {
        let added = v.load_first(&added[first..], zero);
        let scores = &mut scores[first..];
        v.store_first(v.mul_add(v.load_first(scores, zero), scale, added), scores);
    }
}

/// Computes `softmax(scale · scores)` in place, for a positive scale.
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
        // Padding in the last vector gets zero weight.
        let weights = v.exp(v.mul(v.sub(v.load_first(scores, lowest), largest), scale));
        v.store_first(weights, scores);
        sum = v.add(sum, weights);
    }
    let inverse = v.splat(V::Real::ONE / v.sum(sum));
    for weights in scores.chunks_mut(LANES) {
        v.store_first(v.mul(v.load_first(weights, zero), inverse), weights);
    }
}

/// Scratch memory reused by the blocks of a head.
struct Scratch<T> {
    /// Distance between consecutive queries, in values.
    stride: usize,
    weights: Vec<T>,
    /// Weights after dropout; empty without dropout.
    dropped: Vec<T>,
    tiles: Vec<T>,
}

struct Forward<'a, 'b, T> {
    head: Head<'a, T>,
    /// Output, `(T, Dv)`.
    output: &'a mut Part<'b, T>,
}

impl<T: Number> Work<T> for Forward<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        const { assert!(QUERY_BLOCK.is_multiple_of(V::TILE_ROWS), "a block must consist of whole tiles") };
        let Self { head, output } = self;
        let (mut keys, mut values) = (LaidOut::new(), LaidOut::new());
        keys.fill(v, head.keys.some(0, head.key_count).transposed());
        values.fill(v, head.values.some(0, head.key_count));
        let mut scratch = head.scratch();
        for first in (0..head.visible.len()).step_by(QUERY_BLOCK) {
            let block = head.block(first);
            head.weights(v, block, &keys, &mut scratch);
            let weights = if head.dropout.is_some() { &scratch.dropped } else { &scratch.weights };
            let weights = MatrixView::strided(weights, (block.count, block.keys), scratch.stride);
            let output = output.stepped(first, 1, block.count);
            multiply(v, weights, values.all().rows_from(block.first_key), output, false, &mut scratch.tiles);
        }
    }
}

struct Backward<'a, 'b, T> {
    head: Head<'a, T>,
    /// Output gradient, starting at the head's first value; tokens are `output_stride` values apart.
    output_gradient: &'a [T],
    output_stride: usize,
    /// Gradients of the arrays, initially zero.
    ///
    /// For each token, an array has one row for each kind that it holds: query, key or value.
    gradients: &'a mut [Part<'b, T>],
}

impl<T: Number> Work<T> for Backward<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        let Self { head, output_gradient, output_stride, gradients } = self;
        let [of_queries, of_keys, of_values] = places(gradients.len());
        let (mut key_columns, mut key_rows) = (LaidOut::new(), LaidOut::new());
        let (mut value_columns, mut block_rows) = (LaidOut::new(), LaidOut::new());
        key_columns.fill(v, head.keys.some(0, head.key_count).transposed());
        key_rows.fill(v, head.keys.some(0, head.key_count));
        value_columns.fill(v, head.values.some(0, head.key_count).transposed());
        let mut scratch = head.scratch();
        let mut scores = scratch.weights.clone();
        for first in (0..head.visible.len()).step_by(QUERY_BLOCK) {
            let block = head.block(first);
            head.weights(v, block, &key_columns, &mut scratch);
            let Scratch { stride, weights, dropped, tiles, .. } = &mut scratch;
            let stride = *stride;
            let weights = weights.as_slice();
            let dropped = if head.dropout.is_some() { dropped.as_slice() } else { weights };
            let Block { count, first_key, keys, .. } = block;
            let output_gradient = &output_gradient[first * output_stride..];
            let output_gradient =
                MatrixView::strided(output_gradient, (count, head.values.width), output_stride);

            let value_gradient = rows_of(gradients, of_values, first_key, keys);
            block_rows.fill(v, output_gradient);
            let dropped_columns = MatrixView::strided(dropped, (count, keys), stride).transposed();
            multiply(v, dropped_columns, block_rows.all(), value_gradient, true, tiles);

            // Computes the gradient of the weights after dropout, and from it
            // the gradient of the scores, in place.
            let of_weights = Part::of_rows(&mut scores, stride, (count, keys));
            let values = value_columns.all().columns_from(first_key);
            multiply(v, output_gradient, values, of_weights, false, tiles);
            for index in 0..count {
                let row = index * stride..index * stride + keys;
                let (weights, dropped) = (&weights[row.clone()], &dropped[row.clone()]);
                score_gradients(v, weights, dropped, head.scale, &mut scores[row]);
            }

            let score_rows = MatrixView::strided(&scores, (count, keys), stride);
            let query_gradient = rows_of(gradients, of_queries, first, count);
            multiply(v, score_rows, key_rows.all().rows_from(first_key), query_gradient, false, tiles);

            let key_gradient = rows_of(gradients, of_keys, first_key, keys);
            block_rows.fill(v, head.queries.some(first, count));
            multiply(v, score_rows.transposed(), block_rows.all(), key_gradient, true, tiles);
        }
    }
}

/// Returns the gradient rows for the queries, keys or values of `count` tokens.
#[inline(always)]
fn rows_of<'a, T>(gradients: &'a mut [Part<'_, T>], place: Place, first: usize, count: usize) -> Part<'a, T> {
    gradients[place.array].stepped(first * place.count + place.index, place.count, count)
}

/// Converts the gradient of the dropped-out weights to the gradient of the scores, in place.
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
    use crate::simd::{F32Job, InstructionSet};

    /// Returns each query's visible keys: all keys, or a window around the query.
    fn seen(queries: usize, keys: usize, window: Option<(usize, usize)>) -> Vec<Range<usize>> {
        let seen = |query: usize| match window {
            Some((before, after)) => query.saturating_sub(before)..(query + after + 1).min(keys),
            None => 0..keys,
        };
        (0..queries).map(seen).collect()
    }

    /// Checks every instruction set against plain Rust in f64, the version used for gradient checks.
    #[test]
    fn instruction_sets_agree_on_forward_and_backward() {
        let dropout = Some(Dropout { rate: 0.3, seed: 5 });
        let causal = Some((usize::MAX, 0));
        for (arrays, queries, keys, [head_dim, value_dim], window, is_added, dropout) in [
            (1, 1, 1, [3, 3], causal, false, None),
            (1, 5, 5, [16, 16], causal, false, None),
            (1, 151, 151, [20, 20], causal, true, dropout),
            (3, 200, 200, [64, 64], Some((33, 0)), false, None),
            (3, 130, 130, [16, 5], Some((40, 20)), true, None),
            (2, 40, 77, [20, 20], None, false, dropout),
            (3, 1, 50, [64, 32], None, true, None),
        ] {
            let visible = &seen(queries, keys, window);
            let added = noise(queries * keys, 3, 0.0, 2.0);
            let sizes = [(queries, head_dim), (keys, head_dim), (keys, value_dim)];
            let mut qkv = vec![Vec::new(); arrays];
            for (index, (place, (tokens, width))) in places(arrays).into_iter().zip(sizes).enumerate() {
                qkv[place.array].extend(noise(tokens * width, 10 + index as u64, 0.0, 2.0));
            }
            let gradient = noise(queries * value_dim, 2, 0.0, 2.0);
            let wide = |values: &[f32]| values.iter().map(|value| f64::from(*value)).collect::<Vec<_>>();
            let (qkv_wide, added_wide): (Vec<_>, _) =
                (qkv.iter().map(|values| wide(values)).collect(), wide(&added));
            let expected = {
                let slices: Vec<&[f64]> = qkv_wide.iter().map(Vec::as_slice).collect();
                let added = is_added.then_some(AddedScores { values: &added_wide, strides: [0, 0, keys] });
                let attention = Attention {
                    batch: 1,
                    queries,
                    keys,
                    heads: 1,
                    head_dim,
                    value_dim,
                    scale: 0.4,
                    visible,
                    added,
                    dropout,
                };
                let output = forward(&slices, attention);
                [vec![output], backward(&slices, &wide(&gradient), attention)].concat()
            };
            let slices: Vec<&[f32]> = qkv.iter().map(Vec::as_slice).collect();
            let added = is_added.then_some(AddedScores { values: &added, strides: [0, 0, keys] });
            let attention = Attention {
                batch: 1,
                queries,
                keys,
                heads: 1,
                head_dim,
                value_dim,
                scale: 0.4,
                visible,
                added,
                dropout,
            };
            for set in InstructionSet::available() {
                let mut output = vec![0f32; queries * value_dim];
                let part = &mut Part::of_rows(&mut output, value_dim, (queries, value_dim));
                set.run(F32Job(Forward { head: attention.head(&slices, 0, 0), output: part }));
                let mut gradients: Vec<Vec<f32>> = qkv.iter().map(|values| vec![0.0; values.len()]).collect();
                let mut parts = Vec::new();
                for (array, gradient) in gradients.iter_mut().enumerate() {
                    let place = places(arrays).into_iter().zip(sizes).find(|(place, _)| place.array == array);
                    let (place, (tokens, width)) = place.expect("every array has a role");
                    parts.push(Part::of_rows(gradient, width, (tokens * place.count, width)));
                }
                set.run(F32Job(Backward {
                    head: attention.head(&slices, 0, 0),
                    output_gradient: &gradient,
                    output_stride: value_dim,
                    gradients: &mut parts,
                }));
                let found: Vec<f32> = [vec![output], gradients].concat().concat();
                for (found, expected) in found.iter().zip(expected.iter().flatten()) {
                    // Sums of up to 200 products of values below 1, rounded at each step.
                    let error = (f64::from(*found) - expected).abs();
                    assert!(error < 2e-5, "{set:?}, {queries} queries: {found} vs. {expected}");
                }
            }
        }
    }
}
