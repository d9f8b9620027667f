//! The steps of computing a softmax over a row of scores.

use crate::simd::{LANES, Simd};

/// Returns the largest score.
#[inline(always)]
pub(super) fn largest<S: Simd>(simd: S, scores: &[f32]) -> f32 {
    let (vectors, rest) = scores.as_chunks::<LANES>();
    let mut largest = simd.splat(f32::NEG_INFINITY);
    for vector in vectors {
        largest = simd.max(largest, simd.load(vector));
    }
    let mut largest = simd.largest(largest);
    for score in rest {
        largest = largest.max(*score);
    }
    largest
}

/// Replaces scores with `exp(score - shift)` and returns their sum.
#[inline(always)]
pub(super) fn exponentials<S: Simd>(simd: S, scores: &mut [f32], shift: f32) -> f32 {
    let (vectors, rest) = scores.as_chunks_mut::<LANES>();
    let shift = simd.splat(shift);
    let mut sum = simd.splat(0.0);
    for vector in vectors {
        let weights = simd.exp(simd.sub(simd.load(vector), shift));
        sum = simd.add(sum, weights);
        simd.store(weights, vector);
    }
    let mut sum = simd.sum(sum);
    if !rest.is_empty() {
        let mut last = [f32::NEG_INFINITY; LANES];
        last[..rest.len()].copy_from_slice(rest);
        let weights = simd.exp(simd.sub(simd.load(&last), shift));
        simd.store(weights, &mut last);
        rest.copy_from_slice(&last[..rest.len()]);
        let mut sum_of_rest = 0.0;
        for weight in rest {
            sum_of_rest += *weight;
        }
        sum += sum_of_rest;
    }
    sum
}
