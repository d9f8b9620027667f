//! The linear layer: `y = x Wᵀ + b`, with the weight in PyTorch's `nn.Linear` orientation `(out, in)`.
//!
//! A GPT-2 checkpoint stores its matrices as `(in, out)` (`Conv1D`). The loader hands those in as a transposed
//! view, which costs nothing and which the product below turns back into the stored layout.
//!
//! A dense weight is a tensor: any device, trainable, the reference. A packed weight is for inference on the CPU.

use std::sync::Arc;

use candle_core::{CpuStorage, D, DType, Device, Result, Storage, Tensor};
use gpt2_arithmetic::{Finish, PackedMatrix, PanelBias, Strided, WeightFormat};

use super::activation::Activation;
use super::adapted::AdaptedMatrix;
use super::parameters::ParameterSource;
use crate::cpu::{self, PackedProduct};
use crate::training::{self, is_cpu_float, runs_as_in_training};
use crate::{KernelError, cuda};

/// The weight of a linear layer, `(out, in)`.
#[derive(Debug, Clone)]
pub enum Matrix {
    /// A tensor: contiguous, or the transposed view of an `(in, out)` tensor.
    Dense(Tensor),
    /// Weights in the layout of the fast products. Clones share them.
    Packed(Arc<PackedMatrix>),
    /// A fixed matrix with an adapter that is trained.
    Adapted(Arc<AdaptedMatrix>),
}

impl Matrix {
    /// Packs an f32 tensor on the CPU, whatever its strides.
    ///
    /// # Shapes
    /// `weight` `(out, in)`.
    ///
    /// # Errors
    /// When the tensor is another.
    pub fn pack(weight: &Tensor, format: WeightFormat) -> Result<Self> {
        let shape = weight.dims2()?;
        let (storage, layout) = weight.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(values)) = &*storage else {
            return Err(KernelError::NotCpuFloats { found: weight.dtype() }.into());
        };
        let strides = match layout.stride() {
            [output, input] => (*output, *input),
            _ => (0, 0),
        };
        let values = &values[layout.start_offset()..];
        let packed = PackedMatrix::from_values(Strided { values, strides, shape }, format);
        packed.map(|packed| Self::Packed(packed.into())).map_err(candle_core::Error::wrap)
    }

    /// Width of the output and of the input.
    pub(super) fn shape(&self) -> (usize, usize) {
        match self {
            Self::Dense(weight) => {
                (weight.dim(0).unwrap_or_default(), weight.dim(D::Minus1).unwrap_or_default())
            }
            Self::Packed(weight) => (weight.out_features(), weight.in_features()),
            Self::Adapted(weight) => weight.base().shape(),
        }
    }

    /// The type in which what is computed with these weights may be kept between steps without losing more than they did: f32
    /// beside f32 weights, f16 beside all others.
    pub fn kept_dtype(&self) -> DType {
        match self {
            Self::Dense(weight) => weight.dtype(),
            Self::Packed(weight) if weight.format() == WeightFormat::F32 => DType::F32,
            Self::Packed(_) => DType::F16,
            Self::Adapted(weight) => weight.base().kept_dtype(),
        }
    }

    /// The weights as a tensor `(out, in)`: the dense weight itself, packed weights expanded to f32, or weights with what an
    /// adapter adds.
    ///
    /// # Errors
    /// When there is no memory for them.
    pub fn to_tensor(&self) -> Result<Tensor> {
        match self {
            Self::Dense(weight) => Ok(weight.clone()),
            Self::Packed(weight) => cpu::expanded(weight),
            Self::Adapted(weight) => weight.merged(),
        }
    }
}

/// A linear layer, `(…, in)` to `(…, out)`.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Matrix,
    bias: Option<Tensor>,
    /// The bias of a packed weight, laid out as its products take it.
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
        let panel_bias = match (&weight, &bias) {
            (Matrix::Packed(_), Some(bias)) => {
                Some(PanelBias::new(&bias.to_dtype(DType::F32)?.to_vec1::<f32>()?))
            }
            _ => None,
        };
        Ok(Self { weight, bias, panel_bias })
    }

    /// A layer from the parameters `weight` and, where `has_bias`, `bias` below the path of `vb`.
    ///
    /// # Errors
    /// When a parameter is missing or has another shape.
    pub fn load(
        in_features: usize,
        out_features: usize,
        has_bias: bool,
        vb: &impl ParameterSource,
    ) -> Result<Self> {
        let weight = vb.matrix(out_features, in_features, "weight")?;
        let bias = has_bias.then(|| vb.parameter(out_features, "bias")).transpose()?;
        Self::from_matrix(weight, bias)
    }

    /// `x Wᵀ + b`.
    ///
    /// # Shapes
    /// `x` `(…, in)`; returns `(…, out)`.
    ///
    /// # Errors
    /// When the last axis of `x` is not `in` wide, or the weight is packed and `x` is not f32 on the CPU.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let shape = self.output_shape(x)?;
        let weight = match &self.weight {
            Matrix::Dense(weight) => weight,
            Matrix::Packed(weight) => return self.packed_product(weight, x, false),
            Matrix::Adapted(weight) => return weight.forward(x, self.bias.as_ref()),
        };
        let trains = |tensor: &Tensor| runs_as_in_training(tensor);
        if (trains(x) || trains(weight)) && x.dtype() == weight.dtype() && is_cpu_float(x) {
            return training::linear(x, weight, self.bias.as_ref());
        }
        if let Some(y) = self.on_gpu(x, Finish::Nothing)? {
            return Ok(y);
        }
        // One two-axis product: candle would otherwise run one product for each row of the batch.
        let y = x.reshape(((), self.in_features()))?.matmul(&weight.t()?)?.reshape(shape)?;
        match &self.bias {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }

    /// The layer with what follows it on an NVIDIA GPU, where its kernels apply.
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

    /// The rows `ids` of the weight: an embedding lookup, where the same matrix serves as output head.
    ///
    /// # Shapes
    /// `ids` `(…)` of u32; returns `(…, in)`.
    ///
    /// # Errors
    /// When an id is not below `out`.
    pub fn embedding(&self, ids: &Tensor) -> Result<Tensor> {
        let mut shape = ids.dims().to_vec();
        shape.push(self.in_features());
        let flat = ids.flatten_all()?;
        let weight = match &self.weight {
            Matrix::Dense(weight) if runs_as_in_training(weight) => return training::embedding(weight, ids),
            Matrix::Dense(weight) => return weight.embedding(&flat)?.reshape(shape),
            Matrix::Packed(weight) => weight,
            Matrix::Adapted(weight) => return weight.merged()?.embedding(&flat)?.reshape(shape),
        };
        let outputs: Vec<usize> = flat.to_vec1::<u32>()?.into_iter().map(|id| id as usize).collect();
        if let Some(row) = outputs.iter().find(|id| **id >= self.out_features()) {
            return Err(KernelError::NoSuchRow { row: *row, rows: self.out_features() }.into());
        }
        Tensor::from_vec(weight.rows(&outputs), shape, &Device::Cpu)
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

    /// The bias, `(out)`, where the layer has one.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Number of trainable values: weight and bias.
    pub fn parameter_count(&self) -> usize {
        self.out_features() * self.in_features() + self.bias.as_ref().map_or(0, Tensor::elem_count)
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
