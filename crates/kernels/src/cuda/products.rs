//! Matrix products by cuBLAS, with strides that candle's own have no room for, and with sums that stay f32 where something is
//! added to them.

#![expect(unsafe_code, reason = "products and kernels take pointers that the compiler cannot check")]

use std::ffi::c_void;

use candle_core::cuda_backend::cudarc::cublas::result::gemm_strided_batched_ex;
use candle_core::cuda_backend::cudarc::cublas::sys::{
    cublasComputeType_t, cublasGemmAlgo_t, cublasOperation_t, cudaDataType_t,
};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, DevicePtr, PushKernelArg};
use candle_core::cuda_backend::{CudaDevice, WrapErr, gemm_reduced_precision_f32};
use candle_core::{DType, Result, Shape, Tensor};
use half::{bf16, f16};

use super::{
    Element, Held, KERNELS, MAX_BLOCKS, MODULE, ROW_THREADS, applies, by_type, counted, grid, tensor,
};
use crate::linear::Behind;

/// `x Wᵀ`, and what is behind it. `x` `(…, in)`, `weight` `(out, in)`, contiguous or the transposed view of such a tensor.
pub(crate) fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    behind: Behind<'_>,
) -> Result<Option<Tensor>> {
    let Ok((columns, inner)) = weight.dims2() else { return Ok(None) };
    let mut shape = x.dims().to_vec();
    let width = shape.last_mut().filter(|width| **width == inner);
    let (Some(width), true) = (width, applies(&[x, weight])) else { return Ok(None) };
    *width = columns;
    let is_plain = matches!(behind, Behind::Nothing);
    let has_bias = bias.map_or(is_plain, |bias| bias.dims() == [columns] && applies(&[x, bias]));
    let has_residual = match behind {
        Behind::Residual(residual) => residual.dims() == shape && applies(&[x, residual]),
        Behind::Nothing | Behind::Gelu => true,
    };
    if !has_bias || !has_residual || !is_one_piece(weight)? {
        return Ok(None);
    }
    by_type!(x.dtype(), launch_linear(&x.contiguous()?, weight, bias, behind, &shape.into())).map(Some)
}

/// Whether a weight is contiguous, or the transposed view of a contiguous tensor.
pub(super) fn is_one_piece(weight: &Tensor) -> Result<bool> {
    Ok(weight.is_contiguous() || weight.t()?.is_contiguous())
}

fn launch_linear<T: Product>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    behind: Behind<'_>,
    shape: &Shape,
) -> Result<Tensor> {
    let device = x.device().as_cuda_device()?;
    match bias {
        Some(bias) => add_bias::<T>(&linear_product::<T, f32>(x, weight)?, bias, behind, shape, device),
        None => Ok(tensor(linear_product::<T, T>(x, weight)?, device, shape)),
    }
}

/// `x Wᵀ` for a contiguous `x` and a weight in one piece.
pub(super) fn linear_product<T: Product, R: Product>(x: &Tensor, weight: &Tensor) -> Result<CudaSlice<R>> {
    let device = x.device().as_cuda_device()?;
    let (columns, inner) = weight.dims2()?;
    let rows = x.elem_count() / inner;
    let (held_x, held_weight) = (Held::new(x), Held::new(weight));
    let left = Matrices { values: held_x.values::<T>()?, row: inner, each: 0 };
    let weight_values = held_weight.values::<T>()?;
    let right = match weight.is_contiguous() {
        true => Right::Transposed(Matrices { values: weight_values, row: inner, each: 0 }),
        false => Right::AsItIs(Matrices { values: weight_values, row: columns, each: 0 }),
    };
    // SAFETY: the product writes every element.
    let result = unsafe { device.alloc::<R>(rows * columns)? };
    let sizes = Sizes { count: 1, rows, inner, columns };
    product(device, sizes, 1.0, left, right, Matrices { values: result.as_view(), row: columns, each: 0 })?;
    Ok(result)
}

/// The sums of a product with bias and what is behind it, rounded once.
fn add_bias<T: Element>(
    sums: &CudaSlice<f32>,
    bias: &Tensor,
    behind: Behind<'_>,
    shape: &Shape,
    device: &CudaDevice,
) -> Result<Tensor> {
    let (kernel, residual) = match behind {
        Behind::Nothing => ("add_bias", None),
        Behind::Gelu => ("add_bias_gelu", None),
        Behind::Residual(residual) => ("add_bias_residual", Some(residual.contiguous()?)),
    };
    let function = device.get_or_load_custom_func(&format!("{kernel}_{}", T::NAME), MODULE, KERNELS)?;
    let bias = bias.contiguous()?;
    let held_bias = Held::new(&bias);
    let bias_values = held_bias.values::<T>()?;
    let held_residual = residual.as_ref().map(Held::new);
    let residual_values = held_residual.as_ref().map(Held::values::<T>).transpose()?;
    let (count, width) = (sums.len(), counted(bias.elem_count())?);
    // SAFETY: the kernel writes every element.
    let mut y = unsafe { device.alloc::<T>(count)? };
    let blocks = count.div_ceil(ROW_THREADS as usize).min(MAX_BLOCKS);
    let mut launch = function.builder();
    launch.arg(sums).arg(&bias_values);
    if let Some(residual_values) = &residual_values {
        launch.arg(residual_values);
    }
    launch.arg(&mut y).arg(&count).arg(&width);
    // SAFETY: these are the parameters of the kernel; the sums, `y` and the residual hold `count` elements, whole rows of
    // `width`, and the bias `width`.
    unsafe { launch.launch(grid((counted(blocks)?, 1, 1), ROW_THREADS)) }.w()?;
    Ok(tensor(y, device, shape))
}

/// The element types of products.
pub(super) trait Product: Element {
    /// How cuBLAS names it.
    const TYPE: cudaDataType_t;

    /// What products of such matrices are computed in.
    fn compute_type() -> cublasComputeType_t {
        cublasComputeType_t::CUBLAS_COMPUTE_32F
    }
}

impl Product for f32 {
    const TYPE: cudaDataType_t = cudaDataType_t::CUDA_R_32F;

    fn compute_type() -> cublasComputeType_t {
        match gemm_reduced_precision_f32() {
            true => cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            false => cublasComputeType_t::CUBLAS_COMPUTE_32F,
        }
    }
}

impl Product for f16 {
    const TYPE: cudaDataType_t = cudaDataType_t::CUDA_R_16F;
}

impl Product for bf16 {
    const TYPE: cudaDataType_t = cudaDataType_t::CUDA_R_16BF;
}

/// Matrices with the elements of a row side by side.
pub(super) struct Matrices<'a, T> {
    /// From the first element on.
    pub(super) values: CudaView<'a, T>,
    /// Elements from one row to the next.
    pub(super) row: usize,
    /// Elements from one matrix to the next.
    pub(super) each: usize,
}

/// How the right matrices of a product lie in memory.
pub(super) enum Right<'a, T> {
    /// `(inner, columns)`.
    AsItIs(Matrices<'a, T>),
    /// `(columns, inner)`.
    Transposed(Matrices<'a, T>),
}

/// `count` products of `(rows, inner)` and `(inner, columns)`.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) count: usize,
    pub(super) rows: usize,
    pub(super) inner: usize,
    pub(super) columns: usize,
}

impl Sizes {
    /// Elements between the first one of the first matrix and the last one of the last.
    fn reach<T>(self, rows: usize, width: usize, Matrices { row, each, .. }: &Matrices<'_, T>) -> usize {
        (self.count - 1) * each + (rows - 1) * row + width
    }
}

/// `result = factor * left * right`, in f32 (or TF32, see [`crate::use_tf32`]), rounded to the result's type at the end.
pub(super) fn product<T: Product, R: Product>(
    device: &CudaDevice,
    sizes: Sizes,
    factor: f32,
    left: Matrices<'_, T>,
    right: Right<'_, T>,
    result: Matrices<'_, R>,
) -> Result<()> {
    let Sizes { count, rows, inner, columns } = sizes;
    if [count, rows, inner, columns].contains(&0) {
        candle_core::bail!("a product of {rows} by {inner} and {inner} by {columns} elements");
    }
    // cuBLAS counts along columns first, so it sees every matrix transposed: resultᵀ = rightᵀ leftᵀ.
    let (order, right, (right_rows, right_width)) = match right {
        Right::AsItIs(right) => (cublasOperation_t::CUBLAS_OP_N, right, (inner, columns)),
        Right::Transposed(right) => (cublasOperation_t::CUBLAS_OP_T, right, (columns, inner)),
    };
    let is_inside = sizes.reach(rows, inner, &left) <= left.values.len()
        && sizes.reach(right_rows, right_width, &right) <= right.values.len()
        && sizes.reach(rows, columns, &result) <= result.values.len();
    if !is_inside {
        candle_core::bail!("the matrices of a product reach beyond their tensors");
    }
    let size = |size: usize| i32::try_from(size).map_err(candle_core::Error::wrap);
    let distance = |distance: usize| i64::try_from(distance).map_err(candle_core::Error::wrap);
    let zero = 0f32;
    let stream = device.cuda_stream();
    // The guards would order the streams of several tensors, and the device has one.
    let (left_address, _left_guard) = left.values.device_ptr(&stream);
    let (right_address, _right_guard) = right.values.device_ptr(&stream);
    let (result_address, _result_guard) = result.values.device_ptr(&stream);
    // SAFETY: all elements lie inside the tensors, which are held here, and the result's are not read by others before it is
    // written, in the order of the stream; the factors are f32, as every compute type here wants them, and are read before
    // the call returns.
    unsafe {
        gemm_strided_batched_ex(
            *device.cublas_handle().handle(),
            order,
            cublasOperation_t::CUBLAS_OP_N,
            size(columns)?,
            size(rows)?,
            size(inner)?,
            (&raw const factor).cast(),
            right_address as *const c_void,
            T::TYPE,
            size(right.row)?,
            distance(right.each)?,
            left_address as *const c_void,
            T::TYPE,
            size(left.row)?,
            distance(left.each)?,
            (&raw const zero).cast(),
            result_address as *mut c_void,
            R::TYPE,
            size(result.row)?,
            distance(result.each)?,
            size(count)?,
            T::compute_type(),
            cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
        )
    }
    .w()
}
