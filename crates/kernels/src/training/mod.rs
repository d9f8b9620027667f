//! Operations with a backward pass of their own, for training on a CPU in f32 and f64.
//!
//! Each has a plain composition of candle operations beside it, which every other device and type takes and which the
//! tests compare it with. What is gained: one pass over memory in place of five to ten, no temporaries kept until the
//! backward pass, and vector code for the functions that candle computes one value at a time.

mod adamw;
mod arithmetic;
mod bias;
mod causal_attention;
mod dropout;
mod gelu;
mod head_loss;
mod layer_norm;
mod product;

use candle_core::{CpuStorage, DType, Layout, Result, Storage, Tensor};

pub use adamw::{AdamWStep, adamw_step, squared_norm};
pub(crate) use bias::add_bias;
pub use causal_attention::{AttentionDropout, causal_attention_reference, causal_self_attention};
pub(crate) use dropout::apply_dropout;
pub(crate) use gelu::gelu_tanh;
pub use head_loss::{head_loss, head_loss_reference};
pub(crate) use layer_norm::layer_norm;

use arithmetic::Real;

/// Whether `x` leads to a variable, and is where and what the operations here work on.
pub fn is_trained_on_cpu(x: &Tensor) -> bool {
    x.track_op() && is_cpu_float(x)
}

fn is_cpu_float(x: &Tensor) -> bool {
    x.device().is_cpu() && matches!(x.dtype(), DType::F32 | DType::F64)
}

/// The elements of a contiguous storage.
fn elements<'a, T: Real>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    let all = T::cpu_storage_as_slice(storage)?;
    let range = layout.contiguous_offsets().and_then(|(start, end)| all.get(start..end));
    range.ok_or_else(|| candle_core::Error::RequiresContiguous { op: "an operation of training" }.bt())
}

/// Runs `work` on the elements of tensors on the CPU, which are made contiguous first.
fn with_elements<T: Real, const N: usize, R>(
    tensors: [&Tensor; N],
    work: impl FnOnce([&[T]; N]) -> Result<R>,
) -> Result<R> {
    let contiguous = tensors.map(Tensor::contiguous);
    let mut kept = Vec::with_capacity(N);
    for tensor in contiguous {
        kept.push(tensor?);
    }
    let guards: Vec<_> = kept.iter().map(Tensor::storage_and_layout).collect();
    let mut slices: [&[T]; N] = [&[]; N];
    for (slice, (storage, layout)) in slices.iter_mut().zip(&guards) {
        let Storage::Cpu(storage) = &**storage else {
            candle_core::bail!("an operation of training runs on the CPU only");
        };
        *slice = elements(storage, layout)?;
    }
    work(slices)
}

/// Runs a generic function for the element type of a tensor: f32 or f64.
macro_rules! for_real {
    ($dtype:expr, $function:ident ( $($argument:expr),* $(,)? )) => {
        match $dtype {
            candle_core::DType::F32 => $function::<f32>($($argument),*),
            candle_core::DType::F64 => $function::<f64>($($argument),*),
            other => Err(candle_core::Error::UnsupportedDTypeForOp(other, "an operation of training").bt()),
        }
    };
}
use for_real;
