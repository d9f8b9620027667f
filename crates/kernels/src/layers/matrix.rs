//! The weight of a linear layer: dense, packed, or either with an adapter beside it, `W + scale · b a`, which is never added up
//! if it is trained.

use std::sync::Arc;

use candle_core::{CpuStorage, D, DType, Result, Storage, Tensor};
use candle_gpt2_arithmetic::{PackedMatrix, Strided, WeightFormat};

use crate::cpu;
use crate::error::KernelError;

/// The weight of a linear layer, `(out, in)`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_arithmetic::WeightFormat;
/// use candle_gpt2_kernels::{Linear, Matrix};
///
/// let weight = Tensor::ones((5, 64), DType::F32, &Device::Cpu)?;
/// let layer = Linear::from_matrix(Matrix::pack(&weight, WeightFormat::Q8)?, None)?;
/// let x = Tensor::ones((3, 64), DType::F32, &Device::Cpu)?;
/// assert_eq!(layer.forward(&x)?.dims(), [3, 5]);
/// # Ok::<(), candle_core::Error>(())
/// ```
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
        // An empty part of a tensor may begin behind its end.
        let values = values.get(layout.start_offset()..).unwrap_or_default();
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

    /// The matrix without adapters.
    pub(super) fn fixed(&self) -> &Self {
        match self {
            Self::Dense(_) | Self::Packed(_) => self,
            Self::Adapted(weight) => weight.base.fixed(),
        }
    }

    /// Bytes that the weights take, an adapter's included.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Dense(weight) => tensor_bytes(weight),
            Self::Packed(weight) => weight.bytes(),
            Self::Adapted(weight) => weight.base.bytes() + tensor_bytes(&weight.a) + tensor_bytes(&weight.b),
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

/// Bytes of a tensor's values.
pub(super) fn tensor_bytes(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

/// A matrix that stays as it is, with a trained product of low rank beside it.
///
/// ```
/// use std::sync::Arc;
///
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_kernels::{AdaptedMatrix, Matrix};
///
/// let base = Matrix::Dense(Tensor::zeros((3, 2), DType::F32, &Device::Cpu)?);
/// let (a, b) = (Tensor::new(&[[1f32, 2.]], &Device::Cpu)?, Tensor::new(&[[1f32], [0.], [3.]], &Device::Cpu)?);
/// let adapted = Matrix::Adapted(Arc::new(AdaptedMatrix::new(base, a, b, 0.5)?));
/// assert_eq!(adapted.to_tensor()?.to_vec2::<f32>()?, [[0.5, 1.], [0., 0.], [1.5, 3.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct AdaptedMatrix {
    pub(super) base: Matrix,
    pub(super) a: Tensor,
    pub(super) b: Tensor,
    pub(super) scale: f64,
}

impl AdaptedMatrix {
    /// `base + scale · b a`. No gradient leads to the base.
    ///
    /// # Shapes
    /// `base` `(out, in)`, `a` `(rank, in)`, `b` `(out, rank)`.
    ///
    /// # Errors
    /// When the shapes do not fit, or the types of a dense base and the adapter differ.
    pub fn new(base: Matrix, a: Tensor, b: Tensor, scale: f64) -> Result<Self> {
        let base = match base {
            Matrix::Dense(weight) => Matrix::Dense(weight.detach()),
            other => other,
        };
        let weight = base.shape();
        let fits =
            a.rank() == 2 && b.rank() == 2 && (b.dim(0)?, a.dim(1)?) == weight && b.dim(1)? == a.dim(0)?;
        let is_one_type = a.dtype() == b.dtype()
            && match &base {
                Matrix::Dense(weight) => weight.dtype() == a.dtype(),
                Matrix::Packed(_) | Matrix::Adapted(_) => true,
            };
        if !fits || !is_one_type {
            let (a, b) = (a.dims().to_vec(), b.dims().to_vec());
            return Err(KernelError::AdapterShapes { weight, a, b }.into());
        }
        Ok(Self { base, a, b, scale })
    }

    /// The matrix without what the adapter adds.
    pub(super) fn base(&self) -> &Matrix {
        &self.base
    }

    /// The matrix with what the adapter adds, through which gradients lead to the adapter.
    pub(super) fn merged(&self) -> Result<Tensor> {
        self.base.to_tensor()? + (self.b.matmul(&self.a)? * self.scale)?
    }
}
