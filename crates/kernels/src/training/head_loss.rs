//! Cross-entropy fused with the output head, in chunks of rows.
//!
//! The logits of all tokens are the largest tensor of a training step, and a plain cross-entropy keeps about
//! six tensors of that size. Here, a chunk of logits lives only until its loss and its gradients are
//! computed. The gradients of the hidden states and the head are complete as soon as the loss is, so the
//! backward pass only passes them on.
//!
//! Without a kernel, each chunk is recomputed in the backward pass.

use std::sync::{Mutex, PoisonError};

use candle_core::{D, DType, Device, Result, Tensor};
use candle_gpt2_arithmetic::MatrixView;

use super::composed::{composed_linear, wide};
use super::float::{CpuFloat, for_float, on_cpu, with_elements};
use super::operation::{in_place, memory_for, recomputed, record, record_tensor};
use crate::cuda;
use crate::error::KernelError;
use crate::on_gpu::{LOSS_ROWS, LossOnGpu};
use crate::per_thread::{Operation, Sums, has_cpu_kernels, is_without_gradients};

/// Mean negative log-probability of `targets` under `softmax(hidden · weightᵀ)`, in nats.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_kernels::head_loss;
///
/// let hidden = Tensor::zeros((5, 3), DType::F32, &Device::Cpu)?;
/// let weight = Tensor::ones((11, 3), DType::F32, &Device::Cpu)?;
/// let loss = head_loss(&hidden, &weight, &[1, 2, 3, 4, 10])?.to_scalar::<f32>()?;
/// assert!((loss - 11f32.ln()).abs() < 1e-6, "eleven equally likely tokens");
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Shapes
/// `hidden` `(…, C)`, `weight` `(V, C)`, `targets` one ID for each row; returns a scalar. If `hidden` is half
/// precision, products are computed in its dtype and the scalar is f32.
///
/// Gradients can be computed only once: a second `backward` through the same loss fails.
///
/// # Errors
/// If the shapes do not match, there are no rows, or a target is outside the vocabulary.
pub fn head_loss(hidden: &Tensor, weight: &Tensor, targets: &[u32]) -> Result<Tensor> {
    let sizes = check(hidden, weight, targets)?;
    if !has_cpu_kernels(hidden) || hidden.dtype() != weight.dtype() {
        return match on_gpu(hidden, weight, targets, sizes)? {
            Some(loss) => Ok(loss),
            None => in_chunks(hidden, weight, targets, sizes),
        };
    }
    for_float!(hidden.dtype(), fused(hidden, weight, targets, sizes))
}

fn fused<T: CpuFloat>(
    hidden: &Tensor,
    weight: &Tensor,
    targets: &[u32],
    (rows, vocabulary): (usize, usize),
) -> Result<Tensor> {
    let width = weight.dim(D::Minus1)?;
    let wants_gradients = !is_without_gradients() && (hidden.track_op() || weight.track_op());
    let weight_gradient = (wants_gradients && weight.track_op()).then(|| memory_for(weight)).transpose()?;
    let (loss, hidden_gradient) = with_elements::<T, 2, _>([hidden, weight], |[hidden, weight]| {
        let hidden = MatrixView::new(hidden, rows, width);
        let weight = MatrixView::new(weight, vocabulary, width);
        if !wants_gradients {
            return Ok((T::head_loss(hidden, weight, targets), Vec::new()));
        }
        match &weight_gradient {
            None => Ok(T::head_loss_with_gradients(hidden, weight, targets, None)),
            Some(memory) => in_place(memory, |memory: &mut [T]| {
                T::head_loss_with_gradients(hidden, weight, targets, Some(memory))
            }),
        }
    })?;
    let loss = T::of(loss);
    if !wants_gradients {
        return Tensor::new(loss, hidden.device());
    }
    let hidden_gradient = Tensor::from_vec(hidden_gradient, hidden.shape(), hidden.device())?;
    let gradients = Mutex::new(Some([Some(hidden_gradient), weight_gradient]));
    record(&[hidden, weight], on_cpu(vec![loss]), (), HeadLoss { gradients })
}

/// Reference for [`head_loss`]: a composition of candle operations over all rows at once.
///
/// Tests compare the two functions.
///
/// # Errors
/// Same as [`head_loss`].
pub fn head_loss_reference(hidden: &Tensor, weight: &Tensor, targets: &[u32]) -> Result<Tensor> {
    let (rows, _) = check(hidden, weight, targets)?;
    summed(&hidden.reshape((rows, ()))?, weight, targets)? / rows as f64
}

/// Loss on an NVIDIA GPU, or `None` if its kernels do not apply.
///
/// Products are computed in the dtype of `hidden`.
fn on_gpu(
    hidden: &Tensor,
    weight: &Tensor,
    targets: &[u32],
    (rows, _): (usize, usize),
) -> Result<Option<Tensor>> {
    if !hidden.device().is_cuda() {
        return Ok(None);
    }
    let wanted = [hidden, weight].map(|x| x.track_op() && !is_without_gradients());
    let tensors = [&hidden.detach().reshape((rows, ()))?, &weight.detach().to_dtype(hidden.dtype())?];
    let Some(LossOnGpu { mean, of_hidden, of_weight }) = cuda::head_loss(tensors, targets, wanted)? else {
        return Ok(None);
    };
    let of_hidden = of_hidden.map(|gradient| gradient.reshape(hidden.shape())).transpose()?;
    let of_weight = of_weight.map(|gradient| gradient.to_dtype(weight.dtype())).transpose()?;
    let gradients = Mutex::new(Some([of_hidden, of_weight]));
    record_tensor(&[hidden, weight], mean, HeadLoss { gradients }).map(Some)
}

fn in_chunks(hidden: &Tensor, weight: &Tensor, targets: &[u32], (rows, _): (usize, usize)) -> Result<Tensor> {
    let hidden = hidden.reshape((rows, ()))?;
    let mut losses = Vec::with_capacity(rows.div_ceil(LOSS_ROWS));
    for (chunk, targets) in targets.chunks(LOSS_ROWS).enumerate() {
        let (weight, targets) = (weight.clone(), targets.to_vec());
        let part = hidden.narrow(0, chunk * LOSS_ROWS, targets.len())?;
        losses.push(recomputed(&part, move |hidden| summed(hidden, &weight, &targets))?);
    }
    Tensor::stack(&losses, 0)?.sum_all()? / rows as f64
}

/// Sum of the losses over the rows of `hidden`, `(rows, C)`.
fn summed(hidden: &Tensor, weight: &Tensor, targets: &[u32]) -> Result<Tensor> {
    let logits = composed_linear(hidden, weight, None)?;
    let logits = logits.to_dtype(wide(logits.dtype()))?;
    let targets = Tensor::from_slice(targets, (targets.len(), 1), hidden.device())?;
    let log_probabilities = candle_nn::ops::log_softmax(&logits, D::Minus1)?;
    log_probabilities.gather(&targets, 1)?.sum_all()?.neg()
}

/// Checks the shapes and targets, and returns the number of rows and the vocabulary size.
fn check(hidden: &Tensor, weight: &Tensor, targets: &[u32]) -> Result<(usize, usize)> {
    let (vocabulary, width) = weight.dims2()?;
    if hidden.dim(D::Minus1)? != width {
        return Err(KernelError::InputWidth { expected: width, found: hidden.dims().to_vec() }.into());
    }
    let rows = hidden.elem_count() / width.max(1);
    if targets.len() != rows || rows == 0 {
        return Err(KernelError::TargetCount { rows, found: targets.len() }.into());
    }
    let is_outside = |target: &&u32| usize::try_from(**target).map_or(true, |target| target >= vocabulary);
    match targets.iter().find(is_outside) {
        Some(target) => Err(KernelError::TargetRange { vocabulary, found: *target }.into()),
        None => Ok((rows, vocabulary)),
    }
}

/// Loss operation whose gradients are computed together with the loss.
struct HeadLoss {
    /// Gradients of hidden states and head (`None` if frozen), until the backward pass takes them.
    gradients: Mutex<Option<[Option<Tensor>; 2]>>,
}

impl Operation for HeadLoss {
    fn name(&self) -> &'static str {
        "head-loss"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        fn scale<T: CpuFloat>(gradient: &Tensor, factor: f64) -> Result<()> {
            in_place(gradient, |values: &mut [T]| T::scale(values, factor))
        }
        let factor = gradient.to_dtype(DType::F64)?.to_device(&Device::Cpu)?.to_scalar::<f64>()?;
        let gradients = self.gradients.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(gradients) = gradients else {
            candle_core::bail!(
                "the gradients of this loss have already been computed; compute the loss again"
            );
        };
        for (input, gradient) in inputs.iter().zip(gradients) {
            let Some(gradient) = gradient else { continue };
            if factor != 1.0 && !has_cpu_kernels(&gradient) {
                sums.add(input, (gradient * factor)?)?;
                continue;
            }
            if factor != 1.0 {
                for_float!(gradient.dtype(), scale(&gradient, factor))?;
            }
            sums.add(input, gradient)?;
        }
        Ok(())
    }
}
