//! Sources of layer parameters.

use candle_core::{DType, Result, Shape, Tensor};
use candle_gpt2_arithmetic::NumberType;
use candle_nn::{Init, VarBuilder};

use super::matrix::Matrix;

/// Initial distribution of weights in an empty `VarMap`, with GPT-2's `initializer_range`.
pub(super) const INITIAL_WEIGHT: Init = Init::Randn { mean: 0.0, stdev: 0.02 };

/// Source of parameters by path: a [`VarBuilder`], or a loader that packs linear weights.
///
/// A [`VarBuilder`] uses the orientation of published checkpoints: [`conv1d`](ParameterSource::conv1d)
/// weights are `(in, out)`, all others `(out, in)`. All other sources return `(out, in)` for every matrix,
/// which is how layers store them. [`ByOutput`] turns a [`VarBuilder`] into such a source. A source that can
/// create missing parameters, like a `VarMap`, initializes them with `init`.
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
    /// Returns the same source with `name` appended to its path.
    fn below(&self, name: impl ToString) -> Self;

    /// Returns the sources for a model's head and its other parameters, which may be below `prefix`.
    ///
    /// `name` is the name of one of the other parameters. The default implementation returns this source
    /// twice. It suits sources whose names never have the prefix.
    fn head_and_model(&self, prefix: &str, name: &str) -> [Self; 2] {
        let _ = (prefix, name);
        [self.clone(), self.clone()]
    }

    /// Whether the source has a parameter `name`; by default it does not know, and returns false.
    fn contains(&self, name: &str) -> bool {
        let _ = name;
        false
    }

    /// Returns the parameter `name`.
    ///
    /// # Errors
    /// If it is missing or has the wrong shape.
    fn parameter(&self, shape: impl Into<Shape>, name: &str, init: Init) -> Result<Tensor>;

    /// Returns the weight `name` of a linear layer or an embedding, `(out, in)`, in its storage format.
    ///
    /// # Errors
    /// If it is missing or has the wrong shape.
    fn matrix(&self, out_features: usize, in_features: usize, name: &str, init: Init) -> Result<Matrix> {
        self.parameter((out_features, in_features), name, init).map(Matrix::Dense)
    }

    /// Returns the weight `name` of an embedding or head, `(out, in)`, possibly in higher precision.
    ///
    /// # Errors
    /// If it is missing or has the wrong shape.
    fn table(&self, out_features: usize, in_features: usize, name: &str, init: Init) -> Result<Matrix> {
        self.matrix(out_features, in_features, name, init)
    }

    /// Returns the weight `name` of a layer that GPT-2 checkpoints store as `Conv1D`, `(out, in)`.
    ///
    /// # Errors
    /// If it is missing or has the wrong shape.
    fn conv1d(&self, out_features: usize, in_features: usize, name: &str, init: Init) -> Result<Matrix> {
        self.matrix(out_features, in_features, name, init)
    }
}

impl ParameterSource for VarBuilder<'_> {
    fn below(&self, name: impl ToString) -> Self {
        self.pp(name)
    }

    /// Looks for `name` below the prefix, then without it; an empty `VarMap` gets the prefix.
    ///
    /// If the path of this source already ends with the prefix, the head is next to the prefix, as in a file.
    fn head_and_model(&self, prefix: &str, name: &str) -> [Self; 2] {
        let (path, below) = (self.prefix(), self.pp(prefix));
        match path.strip_suffix(prefix) {
            _ if below.contains_tensor(name) => [self.clone(), below],
            Some("") => [self.root(), self.clone()],
            Some(parent) if parent.ends_with('.') => {
                [self.set_prefix(parent.trim_end_matches('.')), self.clone()]
            }
            _ if self.contains_tensor(name) => [self.clone(), self.clone()],
            _ => [self.clone(), below],
        }
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

/// A [`VarBuilder`] whose matrices are all `(out, in)`.
///
/// Examples are the parameters from `expected_parameters`, from minGPT, and from other files that
/// transformers did not write.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// use candle_gpt2_kernels::{ByOutput, Linear};
///
/// let weight = Tensor::new(&[[1f32, 2.]], &Device::Cpu)?; // input width 2, output width 1
/// let bias = Tensor::new(&[3f32], &Device::Cpu)?;
/// let tensors = [("weight".to_owned(), weight), ("bias".to_owned(), bias)].into();
/// let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
/// assert!(Linear::load_conv1d(2, 1, true, vb.clone()).is_err(), "checkpoints store this weight as (2, 1)");
/// let layer = Linear::load_conv1d(2, 1, true, ByOutput(vb))?;
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

    fn head_and_model(&self, prefix: &str, name: &str) -> [Self; 2] {
        self.0.head_and_model(prefix, name).map(Self)
    }

    fn contains(&self, name: &str) -> bool {
        self.0.contains(name)
    }

    fn parameter(&self, shape: impl Into<Shape>, name: &str, init: Init) -> Result<Tensor> {
        self.0.get_with_hints(shape, name, init)
    }
}

/// A source whose matrices are packed for inference on the CPU, at 4 to 32 bits per weight.
///
/// Packed matrices are faster than dense ones, have no gradients, and cannot be trained. The embedding and
/// the head get the type [`NumberType::of_tables`].
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_arithmetic::NumberType;
/// use candle_gpt2_kernels::{Linear, Packed};
/// use candle_nn::VarBuilder;
///
/// let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let layer = Linear::load_conv1d(768, 3072, true, Packed::new(vb, NumberType::Q8))?;
/// assert!(layer.size().bytes < 768 * 3072 * 5 / 4, "8 bits per weight, plus scales");
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Packed<S> {
    source: S,
    dtype: NumberType,
}

impl<S: ParameterSource> Packed<S> {
    /// Creates the source; `dtype` is f32, f16, or a quantized type.
    pub fn new(source: S, dtype: NumberType) -> Self {
        Self { source, dtype }
    }

    fn pack(matrix: Matrix, dtype: NumberType) -> Result<Matrix> {
        match matrix {
            Matrix::Dense(weight) => Matrix::pack(&weight.to_dtype(DType::F32)?, dtype),
            packed => Ok(packed),
        }
    }
}

impl<S: ParameterSource> ParameterSource for Packed<S> {
    fn below(&self, name: impl ToString) -> Self {
        Self::new(self.source.below(name), self.dtype)
    }

    fn head_and_model(&self, prefix: &str, name: &str) -> [Self; 2] {
        self.source.head_and_model(prefix, name).map(|source| Self::new(source, self.dtype))
    }

    fn contains(&self, name: &str) -> bool {
        self.source.contains(name)
    }

    /// Returns the parameter in f32, because products with packed weights compute in f32.
    fn parameter(&self, shape: impl Into<Shape>, name: &str, init: Init) -> Result<Tensor> {
        self.source.parameter(shape, name, init)?.to_dtype(DType::F32)
    }

    fn matrix(&self, out_features: usize, in_features: usize, name: &str, init: Init) -> Result<Matrix> {
        Self::pack(self.source.matrix(out_features, in_features, name, init)?, self.dtype)
    }

    fn table(&self, out_features: usize, in_features: usize, name: &str, init: Init) -> Result<Matrix> {
        Self::pack(self.source.table(out_features, in_features, name, init)?, self.dtype.of_tables())
    }

    fn conv1d(&self, out_features: usize, in_features: usize, name: &str, init: Init) -> Result<Matrix> {
        Self::pack(self.source.conv1d(out_features, in_features, name, init)?, self.dtype)
    }
}
