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
mod free_memory;
mod kv_dtype;
mod layers;
#[cfg(test)]
mod noise;
mod on_gpu;
mod per_thread;
mod recording;
mod system_pages;
mod training;
mod widths;

#[doc(hidden)]
pub use candle_gpt2_arithmetic::weight_formats;
pub use candle_gpt2_arithmetic::{
    AdamWStep, Dropout, Epilogue, Float, KvSlot, LOGITS_AT_ONCE, MatrixBytes, MatrixView, PackError,
    PackedMatrix, RandomStream, SparseRows, StoredFloat, StoredOrder, Strided, WeightFormat, exponentials,
    integer_exponentials, large_pages, limits, log_sum_exp, map_items, mix_bits, region_count,
    relative_entropy, rounded_to_nearest, set_thread_count, thread_count,
};
pub use candle_nn::ops::softmax;
pub use contiguous::contiguous;
pub use device::{DeviceError, open_cuda, open_metal, use_tf32};
pub use device_use::using;
pub use error::{KernelError, carried, carry};
pub use free_memory::{ProcessMemory, free_memory};
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
pub use system_pages::LargePages;
pub use training::{
    Activation, AttentionStage, Before, HeadsAttention, adamw_step, add, add_positions, attention_reference,
    expect_ids, gradient_norm, gradients, head_loss, head_loss_reference, heads_attention,
    heads_attention_reference, heads_of, recomputed, runs_as_in_training, squared_norm,
};
pub use widths::WIDEST_SINGLE_QUERY;
