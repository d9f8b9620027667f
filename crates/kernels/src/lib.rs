#![doc = include_str!("../README.md")]
//!
//! Map of the source: `layers` checks shapes and picks an implementation. `cpu` has inference kernels. `cuda`
//! has inference and training kernels behind the feature `cuda`. `training` has operations with a backward
//! pass. Tests compare all of them with compositions of candle operations.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod contiguous;
mod cpu;
#[cfg_attr(not(feature = "cuda"), path = "cuda/absent.rs")]
mod cuda;
mod device;
mod device_use;
mod error;
mod kv_dtype;
mod layers;
#[cfg(test)]
mod noise;
mod on_gpu;
mod per_thread;
mod recording;
mod training;
mod widths;

pub use contiguous::contiguous;
pub use device::{DeviceError, open_cuda, open_metal, use_tf32};
pub use device_use::using;
pub use error::{KernelError, carried, carry, message_with_causes};
pub use kv_dtype::{KvDType, tensor_dtype};
pub use layers::{
    AdaptedMatrix, ByOutput, KvMemory, LayerNorm, Linear, Matrix, Packed, ParameterSize, ParameterSource,
    SlotGuard, dropout, prefix_attention_on_gpu, step_attention,
};
pub use on_gpu::{LOSS_ROWS, MAX_SCORES_ON_GPU};
pub use per_thread::{
    Interrupt, check_interrupted, composed, has_cpu_kernels, interruptible, is_interrupted,
    is_without_gradients, without_gradients,
};
pub use recording::{Recording, prepared};
pub use training::{
    Activation, AttentionStage, HeadsAttention, InitialGradients, adamw_step, add, add_positions,
    attention_reference, expect_ids, gradient_norm, gradients, head_loss, head_loss_reference,
    heads_attention, heads_attention_reference, heads_of, recomputed, runs_as_in_training, squared_norm,
};
pub use widths::WIDEST_SINGLE_QUERY;
