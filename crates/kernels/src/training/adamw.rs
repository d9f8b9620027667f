//! One AdamW step for one parameter, and the gradient norm for clipping.
//!
//! Source: "Decoupled Weight Decay Regularization" (arXiv:1711.05101, algorithm 2), in the form of PyTorch's
//! `torch.optim.AdamW`. The decay is `lr · weight_decay · parameter`, and epsilon is added after the bias
//! correction.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_gpt2_arithmetic::AdamWStep;

use super::float::{CpuFloat, for_float, with_elements};
use super::operation::{in_place, storage_of};
use crate::cuda;
use crate::error::KernelError;
use crate::per_thread::has_cpu_kernels;

/// Updates a parameter and its two running means in place.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
/// use candle_gpt2_arithmetic::AdamWStep;
/// use candle_gpt2_kernels::adamw_step;
///
/// let zeros = || Var::zeros(3, DType::F32, &Device::Cpu);
/// let (parameter, mean, square) = (zeros()?, zeros()?, zeros()?);
/// let step = AdamWStep {
///     learning_rate: 0.25, beta_1: 0.9, beta_2: 0.999, epsilon: 0.0, weight_decay: 0.0, step: 1, gradient_factor: 1.0,
/// };
/// adamw_step(&parameter, &Tensor::new(&[2f32, -3., 5.], &Device::Cpu)?, &mean, &square, &step)?;
/// // The first step moves each value by the learning rate, against the sign of its gradient.
/// let moved = parameter.to_vec1::<f32>()?;
/// assert!(moved.iter().zip([-0.25, 0.25, -0.25]).all(|(moved, expected)| (moved - expected).abs() < 1e-5));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Shapes
/// All four tensors have the same shape.
///
/// # Errors
/// If the shapes or dtypes differ, or two of the tensors share memory.
pub fn adamw_step(
    parameter: &Var,
    gradient: &Tensor,
    mean: &Var,
    square: &Var,
    step: &AdamWStep,
) -> Result<()> {
    let gradient = gradient.detach();
    let others = [mean.as_tensor(), square.as_tensor(), &gradient];
    if let Some(other) = others.into_iter().find(|other| other.shape() != parameter.shape()) {
        let (expected, found) = (parameter.dims().to_vec(), other.dims().to_vec());
        return Err(KernelError::GradientShape { expected, found }.into());
    }
    let all = [parameter.as_tensor(), others[0], others[1], others[2]].map(storage_of);
    if (1..all.len()).any(|index| all[..index].contains(&all[index])) {
        return Err(KernelError::SharedMemory.into());
    }
    if has_cpu_kernels(parameter) && parameter.is_contiguous() {
        return for_float!(parameter.dtype(), fused([parameter, mean, square], &gradient, step));
    }
    if cuda::adamw_step([parameter, mean, square], &gradient, step)? {
        return Ok(());
    }
    let (correction_1, correction_2) = step.bias_corrections();
    let rate = step.learning_rate / correction_1;
    let gradient = (gradient * step.gradient_factor)?;
    mean.set(&((mean.as_tensor() * step.beta_1)? + (&gradient * (1.0 - step.beta_1))?)?.detach())?;
    square
        .set(&((square.as_tensor() * step.beta_2)? + (gradient.sqr()? * (1.0 - step.beta_2))?)?.detach())?;
    let root = ((square.sqrt()? * (1.0 / correction_2.sqrt()))? + step.epsilon)?;
    let kept = (parameter.as_tensor() * step.decay_factor())?;
    parameter.set(&(kept - ((mean.as_tensor() / root)? * rate)?)?.detach())
}

fn fused<T: CpuFloat>(
    [parameter, mean, square]: [&Var; 3],
    gradient: &Tensor,
    step: &AdamWStep,
) -> Result<()> {
    with_elements::<T, 1, _>([gradient], |[gradient]| {
        in_place(parameter, |parameter: &mut [T]| {
            in_place(mean, |mean: &mut [T]| {
                in_place(square, |square: &mut [T]| T::adamw(parameter, gradient, [mean, square], step))
            })
        })
    })??
}

/// Euclidean norm of the concatenated gradients.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let gradients = [Tensor::new(&[3f32], &Device::Cpu)?, Tensor::new(&[0f32, 4.], &Device::Cpu)?];
/// assert_eq!(candle_gpt2_kernels::gradient_norm(&gradients)?, 5.);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If candle cannot read a gradient.
pub fn gradient_norm(gradients: &[Tensor]) -> Result<f64> {
    if let Some(square) = cuda::sum_of_squares(gradients)? {
        return Ok(square.sqrt());
    }
    if !gradients.iter().all(|gradient| gradient.device().is_cpu()) {
        // The host waits for one number instead of one per gradient.
        let squares =
            gradients.iter().map(|gradient| gradient.detach().sqr()?.sum_all()?.to_dtype(DType::F32));
        let squares = squares.collect::<Result<Vec<_>>>()?;
        if !squares.is_empty() {
            let squares = Tensor::stack(&squares, 0)?.to_device(&Device::Cpu)?;
            return Ok(squares.to_dtype(DType::F64)?.sum_all()?.to_scalar::<f64>()?.sqrt());
        }
    }
    let mut square = 0.0;
    for gradient in gradients {
        square += squared_norm(gradient)?;
    }
    Ok(square.sqrt())
}

/// Sum of the squares of all elements, which [`gradient_norm`] adds up over all gradients.
///
/// # Errors
/// If candle cannot read the tensor.
pub fn squared_norm(x: &Tensor) -> Result<f64> {
    fn sum<T: CpuFloat>(x: &Tensor) -> Result<f64> {
        with_elements::<T, 1, _>([x], |[x]| Ok(T::squared_norm(x)))
    }
    if has_cpu_kernels(x) {
        return for_float!(x.dtype(), sum(x));
    }
    x.sqr()?.sum_all()?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar()
}
