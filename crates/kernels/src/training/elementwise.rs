//! Elementwise operations: addition and dropout.

use candle_core::{Result, Tensor};
use candle_gpt2_arithmetic::Dropout;

use super::composed::composed_dropout;
use super::float::{CpuFloat, FloatOperation, for_float, on_cpu, with_elements};
use super::operation::{record, record_tensor};
use crate::on_gpu::Draws;
use crate::per_thread::{Operation, Sums, has_cpu_kernels};

/// Adds two tensors of the same shape, such as the residual stream and a layer's output.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let (x, y) = (Tensor::new(&[1f32, 2., 3.], &Device::Cpu)?, Tensor::new(&[10f32, 20., 30.], &Device::Cpu)?);
/// assert_eq!(candle_gpt2_kernels::add(&x, &y)?.to_vec1::<f32>()?, [11., 22., 33.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If the shapes differ.
pub fn add(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    fn forward<T: CpuFloat>(x: &Tensor, y: &Tensor) -> Result<Tensor> {
        let sums = with_elements::<T, 2, _>([x, y], |[x, y]| Ok(T::sum(x, y)))?;
        record(&[x, y], on_cpu(sums), x.shape(), Add)
    }
    if has_cpu_kernels(x) && has_cpu_kernels(y) && x.shape() == y.shape() && x.dtype() == y.dtype() {
        return for_float!(x.dtype(), forward(x, y));
    }
    if x.shape() == y.shape() && x.dtype() == y.dtype() {
        return record_tensor(&[x, y], (x.detach() + y.detach())?, Add);
    }
    x + y
}

struct Add;

impl Operation for Add {
    fn name(&self) -> &'static str {
        "add"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        inputs.iter().try_for_each(|input| sums.share(input, gradient))
    }
}

/// Applies dropout to `x`.
pub(crate) fn apply_dropout(x: &Tensor, dropout: Dropout) -> Result<Tensor> {
    fn forward<T: CpuFloat>(x: &Tensor, dropout: Dropout) -> Result<Tensor> {
        let y = with_elements::<T, 1, _>([x], |[x]| Ok(T::dropout(x, dropout)))?;
        record(&[x], on_cpu(y), x.shape(), dropout)
    }
    if has_cpu_kernels(x) {
        return for_float!(x.dtype(), forward(x, dropout));
    }
    composed_dropout(x, dropout, Draws::in_order(x.elem_count()))
}

impl FloatOperation for Dropout {
    const NAME: &str = "dropout";

    fn backward<T: CpuFloat>(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let values = with_elements::<T, 1, _>([gradient], |[gradient]| Ok(T::dropout(gradient, *self)))?;
        sums.add(&inputs[0], Tensor::from_vec(values, gradient.shape(), gradient.device())?)
    }
}
