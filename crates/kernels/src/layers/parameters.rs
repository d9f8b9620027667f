//! Where layers take their parameters from.

use candle_core::{Result, Shape, Tensor};
use candle_nn::VarBuilder;

use super::matrix::Matrix;

/// A source of parameters by path: a [`VarBuilder`], or a loader that packs the weights of linear layers as it reads them.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_nn::VarBuilder;
/// use candle_gpt2_kernels::ParameterSource;
///
/// let source = VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let weight = source.below("h.0").below("ln_1").parameter(6, "weight")?; // `h.0.ln_1.weight`
/// assert_eq!(weight.dims(), [6]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub trait ParameterSource: Sized {
    /// The same source below `name`.
    fn below(&self, name: impl ToString) -> Self;

    /// The parameter `name`.
    ///
    /// # Errors
    /// When it is missing or has another shape.
    fn parameter(&self, shape: impl Into<Shape>, name: &str) -> Result<Tensor>;

    /// The weight `name` of a linear layer or an embedding, `(out, in)`, in the form in which it is to be held.
    ///
    /// # Errors
    /// When it is missing or has another shape.
    fn matrix(&self, out_features: usize, in_features: usize, name: &str) -> Result<Matrix> {
        Ok(Matrix::Dense(self.parameter((out_features, in_features), name)?))
    }
}

impl ParameterSource for VarBuilder<'_> {
    fn below(&self, name: impl ToString) -> Self {
        self.pp(name)
    }

    fn parameter(&self, shape: impl Into<Shape>, name: &str) -> Result<Tensor> {
        self.get(shape, name)
    }
}
