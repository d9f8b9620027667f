//! Activation functions that the `activation_function` field of a GPT-2 `config.json` can name.
//!
//! Source: `ACT2FN` in transformers (`src/transformers/activations.py`). GPT-2 uses the tanh form of GELU,
//! which transformers calls `gelu_new`. The name `gelu` is the exact form with the error function.

use candle_core::{Result, Tensor};
use candle_gpt2_arithmetic::{ElementFunction, QUICK_GELU_FACTOR};

use super::composed::{in_wide_type, on_its_gpu};
use super::float::{self, CpuFloat, FloatOperation, for_float, with_elements};
use super::operation::{record, record_tensor};
use crate::cuda;
use crate::error::KernelError;
use crate::per_thread::{Operation, Sums, has_cpu_kernels};

/// Elementwise activation function.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_kernels::Activation;
///
/// assert_eq!(Activation::from_name("gelu_new"), Some(Activation::GeluTanh));
/// let x = Tensor::new(&[-2f32, 0., 3.], &Device::Cpu)?;
/// assert_eq!(Activation::Relu.forward(&x)?.to_vec1::<f32>()?, [0., 0., 3.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias("gelu_new", "NewGELUActivation"))]
pub enum Activation {
    /// `0.5 x (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))`: `gelu_new` and `gelu_pytorch_tanh`.
    GeluTanh,
    /// `0.5 x (1 + erf(x / sqrt 2))`: `gelu`.
    Gelu,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)²`.
    Relu2,
    /// `x sigmoid(x)`: `silu` and `swish`.
    Silu,
    /// `tanh(x)`.
    Tanh,
    /// `x sigmoid(f x)` with the [factor `f`](QUICK_GELU_FACTOR).
    QuickGelu,
}

impl Activation {
    /// Every accepted name with its function, as spelled in transformers.
    pub const NAMES: [(&'static str, Self); 9] = [
        ("gelu_new", Self::GeluTanh),
        ("gelu_pytorch_tanh", Self::GeluTanh),
        ("gelu", Self::Gelu),
        ("relu", Self::Relu),
        ("relu2", Self::Relu2),
        ("silu", Self::Silu),
        ("swish", Self::Silu),
        ("tanh", Self::Tanh),
        ("quick_gelu", Self::QuickGelu),
    ];

    /// Returns the function for a transformers name, if it is one of [`Activation::NAMES`].
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|(_, activation)| *activation)
    }

    /// Applies the function to every element.
    ///
    /// # Errors
    /// If candle does not support the function for the dtype or device of `x`.
    pub fn forward(self, x: &Tensor) -> Result<Tensor> {
        fn on_cpu<T: CpuFloat>(x: &Tensor, activation: Activation) -> Result<Tensor> {
            let y =
                with_elements::<T, 1, _>([x], |[x]| Ok((T::elementwise(activation.function()).forward)(x)))?;
            record(&[x], float::on_cpu(y), x.shape(), activation)
        }
        if has_cpu_kernels(x) {
            return for_float!(x.dtype(), on_cpu(x, self));
        }
        if self == Self::GeluTanh
            && let Some(y) = cuda::gelu(&x.detach())?
        {
            return record_tensor(&[x], y, GeluOnGpu);
        }
        in_wide_type(x, move |x| self.composed(x))
    }

    fn function(self) -> ElementFunction {
        match self {
            Self::GeluTanh => ElementFunction::GeluTanh,
            Self::Gelu => ElementFunction::GeluErf,
            Self::Relu => ElementFunction::Relu,
            Self::Relu2 => ElementFunction::Relu2,
            Self::Silu => ElementFunction::Silu,
            Self::Tanh => ElementFunction::Tanh,
            Self::QuickGelu => ElementFunction::QuickGelu,
        }
    }

    fn composed(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::GeluTanh => x.gelu(),
            Self::Gelu => x.gelu_erf(),
            Self::Relu => x.relu(),
            Self::Relu2 => x.relu()?.sqr(),
            Self::Silu => x.silu(),
            Self::Tanh => x.tanh(),
            Self::QuickGelu => x * candle_nn::ops::sigmoid(&(x * QUICK_GELU_FACTOR)?)?,
        }
    }
}

impl FloatOperation for Activation {
    const NAME: &str = "activation";

    fn backward<T: CpuFloat>(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let x = &inputs[0];
        let values = with_elements::<T, 2, _>([x, gradient], |[x, gradient]| {
            Ok((T::elementwise(self.function()).backward)(x, gradient))
        })?;
        sums.add(x, Tensor::from_vec(values, x.shape(), x.device())?)
    }
}

/// Tanh form of GELU on an NVIDIA GPU.
struct GeluOnGpu;

impl Operation for GeluOnGpu {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let found = cuda::gelu_backward(&inputs[0].detach(), &gradient.detach())?;
        sums.add(&inputs[0], on_its_gpu(found, self)?)
    }
}

/// Converts candle's activation; fails if GPT-2's `activation_function` cannot name it.
///
/// ```
/// use candle_gpt2_kernels::{Activation, KernelError};
///
/// assert_eq!(Activation::try_from(candle_nn::Activation::NewGelu)?, Activation::GeluTanh);
/// assert!(Activation::try_from(candle_nn::Activation::Mish).is_err());
/// # Ok::<(), KernelError>(())
/// ```
impl TryFrom<candle_nn::Activation> for Activation {
    type Error = KernelError;

    fn try_from(activation: candle_nn::Activation) -> std::result::Result<Self, KernelError> {
        match activation {
            candle_nn::Activation::NewGelu | candle_nn::Activation::GeluPytorchTanh => Ok(Self::GeluTanh),
            candle_nn::Activation::Gelu => Ok(Self::Gelu),
            candle_nn::Activation::Relu => Ok(Self::Relu),
            candle_nn::Activation::Silu | candle_nn::Activation::Swish => Ok(Self::Silu),
            other => Err(KernelError::Activation { found: format!("{other:?}") }),
        }
    }
}
