//! What training does to whole tensors: dropout, steps of AdamW, and the norm of the gradients, each in one launch for a tensor.

#![expect(unsafe_code, reason = "kernels are launched with arguments that the compiler cannot check")]

use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::CudaViewMut;
use candle_core::{Result, Tensor, Var};
use candle_gpt2_arithmetic::{AdamWStep, Dropout};
use half::{bf16, f16};

use super::launch::{Element, Held, Shared, applies, blocks_for, by_type, counted, tensor};
use super::signatures::{AdamW, Drop, ROW_THREADS, Squares};
use crate::training::Draws;

/// Blocks that add up the squares of one gradient at most: enough to keep a large GPU's memory busy.
const MAX_SUMS: usize = 512;

/// What dropout leaves of `x`, a constant: the draws are those of [`Dropout::draw`].
pub(crate) fn drop(x: &Tensor, dropout: Dropout, draws: &Draws) -> Result<Option<Tensor>> {
    if !applies(&[x]) || x.elem_count() != draws.rows * draws.width {
        return Ok(None);
    }
    by_type!(x.dtype(), launch_drop(&x.contiguous()?, dropout, draws)).map(Some)
}

fn launch_drop<T: Element>(x: &Tensor, dropout: Dropout, draws: &Draws) -> Result<Tensor> {
    let device = x.device().as_cuda_device()?;
    let held_x = Held::new(x);
    let count = x.elem_count();
    // SAFETY: the kernel writes every element.
    let mut y = unsafe { device.alloc::<T>(count)? };
    let as_size = |number: u64| usize::try_from(number).map_err(candle_core::Error::wrap);
    #[expect(clippy::cast_possible_truncation, reason = "the kernel multiplies in f32")]
    let parameters = Drop::<T> {
        x: held_x.values()?,
        y: y.as_view_mut(),
        rows: draws.rows,
        width: draws.width,
        tokens: counted(draws.tokens)?,
        queries: counted(draws.queries)?,
        first_query: counted(draws.first_query)?,
        first: counted(draws.first)?,
        seed: as_size(dropout.seed)?,
        limit: as_size(dropout.limit())?,
        factor: dropout.factor() as f32,
    };
    // SAFETY: `x` and `y` hold `rows` rows of `width` elements.
    unsafe { parameters.launch(device, "drop", (blocks_for(count)?, 1, 1))? };
    Ok(tensor(y, device, x.shape()))
}

/// Changes a parameter and its two running means in place; says whether the kernel could. All are of one shape and share no memory.
pub(crate) fn adamw_step(
    [parameter, mean, square]: [&Var; 3],
    gradient: &Tensor,
    step: &AdamWStep,
) -> Result<bool> {
    let all = [parameter, mean, square].map(|var| var.as_detached_tensor());
    let [parameter, mean, square] = &all;
    if !applies(&[parameter, mean, square, gradient]) || !all.iter().all(Tensor::is_contiguous) {
        return Ok(false);
    }
    by_type!(parameter.dtype(), launch_adamw([parameter, mean, square], &gradient.contiguous()?, step))?;
    Ok(true)
}

#[expect(clippy::cast_possible_truncation, reason = "the kernel computes in f32")]
fn launch_adamw<T: Element>(
    [parameter, mean, square]: [&Tensor; 3],
    gradient: &Tensor,
    step: &AdamWStep,
) -> Result<()> {
    let device = parameter.device().as_cuda_device()?;
    let [held_parameter, held_mean, held_square, held_gradient] =
        [parameter, mean, square, gradient].map(Held::new);
    let count = parameter.elem_count();
    let (correction_1, correction_2) = step.bias_corrections();
    let parameters = AdamW::<T> {
        parameter: Shared(held_parameter.values()?),
        mean: Shared(held_mean.values()?),
        square: Shared(held_square.values()?),
        gradient: held_gradient.values()?,
        count,
        factor: step.gradient_factor as f32,
        keep_mean: step.beta_1 as f32,
        add_mean: (1.0 - step.beta_1) as f32,
        keep_square: step.beta_2 as f32,
        add_square: (1.0 - step.beta_2) as f32,
        keep: step.kept_share() as f32,
        rate: (step.learning_rate / correction_1) as f32,
        root_factor: (1.0 / correction_2.sqrt()) as f32,
        epsilon: step.epsilon as f32,
    };
    // SAFETY: all four hold `count` elements in one piece. The kernel writes into variables, which others read in the order of the
    // device's one stream.
    unsafe { parameters.launch(device, "adamw", (blocks_for(count)?, 1, 1)) }
}

/// The sum of the squares of all elements of all tensors, for which the host waits once; `None` if the kernel does not apply to
/// each.
pub(crate) fn sum_of_squares(tensors: &[Tensor]) -> Result<Option<f64>> {
    let tensors: Vec<Tensor> = tensors.iter().map(Tensor::detach).collect();
    let Some(first) = tensors.first() else { return Ok(None) };
    if !tensors.iter().all(|x| applies(&[x]) && x.device().same_device(first.device())) {
        return Ok(None);
    }
    let device = first.device().as_cuda_device()?;
    let blocks: Vec<usize> =
        tensors.iter().map(|x| x.elem_count().div_ceil(ROW_THREADS as usize).min(MAX_SUMS)).collect();
    // SAFETY: each block of each launch writes its element.
    let mut sums = unsafe { device.alloc::<f32>(blocks.iter().sum())? };
    let mut start = 0;
    for (x, blocks) in tensors.iter().zip(blocks) {
        let own = sums.slice_mut(start..start + blocks);
        by_type!(x.dtype(), launch_squares(&x.contiguous()?, own, blocks, device))?;
        start += blocks;
    }
    Ok(Some(device.clone_dtoh(&sums)?.into_iter().map(f64::from).sum()))
}

fn launch_squares<T: Element>(
    x: &Tensor,
    sums: CudaViewMut<'_, f32>,
    blocks: usize,
    device: &CudaDevice,
) -> Result<()> {
    let held_x = Held::new(x);
    let parameters = Squares::<T> { x: held_x.values()?, sums, count: x.elem_count() };
    // SAFETY: `x` holds `count` elements, and there is a sum for each block.
    unsafe { parameters.launch(device, "squares", (counted(blocks)?, 1, 1)) }
}
