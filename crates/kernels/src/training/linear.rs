//! The products of a linear layer: `y = x Wᵀ + b`, and its gradients `dx = dy W`, `dW = dyᵀ x` and the column sums of `dy`.

use candle_core::{D, Result, Tensor};

use super::arithmetic::Real;
use super::elementwise::sum_columns;
use super::operation::{Operation, Sums, record};
use super::product::{Matrix, Output, product};
use super::{for_real, with_elements};

/// `x Wᵀ + b`.
///
/// # Shapes
/// `x` `(…, in)`, `weight` `(out, in)`, `bias` `(out)`; returns `(…, out)`. They fit.
pub(crate) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    fn forward<T: Real>(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (out_features, in_features) = weight.dims2()?;
        let rows = x.elem_count() / in_features.max(1);
        let y = with_elements::<T, 3, _>([x, weight, bias.unwrap_or(weight)], |[x, weight, bias_values]| {
            let mut y = vec![T::ZERO; rows * out_features];
            let mode = if bias.is_some() { Output::Biased(bias_values) } else { Output::Fresh };
            let (x, weight) = (Matrix::rows(x, in_features), Matrix::rows(weight, in_features));
            product(x, weight.transposed(), (rows, in_features, out_features), &mut y, mode);
            Ok(y)
        })?;
        let mut shape = x.dims().to_vec();
        if let Some(width) = shape.last_mut() {
            *width = out_features;
        }
        match bias {
            Some(bias) => record(&[x, weight, bias], y, shape, Linear),
            None => record(&[x, weight], y, shape, Linear),
        }
    }
    for_real!(x.dtype(), forward(x, weight, bias))
}

struct Linear;

impl Operation for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        fn backward<T: Real>(inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
            let (x, weight) = (&inputs[0], &inputs[1]);
            let (out_features, in_features) = weight.dims2()?;
            let rows = gradient.elem_count() / gradient.dim(D::Minus1)?.max(1);
            with_elements::<T, 3, _>([x, weight, gradient], |[x_values, weight_values, gradient]| {
                let mode = |is_fresh| if is_fresh { Output::Fresh } else { Output::Sum };
                let gradient_rows = Matrix::rows(gradient, out_features);
                sums.update::<T>(weight, |sum, is_fresh| {
                    let x = Matrix::rows(x_values, in_features);
                    let sizes = (out_features, rows, in_features);
                    product(gradient_rows.transposed(), x, sizes, sum, mode(is_fresh));
                })?;
                if let Some(bias) = inputs.get(2) {
                    sums.update::<T>(bias, |sum, is_fresh| sum_columns(gradient, sum, is_fresh))?;
                }
                sums.update::<T>(x, |sum, is_fresh| {
                    let weight = Matrix::rows(weight_values, in_features);
                    product(gradient_rows, weight, (rows, out_features, in_features), sum, mode(is_fresh));
                })
            })
        }
        for_real!(gradient.dtype(), backward(inputs, gradient, sums))
    }
}
