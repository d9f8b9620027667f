//! The linear layer: `y = x Wᵀ + b`, with the weight in PyTorch's `nn.Linear` orientation `(out, in)`.
//!
//! A GPT-2 checkpoint stores its matrices as `(in, out)` (`Conv1D`). The loader hands those in as a transposed
//! view, which costs nothing and which the product below turns back into the stored layout.
//!
//! A dense weight is a tensor: any device, trainable, the reference. A packed weight is for inference on the CPU.
//!
//! A dense layer computes in the type of its input, whatever its own: so weights in f32 are trained with products in bf16.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{D, DType, Device, Result, Tensor};
use candle_gpt2_arithmetic::{Finish, PackedMatrix, PanelBias};
use candle_nn::Init;

use super::matrix::{AdaptedMatrix, Matrix};
use super::parameters::{DEVIATION, ParameterSource, normal};
use super::size::ParameterSize;
use crate::cpu::PackedProduct;
use crate::cuda;
use crate::error::KernelError;
use crate::training::{self, Activation, has_cpu_kernels, runs_as_in_training};

/// A linear layer, `(…, in)` to `(…, out)`.
#[derive(Debug, Clone)]
#[doc(alias("Conv1D", "QMatMul"))]
pub struct Linear {
    weight: Matrix,
    bias: Option<Tensor>,
    /// The bias of a packed weight, with an adapter or not, laid out as its products take it.
    panel_bias: Option<PanelBias>,
}

impl Linear {
    /// A layer from its tensors.
    ///
    /// # Shapes
    /// `weight` `(out, in)`, contiguous or the transposed view of an `(in, out)` tensor; `bias` `(out)`.
    ///
    /// # Errors
    /// When the shapes are not these.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        weight.dims2()?;
        Self::from_matrix(Matrix::Dense(weight), bias)
    }

    /// A layer from a weight in any form and a bias of shape `(out)`.
    ///
    /// # Errors
    /// When the bias has another shape.
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

    /// A layer from the parameters `weight` `(out, in)` and, if `has_bias`, `bias` below the path of `vb`. Where they begin in
    /// an empty `VarMap`, they do as in GPT-2: the weight from a normal distribution of deviation 0.02, the bias as zeros.
    ///
    /// # Errors
    /// When a parameter is missing or has another shape.
    pub fn load(
        in_features: usize,
        out_features: usize,
        has_bias: bool,
        vb: impl ParameterSource,
    ) -> Result<Self> {
        Self::load_named(in_features, out_features, ["weight", "bias"], has_bias, vb)
    }

    /// The same under other names than `weight` and `bias`.
    ///
    /// # Errors
    /// As [`Linear::load`].
    pub fn load_named(
        in_features: usize,
        out_features: usize,
        [weight, bias]: [&str; 2],
        has_bias: bool,
        vb: impl ParameterSource,
    ) -> Result<Self> {
        let weight = vb.matrix(out_features, in_features, weight, normal(DEVIATION))?;
        let bias = has_bias.then(|| vb.parameter(out_features, bias, Init::Const(0.0))).transpose()?;
        Self::from_matrix(weight, bias)
    }

    /// A layer that checkpoints of GPT-2 store as `Conv1D`: in a [`VarBuilder`](candle_nn::VarBuilder) its weight lies
    /// `(in, out)`. `deviation` is that of a weight that begins in an empty `VarMap`.
    ///
    /// # Errors
    /// As [`Linear::load`].
    pub fn load_conv1d(
        in_features: usize,
        out_features: usize,
        deviation: f64,
        vb: impl ParameterSource,
    ) -> Result<Self> {
        let weight = vb.conv1d(out_features, in_features, "weight", normal(deviation))?;
        Self::from_matrix(weight, Some(vb.parameter(out_features, "bias", Init::Const(0.0))?))
    }

    /// `x Wᵀ + b`.
    ///
    /// # Shapes
    /// `x` `(…, in)`; returns `(…, out)`.
    ///
    /// # Errors
    /// When the last axis of `x` is not `in` wide, or the weight is packed and `x` is not f32 on the CPU.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.output_shape(x)?;
        self.product(&self.weight, x)
    }

    /// The same with this weight, if `x` is as wide as it must be: the layer's own, or the fixed one of its adapter.
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

    /// Some of the outputs: those of the rows `outputs` of the weight.
    ///
    /// # Shapes
    /// `x` `(…, in)`; returns `(…, outputs.len())`.
    ///
    /// # Errors
    /// As [`Linear::forward`], and when there are no such outputs.
    pub fn forward_outputs(&self, x: &Tensor, outputs: Range<usize>) -> Result<Tensor> {
        if outputs.is_empty() || outputs.end > self.out_features() {
            let what = format!("linear: no outputs {outputs:?} of {}", self.out_features());
            return Err(candle_core::Error::Msg(what));
        }
        if let Matrix::Dense(weight) = &self.weight
            && self.has_kernel(x, weight)
        {
            self.output_shape(x)?;
            return training::linear(x, weight, self.bias.as_ref(), outputs);
        }
        if let Matrix::Packed(_) = &self.weight {
            // Expanding the weight would take longer than computing the outputs that are not wanted.
            return self.forward(x)?.narrow(D::Minus1, outputs.start, outputs.len())?.contiguous();
        }
        let rows = |tensor: &Tensor| tensor.narrow(0, outputs.start, outputs.len());
        Self::new(rows(&self.weight.to_tensor()?)?, self.bias().map(rows).transpose()?)?.forward(x)
    }

    /// Whether the kernel with a way back computes the product with a dense weight.
    fn has_kernel(&self, x: &Tensor, weight: &Tensor) -> bool {
        let is_alike = |tensor: &Tensor| has_cpu_kernels(tensor) && tensor.dtype() == x.dtype();
        is_alike(x) && is_alike(weight) && self.bias.as_ref().is_none_or(is_alike)
    }

    /// `x (W + scale · b a)ᵀ + bias`, if `x` is as wide as it must be.
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

    /// The layer with what follows it on an NVIDIA GPU, if its kernels apply.
    fn on_gpu(&self, x: &Tensor, finish: Finish<&Tensor>) -> Result<Option<Tensor>> {
        match &self.weight {
            Matrix::Dense(weight) => cuda::linear(x, weight, self.bias.as_ref(), finish),
            Matrix::Packed(_) | Matrix::Adapted(_) => Ok(None),
        }
    }

    /// `activation(x Wᵀ + b)`.
    ///
    /// # Shapes
    /// As [`Linear::forward`].
    ///
    /// # Errors
    /// As [`Linear::forward`].
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

    /// `x Wᵀ + b + residual`: the product at the end of a residual branch.
    ///
    /// # Shapes
    /// `x` `(…, in)`, `residual` `(…, out)` with the same leading axes; returns the shape of `residual`.
    ///
    /// # Errors
    /// As [`Linear::forward`], and when the residual has another shape.
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

    /// The rows `ids` of the weight: an embedding lookup, if the same matrix serves as output head.
    ///
    /// # Shapes
    /// `ids` `(…)` of u32; returns `(…, in)`.
    ///
    /// # Errors
    /// When an id is not below `out`. On a GPU the ids are read back for this: an id that its kernel does not find would end the
    /// program's use of the device.
    pub fn embedding(&self, ids: &Tensor) -> Result<Tensor> {
        if let Matrix::Dense(weight) = &self.weight
            && runs_as_in_training(weight)
        {
            return training::embedding(weight, ids);
        }
        // Everywhere: candle has rows of zeros for the largest number of a type.
        let places = training::places(ids, self.out_features())?;
        let weight = match &self.weight {
            Matrix::Packed(weight) => weight,
            Matrix::Dense(weight) if !ids.device().is_cpu() => {
                return training::embedding_on_gpu(weight, ids, places);
            }
            Matrix::Dense(_) | Matrix::Adapted(_) => return self.embedding_on_device(ids),
        };
        Tensor::from_vec(weight.rows(&places), self.embedding_shape(ids), &Device::Cpu)
    }

    /// The same for ids that [`expect_ids`](crate::expect_ids) accepts: nothing is read back from a GPU, so a
    /// [`Recording`](crate::Recording) can have it.
    ///
    /// # Shapes
    /// As [`Linear::embedding`].
    ///
    /// # Errors
    /// When the weight cannot be a table there. Elsewhere than on a GPU also when an id is not below `out`.
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

    /// The weight, `(out, in)`.
    pub fn weight(&self) -> &Matrix {
        &self.weight
    }

    /// The bias, `(out)`, if the layer has one.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// The size of weight and bias.
    pub fn size(&self) -> ParameterSize {
        let (outputs, inputs) = self.weight.shape();
        let weight = ParameterSize { count: outputs * inputs, bytes: self.weight.bytes() };
        weight + self.bias.iter().map(ParameterSize::from).sum()
    }

    /// The shape of the output for `x`.
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
