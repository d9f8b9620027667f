//! Compositions of candle operations, for devices and dtypes without a kernel.
//!
//! These run on Apple GPUs, in bf16 on a CPU, and for some operations on NVIDIA GPUs.
//!
//! Values between layers may be half precision. Sums over many rows, and functions that would lose precision,
//! are still computed in f32. candle keeps every intermediate of a composition until the backward pass, so
//! compositions of many operations are recomputed for their gradients.

use candle_core::{D, DType, Result, Tensor};
use candle_gpt2_arithmetic::{Dropout, Finish};

use super::operation::{recomputed, record_tensor};
use crate::cuda;
use crate::on_gpu::Draws;
use crate::per_thread::{Operation, Sums, has_tape};

/// Dtype for sums over values of `dtype`: at least f32.
pub(crate) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    }
}

/// Applies an elementwise function, in f32 if `x` is half precision, and rounds once.
///
/// The gradient is computed in the same way.
pub(crate) fn in_wide_type(
    x: &Tensor,
    function: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    let (dtype, wide) = (x.dtype(), wide(x.dtype()));
    // Inside a tape, `x` may be untracked at first and tracked when recomputed. Both must round alike.
    if wide == dtype || !(x.track_op() || has_tape()) {
        return function(x);
    }
    recomputed(x, move |x| function(&x.to_dtype(wide)?)?.to_dtype(dtype))
}

/// Dropout without a CPU kernel; every device drops the same elements as the CPU.
pub(crate) fn composed_dropout(x: &Tensor, dropout: Dropout, draws: Draws) -> Result<Tensor> {
    if let Some(y) = cuda::dropout(&x.detach(), dropout, &draws)? {
        return record_tensor(&[x], y, DropOnGpu(dropout, draws));
    }
    // Sampled on the host for every device: seeding a GPU's generator would change the random numbers of the
    // whole program.
    let kept = Tensor::from_vec(draws.kept(dropout), x.shape(), x.device())?;
    in_wide_type(x, move |x| (x * kept.to_dtype(x.dtype())?)? * dropout.factor())
}

/// Dropout kernel on NVIDIA GPUs, which samples the same mask again in the backward pass.
struct DropOnGpu(Dropout, Draws);

impl Operation for DropOnGpu {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let found = cuda::dropout(&gradient.detach(), self.0, &self.1)?;
        sums.add(&inputs[0], on_its_gpu(found, self)?)
    }
}

/// Unwraps the gradient of an operation whose forward pass ran on an NVIDIA GPU.
///
/// Returns an error if the backward kernel does not apply.
pub(super) fn on_its_gpu<T>(found: Option<T>, operation: &impl Operation) -> Result<T> {
    match found {
        Some(found) => Ok(found),
        None => {
            candle_core::bail!(
                "{}: expected a gradient on the input's GPU and in the input's dtype",
                operation.name()
            )
        }
    }
}

/// Computes `x Wᵀ + b` in the dtype of `x`, on any device.
///
/// # Shapes
/// `x` `(…, in)`, `weight` `(out, in)`, `bias` `(out)`; returns `(…, out)`. Callers must check the shapes.
pub(crate) fn composed_linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let product = Product::new(x, weight)?;
    let bias_values = bias.map(|bias| bias.detach().to_dtype(x.dtype())).transpose()?;
    let y = match cuda::linear(&product.x, &product.weight, bias_values.as_ref(), Finish::Nothing)? {
        Some(y) => y,
        None => {
            let y = product.x.matmul(&product.weight.t()?)?;
            if let Some(bias) = bias_values { y.broadcast_add(&bias)? } else { y }
        }
    };
    let y = y.reshape(with_width(x, weight.dim(0)?))?;
    match bias {
        Some(bias) => record_tensor(&[x, weight, bias], y, ComposedLinear),
        None => record_tensor(&[x, weight], y, ComposedLinear),
    }
}

/// Shape of `x` with a different last axis.
pub(super) fn with_width(x: &Tensor, width: usize) -> Vec<usize> {
    let mut shape = x.dims().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = width;
    }
    shape
}

/// Factors of a product, detached and reshaped to matrices.
///
/// For tensors with leading axes, candle would run one product for each row of a batch.
struct Product {
    /// Input, `(rows, in)`.
    x: Tensor,
    /// Weight, `(out, in)`, in the dtype of `x`.
    weight: Tensor,
}

impl Product {
    fn new(x: &Tensor, weight: &Tensor) -> Result<Self> {
        let rows = x.detach().reshape(((), x.dim(D::Minus1)?))?.contiguous()?;
        let weight = weight.detach().to_dtype(x.dtype())?;
        // GPU products accept matrices that are contiguous or transposed without a copy.
        let is_one_piece = weight.is_contiguous() || weight.t()?.is_contiguous();
        Ok(Self { x: rows, weight: if is_one_piece { weight } else { weight.contiguous()? } })
    }
}

/// Column sums of a matrix `(rows, width)` of any dtype.
///
/// A product accumulates in f32; a sum over half-precision rows would not.
pub(crate) fn column_sums(x: &Tensor) -> Result<Tensor> {
    Tensor::ones((1, x.dim(0)?), x.dtype(), x.device())?.matmul(x)?.squeeze(0)
}

struct ComposedLinear;

impl Operation for ComposedLinear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        let (x, weight) = (&inputs[0], &inputs[1]);
        let product = Product::new(x, weight)?;
        let gradient = gradient.detach().reshape(((), weight.dim(0)?))?.contiguous()?; // (rows, out)
        if sums.wants(x) {
            sums.add(x, gradient.matmul(&product.weight)?.reshape(x.shape())?)?;
        }
        if sums.wants(weight) {
            sums.add(weight, gradient.t()?.matmul(&product.x)?.to_dtype(weight.dtype())?)?;
        }
        match inputs.get(2) {
            Some(bias) if sums.wants(bias) => sums.add(bias, column_sums(&gradient)?.to_dtype(bias.dtype())?),
            _ => Ok(()),
        }
    }
}
