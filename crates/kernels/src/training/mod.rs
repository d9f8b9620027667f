//! Operations with a backward pass of their own, for training on a CPU in f32 and f64.
//!
//! Each has a plain composition of candle operations beside it, which every other device and type takes and which the
//! tests compare it with. What is gained: one pass over memory in place of five to ten, no temporaries kept until the
//! backward pass, products and functions in this processor's vectors, and gradients that are added in place. Layer norm and
//! GELU serve inference too. Every sum is added in one order, whatever the number of threads.

mod adamw;
mod arithmetic;
mod causal_attention;
mod elementwise;
mod embedding;
mod head_loss;
mod layer_norm;
mod linear;
mod low_rank;
mod operation;
mod product;

use candle_core::{CpuStorage, DType, Layout, Result, Storage, Tensor};

pub use adamw::{AdamWStep, adamw_step, squared_norm};
pub(crate) use arithmetic::{Real, Vectors};
pub use causal_attention::{AttentionDropout, causal_attention_reference, causal_self_attention};
pub use elementwise::sum;
pub(crate) use elementwise::{apply_dropout, gelu_tanh};
pub use embedding::add_positions;
pub(crate) use embedding::embedding;
pub use head_loss::{head_loss, head_loss_reference};
pub(crate) use layer_norm::layer_norm;
pub(crate) use linear::linear;
pub use low_rank::low_rank_sum;
pub use operation::{Before, gradients, recomputed, without_gradients};
pub(crate) use product::{Tile, compute_tile};

/// Whether `x` is where and what the operations here work on, and gradients are asked for: it leads to a variable, or it is
/// computed within [`gradients`], where what follows may lead to one.
pub fn is_trained_on_cpu(x: &Tensor) -> bool {
    is_cpu_float(x) && (x.track_op() || operation::is_recording())
}

pub(crate) fn is_cpu_float(x: &Tensor) -> bool {
    x.device().is_cpu() && matches!(x.dtype(), DType::F32 | DType::F64)
}

/// The elements of a contiguous storage.
fn elements<'a, T: Real>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    let all = T::cpu_storage_as_slice(storage)?;
    let range = layout.contiguous_offsets().and_then(|(start, end)| all.get(start..end));
    range.ok_or_else(|| candle_core::Error::RequiresContiguous { op: "an operation of training" }.bt())
}

/// The elements of a contiguous storage, to be changed.
fn elements_mut<'a, T: Real>(storage: &'a mut CpuStorage, layout: &Layout) -> Result<&'a mut [T]> {
    let range = layout.contiguous_offsets();
    let elements = T::slice_mut(storage).zip(range).and_then(|(all, (start, end))| all.get_mut(start..end));
    elements.ok_or_else(|| candle_core::Error::RequiresContiguous { op: "an operation of training" }.bt())
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
