//! Cross-entropy fused with the output head, in chunks of rows.
//!
//! The logits of all tokens at once are the largest tensor of a training step, and a plain cross-entropy keeps half a dozen
//! of that size. Here a chunk of logits lives only until its loss and its gradients are taken; the gradients with respect
//! to hidden states and head are complete when the loss is, and the backward pass only hands them on.

use std::sync::Mutex;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, DType, Device, InplaceOp1, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

use super::arithmetic::{Real, Vectorized, vectorized};
use super::{for_real, is_cpu_float};
use crate::KernelError;

/// Logits that exist at once: 32 MiB in f32.
const LOGITS_AT_ONCE: usize = 1 << 23;

/// The mean negative log-probability of `targets` under `softmax(hidden · weightᵀ)`, in nats.
///
/// # Shapes
/// `hidden` `(N, C)`, `weight` `(V, C)`, `targets` one id for each row; returns a scalar.
///
/// # Errors
/// When the shapes do not fit, there are no rows, or a target is outside the vocabulary.
pub fn head_loss(hidden: &Tensor, weight: &Tensor, targets: &[u32]) -> Result<Tensor> {
    if !is_cpu_float(hidden) {
        return head_loss_reference(hidden, weight, targets);
    }
    let (rows, vocabulary) = check(hidden, weight, targets)?;
    let wants_gradients = hidden.track_op() || weight.track_op();
    let (all_hidden, head) = (hidden.detach(), weight.detach());
    let rows_at_once = (LOGITS_AT_ONCE / vocabulary).max(1);
    let mut loss = 0.0;
    let mut hidden_gradients = Vec::new();
    let mut weight_gradient: Option<Tensor> = None;
    for first in (0..rows).step_by(rows_at_once) {
        let count = rows_at_once.min(rows - first);
        let hidden = all_hidden.narrow(0, first, count)?.contiguous()?;
        let logits = hidden.matmul(&head.t()?)?;
        let op = SoftmaxGradient { targets: &targets[first..first + count], rows, loss: Mutex::new(0.0) };
        logits.inplace_op1(&op)?;
        loss += op.loss.into_inner().unwrap_or(f64::NAN);
        if wants_gradients {
            hidden_gradients.push(logits.matmul(&head)?);
        }
        if weight.track_op() {
            let gradient = logits.t()?.matmul(&hidden)?;
            weight_gradient = Some(match weight_gradient {
                Some(sum) => (sum + gradient)?,
                None => gradient,
            });
        }
    }
    let loss = loss / rows as f64;
    if !wants_gradients {
        return Tensor::new(loss, hidden.device())?.to_dtype(hidden.dtype());
    }
    let hidden_gradient = Tensor::cat(&hidden_gradients, 0)?;
    hidden.apply_op2(weight, HeadLoss { loss, hidden_gradient, weight_gradient })
}

/// The same as a composition of candle operations, over all rows at once.
///
/// # Errors
/// As [`head_loss`].
pub fn head_loss_reference(hidden: &Tensor, weight: &Tensor, targets: &[u32]) -> Result<Tensor> {
    let (rows, _) = check(hidden, weight, targets)?;
    let logits = hidden.matmul(&weight.t()?)?;
    let targets = Tensor::from_slice(targets, (rows, 1), hidden.device())?;
    let log_probabilities = candle_nn::ops::log_softmax(&logits, candle_core::D::Minus1)?;
    log_probabilities.gather(&targets, 1)?.mean_all()?.neg()
}

/// Rows and vocabulary, where everything fits.
fn check(hidden: &Tensor, weight: &Tensor, targets: &[u32]) -> Result<(usize, usize)> {
    let ((rows, _), (vocabulary, _)) = (hidden.dims2()?, weight.dims2()?);
    if targets.len() != rows || rows == 0 {
        return Err(KernelError::TargetCount { rows, found: targets.len() }.into());
    }
    let is_outside = |target: &&u32| usize::try_from(**target).map_or(true, |target| target >= vocabulary);
    match targets.iter().find(is_outside) {
        Some(target) => Err(KernelError::TargetRange { vocabulary, found: *target }.into()),
        None => Ok((rows, vocabulary)),
    }
}

/// Turns logits into the gradient of the mean loss, `(softmax - one_hot) / rows`, and adds the loss up.
struct SoftmaxGradient<'a> {
    targets: &'a [u32],
    /// Rows of the whole batch, over which the mean is taken.
    rows: usize,
    loss: Mutex<f64>,
}

impl InplaceOp1 for SoftmaxGradient<'_> {
    fn name(&self) -> &'static str {
        "softmax-gradient"
    }

    fn cpu_fwd(&self, logits: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (_, vocabulary) = layout.shape().dims2()?;
        let losses = match logits {
            CpuStorage::F32(logits) => row_gradients(logits, vocabulary, self.targets, self.rows),
            CpuStorage::F64(logits) => row_gradients(logits, vocabulary, self.targets, self.rows),
            other => {
                return Err(candle_core::Error::UnsupportedDTypeForOp(other.dtype(), "softmax-gradient").bt());
            }
        };
        if let Ok(mut loss) = self.loss.lock() {
            // In the order of the rows, so that the sum does not depend on the number of threads.
            *loss = losses.iter().sum();
        }
        Ok(())
    }
}

fn row_gradients<T: Real>(logits: &mut [T], vocabulary: usize, targets: &[u32], rows: usize) -> Vec<f64> {
    let rows = logits
        .par_chunks_mut(vocabulary)
        .zip(targets)
        .map(|(logits, target)| vectorized(RowGradient { logits, target: *target as usize, rows }));
    rows.collect()
}

struct RowGradient<'a, T> {
    logits: &'a mut [T],
    target: usize,
    rows: usize,
}

impl<T: Real> Vectorized for RowGradient<'_, T> {
    /// The negative log-probability of the target.
    type Output = f64;

    #[inline(always)]
    fn run<const FMA: bool>(self) -> f64 {
        /// Values whose sum is taken in their own type before it joins the total.
        const PART: usize = 64;
        let Self { logits, target, rows } = self;
        let largest = logits.iter().fold(logits[0], |largest, logit| largest.larger(*logit));
        let of_target = (logits[target] - largest).to_f64();
        let mut total = 0.0;
        for part in logits.chunks_mut(PART) {
            let mut sum = T::zero();
            for value in part.iter_mut() {
                *value = (*value - largest).exponential();
            }
            for value in part.iter() {
                sum += *value;
            }
            total += sum.to_f64();
        }
        let factor = T::from_f64(1.0 / (total * rows as f64));
        for value in logits.iter_mut() {
            *value *= factor;
        }
        logits[target] -= T::from_f64(1.0 / rows as f64);
        total.ln() - of_target
    }
}

/// The loss with its gradients, which are known already.
struct HeadLoss {
    loss: f64,
    hidden_gradient: Tensor,
    /// `None` where the head is fixed.
    weight_gradient: Option<Tensor>,
}

impl CustomOp2 for HeadLoss {
    fn name(&self) -> &'static str {
        "head-loss"
    }

    fn cpu_fwd(
        &self,
        hidden: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        fn scalar<T: Real>(value: f64) -> Result<CpuStorage> {
            Ok(T::to_cpu_storage_owned(vec![T::from_f64(value)]))
        }
        Ok((for_real!(hidden.dtype(), scalar(self.loss))?, ().into()))
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let factor = gradient.to_dtype(DType::F64)?.to_device(&Device::Cpu)?.to_scalar::<f64>()?;
        let weight_gradient = self.weight_gradient.as_ref().map(|gradient| gradient * factor).transpose()?;
        Ok((Some((&self.hidden_gradient * factor)?), weight_gradient))
    }
}
