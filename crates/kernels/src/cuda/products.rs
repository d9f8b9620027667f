//! Matrix products: of one row, in f32 of up to four, by a kernel that finishes each output; all others by cuBLAS, with strides that
//! candle's own have no room for, and with sums that stay f32 if something is added to them.

#![expect(unsafe_code, reason = "products and kernels take pointers that the compiler cannot check")]

use std::ffi::c_void;

use candle_core::cuda_backend::cudarc::cublas::result::gemm_strided_batched_ex;
use candle_core::cuda_backend::cudarc::cublas::sys::{
    cublasComputeType_t, cublasGemmAlgo_t, cublasMath_t, cublasOperation_t, cublasSetMathMode,
    cublasSetWorkspace_v2, cudaDataType_t,
};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaView, DevicePtr};
use candle_core::cuda_backend::{CudaDevice, WrapErr, gemm_reduced_precision_f32};
use candle_core::{DType, Result, Shape, Tensor};
use candle_gpt2_arithmetic::Finish;
use half::{bf16, f16};

use super::launch::{Element, Held, applies, by_type, counted, tensor};
use super::signatures::{AddBias, FinishedRowProduct, MAX_LANES, MOST_ROWS, ROW_THREADS, RowProduct};

/// What a thread loads at once in a product of a few rows.
const LOAD_BYTES: usize = 16;
/// How many of them may share a row of the weight, powers of two; fewer make more blocks.
const LANES: [u32; 3] = [MAX_LANES, MAX_LANES / 2, MAX_LANES / 4];
/// Blocks that keep a large GPU's memory busy.
const ENOUGH_BLOCKS: usize = 128;

/// Most blocks of an elementwise kernel, whose threads loop over the rest.
const MAX_BLOCKS: usize = 1 << 15;

/// What cuBLAS may use besides the matrices; on Hopper it asks for this much.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Gives cuBLAS its workspace once, for it would allocate one inside a recording, and lets it add up f16 and bf16 in f32 to the
/// end.
pub(super) fn prepare(device: &CudaDevice) -> Result<()> {
    let blas = device.cublas_handle();
    // SAFETY: cuBLAS writes its workspace before it reads it.
    let workspace = unsafe { device.alloc::<u8>(WORKSPACE_BYTES)? };
    // candle's device has no place for it. There is one for each GPU, since each is opened once and then kept.
    let address = workspace.leak();
    // SAFETY: the handle is open, its stream is that of the workspace, and the workspace is never freed.
    unsafe {
        cublasSetWorkspace_v2(*blas.handle(), address as *mut c_void, WORKSPACE_BYTES).result().w()?;
        let mode = cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
        cublasSetMathMode(*blas.handle(), mode).result().w()?;
    }
    Ok(())
}

/// `x Wᵀ`, and what follows it. `x` `(…, in)`, `weight` `(out, in)`, contiguous or the transposed view of such a tensor.
pub(crate) fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    finish: Finish<&Tensor>,
) -> Result<Option<Tensor>> {
    let Ok((columns, inner)) = weight.dims2() else { return Ok(None) };
    let mut shape = x.dims().to_vec();
    let width = shape.last_mut().filter(|width| **width == inner);
    let (Some(width), true) = (width, applies(&[x, weight])) else { return Ok(None) };
    *width = columns;
    let is_plain = matches!(finish, Finish::Nothing);
    let has_bias = bias.map_or(is_plain, |bias| bias.dims() == [columns] && applies(&[x, bias]));
    let has_residual = match finish {
        Finish::Add(residual) => residual.dims() == shape && applies(&[x, residual]),
        Finish::Nothing | Finish::Gelu => true,
    };
    if !has_bias || !has_residual || !is_one_piece(weight)? {
        return Ok(None);
    }
    by_type!(x.dtype(), launch_linear(&x.contiguous()?, weight, bias, finish, &shape.into())).map(Some)
}

/// Whether a weight is contiguous, or the transposed view of a contiguous tensor.
pub(super) fn is_one_piece(weight: &Tensor) -> Result<bool> {
    Ok(weight.is_contiguous() || weight.t()?.is_contiguous())
}

fn launch_linear<T: Product>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    finish: Finish<&Tensor>,
    shape: &Shape,
) -> Result<Tensor> {
    let device = x.device().as_cuda_device()?;
    let Some(bias) = bias else {
        return Ok(tensor(linear_product::<T, T>(x, weight)?, device, shape));
    };
    let bias = &bias.contiguous()?;
    let (name, residual) = match finish {
        Finish::Nothing => ("bias", None),
        Finish::Gelu => ("bias_gelu", None),
        Finish::Add(residual) => ("bias_residual", Some(residual.contiguous()?)),
    };
    let y = match RowGrid::of::<T>(x, weight)? {
        Some(grid) => finished_row_product::<T>(name, grid, [x, weight, bias], residual.as_ref())?,
        None => add_bias::<T>(name, &sums::<T>(x, weight)?, bias, residual.as_ref(), device)?,
    };
    Ok(tensor(y, device, shape))
}

/// `x Wᵀ` in f32, for a contiguous `x` and a weight in one piece.
pub(super) fn sums<T: Product>(x: &Tensor, weight: &Tensor) -> Result<CudaSlice<f32>> {
    match RowGrid::of::<T>(x, weight)? {
        Some(grid) => row_product::<T>(grid, x, weight),
        None => linear_product::<T, f32>(x, weight),
    }
}

/// How the kernels for a product of a few rows share the work. They read a weight as checkpoints hold it, `(in, out)`, at the
/// memory's speed.
#[derive(Clone, Copy)]
struct RowGrid {
    blocks: u32,
    rows: u32,
    inner: u32,
    columns: u32,
    lanes: u32,
}

impl RowGrid {
    /// `None` if there is no kernel for such a product.
    fn of<T: Element>(x: &Tensor, weight: &Tensor) -> Result<Option<Self>> {
        let (columns, inner) = weight.dims2()?;
        let width = LOAD_BYTES / size_of::<T>();
        let is_aligned =
            columns.is_multiple_of(width) && weight.layout().start_offset().is_multiple_of(width);
        let rows = counted(x.elem_count() / inner)?;
        // In types of 16 bits cuBLAS is faster from two rows on.
        let most_rows = if x.dtype() == DType::F32 { MOST_ROWS } else { 1 };
        if rows > most_rows || !weight.t()?.is_contiguous() || !is_aligned {
            return Ok(None);
        }
        let blocks_of = |lanes: u32| columns.div_ceil(lanes as usize * width);
        let [_, _, fewest] = LANES;
        let lanes = LANES.into_iter().find(|lanes| blocks_of(*lanes) >= ENOUGH_BLOCKS).unwrap_or(fewest);
        let (inner, columns, blocks) = (counted(inner)?, counted(columns)?, counted(blocks_of(lanes))?);
        Ok(Some(Self { blocks, rows, inner, columns, lanes }))
    }
}

/// `x Wᵀ` in f32.
fn row_product<T: Element>(grid: RowGrid, x: &Tensor, weight: &Tensor) -> Result<CudaSlice<f32>> {
    let RowGrid { blocks, rows, inner, columns, lanes } = grid;
    let device = x.device().as_cuda_device()?;
    let (held_x, held_weight) = (Held::new(x), Held::new(weight));
    // SAFETY: the kernel writes every element.
    let mut y = unsafe { device.alloc::<f32>(rows as usize * columns as usize)? };
    let (x, weight) = (held_x.values()?, held_weight.values()?);
    let parameters = RowProduct::<T> { x, weight, y: y.as_view_mut(), rows, inner, columns, lanes };
    // SAFETY: `x` is rows of `inner` elements, no more than there is a kernel for, `y` has an element for each of them and each
    // column, and the weight is whole rows of columns, from a multiple of 16 bytes on; the kernel has room for so many lanes.
    unsafe { parameters.launch(device, "row_product", (blocks, 1, 1))? };
    Ok(y)
}

/// `x Wᵀ` with bias and what follows it.
fn finished_row_product<T: Element>(
    finish: &str,
    grid: RowGrid,
    [x, weight, bias]: [&Tensor; 3],
    residual: Option<&Tensor>,
) -> Result<CudaSlice<T>> {
    let RowGrid { blocks, rows, inner, columns, lanes } = grid;
    let device = x.device().as_cuda_device()?;
    let (held_x, held_weight, held_bias) = (Held::new(x), Held::new(weight), Held::new(bias));
    let held_residual = residual.map(Held::new);
    // SAFETY: the kernel writes every element.
    let mut y = unsafe { device.alloc::<T>(rows as usize * columns as usize)? };
    let parameters = FinishedRowProduct::<T> {
        x: held_x.values()?,
        weight: held_weight.values()?,
        bias: held_bias.values()?,
        residual: held_residual.as_ref().map(Held::values).transpose()?,
        y: y.as_view_mut(),
        rows,
        inner,
        columns,
        lanes,
    };
    // SAFETY: as above; the bias has an element for each column and the residual one for each output, and there is a residual where it
    // is added.
    unsafe { parameters.launch(device, &format!("row_product_{finish}"), (blocks, 1, 1))? };
    Ok(y)
}

/// `x Wᵀ` by cuBLAS, for a contiguous `x` and a weight in one piece.
fn linear_product<T: Product, R: Product>(x: &Tensor, weight: &Tensor) -> Result<CudaSlice<R>> {
    let device = x.device().as_cuda_device()?;
    let (columns, inner) = weight.dims2()?;
    let rows = x.elem_count() / inner;
    let (held_x, held_weight) = (Held::new(x), Held::new(weight));
    let left = Factor::AsItIs(Matrices::one(held_x.values::<T>()?, inner));
    let weight_values = held_weight.values::<T>()?;
    let right = match weight.is_contiguous() {
        true => Factor::Transposed(Matrices::one(weight_values, inner)),
        false => Factor::AsItIs(Matrices::one(weight_values, columns)),
    };
    // SAFETY: the product writes every element.
    let result = unsafe { device.alloc::<R>(rows * columns)? };
    let sizes = Sizes { count: 1, rows, inner, columns };
    let written = Matrices::one(result.as_view(), columns);
    product(device, sizes, 1.0, left, right, (written, Write::Over))?;
    Ok(result)
}

/// Blocks of an elementwise kernel.
pub(super) fn blocks_for(count: usize) -> Result<u32> {
    counted(count.div_ceil(ROW_THREADS as usize).min(MAX_BLOCKS))
}

/// The sums of a product with bias and what follows it, rounded once.
fn add_bias<T: Element>(
    finish: &str,
    sums: &CudaSlice<f32>,
    bias: &Tensor,
    residual: Option<&Tensor>,
    device: &CudaDevice,
) -> Result<CudaSlice<T>> {
    let (held_bias, held_residual) = (Held::new(bias), residual.map(Held::new));
    let count = sums.len();
    // SAFETY: the kernel writes every element.
    let mut y = unsafe { device.alloc::<T>(count)? };
    let parameters = AddBias::<T> {
        sums: sums.as_view(),
        bias: held_bias.values()?,
        residual: held_residual.as_ref().map(Held::values).transpose()?,
        y: y.as_view_mut(),
        count,
        width: counted(bias.elem_count())?,
    };
    let blocks = blocks_for(count)?;
    // SAFETY: the sums, `y` and the residual, which is there where it is added, hold `count` elements, whole rows of `width`, and
    // the bias `width`.
    unsafe { parameters.launch(device, &format!("add_{finish}"), (blocks, 1, 1))? };
    Ok(y)
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

impl<'a, T> Matrices<'a, T> {
    /// A single one.
    pub(super) fn one(values: CudaView<'a, T>, row: usize) -> Self {
        Self { values, row, each: 0 }
    }
}

/// How the matrices of one side of a product lie in memory.
#[derive(Clone, Copy)]
pub(super) enum Factor<M> {
    /// `(rows, inner)` on the left, `(inner, columns)` on the right.
    AsItIs(M),
    /// `(inner, rows)` on the left, `(columns, inner)` on the right.
    Transposed(M),
}

impl<M> Factor<M> {
    /// Other matrices that lie in the same way.
    pub(super) fn map<N>(self, others: impl FnOnce(M) -> N) -> Factor<N> {
        match self {
            Self::AsItIs(matrices) => Factor::AsItIs(others(matrices)),
            Self::Transposed(matrices) => Factor::Transposed(others(matrices)),
        }
    }
}

impl<'a, T> Factor<Matrices<'a, T>> {
    /// How cuBLAS names it, the matrices, and rows and width of each in memory, if it is to be `(rows, width)` in the product.
    fn in_memory(self, rows: usize, width: usize) -> (cublasOperation_t, Matrices<'a, T>, [usize; 2]) {
        match self {
            Self::AsItIs(matrices) => (cublasOperation_t::CUBLAS_OP_N, matrices, [rows, width]),
            Self::Transposed(matrices) => (cublasOperation_t::CUBLAS_OP_T, matrices, [width, rows]),
        }
    }
}

/// How a product writes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Write {
    /// Over whatever was there.
    Over,
    /// Added to it.
    Added,
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
    fn reach<T>(self, [rows, width]: [usize; 2], Matrices { row, each, .. }: &Matrices<'_, T>) -> usize {
        (self.count - 1) * each + (rows - 1) * row + width
    }
}

/// `result = factor * left * right`, or added to it, in f32 (or TF32, see [`crate::use_tf32`]), rounded to the result's type at the
/// end. candle's switches for products in f16 and bf16 are not asked.
pub(super) fn product<T: Product, R: Product>(
    device: &CudaDevice,
    sizes: Sizes,
    factor: f32,
    left: Factor<Matrices<'_, T>>,
    right: Factor<Matrices<'_, T>>,
    (result, write): (Matrices<'_, R>, Write),
) -> Result<()> {
    let Sizes { count, rows, inner, columns } = sizes;
    if [count, rows, inner, columns].contains(&0) {
        candle_core::bail!("a product of {rows} by {inner} and {inner} by {columns} elements");
    }
    // cuBLAS counts along columns first, so it sees every matrix transposed: resultᵀ = rightᵀ leftᵀ.
    let (left_order, left, left_shape) = left.in_memory(rows, inner);
    let (right_order, right, right_shape) = right.in_memory(inner, columns);
    let result_shape = [rows, columns];
    let is_inside = sizes.reach(left_shape, &left) <= left.values.len()
        && sizes.reach(right_shape, &right) <= right.values.len()
        && sizes.reach(result_shape, &result) <= result.values.len();
    if !is_inside {
        candle_core::bail!("the matrices of a product reach beyond their tensors");
    }
    // The distance of rows means nothing where there is one, and could be too small for cuBLAS.
    let distance_of_rows =
        |[rows, width]: [usize; 2], distance: usize| if rows == 1 { width } else { distance };
    let left_row = distance_of_rows(left_shape, left.row);
    let right_row = distance_of_rows(right_shape, right.row);
    let result_row = distance_of_rows(result_shape, result.row);
    let size = |size: usize| i32::try_from(size).map_err(candle_core::Error::wrap);
    let distance = |distance: usize| i64::try_from(distance).map_err(candle_core::Error::wrap);
    let kept = if write == Write::Added { 1f32 } else { 0f32 };
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
            right_order,
            left_order,
            size(columns)?,
            size(rows)?,
            size(inner)?,
            (&raw const factor).cast(),
            right_address as *const c_void,
            T::TYPE,
            size(right_row)?,
            distance(right.each)?,
            left_address as *const c_void,
            T::TYPE,
            size(left_row)?,
            distance(left.each)?,
            (&raw const kept).cast(),
            result_address as *mut c_void,
            R::TYPE,
            size(result_row)?,
            distance(result.each)?,
            size(count)?,
            T::compute_type(),
            cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
        )
    }
    .w()
}
