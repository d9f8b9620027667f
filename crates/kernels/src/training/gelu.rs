//! The tanh form of GELU and its exact derivative.
//!
//! `0.5 x (1 + tanh(u)) = x s` with `s = 1 / (1 + e^(-2u))` and `u = sqrt(2/π) (x + 0.044715 x³)`, which loses no digits
//! near zero; the derivative is `s + x s (1 - s) 2u'`.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::arithmetic::{Real, Vectorized, vectorized};
use super::{elements, for_real, with_elements};

/// Values that one task works on.
const BLOCK: usize = 1 << 14;
/// `2 sqrt(2/π)`.
const SLOPE: f64 = 1.595_769_121_605_731;
/// The factor of the cube, from the GELU paper (arXiv:1606.08415, section 2).
const CUBIC: f64 = 0.044_715;

/// GELU of every element, with a gradient.
pub(crate) fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    x.contiguous()?.apply_op1(Gelu)
}

struct Gelu;

impl CustomOp1 for Gelu {
    fn name(&self) -> &'static str {
        "gelu-tanh"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        fn forward<T: Real>(x: &CpuStorage, layout: &Layout) -> Result<CpuStorage> {
            let x = elements::<T>(x, layout)?;
            let mut y = vec![T::zero(); x.len()];
            y.par_chunks_mut(BLOCK).zip(x.par_chunks(BLOCK)).for_each(|(y, x)| vectorized(Forward { x, y }));
            Ok(T::to_cpu_storage_owned(y))
        }
        Ok((for_real!(x.dtype(), forward(x, layout))?, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        fn backward<T: Real>(x: &Tensor, gradient: &Tensor) -> Result<Tensor> {
            let values = with_elements::<T, 2, _>([x, gradient], |[x, gradient]| {
                let mut y = vec![T::zero(); x.len()];
                y.par_chunks_mut(BLOCK)
                    .zip(x.par_chunks(BLOCK))
                    .zip(gradient.par_chunks(BLOCK))
                    .for_each(|((y, x), gradient)| vectorized(Backward { x, gradient, y }));
                Ok(y)
            })?;
            Tensor::from_vec(values, x.shape(), x.device())
        }
        for_real!(x.dtype(), backward(x, gradient)).map(Some)
    }
}

/// `s` of the file's formula.
#[inline(always)]
fn gate<T: Real>(x: T) -> T {
    let twice_u = T::from_f64(SLOPE) * x * (T::one() + T::from_f64(CUBIC) * x * x);
    T::one() / (T::one() + (T::zero() - twice_u).exponential())
}

struct Forward<'a, T> {
    x: &'a [T],
    y: &'a mut [T],
}

impl<T: Real> Vectorized for Forward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        for (y, x) in self.y.iter_mut().zip(self.x) {
            *y = *x * gate(*x);
        }
    }
}

struct Backward<'a, T> {
    x: &'a [T],
    gradient: &'a [T],
    y: &'a mut [T],
}

impl<T: Real> Vectorized for Backward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<const FMA: bool>(self) {
        let (slope, cubic) = (T::from_f64(SLOPE), T::from_f64(3.0 * CUBIC));
        for ((y, x), gradient) in self.y.iter_mut().zip(self.x).zip(self.gradient) {
            let gate = gate(*x);
            let derivative = gate + *x * gate * (T::one() - gate) * slope * (T::one() + cubic * *x * *x);
            *y = *gradient * derivative;
        }
    }
}
