//! Weights of linear layers: dense, packed, or either one with an adapter.
//!
//! An adapted weight is `W + scale · b a`. The sum is never materialized while the adapter is trained.

use std::sync::Arc;

use candle_core::{CpuStorage, D, DType, Result, Storage, Tensor};
use candle_gpt2_arithmetic::{NumberType, PackedMatrix, Strided};

use super::size::ParameterSize;
use crate::cpu;
use crate::error::KernelError;

/// Weight of a linear layer, `(out, in)`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_arithmetic::NumberType;
/// use candle_gpt2_kernels::{Linear, Matrix};
///
/// let weight = Tensor::ones((5, 64), DType::F32, &Device::Cpu)?;
/// let layer = Linear::from_matrix(Matrix::pack(&weight, NumberType::Q8)?, None)?;
/// let x = Tensor::ones((3, 64), DType::F32, &Device::Cpu)?;
/// assert_eq!(layer.forward(&x)?.dims(), [3, 5]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub enum Matrix {
    /// A tensor that is contiguous or the transposed view of an `(in, out)` tensor.
    Dense(Tensor),
    /// Weights in the layout of the packed products, shared by clones.
    Packed(Arc<PackedMatrix>),
    /// A frozen matrix with a trainable adapter.
    Adapted(Arc<AdaptedMatrix>),
}

impl Matrix {
    /// Packs an f32 tensor on the CPU, with any strides.
    ///
    /// # Shapes
    /// `weight` `(out, in)`.
    ///
    /// # Errors
    /// If the tensor is not a matrix, not f32 or not on the CPU, or cannot be packed in this type.
    pub fn pack(weight: &Tensor, dtype: NumberType) -> Result<Self> {
        let shape = weight.dims2()?;
        let (storage, layout) = weight.storage_and_layout();
        let Storage::Cpu(CpuStorage::F32(values)) = &*storage else {
            return Err(KernelError::not_cpu_floats(weight).into());
        };
        let strides = match layout.stride() {
            [output, input] => (*output, *input),
            _ => (0, 0),
        };
        // The offset of an empty view may be past the end of the storage.
        let values = values.get(layout.start_offset()..).unwrap_or_default();
        let packed = PackedMatrix::from_values(Strided { values, strides, shape }, dtype);
        packed.map(|packed| Self::Packed(packed.into())).map_err(candle_core::Error::wrap)
    }

    /// Output width, then input width.
    pub(super) fn shape(&self) -> (usize, usize) {
        match self {
            Self::Dense(weight) => {
                (weight.dim(0).unwrap_or_default(), weight.dim(D::Minus1).unwrap_or_default())
            }
            Self::Packed(weight) => (weight.out_features(), weight.in_features()),
            Self::Adapted(weight) => weight.base().shape(),
        }
    }

    /// Returns the innermost base matrix, without adapters.
    pub(super) fn fixed(&self) -> &Self {
        match self {
            Self::Dense(_) | Self::Packed(_) => self,
            Self::Adapted(weight) => weight.base.fixed(),
        }
    }

    /// Size of the weights; adapters count toward `trainable` and `bytes`.
    pub fn size(&self) -> ParameterSize {
        match self {
            Self::Dense(weight) => weight.into(),
            Self::Packed(weight) => {
                let count = weight.out_features() * weight.in_features();
                ParameterSize { count, trainable: 0, bytes: weight.bytes() }
            }
            Self::Adapted(weight) => {
                let adapter: ParameterSize =
                    [&weight.a, &weight.b].map(ParameterSize::from).into_iter().sum();
                ParameterSize { count: 0, ..adapter } + weight.base.size()
            }
        }
    }

    /// Dtype for caching values computed from these weights, with at least the weights' precision.
    ///
    /// This is a dense weight's own dtype, f32 for packed f32 weights, and f16 for all other packed weights.
    pub fn kept_dtype(&self) -> DType {
        match self {
            Self::Dense(weight) => weight.dtype(),
            Self::Packed(weight) if weight.dtype() == NumberType::F32 => DType::F32,
            Self::Packed(_) => DType::F16,
            Self::Adapted(weight) => weight.base().kept_dtype(),
        }
    }

    /// Returns the weights as a tensor `(out, in)`.
    ///
    /// Dense weights are returned unchanged, packed weights are unpacked to f32, and adapters are merged into
    /// the base.
    ///
    /// # Errors
    /// If allocation fails.
    pub fn to_tensor(&self) -> Result<Tensor> {
        match self {
            Self::Dense(weight) => Ok(weight.clone()),
            Self::Packed(weight) => cpu::expanded(weight),
            Self::Adapted(weight) => weight.merged(),
        }
    }
}

/// A frozen matrix plus a trainable low-rank product.
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
    /// Combines `base + scale · b a`; no gradient reaches the base.
    ///
    /// # Shapes
    /// `base` `(out, in)`, `a` `(rank, in)`, `b` `(out, rank)`.
    ///
    /// # Errors
    /// If the shapes do not match, or the adapter and a dense base have different dtypes.
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

    /// Returns the matrix without the adapter.
    pub(super) fn base(&self) -> &Matrix {
        &self.base
    }

    /// Returns the matrix with the adapter merged in; gradients reach the adapter.
    pub(super) fn merged(&self) -> Result<Tensor> {
        self.base.to_tensor()? + (self.b.matmul(&self.a)? * self.scale)?
    }
}
