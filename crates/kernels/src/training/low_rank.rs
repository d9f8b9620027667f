//! A fixed matrix with a trained product of low rank added to it: the weight of a layer with an adapter.

use candle_core::{Result, Tensor};

use super::arithmetic::Real;
use super::operation::{Operation, Sums, record};
use super::product::{Matrix, Output, product};
use super::{for_real, is_cpu_float, with_elements};

/// `weight + scale · b a`, with gradients for `a` and `b` alone.
///
/// # Shapes
/// `weight` `(out, in)`, `a` `(rank, in)`, `b` `(out, rank)`; returns the shape of `weight`.
///
/// # Errors
/// When the shapes do not fit.
pub fn low_rank_sum(weight: &Tensor, a: &Tensor, b: &Tensor, scale: f64) -> Result<Tensor> {
    fn forward<T: Real>(weight: &Tensor, a: &Tensor, b: &Tensor, scale: f64) -> Result<Tensor> {
        let ((rank, input), (output, _)) = (a.dims2()?, b.dims2()?);
        let values = with_elements::<T, 3, _>([weight, a, b], |[weight, a, b]| {
            let mut values = vec![T::ZERO; output * input];
            let sizes = (output, rank, input);
            product(Matrix::rows(b, rank), Matrix::rows(a, input), sizes, &mut values, Output::Fresh);
            let scale = T::of(scale);
            values.iter_mut().zip(weight).for_each(|(value, weight)| *value = *weight + *value * scale);
            Ok(values)
        })?;
        record(&[a, b], values, weight.shape(), LowRank { scale })
    }
    let fits = weight.dims2()? == (b.dim(0)?, a.dim(1)?) && b.dim(1)? == a.dim(0)?;
    let is_one_type = weight.dtype() == a.dtype() && a.dtype() == b.dtype();
    if is_cpu_float(weight) && fits && is_one_type {
        return for_real!(weight.dtype(), forward(&weight.detach(), a, b, scale));
    }
    weight.detach() + (b.matmul(a)? * scale)?
}

struct LowRank {
    scale: f64,
}

impl Operation for LowRank {
    fn name(&self) -> &'static str {
        "low-rank-sum"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        fn backward<T: Real>(
            (a, b): (&Tensor, &Tensor),
            scale: f64,
            gradient: &Tensor,
            sums: &mut Sums,
        ) -> Result<()> {
            let ((rank, input), (output, _)) = (a.dims2()?, b.dims2()?);
            let [of_a, of_b] = with_elements::<T, 3, _>([a, b, gradient], |[a, b, gradient]| {
                let (a, b) = (Matrix::rows(a, input), Matrix::rows(b, rank));
                let gradient = Matrix::rows(gradient, input);
                let mut of_a = vec![T::ZERO; rank * input];
                product(b.transposed(), gradient, (rank, output, input), &mut of_a, Output::Fresh);
                let mut of_b = vec![T::ZERO; output * rank];
                product(gradient, a.transposed(), (output, input, rank), &mut of_b, Output::Fresh);
                let scale = T::of(scale);
                of_a.iter_mut().chain(&mut of_b).for_each(|value| *value *= scale);
                Ok([of_a, of_b])
            })?;
            sums.add(a, Tensor::from_vec(of_a, a.shape(), a.device())?)?;
            sums.add(b, Tensor::from_vec(of_b, b.shape(), b.device())?)
        }
        let (a, b) = (&inputs[0], &inputs[1]);
        for_real!(a.dtype(), backward((a, b), self.scale, gradient, sums))
    }
}
