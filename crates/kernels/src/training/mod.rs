//! Operations with a backward pass of their own, for training on a CPU in f32 and f64, and most of them on NVIDIA GPUs too.
//!
//! Each has a composition of candle operations beside it, which every other device and type takes, see `composed`, and which
//! the tests compare it with. What is gained: one pass over memory in place of five to ten, no temporaries kept until the
//! backward pass, products and functions in this processor's vectors, and gradients that are added in place. Layer norm,
//! GELU, ReLU, dense products and attention without a cache serve inference too. What is computed on slices is in `candle-gpt2-arithmetic`; the tape takes tensors of any device.

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
pub(crate) use embedding::{embedding, embedding_on_gpu, places};
pub(crate) use float::elements;
pub use head_loss::{head_loss, head_loss_reference};
pub(crate) use layer_norm::{layer_norm, layer_norm_on_gpu};
pub(crate) use linear::{Adapter, FixedWeight, adapted_linear, linear, packed_linear};
pub use operation::{Before, gradients, recomputed};

/// Whether what is computed from `x` runs as in training: it is where and what the operations here work on, and it leads to
/// a variable, or it is computed within [`gradients`] (where what follows may lead to one) or [`without_gradients`](crate::without_gradients) (whose
/// results are those of training, as constants).
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
