//! One query in each row and head over the keys and values of a cache.
//!
//! Each key and each value is read once and in order, in parts of 256 keys. A part gives the largest of its scores, the sum of
//! their exponentials relative to it and the values weighted with those; parts are put together one after the other, as
//! online softmax does (Milakov and Gimelshein, arXiv:1805.02867). The parts are the same for any number of threads, so the
//! result is too. Sixteen scores are summed at once, so that no key costs a sum across a vector of its own. While a part's keys
//! are read its values are fetched, so that memory is busy all the time.

use std::ops::Range;

use super::element::Element;
use super::heads::{Head, Heads};
use super::softmax::{exponentials, largest};
use crate::fetch::{AHEAD, fetch};
use crate::simd::{InstructionSet, Job, LANES, Simd};
use crate::threads::{Parts, for_each_part};

/// Keys of a part: few enough that one head gives work to several threads where the context is long.
const PART_KEYS: usize = 256;
/// Vectors of a value row that are summed at once.
const SUM_VECTORS: usize = 4;

/// Returns `(B, 1, H, Dv)`; there is at least one value, and each query sees at least one key.
pub(super) fn attention<E: Element>(
    q: &Heads<'_>,
    k: &Heads<'_, E>,
    v: &Heads<'_, E>,
    scale: f32,
    visible: &[Range<usize>],
    instructions: InstructionSet,
) -> Vec<f32> {
    let parts_of_head = visible.iter().map(Range::len).max().unwrap_or(0).div_ceil(PART_KEYS).max(1);
    let value_dim = v.head_dim;
    // The weighted values of each part, and after them the largest score and the sum of the weights.
    let row_len = value_dim + 2;
    let mut partial = vec![0.0; q.rows.len() * q.heads * parts_of_head * row_len];
    for_each_part(&mut partial, Parts { row_len, rows: 1, columns: row_len }, |mut part| {
        let (head, index) = (part.first_row / parts_of_head, part.first_row % parts_of_head);
        let (batch, head) = (head / q.heads, head % q.heads);
        let first_key = visible[batch].start + index * PART_KEYS;
        // In a batch of rows of different lengths, a part may have no keys.
        let keys = first_key..visible[batch].end.clamp(first_key, first_key + PART_KEYS);
        let (query, k, v) = (q.head(batch, head).row(0), k.head(batch, head), v.head(batch, head));
        instructions.run(OnePart { query, k, v, scale, keys, result: part.row(0) });
    });
    let mut output = vec![0.0; q.rows.len() * q.heads * value_dim];
    for (context, parts) in output.chunks_mut(value_dim).zip(partial.chunks(parts_of_head * row_len)) {
        merge(context, parts);
    }
    output
}

/// Puts the parts of one head together.
fn merge(context: &mut [f32], parts: &[f32]) {
    let value_dim = context.len();
    let parts = || parts.chunks_exact(value_dim + 2).map(|part| part.split_at(value_dim));
    let largest = parts().fold(f32::NEG_INFINITY, |largest, (_, numbers)| largest.max(numbers[0]));
    let mut sum = 0.0;
    for (values, numbers) in parts() {
        let weight = (numbers[0] - largest).exp();
        sum += weight * numbers[1];
        for (value, context) in values.iter().zip(&mut *context) {
            *context += weight * value;
        }
    }
    let inverse_sum = sum.recip();
    context.iter_mut().for_each(|value| *value *= inverse_sum);
}

/// Some keys and values of one head.
struct OnePart<'a, E> {
    query: &'a [f32],
    k: Head<'a, E>,
    v: Head<'a, E>,
    scale: f32,
    keys: Range<usize>,
    result: &'a mut [f32],
}

impl<E: Element> Job for OnePart<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { query, k, v, keys, .. } = self;
        let scale = simd.splat(self.scale);
        let mut scores = [0.0; PART_KEYS];
        let (vectors, _) = scores.as_chunks_mut::<LANES>();
        for (first_key, scores) in keys.clone().step_by(LANES).zip(vectors) {
            let mut products = [simd.splat(0.0); LANES];
            for (lane, products) in products.iter_mut().enumerate() {
                // The last key stands in for those after it, whose scores are not looked at.
                let key = (first_key + lane).min(keys.end - 1);
                let row = k.row(key);
                fetch(row, AHEAD);
                fetch(v.row(key), 0);
                *products = multiply(simd, query, row);
            }
            simd.store(simd.mul(simd.sums(products), scale), scores);
        }
        let scores = &mut scores[..keys.len()];
        let largest = largest(simd, scores);
        // Where every score is -inf, exponentials relative to it would be NaN, though another part may have a larger one.
        let shift = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
        let sum = exponentials(simd, scores, shift);

        let (context, numbers) = self.result.split_at_mut(v.head_dim);
        numbers.copy_from_slice(&[largest, sum]);
        let mut column = 0;
        let (groups, rest) = context.as_chunks_mut::<{ SUM_VECTORS * LANES }>();
        let (vectors, rest) = rest.as_chunks_mut::<LANES>();
        for group in groups {
            weigh::<S, E, SUM_VECTORS>(simd, scores, &v, keys.start, column, group);
            column += group.len();
        }
        for vector in vectors {
            weigh::<S, E, 1>(simd, scores, &v, keys.start, column, vector);
            column += LANES;
        }
        for (weight, key) in scores.iter().zip(keys) {
            for (sum, value) in rest.iter_mut().zip(&v.row(key)[column..]) {
                *sum += weight * value.to_f32();
            }
        }
    }
}

/// The products of two rows, in as many lanes as a vector has.
#[inline(always)]
fn multiply<S: Simd, E: Element>(simd: S, a: &[f32], b: &[E]) -> S::Vector {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = simd.splat(0.0);
    for (a, b) in a.iter().zip(b) {
        sums = simd.mul_add(simd.load(a), E::load(simd, b), sums);
    }
    if !a_rest.is_empty() {
        let (mut a, mut b) = ([0.0; LANES], [E::default(); LANES]);
        a[..a_rest.len()].copy_from_slice(a_rest);
        b[..b_rest.len()].copy_from_slice(b_rest);
        sums = simd.mul_add(simd.load(&a), E::load(simd, &b), sums);
    }
    sums
}

/// The weighted sum of the values from `first_key` on, in the columns from `column` on that `to` has room for: `VECTORS` vectors.
#[inline(always)]
fn weigh<S: Simd, E: Element, const VECTORS: usize>(
    simd: S,
    weights: &[f32],
    v: &Head<'_, E>,
    first_key: usize,
    column: usize,
    to: &mut [f32],
) {
    let mut sums = [simd.splat(0.0); VECTORS];
    for (index, weight) in weights.iter().enumerate() {
        let weight = simd.splat(*weight);
        let (values, _) = v.row(first_key + index)[column..].as_chunks::<LANES>();
        for (sum, values) in sums.iter_mut().zip(values) {
            *sum = simd.mul_add(weight, E::load(simd, values), *sum);
        }
    }
    for (sum, to) in sums.into_iter().zip(to.as_chunks_mut::<LANES>().0) {
        simd.store(sum, to);
    }
}
