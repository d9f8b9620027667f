//! AdamW step for one parameter, and the norm for gradient clipping.
//!
//! Source: "Decoupled Weight Decay Regularization" (arXiv:1711.05101, algorithm 2) in the form
//! of PyTorch's `torch.optim.AdamW`: the decay is `lr · weight_decay · parameter`, and epsilon
//! is added after the bias correction.

use crate::simd::{LANES, Number, Real, Vectors, Work};
use crate::threads::{for_each_item, map_items};

/// Values per task, fixed so that sums do not depend on the number of threads.
const BLOCK: usize = 1 << 14;

/// Hyperparameters of a step.
///
/// ```
/// use candle_gpt2_arithmetic::{AdamWStep, Float};
///
/// let step = AdamWStep {
///     learning_rate: 0.25, beta_1: 0.9, beta_2: 0.999, epsilon: 0.0, weight_decay: 0.0, step: 1, gradient_factor: 1.0,
/// };
/// let (mut parameter, mut mean, mut square) = ([1f64, 2., 3.], [0.; 3], [0.; 3]);
/// Float::adamw(&mut parameter, &[5., -7., 11.], [&mut mean, &mut square], &step);
/// // The first step goes by the learning rate against the sign of each gradient.
/// assert!(parameter.iter().zip([0.75, 2.25, 2.75]).all(|(moved, expected)| (moved - expected).abs() < 1e-9));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// Learning rate.
    pub learning_rate: f64,
    /// Decay rate for the running mean of the gradient.
    pub beta_1: f64,
    /// Decay rate for the running mean of the squared gradient.
    pub beta_2: f64,
    /// Term added to the denominator for numerical stability.
    pub epsilon: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Number of this step, starting at 1.
    pub step: u64,
    /// Clipping factor for the gradient.
    pub gradient_factor: f64,
}

impl AdamWStep {
    /// Returns `1 - beta^step` for both decay rates.
    #[inline(always)]
    pub fn bias_corrections(&self) -> (f64, f64) {
        let correction = |beta: f64| 1.0 - libm::pow(beta, self.step as f64);
        (correction(self.beta_1), correction(self.beta_2))
    }

    /// Returns the fraction of a parameter that remains after weight decay.
    #[inline(always)]
    pub fn decay_factor(&self) -> f64 {
        1.0 - self.learning_rate * self.weight_decay
    }
}

pub(super) fn adamw<T: Real>(
    parameter: &mut [T],
    gradient: &[T],
    [mean, square]: [&mut [T]; 2],
    step: &AdamWStep,
) {
    let lens = [gradient.len(), mean.len(), square.len()];
    assert!(
        lens == [parameter.len(); 3],
        "the gradient and the two means have {lens:?} values, but the parameter has {}",
        parameter.len()
    );
    let means = mean.chunks_mut(BLOCK).zip(square.chunks_mut(BLOCK));
    let blocks = parameter.chunks_mut(BLOCK).zip(gradient.chunks(BLOCK)).zip(means);
    for_each_item(blocks, |((parameter, gradient), (mean, square))| {
        T::vectorized(Update { step, parameter, gradient, mean, square });
    });
}

struct Update<'a, T> {
    step: &'a AdamWStep,
    parameter: &'a mut [T],
    gradient: &'a [T],
    mean: &'a mut [T],
    square: &'a mut [T],
}

impl<T: Number> Work<T> for Update<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        let Self { step, parameter, gradient, mean, square } = self;
        let AdamWStep { learning_rate, beta_1, beta_2, epsilon, gradient_factor, .. } = *step;
        let (correction_1, correction_2) = step.bias_corrections();
        let factor = v.splat(T::of(gradient_factor));
        let (keep_1, rest_1) = (v.splat(T::of(beta_1)), v.splat(T::of(1.0 - beta_1)));
        let (keep_2, rest_2) = (v.splat(T::of(beta_2)), v.splat(T::of(1.0 - beta_2)));
        let keep = v.splat(T::of(step.decay_factor()));
        let rate = v.splat(T::of(learning_rate / correction_1));
        let root_factor = v.splat(T::of(1.0 / correction_2.sqrt()));
        let (epsilon, zero) = (v.splat(T::of(epsilon)), T::ZERO);
        for first in (0..parameter.len()).step_by(LANES) {
            let (parameter, gradient) = (&mut parameter[first..], &gradient[first..]);
            let (mean, square) = (&mut mean[first..], &mut square[first..]);
            let gradient = v.mul(v.load_first(gradient, zero), factor);
            let new_mean = v.mul_add(v.load_first(mean, zero), keep_1, v.mul(gradient, rest_1));
            v.store_first(new_mean, mean);
            let squared = v.mul(gradient, gradient);
            let new_square = v.mul_add(v.load_first(square, zero), keep_2, v.mul(squared, rest_2));
            v.store_first(new_square, square);
            let root = v.mul_add(v.root(new_square), root_factor, epsilon);
            let change = v.mul(v.div(new_mean, root), rate);
            v.store_first(v.sub(v.mul(v.load_first(parameter, zero), keep), change), parameter);
        }
    }
}

pub(super) fn squared_norm<T: Real>(x: &[T]) -> f64 {
    map_items(x.chunks(BLOCK), |values| T::vectorized(Squares(values))).into_iter().sum()
}

struct Squares<'a, T>(&'a [T]);

impl<T: Number> Work<T> for Squares<'_, T> {
    type Output = f64;

    /// Sums the squares in f64; the compiler vectorizes the loop.
    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, _: V) -> f64 {
        const PARTS: usize = 32;
        let mut sums = [0.0; PARTS];
        for values in self.0.chunks(PARTS) {
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum += value.to_f64() * value.to_f64();
            }
        }
        let mut total = 0.0;
        for sum in sums {
            total += sum;
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::noise;
    use crate::simd::{F32Job, InstructionSet};

    #[test]
    fn instruction_sets_follow_the_adamw_formula() {
        let step = AdamWStep {
            learning_rate: 0.1,
            beta_1: 0.9,
            beta_2: 0.99,
            epsilon: 1e-8,
            weight_decay: 0.5,
            step: 3,
            gradient_factor: 0.5,
        };
        let initial =
            [noise(37, 1, 0.0, 2.0), noise(37, 2, 0.0, 2.0), noise(37, 3, 0.0, 0.2), noise(37, 4, 0.1, 0.1)];
        for set in InstructionSet::available() {
            let [mut parameter, gradient, mut mean, mut square] = initial.clone();
            set.run(F32Job(Update {
                step: &step,
                parameter: &mut parameter,
                gradient: &gradient,
                mean: &mut mean,
                square: &mut square,
            }));
            for index in 0..37 {
                let [p, g, m, s] = [0, 1, 2, 3].map(|which: usize| f64::from(initial[which][index]));
                let g = 0.5 * g;
                let (m, s) = (0.9 * m + 0.1 * g, 0.99 * s + 0.01 * g * g);
                let root = (s / (1.0 - 0.99f64.powi(3))).sqrt() + 1e-8;
                let p = p * 0.95 - 0.1 * (m / (1.0 - 0.9f64.powi(3))) / root;
                // Each result takes a few operations on values below 2, each rounded once.
                for (found, expected) in [(parameter[index], p), (mean[index], m), (square[index], s)] {
                    assert!((f64::from(found) - expected).abs() < 1e-6, "{set:?}: {found} vs. {expected}");
                }
            }
            let expected: f64 = initial[0].iter().map(|value| f64::from(*value).powi(2)).sum();
            let found = set.run(F32Job(Squares(&initial[0])));
            assert!((found / expected - 1.0).abs() < 1e-14, "{set:?}: {found} vs. {expected}");
        }
    }
}
