//! Training on NVIDIA GPUs, except for linear layers and attention.
//!
//! Each operation takes one or two launches for a tensor; the loss runs in chunks of rows. All inputs are
//! constants, and the operations of `crate::training` record the backward pass.

#![expect(unsafe_code, reason = "kernels are launched with arguments that the compiler cannot check")]

use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaViewMut};
use candle_core::{DType, Result, Tensor, Var};
use candle_gpt2_arithmetic::{AdamWStep, Dropout};
use half::{bf16, f16};

use super::launch::{Element, Read, Shared, TensorMemory, applies, by_type, counted, tensor};
use super::products::{Factor, Matrices, Product, Sizes, Write, blocks_for, product};
use super::signatures::{
    AdamW, AddRows, Drop, Gelu, GeluBackward, Losses, NORM_COLUMNS, NormBackward, ROW_THREADS, Squares,
    WideNorm,
};
use crate::on_gpu::{Draws, LOSS_ROWS, LossOnGpu};

/// Maximum number of blocks that sum the squares of one gradient.
///
/// This many blocks saturate the memory bandwidth of a large GPU.
const MAX_SUMS: usize = 512;

/// Applies dropout to a constant `x`, with the samples of [`Dropout::sample`].
pub(crate) fn dropout(x: &Tensor, dropout: Dropout, draws: &Draws) -> Result<Option<Tensor>> {
    if !applies(&[x]) || x.elem_count() != draws.rows * draws.width {
        return Ok(None);
    }
    by_type!(x.dtype(), dropped(&x.contiguous()?, dropout, draws)).map(Some)
}

fn dropped<T: Element>(x: &Tensor, dropout: Dropout, draws: &Draws) -> Result<Tensor> {
    let device = x.device().as_cuda_device()?;
    let held_x = TensorMemory::new(x);
    Ok(tensor(launch_drop::<T>(held_x.values()?, dropout, draws, device)?, device, x.shape()))
}

/// Applies dropout to the first `draws.rows` rows of `x`.
pub(super) fn launch_drop<T: Element>(
    x: Read<'_, T>,
    dropout: Dropout,
    draws: &Draws,
    device: &CudaDevice,
) -> Result<CudaSlice<T>> {
    let count = draws.rows * draws.width;
    // SAFETY: the kernel writes every element.
    let mut y = unsafe { device.alloc::<T>(count)? };
    let as_size = |number: u64| usize::try_from(number).map_err(candle_core::Error::wrap);
    #[expect(clippy::cast_possible_truncation, reason = "the kernel multiplies in f32")]
    let parameters = Drop::<T> {
        x,
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
    Ok(y)
}

/// Applies GELU to each element.
pub(crate) fn gelu(x: &Tensor) -> Result<Option<Tensor>> {
    if !applies(&[x]) {
        return Ok(None);
    }
    by_type!(x.dtype(), launch_gelu(&x.contiguous()?)).map(Some)
}

fn launch_gelu<T: Element>(x: &Tensor) -> Result<Tensor> {
    let device = x.device().as_cuda_device()?;
    let (held_x, count) = (TensorMemory::new(x), x.elem_count());
    // SAFETY: the kernel writes every element.
    let mut y = unsafe { device.alloc::<T>(count)? };
    let parameters = Gelu::<T> { x: held_x.values()?, y: y.as_view_mut(), count };
    // SAFETY: `x` and `y` hold `count` elements.
    unsafe { parameters.launch(device, "gelu", (blocks_for(count)?, 1, 1))? };
    Ok(tensor(y, device, x.shape()))
}

/// Gradient of `x` from the gradient of its GELU.
pub(crate) fn gelu_backward(x: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
    if !applies(&[x, gradient]) || x.shape() != gradient.shape() {
        return Ok(None);
    }
    by_type!(x.dtype(), launch_gelu_backward(&x.contiguous()?, &gradient.contiguous()?)).map(Some)
}

fn launch_gelu_backward<T: Element>(x: &Tensor, gradient: &Tensor) -> Result<Tensor> {
    let device = x.device().as_cuda_device()?;
    let (held_x, held_gradient, count) = (TensorMemory::new(x), TensorMemory::new(gradient), x.elem_count());
    // SAFETY: the kernel writes every element.
    let mut result = unsafe { device.alloc::<T>(count)? };
    let (x_values, gradient) = (held_x.values()?, held_gradient.values()?);
    let parameters = GeluBackward::<T> { x: x_values, gradient, result: result.as_view_mut(), count };
    // SAFETY: all three hold `count` elements.
    unsafe { parameters.launch(device, "gelu_backward", (blocks_for(count)?, 1, 1))? };
    Ok(tensor(result, device, x.shape()))
}

/// Maximum number of blocks in a layer norm's backward pass.
///
/// This is four blocks per multiprocessor on a large GPU.
const NORM_BLOCKS: usize = 528;

/// Whether the layer norm kernels for training apply; they need f32 parameters.
fn norm_applies(x: &Tensor, parameters: &[&Tensor]) -> bool {
    let width = x.dims().last().copied().unwrap_or(0);
    let fits = |parameter: &&Tensor| parameter.dims() == [width] && parameter.dtype() == DType::F32;
    applies(&[x])
        && applies(parameters)
        && parameters.iter().all(fits)
        && width <= (NORM_COLUMNS * ROW_THREADS) as usize
}

/// Layer norm of `x` `(…, width)` with f32 parameters `weight` and `bias` `(width)`.
pub(crate) fn wide_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, epsilon: f64) -> Result<Option<Tensor>> {
    if !norm_applies(x, &[weight, bias]) {
        return Ok(None);
    }
    let parameters = [&weight.contiguous()?, &bias.contiguous()?];
    by_type!(x.dtype(), launch_wide_norm(&x.contiguous()?, parameters, epsilon)).map(Some)
}

fn launch_wide_norm<T: Element>(x: &Tensor, [weight, bias]: [&Tensor; 2], epsilon: f64) -> Result<Tensor> {
    let device = x.device().as_cuda_device()?;
    let [held_x, held_weight, held_bias] = [x, weight, bias].map(TensorMemory::new);
    let (count, width) = (x.elem_count(), weight.elem_count());
    // SAFETY: the kernel writes every element.
    let mut y = unsafe { device.alloc::<T>(count)? };
    #[expect(clippy::cast_possible_truncation, reason = "added to an f32 variance")]
    let parameters = WideNorm::<T> {
        x: held_x.values()?,
        weight: held_weight.values()?,
        bias: held_bias.values()?,
        y: y.as_view_mut(),
        width: counted(width)?,
        epsilon: epsilon as f32,
    };
    // SAFETY: `x` and `y` have rows of `width` elements; `weight` and `bias` hold one row each.
    unsafe { parameters.launch(device, "wide_norm", (counted(count / width)?, 1, 1))? };
    Ok(tensor(y, device, x.shape()))
}

/// Gradient of the input of [`wide_norm`], and partial sums of the parameter gradients.
///
/// Each row of partial sums concatenates the gradients of `weight` and `bias`. The sum over the rows is the
/// parameter gradient.
pub(crate) fn wide_norm_backward(
    x: &Tensor,
    weight: &Tensor,
    gradient: &Tensor,
    epsilon: f64,
) -> Result<Option<[Tensor; 2]>> {
    if !norm_applies(x, &[weight]) || !applies(&[x, gradient]) || x.shape() != gradient.shape() {
        return Ok(None);
    }
    let tensors = [&x.contiguous()?, &weight.contiguous()?, &gradient.contiguous()?];
    by_type!(x.dtype(), launch_norm_backward(tensors, epsilon)).map(Some)
}

fn launch_norm_backward<T: Element>(
    [x, weight, gradient]: [&Tensor; 3],
    epsilon: f64,
) -> Result<[Tensor; 2]> {
    let device = x.device().as_cuda_device()?;
    let [held_x, held_weight, held_gradient] = [x, weight, gradient].map(TensorMemory::new);
    let (count, width) = (x.elem_count(), weight.elem_count());
    let (rows, blocks) = (count / width, NORM_BLOCKS.min(count / width));
    // SAFETY: the kernel writes every element.
    let mut result = unsafe { device.alloc::<T>(count)? };
    // SAFETY: the kernel writes every element.
    let mut sums = unsafe { device.alloc::<f32>(blocks * 2 * width)? };
    #[expect(clippy::cast_possible_truncation, reason = "added to an f32 variance")]
    let parameters = NormBackward::<T> {
        x: held_x.values()?,
        weight: held_weight.values()?,
        gradient: held_gradient.values()?,
        result: result.as_view_mut(),
        sums: sums.as_view_mut(),
        rows: counted(rows)?,
        width: counted(width)?,
        epsilon: epsilon as f32,
    };
    // SAFETY: `x`, `gradient` and `result` have `rows` rows of `width` elements, no wider than the kernel
    // supports. `weight` is one row, and `sums` has two rows for each block.
    unsafe { parameters.launch(device, "norm_backward", (counted(blocks)?, 1, 1))? };
    Ok([tensor(result, device, x.shape()), tensor(sums, device, &(blocks, 2 * width).into())])
}

/// Alignment of the rows of logits, in elements.
const ROW_ALIGNMENT: usize = 8;

/// Mean negative log-probability of `targets`; see [`crate::head_loss`](crate::head_loss()).
///
/// `hidden` is `(rows, C)` and `weight` `(V, C)`. `wanted` selects which of their gradients to compute.
pub(crate) fn head_loss(
    [hidden, weight]: [&Tensor; 2],
    targets: &[u32],
    wanted: [bool; 2],
) -> Result<Option<LossOnGpu>> {
    if !applies(&[hidden, weight]) {
        return Ok(None);
    }
    let tensors = [&hidden.contiguous()?, &weight.contiguous()?];
    by_type!(hidden.dtype(), losses_of_rows(tensors, targets, wanted)).map(Some)
}

fn losses_of_rows<T: Product>(
    [hidden, weight]: [&Tensor; 2],
    targets: &[u32],
    [wants_hidden, wants_weight]: [bool; 2],
) -> Result<LossOnGpu> {
    let device = hidden.device().as_cuda_device()?;
    let ((rows, width), vocabulary) = (hidden.dims2()?, weight.dim(0)?);
    let [held_hidden, held_weight] = [hidden, weight].map(TensorMemory::new);
    let (hidden_values, weight_values) = (held_hidden.values::<T>()?, held_weight.values::<T>()?);
    let targets = device.clone_htod(targets)?;
    // Products are several times faster if rows start at multiples of 16 bytes, but the vocabulary
    // size may be odd.
    let distance = vocabulary.next_multiple_of(ROW_ALIGNMENT);
    // SAFETY: the kernel writes one element for each row.
    let mut losses = unsafe { device.alloc::<f32>(rows)? };
    // SAFETY: the products write every element.
    let of_hidden = wants_hidden.then(|| unsafe { device.alloc::<T>(rows * width) }).transpose()?;
    // SAFETY: the products write every element.
    let of_weight = wants_weight.then(|| unsafe { device.alloc::<f32>(vocabulary * width) }).transpose()?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        reason = "the products take an f32 factor"
    )]
    let share = (1.0 / rows as f64) as f32;
    for first in (0..rows).step_by(LOSS_ROWS) {
        let chunk = LOSS_ROWS.min(rows - first);
        let chunk_hidden = || Matrices::one(hidden_values.slice(first * width..), width);
        // SAFETY: the product writes every element.
        let logits = unsafe { device.alloc::<f32>(chunk * distance)? };
        let sizes = Sizes { count: 1, rows: chunk, inner: width, columns: vocabulary };
        let right = Factor::Transposed(Matrices::one(weight_values.slice(..), width));
        let written = Matrices::one(logits.as_view(), distance);
        product(device, sizes, 1.0, Factor::AsItIs(chunk_hidden()), right, (written, Write::Over))?;
        // SAFETY: the kernel writes every element.
        let slopes = (wants_hidden || wants_weight).then(|| unsafe { device.alloc::<T>(chunk * distance) });
        let mut slopes = slopes.transpose()?;
        let parameters = Losses::<T> {
            logits: logits.as_view(),
            targets: targets.slice(first..first + chunk),
            loss: losses.slice_mut(first..first + chunk),
            gradient: slopes.as_mut().map(CudaSlice::as_view_mut),
            width: counted(vocabulary)?,
            distance: counted(distance)?,
        };
        // SAFETY: logits and gradient have `chunk` rows of `width` elements at the given distance. Each row
        // has a loss and a valid target.
        unsafe { parameters.launch(device, "losses", (counted(chunk)?, 1, 1))? };
        let Some(slopes) = &slopes else { continue };
        if let Some(result) = &of_hidden {
            let sizes = Sizes { count: 1, rows: chunk, inner: vocabulary, columns: width };
            let left = Factor::AsItIs(Matrices::one(slopes.as_view(), distance));
            let right = Factor::AsItIs(Matrices::one(weight_values.slice(..), width));
            let written = Matrices::one(result.slice(first * width..), width);
            product(device, sizes, share, left, right, (written, Write::Over))?;
        }
        if let Some(result) = &of_weight {
            let sizes = Sizes { count: 1, rows: vocabulary, inner: chunk, columns: width };
            let left = Factor::Transposed(Matrices::one(slopes.as_view(), distance));
            let write = if first == 0 { Write::Over } else { Write::Added };
            let written = Matrices::one(result.as_view(), width);
            product(device, sizes, share, left, Factor::AsItIs(chunk_hidden()), (written, write))?;
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "row counts are exact in f64")]
    let mean = (tensor(losses, device, &rows.into()).sum_all()? / rows as f64)?;
    Ok(LossOnGpu {
        mean,
        of_hidden: of_hidden.map(|values| tensor(values, device, hidden.shape())),
        of_weight: of_weight.map(|values| tensor(values, device, weight.shape())),
    })
}

/// Gradient of a table with `rows` rows, from gradients `(…, width)` for the rows at `row_indices`.
///
/// Gradients for the same row are added in order.
pub(crate) fn add_rows(gradient: &Tensor, row_indices: &[usize], rows: usize) -> Result<Option<Tensor>> {
    if !applies(&[gradient]) {
        return Ok(None);
    }
    by_type!(gradient.dtype(), launch_add_rows(&gradient.contiguous()?, row_indices, rows)).map(Some)
}

fn launch_add_rows<T: Element>(gradient: &Tensor, row_indices: &[usize], rows: usize) -> Result<Tensor> {
    let device = gradient.device().as_cuda_device()?;
    let width = gradient.elem_count() / row_indices.len().max(1);
    let mut order: Vec<usize> = (0..row_indices.len()).collect();
    order.sort_by_key(|index| row_indices[*index]); // a stable sort
    let (mut table_rows, mut starts) = (Vec::new(), Vec::new());
    for (start, index) in order.iter().enumerate() {
        if table_rows.last() != Some(&row_indices[*index]) {
            table_rows.push(row_indices[*index]);
            starts.push(start);
        }
    }
    starts.push(order.len());
    let upload = |numbers: &[usize]| -> Result<CudaSlice<u32>> {
        device.clone_htod(&numbers.iter().map(|number| counted(*number)).collect::<Result<Vec<_>>>()?)
    };
    let (table_rows, starts, order) = (upload(&table_rows)?, upload(&starts)?, upload(&order)?);
    let sums = Tensor::zeros((rows, width), gradient.dtype(), gradient.device())?;
    let (held, held_sums) = (TensorMemory::new(gradient), TensorMemory::new(&sums));
    let parameters = AddRows::<T> {
        rows: held.values()?,
        table_rows: table_rows.as_view(),
        starts: starts.as_view(),
        order: order.as_view(),
        sums: Shared(held_sums.values()?),
        width: counted(width)?,
    };
    // SAFETY: `row_indices` are rows of the table. Each one has a start, followed by the next start or the
    // end. `order` has valid rows of the gradient.
    unsafe { parameters.launch(device, "add_rows", (counted(table_rows.len())?, 1, 1))? };
    drop(held_sums);
    Ok(sums)
}

/// Updates a parameter and its two running means in place; returns whether the kernel applies.
///
/// All tensors must have the same shape and share no memory.
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
        [parameter, mean, square, gradient].map(TensorMemory::new);
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
        keep: step.decay_factor() as f32,
        rate: (step.learning_rate / correction_1) as f32,
        root_factor: (1.0 / correction_2.sqrt()) as f32,
        epsilon: step.epsilon as f32,
    };
    // SAFETY: all four hold `count` contiguous elements. The kernel writes into variables that others read in
    // the order of the device's one stream.
    unsafe { parameters.launch(device, "adamw", (blocks_for(count)?, 1, 1)) }
}

/// Sum of the squares of all elements of all tensors; the host waits only once.
///
/// Returns `None` if the kernel does not apply to every tensor.
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
    let held_x = TensorMemory::new(x);
    let parameters = Squares::<T> { x: held_x.values()?, sums, count: x.elem_count() };
    // SAFETY: `x` holds `count` elements, and `sums` has an element for each block.
    unsafe { parameters.launch(device, "squares", (counted(blocks)?, 1, 1)) }
}
