//! Layer norm that computes all three gradients in one pass over the batch.

use candle_core::{Result, Tensor};
use candle_gpt2_arithmetic::LayerNormGradients;

use super::composed::{column_sums, on_its_gpu};
use super::float::{CpuFloat, FloatOperation, for_float, on_cpu, with_elements};
use super::operation::{record, record_tensor};
use crate::cuda;
use crate::per_thread::{Operation, Sums};

/// Normalizes every row, then scales and shifts it, on the CPU in f32 or f64.
///
/// # Shapes
/// `x` `(…, width)`, `weight` and `bias` `(width)` with a width above zero; returns the shape of `x`.
pub(crate) fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, epsilon: f64) -> Result<Tensor> {
    fn forward<T: CpuFloat>(x: &Tensor, weight: &Tensor, bias: &Tensor, epsilon: f64) -> Result<Tensor> {
        let y = with_elements::<T, 3, _>([x, weight, bias], |[x, weight, bias]| {
            Ok(T::layer_norm(x, weight, bias, epsilon))
        })?;
        record(&[x, weight, bias], on_cpu(y), x.shape(), Norm { epsilon })
    }
    for_float!(x.dtype(), forward(x, weight, bias, epsilon))
}

/// Layer norm on an NVIDIA GPU with f32 parameters, or `None` if its kernels do not apply.
pub(crate) fn layer_norm_on_gpu(
    x: &Tensor,
    weight: &Tensor,
    bias: &Tensor,
    epsilon: f64,
) -> Result<Option<Tensor>> {
    match cuda::wide_norm(&x.detach(), &weight.detach(), &bias.detach(), epsilon)? {
        Some(y) => record_tensor(&[x, weight, bias], y, NormOnGpu { epsilon }).map(Some),
        None => Ok(None),
    }
}

struct NormOnGpu {
    epsilon: f64,
}

impl Operation for NormOnGpu {
    fn name(&self) -> &'static str {
        "layer-norm"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let (x, weight) = (inputs[0].detach(), inputs[1].detach());
        let found = cuda::wide_norm_backward(&x, &weight, &gradient.detach(), self.epsilon)?;
        let [of_x, rows] = on_its_gpu(found, self)?;
        sums.add(&inputs[0], of_x)?;
        let of_parameters = column_sums(&rows)?;
        let width = weight.elem_count();
        for (input, first) in inputs[1..].iter().zip([0, width]) {
            // Copies each gradient into memory of its own.
            sums.add(input, of_parameters.narrow(0, first, width)?.force_contiguous()?)?;
        }
        Ok(())
    }
}

struct Norm {
    epsilon: f64,
}

impl FloatOperation for Norm {
    const NAME: &str = "layer-norm";

    fn backward<T: CpuFloat>(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let gradients =
            with_elements::<T, 3, _>([&inputs[0], &inputs[1], gradient], |[x, weight, gradient]| {
                Ok(T::layer_norm_backward(x, weight, gradient, self.epsilon))
            })?;
        let LayerNormGradients { x, weight, bias } = gradients;
        for (input, gradient) in inputs.iter().zip([x, weight, bias]) {
            sums.add(input, Tensor::from_vec(gradient, input.shape(), input.device())?)?;
        }
        Ok(())
    }
}
