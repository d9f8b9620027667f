//! Cross-entropy fused with the output head, in chunks of rows.
//!
//! The logits of all tokens at once are the largest tensor of a training step, and a plain cross-entropy keeps half a dozen
//! of that size. Here a chunk of logits lives only until its loss and its gradients are taken; the gradients with respect
//! to hidden states and head are complete when the loss is, and the backward pass only hands them on.

use std::sync::{Mutex, PoisonError};

use candle_core::{D, DType, Device, Result, Tensor};

use super::arithmetic::{Real, Vectors, Work};
use super::operation::{Operation, Sums, in_place, memory_for, record};
use super::product::{Matrix, Output, product};
use super::{for_real, is_cpu_float, with_elements};
use crate::KernelError;
use crate::parallel::for_each_item;
use crate::simd::LANES;

/// Logits that exist at once: 64 MiB in f32.
const LOGITS_AT_ONCE: usize = 1 << 24;

/// The mean negative log-probability of `targets` under `softmax(hidden · weightᵀ)`, in nats.
///
/// # Shapes
/// `hidden` `(…, C)`, `weight` `(V, C)`, `targets` one id for each row; returns a scalar.
///
/// # Errors
/// When the shapes do not fit, there are no rows, or a target is outside the vocabulary.
pub fn head_loss(hidden: &Tensor, weight: &Tensor, targets: &[u32]) -> Result<Tensor> {
    if !is_cpu_float(hidden) {
        return head_loss_reference(hidden, weight, targets);
    }
    let (rows, vocabulary) = check(hidden, weight, targets)?;
    for_real!(hidden.dtype(), fused(hidden, weight, targets, (rows, vocabulary)))
}

fn fused<T: Real>(
    hidden: &Tensor,
    weight: &Tensor,
    targets: &[u32],
    (rows, vocabulary): (usize, usize),
) -> Result<Tensor> {
    let width = weight.dim(D::Minus1)?;
    let rows_at_once = (LOGITS_AT_ONCE / vocabulary).clamp(1, rows);
    let wants_gradients = hidden.track_op() || weight.track_op();
    let weight_gradient = weight.track_op().then(|| memory_for(weight)).transpose()?;
    let (loss, hidden_gradient) = with_elements::<T, 2, _>([hidden, weight], |[hidden, weight]| {
        let weight = Matrix::rows(weight, width);
        let mut hidden_gradient = vec![T::ZERO; if wants_gradients { hidden.len() } else { 0 }];
        let mut logits = vec![T::ZERO; rows_at_once * vocabulary];
        let mut loss = 0.0;
        for first in (0..rows).step_by(rows_at_once) {
            let count = rows_at_once.min(rows - first);
            let range = first * width..(first + count) * width;
            let logits = &mut logits[..count * vocabulary];
            let hidden = Matrix::rows(&hidden[range.clone()], width);
            product(hidden, weight.transposed(), (count, width, vocabulary), logits, Output::Fresh);
            loss += softmax_gradients(logits, &targets[first..first + count], rows);
            if !wants_gradients {
                continue;
            }
            let logits = Matrix::rows(logits, vocabulary);
            let gradient = &mut hidden_gradient[range];
            product(logits, weight, (count, vocabulary, width), gradient, Output::Fresh);
            if let Some(gradient) = &weight_gradient {
                let mode = if first == 0 { Output::Fresh } else { Output::Sum };
                let sizes = (vocabulary, count, width);
                in_place(gradient, |gradient| product(logits.transposed(), hidden, sizes, gradient, mode))?;
            }
        }
        Ok((T::of(loss / rows as f64), hidden_gradient))
    })?;
    if !wants_gradients {
        return Tensor::new(loss, hidden.device());
    }
    let hidden_gradient = Tensor::from_vec(hidden_gradient, hidden.shape(), hidden.device())?;
    let gradients = Mutex::new(Some((hidden_gradient, weight_gradient)));
    record(&[hidden, weight], vec![loss], (), HeadLoss { gradients })
}

/// The same as a composition of candle operations, over all rows at once.
///
/// # Errors
/// As [`head_loss`].
pub fn head_loss_reference(hidden: &Tensor, weight: &Tensor, targets: &[u32]) -> Result<Tensor> {
    let (rows, _) = check(hidden, weight, targets)?;
    let logits = hidden.reshape((rows, ()))?.matmul(&weight.t()?)?;
    let targets = Tensor::from_slice(targets, (rows, 1), hidden.device())?;
    let log_probabilities = candle_nn::ops::log_softmax(&logits, D::Minus1)?;
    log_probabilities.gather(&targets, 1)?.mean_all()?.neg()
}

/// Rows and vocabulary, where everything fits.
fn check(hidden: &Tensor, weight: &Tensor, targets: &[u32]) -> Result<(usize, usize)> {
    let (vocabulary, width) = weight.dims2()?;
    if hidden.dim(D::Minus1)? != width || hidden.dtype() != weight.dtype() {
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

/// Turns logits into the gradient of the mean loss over `rows`, `(softmax - one_hot) / rows`, and returns the summed loss.
fn softmax_gradients<T: Real>(logits: &mut [T], targets: &[u32], rows: usize) -> f64 {
    let vocabulary = logits.len() / targets.len();
    let mut losses = vec![0.0; targets.len()];
    let given = logits.chunks_mut(vocabulary).zip(targets);
    for_each_item(given.zip(&mut losses), |((logits, target), loss)| {
        *loss = T::vectorized(RowGradient { logits, target: *target as usize, rows });
    });
    // In the order of the rows, so that the sum does not depend on the number of threads.
    losses.iter().sum()
}

struct RowGradient<'a, T> {
    logits: &'a mut [T],
    target: usize,
    rows: usize,
}

impl<T: Real> Work<T> for RowGradient<'_, T> {
    /// The negative log-probability of the target.
    type Output = f64;

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) -> f64 {
        /// Values whose sum is taken in their own type before it joins the total.
        const PART: usize = 64 * LANES;
        let Self { logits, target, rows } = self;
        let (zero, lowest) = (T::ZERO, T::LOWEST);
        let mut largest = v.splat(lowest);
        for logits in logits.chunks(LANES) {
            largest = v.max(largest, v.load_first(logits, lowest));
        }
        let largest = v.largest(largest);
        let of_target = (logits[target] - largest).to_f64();
        let largest = v.splat(largest);
        let mut total = 0.0;
        for part in logits.chunks_mut(PART) {
            let mut sum = v.splat(zero);
            for logits in part.chunks_mut(LANES) {
                let exponentials = v.exp(v.sub(v.load_first(logits, lowest), largest));
                v.store_first(exponentials, logits);
                sum = v.add(sum, exponentials);
            }
            total += v.sum(sum).to_f64();
        }
        let factor = v.splat(T::of(1.0 / (total * rows as f64)));
        for logits in logits.chunks_mut(LANES) {
            v.store_first(v.mul(v.load_first(logits, zero), factor), logits);
        }
        logits[target] -= T::of(1.0 / rows as f64);
        total.ln() - of_target
    }
}

/// The gradients, which are known when the loss is.
struct HeadLoss {
    /// Of the hidden states and, unless the head is fixed, of the head; until they have been handed on.
    gradients: Mutex<Option<(Tensor, Option<Tensor>)>>,
}

impl Operation for HeadLoss {
    fn name(&self) -> &'static str {
        "head-loss"
    }

    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()> {
        fn scale<T: Real>(gradient: &Tensor, factor: f64) -> Result<()> {
            in_place(gradient, |values: &mut [T]| {
                let factor = T::of(factor);
                for_each_item(values.chunks_mut(1 << 14), |values| {
                    values.iter_mut().for_each(|value| *value *= factor);
                });
            })
        }
        let factor = gradient.to_dtype(DType::F64)?.to_device(&Device::Cpu)?.to_scalar::<f64>()?;
        let gradients = self.gradients.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some((of_hidden, of_weight)) = gradients else {
            candle_core::bail!("the gradients of a head loss can be taken once; compute the loss again");
        };
        for (input, gradient) in inputs.iter().zip([Some(of_hidden), of_weight]) {
            if let Some(gradient) = gradient {
                if factor != 1.0 {
                    for_real!(gradient.dtype(), scale(&gradient, factor))?;
                }
                sums.add(input, gradient)?;
            }
        }
        Ok(())
    }
}
