//! Operations with their own backward pass, for training on a CPU in f32 and f64.
//!
//! Most of them also have kernels for NVIDIA GPUs. Each operation has a composition of candle operations (see
//! `composed`) for all other devices and dtypes. Tests compare the composition with the kernel.
//!
//! The kernels make one pass over memory instead of five to ten and keep no temporaries until the backward
//! pass. They use the CPU's vector instructions and add gradients in place. Layer norm, GELU, ReLU, dense
//! products and attention without a cache also serve inference. `candle-gpt2-arithmetic` has the computations
//! on slices. The tape accepts tensors of any device.

mod activation;
mod adamw;
mod attention;
mod composed;
mod elementwise;
mod embedding;
mod float;
mod head_loss;
mod layer_norm;
mod linear;
mod operation;

use candle_core::Tensor;

pub(crate) use crate::per_thread::has_cpu_kernels;
use crate::per_thread::has_tape;

pub use activation::Activation;
pub use adamw::{adamw_step, gradient_norm, squared_norm};
pub use attention::{
    AttentionStage, HeadsAttention, attention_reference, heads_attention, heads_attention_reference, heads_of,
};
pub(crate) use composed::composed_linear;
pub use elementwise::add;
pub(crate) use elementwise::apply_dropout;
pub use embedding::{add_positions, expect_ids};
pub(crate) use embedding::{embedding, embedding_on_gpu, row_indices};
pub(crate) use float::elements;
pub use head_loss::{head_loss, head_loss_reference};
pub(crate) use layer_norm::{layer_norm, layer_norm_on_gpu};
pub(crate) use linear::{Adapter, FixedWeight, adapted_linear, linear, packed_linear};
pub use operation::{InitialGradients, gradients, recomputed};

/// Whether computations on `x` run as in training.
///
/// `x` must be f32 or f64 on the CPU, outside [`composed`](crate::composed). It must also meet one of these
/// conditions:
///
/// - It depends on a variable.
/// - The call is inside [`gradients`], where later values may depend on a variable.
/// - The call is inside [`without_gradients`](crate::without_gradients), which computes the same values as
///   training, but as constants.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use candle_gpt2_kernels::runs_as_in_training;
///
/// let x = Var::zeros(3, DType::F32, &Device::Cpu)?;
/// assert!(runs_as_in_training(&x));
/// assert!(!runs_as_in_training(&x.as_tensor().detach()));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn runs_as_in_training(x: &Tensor) -> bool {
    has_cpu_kernels(x) && (x.track_op() || has_tape())
}
