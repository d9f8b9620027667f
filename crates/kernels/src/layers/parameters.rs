//! Where layers take their parameters from.

use candle_core::{Result, Shape, Tensor};
use candle_nn::{Init, VarBuilder};

use super::matrix::Matrix;

/// Standard deviation of a weight that begins in an empty `VarMap`: GPT-2's `initializer_range`. [`Linear::load`](crate::Linear::load)
/// takes it.
pub const DEVIATION: f64 = 0.02;

/// A source of parameters by path: a [`VarBuilder`], or a loader that packs the weights of linear layers as it reads them.
///
/// A [`VarBuilder`] means what checkpoints publish: a [`conv1d`](ParameterSource::conv1d) weight lies `(in, out)` there, any
/// other `(out, in)`. All other sources hand out `(out, in)` everywhere, as layers hold it; [`ByOutput`] makes a [`VarBuilder`]
/// one of them. What a source does not have and may make up, as a `VarMap` does, begins as `init` says.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::{Init, VarBuilder};
/// use candle_gpt2_kernels::ParameterSource;
///
/// let source = VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let weight = source.below("h.0").below("ln_1").parameter(6, "weight", Init::Const(1.0))?; // `h.0.ln_1.weight`
/// assert_eq!(weight.dims(), [6]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub trait ParameterSource: Clone {
    /// The same source below `name`.
    fn below(&self, name: impl ToString) -> Self;

    /// Whether it is known to have the parameter `name`. A source without any choice of names need not say.
    fn contains(&self, name: &str) -> bool {
        let _ = name;
        false
    }

    /// The parameter `name`.
    ///
    /// # Errors
    /// When it is missing or has another shape.
    fn parameter(&self, shape: impl Into<Shape>, name: &str, init: Init) -> Result<Tensor>;

    /// The weight `name` of a linear layer or an embedding, `(out, in)`, in the form in which it is to be held.
    ///
    /// # Errors
    /// When it is missing or has another shape.
    fn matrix(&self, out_features: usize, in_features: usize, name: &str, init: Init) -> Result<Matrix> {
        self.parameter((out_features, in_features), name, init).map(Matrix::Dense)
    }

    /// The same of a layer that checkpoints of GPT-2 store as `Conv1D`.
    ///
    /// # Errors
    /// When it is missing or has another shape.
    fn conv1d(&self, out_features: usize, in_features: usize, name: &str, init: Init) -> Result<Matrix> {
        self.matrix(out_features, in_features, name, init)
    }
}

pub(super) fn normal(stdev: f64) -> Init {
    Init::Randn { mean: 0.0, stdev }
}

impl ParameterSource for VarBuilder<'_> {
    fn below(&self, name: impl ToString) -> Self {
        self.pp(name)
    }

    fn contains(&self, name: &str) -> bool {
        self.contains_tensor(name)
    }

    fn parameter(&self, shape: impl Into<Shape>, name: &str, init: Init) -> Result<Tensor> {
        self.get_with_hints(shape, name, init)
    }

    fn conv1d(&self, out_features: usize, in_features: usize, name: &str, init: Init) -> Result<Matrix> {
        self.parameter((in_features, out_features), name, init)?.t().map(Matrix::Dense)
    }
}

/// A [`VarBuilder`] whose matrices lie `(out, in)`, all of them: those of `expected_parameters`, of minGPT and of other files that
/// are not transformers'.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// use candle_gpt2_kernels::{ByOutput, Linear};
///
/// let weight = Tensor::new(&[[1f32, 2.]], &Device::Cpu)?; // two wide to one wide
/// let bias = Tensor::new(&[3f32], &Device::Cpu)?;
/// let tensors = [("weight".to_owned(), weight), ("bias".to_owned(), bias)].into();
/// let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
/// assert!(Linear::load_conv1d(2, 1, 0.02, vb.clone()).is_err(), "a published weight would be (2, 1)");
/// let layer = Linear::load_conv1d(2, 1, 0.02, ByOutput(vb))?;
/// let x = Tensor::new(&[[10f32, 100.]], &Device::Cpu)?;
/// assert_eq!(layer.forward(&x)?.to_vec2::<f32>()?, [[213.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone)]
pub struct ByOutput<'a>(pub VarBuilder<'a>);

impl ParameterSource for ByOutput<'_> {
    fn below(&self, name: impl ToString) -> Self {
        Self(self.0.pp(name))
    }

    fn contains(&self, name: &str) -> bool {
        self.0.contains_tensor(name)
    }

    fn parameter(&self, shape: impl Into<Shape>, name: &str, init: Init) -> Result<Tensor> {
        self.0.get_with_hints(shape, name, init)
    }
}
