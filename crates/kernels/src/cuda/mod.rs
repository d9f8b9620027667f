//! NVIDIA GPU kernels for inference and training, and the conditions for using them.
//!
//! The source of the kernels is `kernels.cu`.
//!
//! - [`attention`] has the attention kernels.
//! - [`products`] has matrix products with fused epilogues.
//! - [`training`] has the other operations of training.
//! - [`recording`] launches all kernels of a step in one call.
//! - [`signatures`] declares the parameters of each kernel.
//! - [`launch`] has the code shared by all launches.
//!
//! A step of one token is so little work for a GPU that kernel launches take most of the time. candle
//! launches one kernel for each operation. The kernels here fuse all operations between two matrix products.
//!
//! Each function returns `None` if its kernel does not apply: on other devices, for dtypes other than f32,
//! f16 and bf16, or if a gradient is needed. Callers then fall back to compositions of candle operations.
//! Tests compare the kernels with these compositions.

#![expect(unsafe_code, reason = "kernels are launched with arguments that the compiler cannot check")]

use candle_core::cuda_backend::cudarc::driver::result;
use candle_core::cuda_backend::cudarc::driver::sys::CUmemPool_attribute;
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{DType, Device, Result, Tensor};
use half::{bf16, f16};

mod attention;
mod launch;
mod products;
mod recording;
mod signatures;
mod training;

pub(crate) use attention::{
    heads_attention, heads_attention_backward, prefix_attention, step_attention, write_tokens,
};
pub(crate) use products::linear;
pub(crate) use recording::{Graph, kept_uploads};
pub(crate) use training::{
    adamw_step, add_rows, dropout, gelu, gelu_backward, head_loss, sum_of_squares, wide_norm,
    wide_norm_backward,
};

use launch::{Element, TensorMemory, applies, by_type, counted, tensor};
use signatures::LayerNorm;

/// Opens GPU `index` with its own stream, which runs all work in order.
///
/// Call this only once for each GPU: the workspace of its products is never freed.
pub(crate) fn open(index: usize) -> Result<Device> {
    let device = Device::new_cuda_with_stream(index)?;
    // SAFETY: events order the work of several streams, and this device has only one stream.
    unsafe { device.as_cuda_device()?.disable_event_tracking() };
    // Devices without memory pools do not support this setting, so errors are ignored.
    let _ = keep_freed_memory(device.as_cuda_device()?);
    products::prepare(device.as_cuda_device()?)?;
    Ok(device)
}

/// Keeps freed memory for the next allocation.
///
/// By default, the driver returns it to the system at each synchronization, which happens for every token.
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

/// Layer norm of `x` `(…, width)`, with `weight` and `bias` `(width)`.
pub(crate) fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, epsilon: f64) -> Result<Option<Tensor>> {
    let Some(width) = row_width(x, &[weight, bias]).filter(|_| applies(&[x, weight, bias])) else {
        return Ok(None);
    };
    let parameters = [&weight.contiguous()?, &bias.contiguous()?];
    by_type!(x.dtype(), launch_normed(&x.contiguous()?, parameters, width, epsilon)).map(Some)
}

/// Width of the last axis of `x`, if it fits in a `u32` and every parameter has the same width.
fn row_width(x: &Tensor, parameters: &[&Tensor]) -> Option<u32> {
    let width = *x.dims().last()?;
    parameters.iter().all(|parameter| parameter.dims() == [width]).then(|| u32::try_from(width).ok())?
}

fn launch_normed<T: Element>(
    x: &Tensor,
    [weight, bias]: [&Tensor; 2],
    width: u32,
    epsilon: f64,
) -> Result<Tensor> {
    let device = x.device().as_cuda_device()?;
    let (held_x, held_weight, held_bias) =
        (TensorMemory::new(x), TensorMemory::new(weight), TensorMemory::new(bias));
    let count = x.elem_count();
    // SAFETY: the kernel writes every element.
    let mut y = unsafe { device.alloc::<T>(count)? };
    #[expect(clippy::cast_possible_truncation, reason = "added to an f32 variance")]
    let epsilon = epsilon as f32;
    let (x_values, y_values) = (held_x.values()?, y.as_view_mut());
    let (weight, bias) = (held_weight.values()?, held_bias.values()?);
    let parameters = LayerNorm::<T> { x: x_values, weight, bias, y: y_values, width, epsilon };
    let rows = counted(count / width as usize)?;
    // SAFETY: `x` and `y` hold `rows` rows of `width` elements; `weight` and `bias` hold one row each.
    unsafe { parameters.launch(device, "layer_norm", (rows, 1, 1))? };
    Ok(tensor(y, device, x.shape()))
}
