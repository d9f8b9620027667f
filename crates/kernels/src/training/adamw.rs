//! One step of AdamW for one parameter, and the norm that clipping needs.
//!
//! Source: "Decoupled Weight Decay Regularization" (arXiv:1711.05101, algorithm 2) in the form of PyTorch's
//! `torch.optim.AdamW`: the decay is `lr · weight_decay · parameter`, and epsilon is added behind the bias correction.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, InplaceOp2, InplaceOp3, Layout, Result, Tensor, Var};
use rayon::prelude::*;

use super::arithmetic::{Real, Vectorized, vectorized};
use super::{elements, for_real, is_cpu_float, with_elements};

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
        let gradient = gradient.contiguous()?;
        let factor = step.gradient_factor;
        mean.inplace_op2(&gradient, &RunningMean { beta: step.beta_1, factor, is_squared: false })?;
        square.inplace_op2(&gradient, &RunningMean { beta: step.beta_2, factor, is_squared: true })?;
        let update = Update { keep, rate, root_factor: 1.0 / correction_2.sqrt(), epsilon: step.epsilon };
        return parameter.inplace_op3(mean, square, &update);
    }
    let gradient = (gradient * step.gradient_factor)?;
    mean.set(&((mean.as_tensor() * step.beta_1)? + (&gradient * (1.0 - step.beta_1))?)?.detach())?;
    square
        .set(&((square.as_tensor() * step.beta_2)? + (gradient.sqr()? * (1.0 - step.beta_2))?)?.detach())?;
    let root = ((square.sqrt()? * (1.0 / correction_2.sqrt()))? + step.epsilon)?;
    parameter.set(&((parameter.as_tensor() * keep)? - ((mean.as_tensor() / root)? * rate)?)?.detach())
}

/// The sum of the squares of all elements.
///
/// # Errors
/// When candle cannot read the tensor.
pub fn squared_norm(x: &Tensor) -> Result<f64> {
    fn sum<T: Real>(x: &Tensor) -> Result<f64> {
        with_elements::<T, 1, _>([x], |[x]| {
            let parts: Vec<f64> = x.par_chunks(BLOCK).map(|values| vectorized(Squares { values })).collect();
            Ok(parts.iter().sum())
        })
    }
    if is_cpu_float(x) {
        return for_real!(x.dtype(), sum(x));
    }
    x.sqr()?.sum_all()?.to_dtype(candle_core::DType::F64)?.to_scalar()
}

struct Squares<'a, T> {
    values: &'a [T],
}

impl<T: Real> Vectorized for Squares<'_, T> {
    type Output = f64;

    #[inline(always)]
    fn run<const FMA: bool>(self) -> f64 {
        const PARTS: usize = 8;
        let mut sums = [0.0; PARTS];
        for values in self.values.chunks(PARTS) {
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum += value.to_f64() * value.to_f64();
            }
        }
        sums.iter().sum()
    }
}

struct RunningMean {
    beta: f64,
    factor: f64,
    is_squared: bool,
}

impl InplaceOp2 for RunningMean {
    fn name(&self) -> &'static str {
        "running-mean"
    }

    fn cpu_fwd(
        &self,
        mean: &mut CpuStorage,
        mean_layout: &Layout,
        gradient: &CpuStorage,
        layout: &Layout,
    ) -> Result<()> {
        match mean {
            CpuStorage::F32(mean) => self.run(range(mean, mean_layout)?, elements(gradient, layout)?),
            CpuStorage::F64(mean) => self.run(range(mean, mean_layout)?, elements(gradient, layout)?),
            other => {
                return Err(candle_core::Error::UnsupportedDTypeForOp(other.dtype(), "running-mean").bt());
            }
        }
        Ok(())
    }
}

impl RunningMean {
    fn run<T: Real>(&self, mean: &mut [T], gradient: &[T]) {
        mean.par_chunks_mut(BLOCK).zip(gradient.par_chunks(BLOCK)).for_each(|(mean, gradient)| {
            vectorized(RunningMeanOf { numbers: self, mean, gradient });
        });
    }
}

struct RunningMeanOf<'a, T> {
    numbers: &'a RunningMean,
    mean: &'a mut [T],
    gradient: &'a [T],
}

impl<T: Real> Vectorized for RunningMeanOf<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Self { numbers, mean, gradient } = self;
        let (beta, rest) = (T::from_f64(numbers.beta), T::from_f64(1.0 - numbers.beta));
        let factor = T::from_f64(numbers.factor);
        for (mean, gradient) in mean.iter_mut().zip(gradient) {
            let gradient = *gradient * factor;
            let value = if numbers.is_squared { gradient * gradient } else { gradient };
            *mean = *mean * beta + value * rest;
        }
    }
}

struct Update {
    keep: f64,
    rate: f64,
    root_factor: f64,
    epsilon: f64,
}

impl InplaceOp3 for Update {
    fn name(&self) -> &'static str {
        "adamw-update"
    }

    fn cpu_fwd(
        &self,
        parameter: &mut CpuStorage,
        layout: &Layout,
        mean: &CpuStorage,
        mean_layout: &Layout,
        square: &CpuStorage,
        square_layout: &Layout,
    ) -> Result<()> {
        match parameter {
            CpuStorage::F32(parameter) => self.run(
                range(parameter, layout)?,
                elements(mean, mean_layout)?,
                elements(square, square_layout)?,
            ),
            CpuStorage::F64(parameter) => self.run(
                range(parameter, layout)?,
                elements(mean, mean_layout)?,
                elements(square, square_layout)?,
            ),
            other => {
                return Err(candle_core::Error::UnsupportedDTypeForOp(other.dtype(), "adamw-update").bt());
            }
        }
        Ok(())
    }
}

impl Update {
    fn run<T: Real>(&self, parameter: &mut [T], mean: &[T], square: &[T]) {
        let blocks = parameter.par_chunks_mut(BLOCK).zip(mean.par_chunks(BLOCK));
        blocks.zip(square.par_chunks(BLOCK)).for_each(|((parameter, mean), square)| {
            vectorized(UpdateOf { numbers: self, parameter, mean, square });
        });
    }
}

struct UpdateOf<'a, T> {
    numbers: &'a Update,
    parameter: &'a mut [T],
    mean: &'a [T],
    square: &'a [T],
}

impl<T: Real> Vectorized for UpdateOf<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Self { numbers, parameter, mean, square } = self;
        let (keep, rate) = (T::from_f64(numbers.keep), T::from_f64(numbers.rate));
        let (root_factor, epsilon) = (T::from_f64(numbers.root_factor), T::from_f64(numbers.epsilon));
        for ((parameter, mean), square) in parameter.iter_mut().zip(mean).zip(square) {
            let root = square.root() * root_factor + epsilon;
            *parameter = *parameter * keep - *mean / root * rate;
        }
    }
}

/// The elements of a contiguous storage, to be changed.
fn range<'a, T>(values: &'a mut [T], layout: &Layout) -> Result<&'a mut [T]> {
    let range = layout.contiguous_offsets().and_then(|(start, end)| values.get_mut(start..end));
    range.ok_or_else(|| candle_core::Error::RequiresContiguous { op: "adamw" }.bt())
}
