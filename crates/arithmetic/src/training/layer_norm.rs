//! Layer norm and its gradients.
//!
//! The forward pass works row by row, so that each row stays in the nearest cache. The backward pass computes
//! all three gradients in one pass over the batch.
//!
//! Let `n = (x - mean) / deviation` and `g = gradient · weight`. The gradient of a row is
//! `(g - mean(g) - n · mean(g · n)) / deviation`. The gradients of weight and bias are the column sums of
//! `gradient · n` and of `gradient`.

use std::sync::OnceLock;

use crate::simd::{LANES, Number, Real, Vectors, Work};
use crate::threads::{Part, Parts, computed_in_parts};

/// Rows per part of the output.
const PART_ROWS: usize = 16;
/// Number of rows whose weight and bias gradients are summed by one thread.
///
/// Fixed, so that sums do not depend on the number of threads.
const GRADIENT_ROWS: usize = 64;

/// Layer norm gradients from [`Float::layer_norm_backward`](crate::Float::layer_norm_backward).
#[derive(Debug, Clone, PartialEq)]
pub struct LayerNormGradients<T> {
    /// Gradient of the input, `(rows, width)`.
    pub x: Vec<T>,
    /// Gradient of the scale, `(width)`.
    pub weight: Vec<T>,
    /// Gradient of the shift, `(width)`.
    pub bias: Vec<T>,
}

pub(super) fn forward<T: Real>(x: &[T], weight: &[T], bias: &[T], epsilon: f64) -> Vec<T> {
    let row_len = weight.len();
    check(x, row_len);
    assert!(bias.len() == row_len, "the bias has {} values, but each row has {row_len}", bias.len());
    computed_in_parts(x.len(), Parts { row_len, rows: PART_ROWS, columns: row_len }, |mut part| {
        T::vectorized(Forward { x, weight, bias, epsilon, part: &mut part });
    })
}

pub(super) fn backward<T: Real>(
    x: &[T],
    weight: &[T],
    gradient: &[T],
    epsilon: f64,
) -> LayerNormGradients<T> {
    let width = weight.len();
    check(x, width);
    assert!(
        gradient.len() == x.len(),
        "the output gradient has {} values, but the input has {}",
        gradient.len(),
        x.len()
    );
    // Each row block's sums for the weight, followed by its sums for the bias.
    let blocks = x.len().div_ceil(GRADIENT_ROWS * width);
    let by_block: Vec<OnceLock<Vec<T>>> = (0..blocks).map(|_| OnceLock::new()).collect();
    let parts = Parts { row_len: width, rows: GRADIENT_ROWS, columns: width };
    let x_gradient = computed_in_parts(x.len(), parts, |mut part| {
        let range = part.first_row * width..(part.first_row + part.rows()) * width;
        by_block[part.first_row / GRADIENT_ROWS].get_or_init(|| {
            let mut sums = vec![T::ZERO; 2 * width];
            let (x, gradient) = (&x[range.clone()], &gradient[range]);
            let x_gradient = part.all();
            T::vectorized(Backward { x, weight, gradient, epsilon, x_gradient, sums: &mut sums });
            sums
        });
    });
    let mut totals = vec![T::ZERO; 2 * width];
    for sums in by_block.iter().filter_map(OnceLock::get) {
        for (total, sum) in totals.iter_mut().zip(sums) {
            *total += *sum;
        }
    }
    let bias = totals.split_off(width);
    LayerNormGradients { x: x_gradient, weight: totals, bias }
}

fn check<T>(x: &[T], width: usize) {
    assert!(
        width > 0 && x.len().is_multiple_of(width),
        "cannot split {} values into rows of {width}",
        x.len()
    );
}

struct Forward<'a, 'b, T> {
    x: &'a [T],
    weight: &'a [T],
    bias: &'a [T],
    epsilon: f64,
    part: &'a mut Part<'b, T>,
}

impl<T: Number> Work<T> for Forward<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        let Self { x, weight, bias, epsilon, part } = self;
        let (width, zero) = (weight.len(), T::ZERO);
        for row in 0..part.rows() {
            let x = &x[(part.first_row + row) * width..][..width];
            let (mean, inverse) = moments(v, x, epsilon);
            let (means, inverses) = (v.splat(mean), v.splat(inverse));
            let y = part.row(row);
            for first in (0..width).step_by(LANES) {
                let normalized = v.mul(v.sub(v.load_first(&x[first..], zero), means), inverses);
                let (weight, bias) =
                    (v.load_first(&weight[first..], zero), v.load_first(&bias[first..], zero));
                v.store_first(v.mul_add(normalized, weight, bias), &mut y[first..]);
            }
        }
    }
}

/// Work that computes the gradients of a block of rows.
struct Backward<'a, T> {
    x: &'a [T],
    weight: &'a [T],
    gradient: &'a [T],
    epsilon: f64,
    x_gradient: &'a mut [T],
    /// Sums over these rows for the weight, followed by those for the bias; initially zero.
    sums: &'a mut [T],
}

impl<T: Number> Work<T> for Backward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        let Self { x, weight, gradient, epsilon, x_gradient, sums } = self;
        let (width, zero) = (weight.len(), T::ZERO);
        let (weight_sums, bias_sums) = sums.split_at_mut(width);
        for start in (0..x.len()).step_by(width) {
            let (x, gradient) = (&x[start..][..width], &gradient[start..][..width]);
            let x_gradient = &mut x_gradient[start..][..width];
            let (mean, inverse) = moments(v, x, epsilon);
            let (means, inverses) = (v.splat(mean), v.splat(inverse));
            // Padding in the last vector is set to the mean, so that it normalizes to zero.
            let (mut sum, mut product) = (v.splat(zero), v.splat(zero));
            for first in (0..width).step_by(LANES) {
                let normalized = v.mul(v.sub(v.load_first(&x[first..], mean), means), inverses);
                let gradient = v.load_first(&gradient[first..], zero);
                let scaled = v.mul(gradient, v.load_first(&weight[first..], zero));
                sum = v.add(sum, scaled);
                product = v.mul_add(scaled, normalized, product);
            }
            let count = T::of(width as f64);
            let (mean_scaled, mean_product) = (v.splat(v.sum(sum) / count), v.splat(v.sum(product) / count));
            for first in (0..width).step_by(LANES) {
                let normalized = v.mul(v.sub(v.load_first(&x[first..], mean), means), inverses);
                let gradient = v.load_first(&gradient[first..], zero);
                let scaled = v.mul(gradient, v.load_first(&weight[first..], zero));
                let centered = v.sub(v.sub(scaled, mean_scaled), v.mul(normalized, mean_product));
                v.store_first(v.mul(centered, inverses), &mut x_gradient[first..]);
                let sum = v.mul_add(gradient, normalized, v.load_first(&weight_sums[first..], zero));
                v.store_first(sum, &mut weight_sums[first..]);
                let sum = v.add(gradient, v.load_first(&bias_sums[first..], zero));
                v.store_first(sum, &mut bias_sums[first..]);
            }
        }
    }
}

/// Returns the mean of a row and the reciprocal of its standard deviation.
#[inline(always)]
fn moments<V: Vectors>(v: V, x: &[V::Real], epsilon: f64) -> (V::Real, V::Real) {
    let zero = V::Real::ZERO;
    let count = V::Real::of(x.len() as f64);
    let mut sum = v.splat(zero);
    for x in x.chunks(LANES) {
        sum = v.add(sum, v.load_first(x, zero));
    }
    let mean = v.sum(sum) / count;
    let mut squares = v.splat(zero);
    for x in x.chunks(LANES) {
        let centered = v.sub(v.load_first(x, mean), v.splat(mean));
        squares = v.mul_add(centered, centered, squares);
    }
    let variance = v.sum(squares) / count + V::Real::of(epsilon);
    (mean, V::Real::ONE / variance.root())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::noise;
    use crate::simd::{F32Job, InstructionSet};

    #[test]
    fn instruction_sets_agree_on_forward_and_backward() {
        for width in [1, 2, 15, 16, 24, 768, 1601] {
            let x = noise(3 * width, 1, 3.0, 2.0);
            let (weight, bias) = (noise(width, 2, 1.0, 1.0), noise(width, 3, 0.0, 1.0));
            let wide = |values: &[f32]| values.iter().map(|value| f64::from(*value)).collect::<Vec<_>>();
            let (x_wide, weight_wide, bias_wide) = (wide(&x), wide(&weight), wide(&bias));
            let run = |(y, x_gradient, sums): (&mut [f64], &mut [f64], &mut [f64])| {
                let part = &mut Part::of_rows(y, width, (3, width));
                let (x, weight) = (&x_wide[..], &weight_wide[..]);
                f64::vectorized(Forward { x, weight, bias: &bias_wide, epsilon: 1e-5, part });
                f64::vectorized(Backward { x, weight, gradient: x, epsilon: 1e-5, x_gradient, sums });
            };
            let mut expected = [vec![0.0; 3 * width], vec![0.0; 3 * width], vec![0.0; 2 * width]];
            let [y, x_gradient, sums] = &mut expected;
            run((y, x_gradient, sums));
            for set in InstructionSet::available() {
                let mut found = [vec![0f32; 3 * width], vec![0.0; 3 * width], vec![0.0; 2 * width]];
                let [y, x_gradient, sums] = &mut found;
                let part = &mut Part::of_rows(y, width, (3, width));
                let (x, weight) = (&x[..], &weight[..]);
                set.run(F32Job(Forward { x, weight, bias: &bias, epsilon: 1e-5, part }));
                set.run(F32Job(Backward { x, weight, gradient: x, epsilon: 1e-5, x_gradient, sums }));
                for (what, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    for (found, expected) in found.iter().zip(expected) {
                        // The mean of values near 3 is rounded to 2e-7 and divided by a deviation of about
                        // 0.6. Gradients are about 3 times as large as values.
                        let error = (f64::from(*found) - expected).abs();
                        let bound = 2e-5 * expected.abs().max(1.0);
                        assert!(
                            width == 1 || error < bound,
                            "{set:?} {width} {what}: {found} vs. {expected}"
                        );
                    }
                }
            }
        }
    }
}
