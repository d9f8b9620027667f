//! Operations on each element: sums, dropout, activations.

use candle_core::{Result, Tensor};
use candle_gpt2_arithmetic::{Dropout, Float};

use super::composed::in_wide_type;
use super::float::{CpuFloat, FloatOperation, for_float, on_cpu, with_elements};
use super::operation::record;
use crate::layers::Activation;
use crate::per_thread::{Operation, Sums, has_cpu_kernels};

/// `x + y`, as a residual stream adds what a layer gives.
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
/// When the shapes differ.
pub fn add(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    fn forward<T: CpuFloat>(x: &Tensor, y: &Tensor) -> Result<Tensor> {
        let sums = with_elements::<T, 2, _>([x, y], |[x, y]| Ok(T::sum(x, y)))?;
        record(&[x, y], on_cpu(sums), x.shape(), Add)
    }
    if has_cpu_kernels(x) && has_cpu_kernels(y) && x.shape() == y.shape() && x.dtype() == y.dtype() {
        return for_float!(x.dtype(), forward(x, y));
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

/// The factors of `silu` and of `quick_gelu`, of which the second is from the GELU paper (arXiv:1606.08415, section 2).
const SILU_FACTOR: f64 = 1.0;
pub(crate) const QUICK_GELU_FACTOR: f64 = 1.702;

impl FloatOperation for Activation {
    const NAME: &str = "activation";

    fn backward<T: CpuFloat>(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let of = |x: &[T], gradient: &[T]| match self {
            Self::GeluTanh => T::gelu_tanh_backward(x, gradient),
            Self::Gelu => T::gelu_erf_backward(x, gradient),
            Self::Relu => T::relu_backward(x, gradient),
            Self::Silu => T::swish_backward(x, gradient, SILU_FACTOR),
            Self::Tanh => T::tanh_backward(x, gradient),
            Self::QuickGelu => T::swish_backward(x, gradient, QUICK_GELU_FACTOR),
        };
        let x = &inputs[0];
        let values = with_elements::<T, 2, _>([x, gradient], |[x, gradient]| Ok(of(x, gradient)))?;
        sums.add(x, Tensor::from_vec(values, x.shape(), x.device())?)
    }
}

/// The activation of every element, on the CPU.
pub(crate) fn activated(x: &Tensor, activation: Activation) -> Result<Tensor> {
    fn forward<T: CpuFloat>(x: &Tensor, activation: Activation) -> Result<Tensor> {
        let of = |x: &[T]| match activation {
            Activation::GeluTanh => T::gelu_tanh(x),
            Activation::Gelu => T::gelu_erf(x),
            Activation::Relu => T::relu(x),
            Activation::Silu => T::swish(x, SILU_FACTOR),
            Activation::Tanh => <T as Float>::tanh(x),
            Activation::QuickGelu => T::swish(x, QUICK_GELU_FACTOR),
        };
        let y = with_elements::<T, 1, _>([x], |[x]| Ok(of(x)))?;
        record(&[x], on_cpu(y), x.shape(), activation)
    }
    for_float!(x.dtype(), forward(x, activation))
}

/// What dropout leaves of `x`, on the CPU.
pub(crate) fn apply_dropout(x: &Tensor, dropout: Dropout) -> Result<Tensor> {
    fn forward<T: CpuFloat>(x: &Tensor, dropout: Dropout) -> Result<Tensor> {
        let y = with_elements::<T, 1, _>([x], |[x]| Ok(T::dropout(x, dropout)))?;
        record(&[x], on_cpu(y), x.shape(), dropout)
    }
    if has_cpu_kernels(x) {
        return for_float!(x.dtype(), forward(x, dropout));
    }
    let mut kept = vec![false; x.elem_count()];
    dropout.draw(0, 0, &mut kept);
    let kept: Vec<u8> = kept.into_iter().map(u8::from).collect();
    apply_drawn(x, Tensor::from_vec(kept, x.shape(), x.device())?, dropout.factor())
}

/// The same for 1 and 0 in `kept`, on any device.
pub(crate) fn apply_drawn(x: &Tensor, kept: Tensor, scale: f64) -> Result<Tensor> {
    in_wide_type(x, move |x| (x * kept.to_dtype(x.dtype())?)? * scale)
}

impl FloatOperation for Dropout {
    const NAME: &str = "dropout";

    fn backward<T: CpuFloat>(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let values = with_elements::<T, 1, _>([gradient], |[gradient]| Ok(T::dropout(gradient, *self)))?;
        sums.add(&inputs[0], Tensor::from_vec(values, gradient.shape(), gradient.device())?)
    }
}
