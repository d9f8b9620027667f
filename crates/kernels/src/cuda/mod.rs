//! Inference on NVIDIA GPUs in few launches: the kernels of `kernels.cu`, and where they apply; [`recording`] starts those of
//! a whole step at once.
//!
//! A step of one token is so little work for a GPU that starting its kernels takes most of the time. candle has one for
//! each operation; these do what stands between two matrix products in one. Each function returns `None` where its kernel
//! does not apply: on other devices, for other types than f32, f16 and bf16, and where a gradient is wanted. The
//! compositions of candle's operations that are taken then are also what the tests compare with.

#![expect(unsafe_code, reason = "kernels are launched with arguments that the compiler cannot check")]

use candle_core::cuda_backend::cudarc::driver::sys::CUmemPool_attribute;
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaView, DeviceRepr, LaunchConfig, PushKernelArg, result,
};
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaStorage, WrapErr};
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Layout, Result, Shape, Storage, StorageRef, Tensor};
use half::{bf16, f16};

mod recording;

pub use recording::{Recording, prepared};

/// The compiled kernels.
const KERNELS: &str = include_str!(concat!(env!("OUT_DIR"), "/kernels.ptx"));
/// Under this name candle keeps them on the device.
const MODULE: &str = "gpt2";
/// Threads of a block that works on one row.
const ROW_THREADS: u32 = 256;
/// Threads of a block that writes one head's row.
const HEAD_THREADS: u32 = 64;
/// `WARP * ATTENTION_WARPS` of the kernels.
const ATTENTION_THREADS: u32 = 512;
/// Widths of a head up to which a kernel for one query was compiled.
const HEAD_WIDTHS: [usize; 3] = [64, 128, 256];
/// Blocks of an elementwise kernel, whose threads go on behind them.
const MAX_BLOCKS: usize = 1 << 15;

/// Opens GPU `index` with a stream of its own, on which everything runs in order.
pub(crate) fn open(index: usize) -> Result<Device> {
    let device = Device::new_cuda_with_stream(index)?;
    // SAFETY: the events order the work of several streams, and this device has one.
    unsafe { device.as_cuda_device()?.disable_event_tracking() };
    // Without memory pools there is nothing to keep.
    let _ = keep_freed_memory(device.as_cuda_device()?);
    Ok(device)
}

/// Keeps freed memory for the next allocation. The driver would give it back whenever the program waits, as it does for
/// each token.
fn keep_freed_memory(device: &CudaDevice) -> Result<()> {
    let stream = device.cuda_stream();
    let mut bytes = u64::MAX;
    // SAFETY: the device is open; the attribute is a `u64`, which the driver reads before the call returns.
    unsafe {
        let pool = result::device::get_default_mem_pool(stream.context().cu_device()).w()?;
        let threshold = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        result::mem_pool::set_attribute(pool, threshold, (&raw mut bytes).cast()).w()
    }
}

/// `x + bias`. `x` `(…, width)`, `bias` `(width)`.
pub(crate) fn add_bias(x: &Tensor, bias: &Tensor) -> Result<Option<Tensor>> {
    biased("add_bias", x, bias, None)
}

/// The tanh form of GELU of `x + bias`.
pub(crate) fn add_bias_gelu(x: &Tensor, bias: &Tensor) -> Result<Option<Tensor>> {
    biased("add_bias_gelu", x, bias, None)
}

/// `x + bias + residual`; `residual` as `x`.
pub(crate) fn add_bias_residual(x: &Tensor, bias: &Tensor, residual: &Tensor) -> Result<Option<Tensor>> {
    biased("add_bias_residual", x, bias, Some(residual))
}

/// The layer norm of `x` `(…, width)`; `weight` and `bias` `(width)`.
pub(crate) fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, epsilon: f64) -> Result<Option<Tensor>> {
    let Some(width) = row_width(x, &[weight, bias]).filter(|_| applies(&[x, weight, bias])) else {
        return Ok(None);
    };
    let parameters = [&weight.contiguous()?, &bias.contiguous()?];
    by_type!(x.dtype(), launch_normed(&x.contiguous()?, parameters, width, epsilon)).map(Some)
}

/// Attention over the first keys up to some number, as [`crate::prefix_attention`] computes it on the CPU.
///
/// One query is one launch. Many are two matrix products, for which GPUs have units of their own, with one launch for
/// scale, mask and softmax between them.
pub(crate) fn prefix_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    visible: &[usize],
) -> Result<Option<Tensor>> {
    if !applies(&[q, k, v]) {
        return Ok(None);
    }
    let (batch, heads, query_len, head_dim) = q.dims4()?;
    let (_, _, key_len, value_dim) = v.dims4()?;
    let fits = k.dims() == [batch, heads, key_len, head_dim]
        && v.dims() == [batch, heads, key_len, value_dim]
        && visible.len() == batch * query_len
        && visible.iter().all(|keys| (1..=key_len).contains(keys));
    if !fits {
        return Ok(None);
    }
    let uploaded = uploaded_list(visible, query_len, q.device().as_cuda_device()?)?;
    let visible = match &uploaded {
        Some(list) => Visible { list: Some(list.as_view()), more: 0 },
        None => Visible { list: None, more: counted(visible.first().copied().unwrap_or_default())? },
    };
    if let (1, Some(width)) = (query_len, compiled_width(head_dim, value_dim)) {
        return by_type!(q.dtype(), attend(width, [q, k, v], scale, &visible)).map(Some);
    }
    let scores = q.contiguous()?.matmul(&k.contiguous()?.t()?)?; // (B, H, T, S)
    let weights = by_type!(scores.dtype(), prefix_softmax(&scores, scale, &visible))?;
    weights.matmul(&v.contiguous()?).map(Some)
}

/// Attention as in [`crate::step_attention`].
pub(crate) fn step_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    lengths: &Tensor,
) -> Result<Option<Tensor>> {
    let (batch, heads, query_len, head_dim) = q.dims4()?;
    let (_, _, key_len, value_dim) = v.dims4()?;
    let fits = query_len == 1
        && k.dims() == [batch, heads, key_len, head_dim]
        && v.dims() == [batch, heads, key_len, value_dim]
        && counts_rows(lengths, batch);
    let Some(width) = compiled_width(head_dim, value_dim).filter(|_| fits && applies(&[q, k, v])) else {
        return Ok(None);
    };
    let held = Held::new(lengths);
    // The new token sees itself too.
    let visible = Visible { list: Some(held.values::<u32>()?), more: 1 };
    by_type!(q.dtype(), attend(width, [q, k, v], scale, &visible)).map(Some)
}

/// Writes as [`crate::write_step`] does; says whether it could.
pub(crate) fn write_step(memories: [&Tensor; 2], tokens: [&Tensor; 2], lengths: &Tensor) -> Result<bool> {
    let (batch, heads, _, head_dim) = memories[0].dims4()?;
    let fits = memories[1].dims() == memories[0].dims()
        && memories.iter().all(|memory| memory.is_contiguous())
        && tokens.iter().all(|x| x.dims() == [batch, heads, 1, head_dim])
        && counts_rows(lengths, batch)
        && applies(&[memories[0], memories[1], tokens[0], tokens[1]]);
    if fits {
        by_type!(tokens[0].dtype(), launch_write_step(memories, tokens, lengths))?;
    }
    Ok(fits)
}

/// Whether `lengths` has a number for each row that the kernels can read.
fn counts_rows(lengths: &Tensor, rows: usize) -> bool {
    lengths.dims() == [rows]
        && lengths.dtype() == DType::U32
        && lengths.is_contiguous()
        && lengths.device().is_cuda()
}

/// The width of a compiled kernel for one query that serves heads of this width.
fn compiled_width(head_dim: usize, value_dim: usize) -> Option<usize> {
    HEAD_WIDTHS.into_iter().find(|width| head_dim <= *width && value_dim == head_dim)
}

/// The element types of the kernels.
trait Element: CudaDType + DeviceRepr {
    /// How the kernels name it.
    const NAME: &str;
}

impl Element for f32 {
    const NAME: &str = "f32";
}

impl Element for f16 {
    const NAME: &str = "f16";
}

impl Element for bf16 {
    const NAME: &str = "bf16";
}

/// Calls a function that is generic over the element type.
macro_rules! by_type {
    ($dtype:expr, $function:ident ( $($argument:expr),* $(,)? )) => {
        match $dtype {
            DType::F16 => $function::<f16>($($argument),*),
            DType::BF16 => $function::<bf16>($($argument),*),
            _ => $function::<f32>($($argument),*),
        }
    };
}
use by_type;

/// Whether all tensors are on one GPU, of one type that the kernels have, not empty, and want no gradient.
fn applies(tensors: &[&Tensor]) -> bool {
    let alike = |x: &&Tensor| {
        x.device().is_cuda()
            && x.device().same_device(tensors[0].device())
            && x.dtype() == tensors[0].dtype()
            && matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16)
            && !x.track_op()
            && x.elem_count() > 0
    };
    tensors.iter().all(alike)
}

/// The width of the last axis of `x`, where the kernels can count it and every parameter has it.
fn row_width(x: &Tensor, parameters: &[&Tensor]) -> Option<u32> {
    let width = *x.dims().last()?;
    parameters.iter().all(|parameter| parameter.dims() == [width]).then(|| u32::try_from(width).ok())?
}

fn biased(kernel: &str, x: &Tensor, bias: &Tensor, residual: Option<&Tensor>) -> Result<Option<Tensor>> {
    let fits = residual.is_none_or(|residual| residual.dims() == x.dims() && applies(&[x, residual]));
    let Some(width) = row_width(x, &[bias]).filter(|_| fits && applies(&[x, bias])) else {
        return Ok(None);
    };
    let (x, bias) = (x.contiguous()?, bias.contiguous()?);
    let residual = residual.map(Tensor::contiguous).transpose()?;
    by_type!(x.dtype(), launch_biased(kernel, &x, &bias, residual.as_ref(), width)).map(Some)
}

fn launch_biased<T: Element>(
    kernel: &str,
    x: &Tensor,
    bias: &Tensor,
    residual: Option<&Tensor>,
    width: u32,
) -> Result<Tensor> {
    let device = x.device().as_cuda_device()?;
    let function = device.get_or_load_custom_func(&format!("{kernel}_{}", T::NAME), MODULE, KERNELS)?;
    let (held_x, held_bias) = (Held::new(x), Held::new(bias));
    let (x_values, bias_values) = (held_x.values::<T>()?, held_bias.values::<T>()?);
    let held_residual = residual.map(Held::new);
    let residual_values = held_residual.as_ref().map(Held::values::<T>).transpose()?;
    let count = x.elem_count();
    // SAFETY: the kernel writes every element.
    let mut y = unsafe { device.alloc::<T>(count)? };
    let blocks = count.div_ceil(ROW_THREADS as usize).min(MAX_BLOCKS);
    let mut launch = function.builder();
    launch.arg(&x_values).arg(&bias_values);
    if let Some(residual_values) = &residual_values {
        launch.arg(residual_values);
    }
    launch.arg(&mut y).arg(&count).arg(&width);
    // SAFETY: these are the parameters of the kernel; `x`, `y` and the residual hold `count` elements, whole rows of
    // `width`, and the bias `width`.
    unsafe { launch.launch(grid((counted(blocks)?, 1), ROW_THREADS)) }.w()?;
    Ok(tensor(y, device, x.shape()))
}

fn launch_normed<T: Element>(
    x: &Tensor,
    [weight, bias]: [&Tensor; 2],
    width: u32,
    epsilon: f64,
) -> Result<Tensor> {
    let device = x.device().as_cuda_device()?;
    let function = device.get_or_load_custom_func(&format!("layer_norm_{}", T::NAME), MODULE, KERNELS)?;
    let (held_x, held_weight, held_bias) = (Held::new(x), Held::new(weight), Held::new(bias));
    let x_values = held_x.values::<T>()?;
    let (weight_values, bias_values) = (held_weight.values::<T>()?, held_bias.values::<T>()?);
    let count = x.elem_count();
    // SAFETY: the kernel writes every element.
    let mut y = unsafe { device.alloc::<T>(count)? };
    #[expect(clippy::cast_possible_truncation, reason = "added to an f32 variance")]
    let epsilon = epsilon as f32;
    let mut launch = function.builder();
    launch.arg(&x_values).arg(&weight_values).arg(&bias_values).arg(&mut y).arg(&width).arg(&epsilon);
    let rows = counted(count / width as usize)?;
    // SAFETY: these are the parameters of the kernel; `x` and `y` hold `rows` rows of `width` elements, weight and bias one.
    unsafe { launch.launch(grid((rows, 1), ROW_THREADS)) }.w()?;
    Ok(tensor(y, device, x.shape()))
}

/// The keys that each query sees, as the kernels take it: `more` than the list says, or than the query's number where there
/// is none.
struct Visible<'a> {
    list: Option<CudaView<'a, u32>>,
    more: u32,
}

/// The list of visible keys on the device; `None` where each next query of a row sees one more, and none is needed.
fn uploaded_list(visible: &[usize], query_len: usize, device: &CudaDevice) -> Result<Option<CudaSlice<u32>>> {
    let first = visible.first().copied().unwrap_or_default();
    if visible.iter().enumerate().all(|(row, keys)| *keys == first + row % query_len) {
        return Ok(None);
    }
    let list = visible.iter().map(|keys| counted(*keys)).collect::<Result<Vec<_>>>()?;
    device.clone_htod(&list).map(Some)
}

/// Adds the list of visible keys to the arguments of a launch, or a null pointer.
macro_rules! visible_argument {
    ($launch:expr, $visible:expr) => {
        match &$visible.list {
            Some(list) => $launch.arg(list),
            None => $launch.arg(&NO_LIST),
        }
    };
}

/// A null pointer of the device.
const NO_LIST: u64 = 0;

/// `scores` `(B, H, T, S)`, contiguous.
fn prefix_softmax<T: Element>(scores: &Tensor, scale: f64, visible: &Visible<'_>) -> Result<Tensor> {
    let device = scores.device().as_cuda_device()?;
    let function = device.get_or_load_custom_func(&format!("prefix_softmax_{}", T::NAME), MODULE, KERNELS)?;
    let (batch, heads, query_len, key_len) = scores.dims4()?;
    let rows = counted(batch * heads * query_len)?;
    let (heads, queries, keys) = (counted(heads)?, counted(query_len)?, counted(key_len)?);
    #[expect(clippy::cast_possible_truncation, reason = "the scores are f32 in the kernel")]
    let scale = scale as f32;
    let held = Held::new(scores);
    let values = held.values::<T>()?;
    // SAFETY: the kernel writes every element.
    let mut weights = unsafe { device.alloc::<T>(scores.elem_count())? };
    let mut launch = function.builder();
    launch.arg(&values).arg(&mut weights);
    visible_argument!(launch, visible);
    launch.arg(&visible.more).arg(&heads).arg(&queries).arg(&keys).arg(&scale);
    // SAFETY: these are the parameters of the kernel; scores and weights hold `rows` rows of `keys` elements, and the list
    // has a number for each query of each batch row.
    unsafe { launch.launch(grid((rows, 1), ROW_THREADS)) }.w()?;
    Ok(tensor(weights, device, scores.shape()))
}

/// Where the rows of a `(B, H, T, D)` tensor are; the kernels have the same structure.
#[repr(C)]
#[derive(Clone, Copy)]
struct Strides {
    batch: usize,
    head: usize,
    token: usize,
}

// SAFETY: three integers in the layout of C.
unsafe impl DeviceRepr for Strides {}

/// `x` with its rows in one piece; whatever else the strides are, the kernels follow them.
fn with_whole_rows(x: &Tensor) -> Result<Tensor> {
    if x.stride().last() == Some(&1) { Ok(x.clone()) } else { x.contiguous() }
}

/// `q` `(B, H, 1, D)`, `k` and `v` `(B, H, S, D)`; returns `(B, H, 1, D)`.
fn attend<T: Element>(
    width: usize,
    [q, k, v]: [&Tensor; 3],
    scale: f64,
    visible: &Visible<'_>,
) -> Result<Tensor> {
    let (q, k, v) = (with_whole_rows(q)?, with_whole_rows(k)?, with_whole_rows(v)?);
    let device = q.device().as_cuda_device()?;
    let function = device.get_or_load_custom_func(&format!("attend_{width}_{}", T::NAME), MODULE, KERNELS)?;
    let (batch, heads, _, head_dim) = q.dims4()?;
    let keys = counted(k.dim(2)?)?;
    let blocks = (counted(heads)?, counted(batch)?);
    let width = counted(head_dim)?;
    #[expect(clippy::cast_possible_truncation, reason = "the scores are f32 in the kernel")]
    let scale = scale as f32;
    let (held_q, held_k, held_v) = (Held::new(&q), Held::new(&k), Held::new(&v));
    let (q_values, k_values) = (held_q.values::<T>()?, held_k.values::<T>()?);
    let v_values = held_v.values::<T>()?;
    let (q_strides, k_strides, v_strides) = (held_q.strides()?, held_k.strides()?, held_v.strides()?);
    // SAFETY: the kernel writes every element.
    let mut context = unsafe { device.alloc::<T>(batch * heads * head_dim)? };
    let mut launch = function.builder();
    launch.arg(&q_values).arg(&k_values).arg(&v_values).arg(&mut context);
    launch.arg(&q_strides).arg(&k_strides).arg(&v_strides);
    visible_argument!(launch, visible);
    launch.arg(&visible.more).arg(&keys).arg(&width).arg(&scale);
    // SAFETY: these are the parameters of the kernel; the strides are those of the tensors, whose rows are in one piece,
    // and the list has a number for each batch row.
    unsafe { launch.launch(grid(blocks, ATTENTION_THREADS)) }.w()?;
    Ok(tensor(context, device, &Shape::from((batch, heads, 1, head_dim))))
}

/// `memories` `(B, H, S, D)`, contiguous; `tokens` `(B, H, 1, D)`, `lengths` `(B)`.
fn launch_write_step<T: Element>(
    memories: [&Tensor; 2],
    [keys, values]: [&Tensor; 2],
    lengths: &Tensor,
) -> Result<()> {
    let (keys, values) = (with_whole_rows(keys)?, with_whole_rows(values)?);
    let device = keys.device().as_cuda_device()?;
    let function = device.get_or_load_custom_func(&format!("write_step_{}", T::NAME), MODULE, KERNELS)?;
    let (batch, heads, capacity, head_dim) = memories[0].dims4()?;
    let blocks = (counted(heads)?, counted(batch)?);
    let (capacity, width) = (counted(capacity)?, counted(head_dim)?);
    let (held_keys, held_values, held_lengths) = (Held::new(&keys), Held::new(&values), Held::new(lengths));
    let [held_key_memory, held_value_memory] = memories.map(Held::new);
    let (new_keys, new_values) = (held_keys.values::<T>()?, held_values.values::<T>()?);
    let (key_memory, value_memory) = (held_key_memory.values::<T>()?, held_value_memory.values::<T>()?);
    let length_values = held_lengths.values::<u32>()?;
    let (key_strides, value_strides) = (held_keys.strides()?, held_values.strides()?);
    let mut launch = function.builder();
    launch.arg(&new_keys).arg(&new_values).arg(&key_memory).arg(&value_memory);
    launch.arg(&key_strides).arg(&value_strides).arg(&length_values).arg(&capacity).arg(&width);
    // SAFETY: these are the parameters of the kernel; the strides are those of the tensors, whose rows are in one piece, and
    // the memories hold `capacity` rows of `width` for each block. The kernel writes into the memories, behind the tokens
    // that they hold, and all work of this device is in the order of one stream.
    unsafe { launch.launch(grid(blocks, HEAD_THREADS)) }.w()?;
    Ok(())
}

/// A tensor's memory, held while it is read.
struct Held<'a> {
    storage: StorageRef<'a>,
    layout: &'a Layout,
}

impl<'a> Held<'a> {
    fn new(x: &'a Tensor) -> Self {
        let (storage, layout) = x.storage_and_layout();
        Self { storage, layout }
    }

    /// The elements from the tensor's first one on.
    fn values<T: CudaDType>(&self) -> Result<CudaView<'_, T>> {
        let Storage::Cuda(storage) = &*self.storage else {
            candle_core::bail!("expected a tensor on a GPU");
        };
        Ok(storage.as_cuda_slice::<T>()?.slice(self.layout.start_offset()..))
    }

    fn strides(&self) -> Result<Strides> {
        match self.layout.stride() {
            [batch, head, token, _] => Ok(Strides { batch: *batch, head: *head, token: *token }),
            other => candle_core::bail!("expected four axes, found {}", other.len()),
        }
    }
}

/// A size as the kernels count.
fn counted(size: usize) -> Result<u32> {
    u32::try_from(size).map_err(candle_core::Error::wrap)
}

fn grid((x, y): (u32, u32), threads: u32) -> LaunchConfig {
    LaunchConfig { grid_dim: (x, y, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 }
}

fn tensor<T: Element>(values: CudaSlice<T>, device: &CudaDevice, shape: &Shape) -> Tensor {
    let storage = CudaStorage::wrap_cuda_slice(values, device.clone());
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}
