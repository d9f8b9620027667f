//! Layer norm in two passes over a row, and its three gradients in one pass over the batch.
//!
//! With `n = (x - mean) / deviation` and `g = gradient · weight`, the gradient of a row is
//! `(g - mean(g) - n · mean(g · n)) / deviation`; those of weight and bias are the column sums of `gradient · n` and of
//! `gradient`.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, D, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::arithmetic::{Real, Vectorized, vectorized};
use super::{elements, for_real, with_elements};

/// Rows that one task works on. Fixed, so that sums do not depend on the number of threads.
const ROW_BLOCK: usize = 64;

/// The norm of every row, scaled and shifted.
///
/// # Shapes
/// `x` `(…, width)`, `weight` and `bias` `(width)`; returns the shape of `x`.
pub(crate) fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, epsilon: f64) -> Result<Tensor> {
    x.contiguous()?.apply_op3(&weight.contiguous()?, &bias.contiguous()?, Norm { epsilon })
}

struct Norm {
    epsilon: f64,
}

impl CustomOp3 for Norm {
    fn name(&self) -> &'static str {
        "layer-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        fn forward<T: Real>(
            (x, weight, bias): (&CpuStorage, &CpuStorage, &CpuStorage),
            (x_layout, weight_layout, bias_layout): (&Layout, &Layout, &Layout),
            epsilon: f64,
        ) -> Result<CpuStorage> {
            let x = elements::<T>(x, x_layout)?;
            let (weight, bias) = (elements::<T>(weight, weight_layout)?, elements::<T>(bias, bias_layout)?);
            let width = weight.len();
            let mut y = vec![T::zero(); x.len()];
            y.par_chunks_mut(ROW_BLOCK * width).zip(x.par_chunks(ROW_BLOCK * width)).for_each(|(y, x)| {
                vectorized(Forward { x, weight, bias, epsilon, y });
            });
            Ok(T::to_cpu_storage_owned(y))
        }
        let layouts = (x_layout, weight_layout, bias_layout);
        let y = for_real!(x.dtype(), forward((x, weight, bias), layouts, self.epsilon))?;
        Ok((y, x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        fn backward<T: Real>(
            x: &Tensor,
            weight: &Tensor,
            gradient: &Tensor,
            epsilon: f64,
        ) -> Result<[Tensor; 3]> {
            let width = x.dim(D::Minus1)?;
            let [x_gradient, weight_gradient, bias_gradient] =
                with_elements::<T, 3, _>([x, weight, gradient], |[x, weight, gradient]| {
                    let mut x_gradient = vec![T::zero(); x.len()];
                    let block = ROW_BLOCK * width;
                    let partial: Vec<_> = x_gradient
                        .par_chunks_mut(block)
                        .zip(x.par_chunks(block))
                        .zip(gradient.par_chunks(block))
                        .map(|((x_gradient, x), gradient)| {
                            vectorized(Backward { x, weight, gradient, epsilon, x_gradient })
                        })
                        .collect();
                    let mut sums = [vec![T::zero(); width], vec![T::zero(); width]];
                    for partial in &partial {
                        for (sum, partial) in sums.iter_mut().zip(partial) {
                            for (sum, value) in sum.iter_mut().zip(partial) {
                                *sum += *value;
                            }
                        }
                    }
                    let [weight_gradient, bias_gradient] = sums;
                    Ok([x_gradient, weight_gradient, bias_gradient])
                })?;
            Ok([
                Tensor::from_vec(x_gradient, x.shape(), x.device())?,
                Tensor::from_vec(weight_gradient, width, x.device())?,
                Tensor::from_vec(bias_gradient, width, x.device())?,
            ])
        }
        let [x, weight, bias_gradient] = for_real!(x.dtype(), backward(x, weight, gradient, self.epsilon))?;
        Ok((Some(x), Some(weight), Some(bias_gradient.reshape(bias.shape())?)))
    }
}

struct Forward<'a, T> {
    x: &'a [T],
    weight: &'a [T],
    bias: &'a [T],
    epsilon: f64,
    y: &'a mut [T],
}

impl<T: Real> Vectorized for Forward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let Self { x, weight, bias, epsilon, y } = self;
        let width = weight.len();
        for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
            let (mean, inverse) = moments(x, epsilon);
            for (((y, x), weight), bias) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                *y = (*x - mean) * inverse * *weight + *bias;
            }
        }
    }
}

struct Backward<'a, T> {
    x: &'a [T],
    weight: &'a [T],
    gradient: &'a [T],
    epsilon: f64,
    x_gradient: &'a mut [T],
}

impl<T: Real> Vectorized for Backward<'_, T> {
    /// The sums of these rows for weight and bias.
    type Output = [Vec<T>; 2];

    #[inline(always)]
    fn run<const FMA: bool>(self) -> [Vec<T>; 2] {
        let Self { x, weight, gradient, epsilon, x_gradient } = self;
        let width = weight.len();
        let count = T::from_f64(width as f64);
        let mut weight_sums = vec![T::zero(); width];
        let mut bias_sums = vec![T::zero(); width];
        let rows = x.chunks_exact(width).zip(gradient.chunks_exact(width));
        for ((x, gradient), x_gradient) in rows.zip(x_gradient.chunks_exact_mut(width)) {
            let (mean, inverse) = moments(x, epsilon);
            let scaled = |index: usize| gradient[index] * weight[index];
            let normalized = |index: usize| (x[index] - mean) * inverse;
            let mean_scaled = sum(width, scaled) / count;
            let mean_product = sum(width, |index| scaled(index) * normalized(index)) / count;
            for index in 0..width {
                x_gradient[index] =
                    (scaled(index) - mean_scaled - normalized(index) * mean_product) * inverse;
                weight_sums[index] += gradient[index] * normalized(index);
                bias_sums[index] += gradient[index];
            }
        }
        [weight_sums, bias_sums]
    }
}

/// The mean of a row, and one over its deviation.
#[inline(always)]
fn moments<T: Real>(x: &[T], epsilon: f64) -> (T, T) {
    let count = T::from_f64(x.len() as f64);
    let mean = sum(x.len(), |index| x[index]) / count;
    let variance = sum(x.len(), |index| (x[index] - mean) * (x[index] - mean)) / count;
    (mean, T::one() / (variance + T::from_f64(epsilon)).root())
}

/// A sum in eight interleaved parts, which the compiler keeps in one vector and which loses fewer digits than one.
#[inline(always)]
fn sum<T: Real>(count: usize, term: impl Fn(usize) -> T) -> T {
    const PARTS: usize = 8;
    let mut parts = [T::zero(); PARTS];
    let whole = count / PARTS * PARTS;
    for first in (0..whole).step_by(PARTS) {
        for (offset, part) in parts.iter_mut().enumerate() {
            *part += term(first + offset);
        }
    }
    let mut total = T::zero();
    for index in whole..count {
        total += term(index);
    }
    parts.into_iter().fold(total, |total, part| total + part)
}
