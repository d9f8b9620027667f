//! Matrix products on NVIDIA GPUs.
//!
//! Products of one row, or up to four rows in f32, use a kernel with a fused epilogue. All others use cuBLAS,
//! with strides that candle's products do not support, and with f32 sums if something is added to them.

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

use super::launch::{Element, TensorMemory, applies, by_type, counted, tensor};
use super::signatures::{AddBias, FinishedRowProduct, MAX_LANES, MAX_ROWS, ROW_THREADS, RowProduct};

/// Number of bytes that a thread loads per instruction in a few-row product.
const LOAD_BYTES: usize = 16;
/// Possible numbers of threads that share a row of the weight: powers of two.
///
/// Fewer threads per row result in more blocks.
const LANES: [u32; 3] = [MAX_LANES, MAX_LANES / 2, MAX_LANES / 4];
/// Minimum number of blocks needed to saturate a large GPU's memory bandwidth.
const ENOUGH_BLOCKS: usize = 128;

/// Maximum number of blocks for an elementwise kernel; its threads loop over any further elements.
const MAX_BLOCKS: usize = 1 << 15;

/// Size of the cuBLAS workspace: the recommended size for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Sets the cuBLAS workspace and disables reduced-precision reductions.
///
/// Without a workspace, cuBLAS would allocate one inside a recording. f16 and bf16 products accumulate
/// entirely in f32.
pub(super) fn prepare(device: &CudaDevice) -> Result<()> {
    let blas = device.cublas_handle();
    // SAFETY: cuBLAS writes its workspace before it reads it.
    let workspace = unsafe { device.alloc::<u8>(WORKSPACE_BYTES)? };
    // candle's device cannot own the workspace, so it leaks. Each GPU has only one workspace, because each
    // GPU is opened once and never closed.
    let address = workspace.leak();
    // SAFETY: the handle is open, its stream is the workspace's stream, and the workspace is never freed.
    unsafe {
        cublasSetWorkspace_v2(*blas.handle(), address as *mut c_void, WORKSPACE_BYTES).result().w()?;
        let mode = cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
        cublasSetMathMode(*blas.handle(), mode).result().w()?;
    }
    Ok(())
}

/// Computes `x Wᵀ` with an optional bias and epilogue.
///
/// `x` is `(…, in)`. `weight` is `(out, in)`, contiguous or the transposed view of a contiguous tensor.
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

/// Computes `x Wᵀ` in f32 for a contiguous `x` and a weight that [`is_one_piece`] accepts.
pub(super) fn sums<T: Product>(x: &Tensor, weight: &Tensor) -> Result<CudaSlice<f32>> {
    match RowGrid::of::<T>(x, weight)? {
        Some(grid) => row_product::<T>(grid, x, weight),
        None => linear_product::<T, f32>(x, weight),
    }
}

/// Work distribution of the kernels for few-row products.
///
/// These kernels read a weight in the checkpoint layout `(in, out)` at full memory bandwidth.
#[derive(Clone, Copy)]
struct RowGrid {
    blocks: u32,
    rows: u32,
    inner: u32,
    columns: u32,
    lanes: u32,
}

impl RowGrid {
    /// Computes the work distribution, or returns `None` if no kernel supports this product.
    fn of<T: Element>(x: &Tensor, weight: &Tensor) -> Result<Option<Self>> {
        let (columns, inner) = weight.dims2()?;
        let width = LOAD_BYTES / size_of::<T>();
        let is_aligned =
            columns.is_multiple_of(width) && weight.layout().start_offset().is_multiple_of(width);
        let rows = counted(x.elem_count() / inner)?;
        // For 16-bit dtypes, cuBLAS is faster for two or more rows.
        let max_rows = if x.dtype() == DType::F32 { MAX_ROWS } else { 1 };
        if rows > max_rows || !weight.t()?.is_contiguous() || !is_aligned {
            return Ok(None);
        }
        let blocks_of = |lanes: u32| columns.div_ceil(lanes as usize * width);
        let [_, _, fewest] = LANES;
        let lanes = LANES.into_iter().find(|lanes| blocks_of(*lanes) >= ENOUGH_BLOCKS).unwrap_or(fewest);
        let (inner, columns, blocks) = (counted(inner)?, counted(columns)?, counted(blocks_of(lanes))?);
        Ok(Some(Self { blocks, rows, inner, columns, lanes }))
    }
}

/// Computes `x Wᵀ` in f32 with a row-product kernel.
fn row_product<T: Element>(grid: RowGrid, x: &Tensor, weight: &Tensor) -> Result<CudaSlice<f32>> {
    let RowGrid { blocks, rows, inner, columns, lanes } = grid;
    let device = x.device().as_cuda_device()?;
    let (held_x, held_weight) = (TensorMemory::new(x), TensorMemory::new(weight));
    // SAFETY: the kernel writes every element.
    let mut y = unsafe { device.alloc::<f32>(rows as usize * columns as usize)? };
    let (x, weight) = (held_x.values()?, held_weight.values()?);
    let parameters = RowProduct::<T> { x, weight, y: y.as_view_mut(), rows, inner, columns, lanes };
    // SAFETY: `x` has rows of `inner` elements, no more than the kernel supports. `y` has an element for each
    // row and column. The weight has complete rows of `columns` elements and starts at a multiple of 16
    // bytes. The kernel supports this number of lanes.
    unsafe { parameters.launch(device, "row_product", (blocks, 1, 1))? };
    Ok(y)
}

/// Computes `x Wᵀ` plus bias and epilogue with a row-product kernel.
fn finished_row_product<T: Element>(
    finish: &str,
    grid: RowGrid,
    [x, weight, bias]: [&Tensor; 3],
    residual: Option<&Tensor>,
) -> Result<CudaSlice<T>> {
    let RowGrid { blocks, rows, inner, columns, lanes } = grid;
    let device = x.device().as_cuda_device()?;
    let (held_x, held_weight, held_bias) =
        (TensorMemory::new(x), TensorMemory::new(weight), TensorMemory::new(bias));
    let held_residual = residual.map(TensorMemory::new);
    // SAFETY: the kernel writes every element.
    let mut y = unsafe { device.alloc::<T>(rows as usize * columns as usize)? };
    let parameters = FinishedRowProduct::<T> {
        x: held_x.values()?,
        weight: held_weight.values()?,
        bias: held_bias.values()?,
        residual: held_residual.as_ref().map(TensorMemory::values).transpose()?,
        y: y.as_view_mut(),
        rows,
        inner,
        columns,
        lanes,
    };
    // SAFETY: same as for `row_product`. Also, the bias has an element for each column and the residual one
    // for each output. A residual is present if the epilogue adds it.
    unsafe { parameters.launch(device, &format!("row_product_{finish}"), (blocks, 1, 1))? };
    Ok(y)
}

/// Computes `x Wᵀ` with cuBLAS for a contiguous `x` and a weight that [`is_one_piece`] accepts.
fn linear_product<T: Product, R: Product>(x: &Tensor, weight: &Tensor) -> Result<CudaSlice<R>> {
    let device = x.device().as_cuda_device()?;
    let (columns, inner) = weight.dims2()?;
    let rows = x.elem_count() / inner;
    let (held_x, held_weight) = (TensorMemory::new(x), TensorMemory::new(weight));
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

/// Number of blocks for an elementwise kernel over `count` elements.
pub(super) fn blocks_for(count: usize) -> Result<u32> {
    counted(count.div_ceil(ROW_THREADS as usize).min(MAX_BLOCKS))
}

/// Adds the bias to the f32 result of a matrix product, applies the epilogue and rounds once.
fn add_bias<T: Element>(
    finish: &str,
    sums: &CudaSlice<f32>,
    bias: &Tensor,
    residual: Option<&Tensor>,
    device: &CudaDevice,
) -> Result<CudaSlice<T>> {
    let (held_bias, held_residual) = (TensorMemory::new(bias), residual.map(TensorMemory::new));
    let count = sums.len();
    // SAFETY: the kernel writes every element.
    let mut y = unsafe { device.alloc::<T>(count)? };
    let parameters = AddBias::<T> {
        sums: sums.as_view(),
        bias: held_bias.values()?,
        residual: held_residual.as_ref().map(TensorMemory::values).transpose()?,
        y: y.as_view_mut(),
        count,
        width: counted(bias.elem_count())?,
    };
    let blocks = blocks_for(count)?;
    // SAFETY: the sums, `y` and the residual hold `count` elements in complete rows of `width`, and the bias
    // holds `width`. A residual is present if the epilogue adds it.
    unsafe { parameters.launch(device, &format!("add_{finish}"), (blocks, 1, 1))? };
    Ok(y)
}

/// Element type of cuBLAS products.
pub(super) trait Product: Element {
    /// Name of the type in cuBLAS.
    const TYPE: cudaDataType_t;

    /// Compute type for products of this element type.
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

/// Batch of matrices whose rows are contiguous.
pub(super) struct Matrices<'a, T> {
    /// Memory, starting at the first element.
    pub(super) values: CudaView<'a, T>,
    /// Distance between two rows, in elements.
    pub(super) row: usize,
    /// Distance between two matrices, in elements.
    pub(super) each: usize,
}

impl<'a, T> Matrices<'a, T> {
    /// Batch with a single matrix.
    pub(super) fn one(values: CudaView<'a, T>, row: usize) -> Self {
        Self { values, row, each: 0 }
    }
}

/// Memory layout of one operand of a product.
#[derive(Clone, Copy)]
pub(super) enum Factor<M> {
    /// `(rows, inner)` on the left, `(inner, columns)` on the right.
    AsItIs(M),
    /// `(inner, rows)` on the left, `(columns, inner)` on the right.
    Transposed(M),
}

impl<M> Factor<M> {
    /// Replaces the matrices and keeps the layout.
    pub(super) fn map<N>(self, others: impl FnOnce(M) -> N) -> Factor<N> {
        match self {
            Self::AsItIs(matrices) => Factor::AsItIs(others(matrices)),
            Self::Transposed(matrices) => Factor::Transposed(others(matrices)),
        }
    }
}

impl<'a, T> Factor<Matrices<'a, T>> {
    /// Returns an operand `(rows, width)` as cuBLAS takes it: layout flag, matrices and stored shape.
    fn in_memory(self, rows: usize, width: usize) -> (cublasOperation_t, Matrices<'a, T>, [usize; 2]) {
        match self {
            Self::AsItIs(matrices) => (cublasOperation_t::CUBLAS_OP_N, matrices, [rows, width]),
            Self::Transposed(matrices) => (cublasOperation_t::CUBLAS_OP_T, matrices, [width, rows]),
        }
    }
}

/// Write mode of a product.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Write {
    /// Overwrites the result.
    Over,
    /// Adds to the result.
    Added,
}

/// Sizes of `count` products `(rows, inner)` × `(inner, columns)`.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) count: usize,
    pub(super) rows: usize,
    pub(super) inner: usize,
    pub(super) columns: usize,
}

impl Sizes {
    /// Number of elements from the start of the first matrix to the end of the last.
    fn reach<T>(self, [rows, width]: [usize; 2], Matrices { row, each, .. }: &Matrices<'_, T>) -> usize {
        (self.count - 1) * each + (rows - 1) * row + width
    }
}

/// Computes `result = factor * left * right`, or adds it to `result`.
///
/// The product is computed in f32 (or TF32, see [`crate::use_tf32`]) and rounded once to the result's dtype.
/// candle's settings for f16 and bf16 products are ignored.
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
        candle_core::bail!(
            "cannot multiply empty matrices of {rows} by {inner} and {inner} by {columns} elements"
        );
    }
    // cuBLAS is column-major, so it sees every matrix transposed: resultᵀ = rightᵀ leftᵀ.
    let (left_order, left, left_shape) = left.in_memory(rows, inner);
    let (right_order, right, right_shape) = right.in_memory(inner, columns);
    let result_shape = [rows, columns];
    let is_inside = sizes.reach(left_shape, &left) <= left.values.len()
        && sizes.reach(right_shape, &right) <= right.values.len()
        && sizes.reach(result_shape, &result) <= result.values.len();
    if !is_inside {
        candle_core::bail!("a matrix product reads or writes past the end of a tensor");
    }
    // For a single row, the distance between rows has no meaning and could be too small for cuBLAS.
    let distance_of_rows =
        |[rows, width]: [usize; 2], distance: usize| if rows == 1 { width } else { distance };
    let left_row = distance_of_rows(left_shape, left.row);
    let right_row = distance_of_rows(right_shape, right.row);
    let result_row = distance_of_rows(result_shape, result.row);
    let size = |size: usize| i32::try_from(size).map_err(candle_core::Error::wrap);
    let distance = |distance: usize| i64::try_from(distance).map_err(candle_core::Error::wrap);
    let kept = if write == Write::Added { 1f32 } else { 0f32 };
    let stream = device.cuda_stream();
    // The guards would order the streams of several tensors, but the device has only one stream.
    let (left_address, _left_guard) = left.values.device_ptr(&stream);
    let (right_address, _right_guard) = right.values.device_ptr(&stream);
    let (result_address, _result_guard) = result.values.device_ptr(&stream);
    // SAFETY: all elements are inside the tensors, which are borrowed here. The result's elements are not
    // read before they are written, in the order of the stream. The factors are f32, as required by every
    // compute type here, and are read before the call returns.
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
