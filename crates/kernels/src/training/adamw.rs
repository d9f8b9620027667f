//! One step of AdamW for one parameter, and the norm that clipping needs.
//!
//! Source: "Decoupled Weight Decay Regularization" (arXiv:1711.05101, algorithm 2) in the form of PyTorch's
//! `torch.optim.AdamW`: the decay is `lr · weight_decay · parameter`, and epsilon is added after the bias correction.

use candle_core::{DType, Result, Tensor, Var};

use super::arithmetic::{Real, Vectors, Work};
use super::operation::in_place;
use super::{for_real, is_cpu_float, with_elements};
use crate::parallel::for_each_item;
use crate::simd::LANES;

/// Values that one task works on. Fixed, so that sums do not depend on the number of threads.
const BLOCK: usize = 1 << 14;

/// The numbers of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// Learning rate.
    pub learning_rate: f64,
    /// Decay rate of the gradient's running mean.
    pub beta_1: f64,
    /// Decay rate of the squared gradient's running mean.
    pub beta_2: f64,
    /// Added to the square root that divides the step.
    pub epsilon: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Number of this step, from 1.
    pub step: u64,
    /// What the gradient is multiplied by first: the factor of clipping.
    pub gradient_factor: f64,
}

impl AdamWStep {
    /// `1 - beta^step` for both.
    fn bias_corrections(&self) -> (f64, f64) {
        let correction = |beta: f64| 1.0 - beta.powf(self.step as f64);
        (correction(self.beta_1), correction(self.beta_2))
    }
}

/// Changes a parameter and its two running means in place.
///
/// # Shapes
/// All four alike.
///
/// # Errors
/// When the shapes or types differ.
pub fn adamw_step(
    parameter: &Var,
    gradient: &Tensor,
    mean: &Var,
    square: &Var,
    step: &AdamWStep,
) -> Result<()> {
    let gradient = gradient.detach();
    let (correction_1, correction_2) = step.bias_corrections();
    let rate = step.learning_rate / correction_1;
    let keep = 1.0 - step.learning_rate * step.weight_decay;
    if is_cpu_float(parameter) && parameter.is_contiguous() {
        let variables = [parameter, mean, square];
        let numbers = Numbers { step, keep, rate, root_factor: 1.0 / correction_2.sqrt() };
        return for_real!(parameter.dtype(), fused(variables, &gradient, &numbers));
    }
    let gradient = (gradient * step.gradient_factor)?;
    mean.set(&((mean.as_tensor() * step.beta_1)? + (&gradient * (1.0 - step.beta_1))?)?.detach())?;
    square
        .set(&((square.as_tensor() * step.beta_2)? + (gradient.sqr()? * (1.0 - step.beta_2))?)?.detach())?;
    let root = ((square.sqrt()? * (1.0 / correction_2.sqrt()))? + step.epsilon)?;
    parameter.set(&((parameter.as_tensor() * keep)? - ((mean.as_tensor() / root)? * rate)?)?.detach())
}

/// The numbers of a step with what follows from them.
struct Numbers<'a> {
    step: &'a AdamWStep,
    /// What decay leaves of a parameter.
    keep: f64,
    /// Learning rate with the correction of the mean.
    rate: f64,
    /// The correction of the root of the mean square.
    root_factor: f64,
}

fn fused<T: Real>([parameter, mean, square]: [&Var; 3], gradient: &Tensor, numbers: &Numbers) -> Result<()> {
    if [mean.shape(), square.shape(), gradient.shape()].iter().any(|shape| *shape != parameter.shape()) {
        candle_core::bail!("adamw: parameter, gradient and means have different shapes");
    }
    with_elements::<T, 1, _>([gradient], |[gradient]| {
        in_place(parameter, |parameter: &mut [T]| {
            in_place(mean, |mean: &mut [T]| {
                in_place(square, |square: &mut [T]| {
                    let means = mean.chunks_mut(BLOCK).zip(square.chunks_mut(BLOCK));
                    let blocks = parameter.chunks_mut(BLOCK).zip(gradient.chunks(BLOCK)).zip(means);
                    for_each_item(blocks, |((parameter, gradient), (mean, square))| {
                        T::vectorized(Update { numbers, parameter, gradient, mean, square });
                    });
                })
            })
        })
    })???;
    Ok(())
}

struct Update<'a, T> {
    numbers: &'a Numbers<'a>,
    parameter: &'a mut [T],
    gradient: &'a [T],
    mean: &'a mut [T],
    square: &'a mut [T],
}

impl<T: Real> Work<T> for Update<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        let Self { numbers, parameter, gradient, mean, square } = self;
        let constant = |value: f64| v.splat(T::of(value));
        let AdamWStep { beta_1, beta_2, epsilon, gradient_factor, .. } = *numbers.step;
        let factor = constant(gradient_factor);
        let (beta_1, rest_1) = (constant(beta_1), constant(1.0 - beta_1));
        let (beta_2, rest_2) = (constant(beta_2), constant(1.0 - beta_2));
        let (keep, rate) = (constant(numbers.keep), constant(numbers.rate));
        let (root_factor, epsilon) = (constant(numbers.root_factor), constant(epsilon));
        let zero = T::ZERO;
        let means = mean.chunks_mut(LANES).zip(square.chunks_mut(LANES));
        let given = parameter.chunks_mut(LANES).zip(gradient.chunks(LANES));
        for ((parameter, gradient), (mean, square)) in given.zip(means) {
            let gradient = v.mul(v.load_first(gradient, zero), factor);
            let new_mean = v.mul_add(v.load_first(mean, zero), beta_1, v.mul(gradient, rest_1));
            v.store_first(new_mean, mean);
            let squared = v.mul(gradient, gradient);
            let new_square = v.mul_add(v.load_first(square, zero), beta_2, v.mul(squared, rest_2));
            v.store_first(new_square, square);
            let root = v.mul_add(v.root(new_square), root_factor, epsilon);
            let change = v.mul(v.div(new_mean, root), rate);
            v.store_first(v.sub(v.mul(v.load_first(parameter, zero), keep), change), parameter);
        }
    }
}

/// The sum of the squares of all elements.
///
/// # Errors
/// When candle cannot read the tensor.
pub fn squared_norm(x: &Tensor) -> Result<f64> {
    fn sum<T: Real>(x: &Tensor) -> Result<f64> {
        with_elements::<T, 1, _>([x], |[x]| {
            let mut sums = vec![0.0; x.len().div_ceil(BLOCK)];
            for_each_item(x.chunks(BLOCK).zip(&mut sums), |(values, sum)| {
                *sum = T::vectorized(Squares { values });
            });
            Ok(sums.iter().sum())
        })
    }
    if is_cpu_float(x) {
        return for_real!(x.dtype(), sum(x));
    }
    x.sqr()?.sum_all()?.to_dtype(DType::F64)?.to_scalar()
}

struct Squares<'a, T> {
    values: &'a [T],
}

impl<T: Real> Work<T> for Squares<'_, T> {
    type Output = f64;

    /// In f64 throughout, which the compiler turns into vector code.
    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, _: V) -> f64 {
        const PARTS: usize = 32;
        let mut sums = [0.0; PARTS];
        for values in self.values.chunks(PARTS) {
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum += value.to_f64() * value.to_f64();
            }
        }
        sums.iter().sum()
    }
}
