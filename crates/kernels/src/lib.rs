#![doc = include_str!("../README.md")]
//!
//! In the source, `layers` chooses who computes: `cpu` has kernels for inference, `cuda`, with the feature of that name, for
//! inference and training, and `training` has operations with a way back; they are tested against compositions of candle's operations.

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
pub use error::{KernelError, carried, carry};
pub use kv_dtype::{KvDType, UnknownKvDType};
pub use layers::{
    AdaptedMatrix, ByOutput, DEVIATION, KvMemory, LayerNorm, Linear, Matrix, ParameterSize, ParameterSource,
    TakenSlot, dropout, prefix_attention_on_gpu, step_attention,
};
pub use on_gpu::{LOSS_ROWS, MOST_SCORES_ON_GPU};
pub use per_thread::{
    Interrupt, check_interrupted, composed, has_cpu_kernels, interruptible, is_interrupted, without_gradients,
};
pub use recording::{Recording, prepared};
pub use training::{
    Activation, AttentionStage, Before, HeadsAttention, adamw_step, add, add_positions, attention_reference,
    expect_ids, gradient_norm, gradients, head_loss, head_loss_reference, heads_attention,
    heads_attention_reference, heads_of, recomputed, runs_as_in_training, squared_norm,
};
pub use widths::WIDEST_SINGLE_QUERY;
