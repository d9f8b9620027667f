//! Linear layer: `y = x Wᵀ + b`, with the weight `(out, in)` as in PyTorch's `nn.Linear`.
//!
//! A GPT-2 checkpoint stores its matrices as `(in, out)` (`Conv1D`). The loader passes them as transposed
//! views, without a copy, and the product reads the stored layout.
//!
//! A dense weight is a tensor. It works on any device, is trainable, and serves as the reference. A packed
//! weight is for inference on the CPU.
//!
//! A dense layer computes in the dtype of its input, whatever the dtype of its weights. This allows f32
//! weights to be trained with bf16 products.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{D, DType, Device, Result, Tensor};
use candle_gpt2_arithmetic::{Finish, PackedMatrix, PanelBias};
use candle_nn::Init;

use super::matrix::{AdaptedMatrix, Matrix};
use super::parameters::{INITIAL_WEIGHT, ParameterSource};
use super::size::ParameterSize;
use crate::cpu::PackedProduct;
use crate::cuda;
use crate::error::KernelError;
use crate::training::{self, Activation, has_cpu_kernels, runs_as_in_training};

/// Linear layer, `(…, in)` to `(…, out)`.
#[derive(Debug, Clone)]
#[doc(alias("Conv1D", "QMatMul"))]
pub struct Linear {
    weight: Matrix,
    bias: Option<Tensor>,
    /// Bias in panel layout if the weight or an adapter's base is packed.
    panel_bias: Option<PanelBias>,
}

impl Linear {
    /// Creates a layer from its tensors.
    ///
    /// # Shapes
    /// `weight` `(out, in)`, contiguous or the transposed view of an `(in, out)` tensor; `bias` `(out)`.
    ///
    /// # Errors
    /// If the shapes do not match.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        weight.dims2()?;
        Self::from_matrix(Matrix::Dense(weight), bias)
    }

    /// Creates a layer from a weight in any form and a bias of shape `(out)`.
    ///
    /// # Errors
    /// If the bias has the wrong shape.
    pub fn from_matrix(weight: Matrix, bias: Option<Tensor>) -> Result<Self> {
        let (out_features, _) = weight.shape();
        if let Some(bias) = &bias
            && bias.dims() != [out_features]
        {
            return Err(KernelError::BiasShape { expected: out_features, found: bias.dims().to_vec() }.into());
        }
        let panel_bias = match (weight.fixed(), &bias) {
            (Matrix::Packed(_), Some(bias)) => {
                Some(PanelBias::new(&bias.to_dtype(DType::F32)?.to_vec1::<f32>()?))
            }
            _ => None,
        };
        Ok(Self { weight, bias, panel_bias })
    }

    /// Loads `weight` `(out, in)` and, if `has_bias`, `bias` below the path of `vb`.
    ///
    /// An empty `VarMap` initializes them as in GPT-2: the weight from a normal distribution with standard
    /// deviation 0.02, the bias to zeros.
    ///
    /// # Errors
    /// If a parameter is missing or has the wrong shape.
    pub fn load(
        in_features: usize,
        out_features: usize,
        has_bias: bool,
        vb: impl ParameterSource,
    ) -> Result<Self> {
        Self::load_named(in_features, out_features, ["weight", "bias"], has_bias, vb)
    }

    /// Loads a layer whose parameters have names other than `weight` and `bias`.
    ///
    /// # Errors
    /// Same as [`Linear::load`].
    pub fn load_named(
        in_features: usize,
        out_features: usize,
        [weight, bias]: [&str; 2],
        has_bias: bool,
        vb: impl ParameterSource,
    ) -> Result<Self> {
        let weight = vb.matrix(out_features, in_features, weight, INITIAL_WEIGHT)?;
        let bias = has_bias.then(|| vb.parameter(out_features, bias, Init::Const(0.0))).transpose()?;
        Self::from_matrix(weight, bias)
    }

    /// Loads a layer that GPT-2 checkpoints store as `Conv1D`.
    ///
    /// In a [`VarBuilder`](candle_nn::VarBuilder), its weight is `(in, out)`. An empty `VarMap` initializes
    /// it like [`Linear::load`].
    ///
    /// # Errors
    /// Same as [`Linear::load`].
    pub fn load_conv1d(
        in_features: usize,
        out_features: usize,
        has_bias: bool,
        vb: impl ParameterSource,
    ) -> Result<Self> {
        let weight = vb.conv1d(out_features, in_features, "weight", INITIAL_WEIGHT)?;
        let bias = has_bias.then(|| vb.parameter(out_features, "bias", Init::Const(0.0))).transpose()?;
        Self::from_matrix(weight, bias)
    }

    /// Computes `x Wᵀ + b`.
    ///
    /// # Shapes
    /// `x` `(…, in)`; returns `(…, out)`.
    ///
    /// # Errors
    /// If the last axis of `x` is not `in` wide, or the weight is packed and `x` is not f32 on the CPU.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.output_shape(x)?;
        self.product(&self.weight, x)
    }

    /// Computes `x Wᵀ + b` with `weight`, which is the layer's own weight or an adapter's base.
    ///
    /// Callers must check the width of `x`.
    fn product(&self, weight: &Matrix, x: &Tensor) -> Result<Tensor> {
        let weight = match weight {
            Matrix::Dense(weight) => weight,
            Matrix::Packed(weight) if x.track_op() && has_cpu_kernels(x) => {
                return training::packed_linear(x, weight, self.bias.as_ref());
            }
            Matrix::Packed(weight) => return self.packed_product(weight, x, false),
            Matrix::Adapted(weight) => return self.forward_adapted(weight, x),
        };
        if self.has_kernel(x, weight) {
            return training::linear(x, weight, self.bias.as_ref(), 0..self.out_features());
        }
        if let Some(y) = cuda::linear(x, weight, self.bias.as_ref(), Finish::Nothing)? {
            return Ok(y);
        }
        training::composed_linear(x, weight, self.bias.as_ref())
    }

    /// Computes only the outputs in the range `outputs`, which are rows of the weight.
    ///
    /// # Shapes
    /// `x` `(…, in)`; returns `(…, outputs.len())`.
    ///
    /// # Errors
    /// Same as [`Linear::forward`], and if the range is empty or out of bounds.
    pub fn forward_outputs(&self, x: &Tensor, outputs: Range<usize>) -> Result<Tensor> {
        if outputs.is_empty() || outputs.end > self.out_features() {
            let what = format!(
                "linear layer: outputs {outputs:?} are empty or out of range; the layer has {}",
                self.out_features()
            );
            return Err(candle_core::Error::Msg(what));
        }
        if let Matrix::Dense(weight) = &self.weight
            && self.has_kernel(x, weight)
        {
            self.output_shape(x)?;
            return training::linear(x, weight, self.bias.as_ref(), outputs);
        }
        if let Matrix::Packed(_) = &self.weight {
            // Unpacking the weight would take longer than computing the extra outputs.
            return self.forward(x)?.narrow(D::Minus1, outputs.start, outputs.len())?.contiguous();
        }
        let rows = |tensor: &Tensor| tensor.narrow(0, outputs.start, outputs.len());
        Self::new(rows(&self.weight.to_tensor()?)?, self.bias().map(rows).transpose()?)?.forward(x)
    }

    /// Whether the CPU kernel with a backward pass supports this product with a dense weight.
    fn has_kernel(&self, x: &Tensor, weight: &Tensor) -> bool {
        let is_alike = |tensor: &Tensor| has_cpu_kernels(tensor) && tensor.dtype() == x.dtype();
        is_alike(x) && is_alike(weight) && self.bias.as_ref().is_none_or(is_alike)
    }

    /// Computes `x (W + scale · b a)ᵀ + bias`; callers must check the width of `x`.
    fn forward_adapted(&self, weight: &AdaptedMatrix, x: &Tensor) -> Result<Tensor> {
        let AdaptedMatrix { base, a, b, scale } = weight;
        let bias = self.bias.as_ref();
        let fixed = match base {
            Matrix::Dense(weight) => Some(training::FixedWeight::Dense(weight.clone())),
            Matrix::Packed(weight) => Some(training::FixedWeight::Packed(weight.clone())),
            Matrix::Adapted(_) => None,
        };
        let is_training = runs_as_in_training(x) || runs_as_in_training(a);
        let is_fixed = bias.is_none_or(|bias| !bias.track_op() && bias.dtype() == x.dtype());
        if let Some(fixed) = fixed
            && is_training
            && is_fixed
            && has_cpu_kernels(x)
            && x.dtype() == a.dtype()
        {
            return training::adapted_linear(x, &fixed, bias, &training::Adapter { a, b, scale: *scale });
        }
        let [a, b] = [a.to_dtype(x.dtype())?, b.to_dtype(x.dtype())?];
        let inner = x.reshape(((), x.dim(D::Minus1)?))?.matmul(&a.t()?)?;
        let added = (inner.matmul(&b.t()?)? * *scale)?;
        let y = self.product(base, x)?;
        let added = added.reshape(y.shape())?;
        y + added
    }

    /// Runs the layer with a fused epilogue on an NVIDIA GPU, or returns `None` if no kernel applies.
    fn on_gpu(&self, x: &Tensor, finish: Finish<&Tensor>) -> Result<Option<Tensor>> {
        match &self.weight {
            Matrix::Dense(weight) => cuda::linear(x, weight, self.bias.as_ref(), finish),
            Matrix::Packed(_) | Matrix::Adapted(_) => Ok(None),
        }
    }

    /// Computes `activation(x Wᵀ + b)`.
    ///
    /// # Shapes
    /// Same as [`Linear::forward`].
    ///
    /// # Errors
    /// Same as [`Linear::forward`].
    pub fn forward_activated(&self, x: &Tensor, activation: Activation) -> Result<Tensor> {
        self.output_shape(x)?;
        if activation == Activation::GeluTanh && !x.track_op() {
            if let Matrix::Packed(weight) = &self.weight {
                return self.packed_product(weight, x, true);
            }
            if let Some(y) = self.on_gpu(x, Finish::Gelu)? {
                return Ok(y);
            }
        }
        activation.forward(&self.forward(x)?)
    }

    /// Computes `x Wᵀ + b + residual`, the product at the end of a residual branch.
    ///
    /// # Shapes
    /// `x` `(…, in)`, `residual` `(…, out)` with the same leading axes; returns the shape of `residual`.
    ///
    /// # Errors
    /// Same as [`Linear::forward`], and if the residual has the wrong shape.
    pub fn forward_added(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        let expected = self.output_shape(x)?;
        if residual.dims() != expected {
            return Err(KernelError::ResidualShape { expected, found: residual.dims().to_vec() }.into());
        }
        if !x.track_op() && !residual.track_op() {
            if let Matrix::Packed(weight) = &self.weight {
                return x
                    .contiguous()?
                    .apply_op2_no_bwd(&residual.contiguous()?, &self.product_op(weight, false));
            }
            if let Some(y) = self.on_gpu(x, Finish::Add(residual))? {
                return Ok(y);
            }
        }
        training::add(&self.forward(x)?, residual)
    }

    /// Looks up weight rows by ID: an embedding that shares its matrix with the output head.
    ///
    /// # Shapes
    /// `ids` `(…)` of u32; returns `(…, in)`.
    ///
    /// # Errors
    /// If an ID is not below `out`. On a GPU, the IDs are read back to check this, because an invalid ID in
    /// the GPU kernel would make the device unusable for the rest of the program.
    pub fn embedding(&self, ids: &Tensor) -> Result<Tensor> {
        if let Matrix::Dense(weight) = &self.weight
            && runs_as_in_training(weight)
        {
            return training::embedding(weight, ids);
        }
        // Checked on every device: candle returns zeros for the largest value of the index dtype.
        let row_indices = training::row_indices(ids, self.out_features())?;
        let weight = match &self.weight {
            Matrix::Packed(weight) => weight,
            Matrix::Dense(weight) if !ids.device().is_cpu() => {
                return training::embedding_on_gpu(weight, ids, row_indices);
            }
            Matrix::Dense(_) | Matrix::Adapted(_) => return self.embedding_on_device(ids),
        };
        Tensor::from_vec(weight.rows(&row_indices), self.embedding_shape(ids), &Device::Cpu)
    }

    /// Looks up rows like [`Linear::embedding`], without reading the IDs back from a GPU.
    ///
    /// A [`Recording`](crate::Recording) can therefore contain it. The IDs must be valid;
    /// [`expect_ids`](crate::expect_ids) checks them.
    ///
    /// # Shapes
    /// Same as [`Linear::embedding`].
    ///
    /// # Errors
    /// If the weight cannot serve as an embedding table on this device. On a CPU, also if an ID is not below
    /// `out`.
    pub fn embedding_on_device(&self, ids: &Tensor) -> Result<Tensor> {
        let rows_of =
            |weight: &Tensor| weight.embedding(&ids.flatten_all()?)?.reshape(self.embedding_shape(ids));
        match &self.weight {
            Matrix::Dense(weight) if !runs_as_in_training(weight) => rows_of(weight),
            Matrix::Dense(_) | Matrix::Packed(_) => self.embedding(ids),
            Matrix::Adapted(weight) => rows_of(&weight.merged()?),
        }
    }

    fn embedding_shape(&self, ids: &Tensor) -> Vec<usize> {
        [ids.dims(), &[self.in_features()]].concat()
    }

    /// Width of the input.
    pub fn in_features(&self) -> usize {
        self.weight.shape().1
    }

    /// Width of the output.
    pub fn out_features(&self) -> usize {
        self.weight.shape().0
    }

    /// Weight, `(out, in)`.
    pub fn weight(&self) -> &Matrix {
        &self.weight
    }

    /// Bias, `(out)`, if the layer has one.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Device of the weight.
    pub fn device(&self) -> &Device {
        match self.weight.fixed() {
            Matrix::Dense(weight) => weight.device(),
            Matrix::Packed(_) | Matrix::Adapted(_) => &Device::Cpu,
        }
    }

    /// Size of the weight and the bias.
    pub fn size(&self) -> ParameterSize {
        self.weight.size() + self.bias.iter().map(ParameterSize::from).sum()
    }

    /// Shape of the output for `x`; an error if the input width does not match.
    fn output_shape(&self, x: &Tensor) -> Result<Vec<usize>> {
        let mut shape = x.dims().to_vec();
        let Some(width) = shape.last_mut().filter(|width| **width == self.in_features()) else {
            return Err(
                KernelError::InputWidth { expected: self.in_features(), found: x.dims().to_vec() }.into()
            );
        };
        *width = self.out_features();
        Ok(shape)
    }

    fn packed_product(&self, weight: &Arc<PackedMatrix>, x: &Tensor, gelu: bool) -> Result<Tensor> {
        x.contiguous()?.apply_op1(self.product_op(weight, gelu))
    }

    fn product_op(&self, weight: &Arc<PackedMatrix>, gelu: bool) -> PackedProduct {
        PackedProduct { weight: Arc::clone(weight), bias: self.panel_bias.clone(), gelu }
    }
}

/// Shares the tensors of candle's layer, including variables; fails if the bias shape is wrong.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_kernels::Linear;
///
/// let weight = Tensor::ones((3, 2), DType::F32, &Device::Cpu)?;
/// let layer = Linear::try_from(candle_nn::Linear::new(weight, None))?;
/// assert_eq!((layer.in_features(), layer.out_features()), (2, 3));
/// # Ok::<(), candle_core::Error>(())
/// ```
impl TryFrom<candle_nn::Linear> for Linear {
    type Error = candle_core::Error;

    fn try_from(layer: candle_nn::Linear) -> Result<Self> {
        Self::new(layer.weight().clone(), layer.bias().cloned())
    }
}
