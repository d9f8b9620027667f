//! What is computed with candle's operations if no kernel is: on Apple GPUs, on a CPU in bf16, and some of it on NVIDIA GPUs.
//!
//! A type of half precision holds what lies between the layers; what is summed over many rows, and functions that would lose
//! their digits, are computed in f32 all the same. candle keeps whatever a composition makes until the backward pass, so
//! compositions of many operations are computed again for their gradients.

use candle_core::{D, DType, Result, Tensor};
use candle_gpt2_arithmetic::{Dropout, Finish};

use super::operation::{recomputed, record_tensor};
use crate::cuda;
use crate::on_gpu::Draws;
use crate::per_thread::{Operation, Sums, has_tape};

/// The type in which sums over what is held in `dtype` are computed: f32 at least.
pub(crate) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        other => other,
    }
}

/// A function of each element, computed in f32 if `x` is of half precision and rounded once; its slopes too.
pub(crate) fn in_wide_type(
    x: &Tensor,
    function: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    let (dtype, wide) = (x.dtype(), wide(x.dtype()));
    // What is computed again for its gradients is no variable's the first time, and must be the same.
    if wide == dtype || !(x.track_op() || has_tape()) {
        return function(x);
    }
    recomputed(x, move |x| function(&x.to_dtype(wide)?)?.to_dtype(dtype))
}

/// Dropout without a kernel of the CPU. Every device drops the same elements as the CPU.
pub(crate) fn composed_dropout(x: &Tensor, dropout: Dropout, draws: Draws) -> Result<Tensor> {
    if let Some(y) = cuda::dropout(&x.detach(), dropout, &draws)? {
        return record_tensor(&[x], y, DropOnGpu(dropout, draws));
    }
    // Drawn on the host for every device: seeding the generator of a GPU would change the random numbers of the whole program.
    let kept = Tensor::from_vec(draws.kept(dropout), x.shape(), x.device())?;
    in_wide_type(x, move |x| (x * kept.to_dtype(x.dtype())?)? * dropout.factor())
}

/// The kernel for dropout of NVIDIA GPUs, which draws again on the way back.
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

/// What a kernel of an NVIDIA GPU computed on the way back of an operation whose result came from one.
pub(super) fn on_its_gpu<T>(found: Option<T>, operation: &impl Operation) -> Result<T> {
    match found {
        Some(found) => Ok(found),
        None => candle_core::bail!("{}: the gradient is not of the input's GPU and type", operation.name()),
    }
}

/// `x Wᵀ + b` in the type of `x`, on any device.
///
/// # Shapes
/// `x` `(…, in)`, `weight` `(out, in)`, `bias` `(out)`; returns `(…, out)`. They fit.
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

/// The shape of `x` with another last axis.
pub(super) fn with_width(x: &Tensor, width: usize) -> Vec<usize> {
    let mut shape = x.dims().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = width;
    }
    shape
}

/// The factors of a product without a way back: candle would otherwise run one product for each row of a batch.
struct Product {
    /// `(rows, in)`.
    x: Tensor,
    /// `(out, in)`, in the type of `x`.
    weight: Tensor,
}

impl Product {
    fn new(x: &Tensor, weight: &Tensor) -> Result<Self> {
        let rows = x.detach().reshape(((), x.dim(D::Minus1)?))?.contiguous()?;
        let weight = weight.detach().to_dtype(x.dtype())?;
        // A GPU multiplies matrices in one piece, as they are or transposed.
        let is_one_piece = weight.is_contiguous() || weight.t()?.is_contiguous();
        Ok(Self { x: rows, weight: if is_one_piece { weight } else { weight.contiguous()? } })
    }
}

/// The sums of the columns of `(rows, width)`, of any type: a product adds in f32, where a sum over half-precision rows would not.
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
