//! The arithmetic of a transformer as functions and small layers over candle tensors.
//!
//! Everything runs on every device candle has, keeps gradients, and is tested against PyTorch. Where no gradient is wanted
//! on the CPU, layer norm, attention and products with packed weights take kernels of their own, which are tested against
//! those compositions: `simd` says what differs between processors, `pool` how threads share the work.
//! With the feature `cuda`, `cuda` does the same on NVIDIA GPUs.
//! candle's own fused `LayerNorm` and `softmax_last_dim` cut gradients without an error, so neither is used.
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use gpt2_kernels::Linear;
//!
//! let weight = Tensor::new(&[[1f32, 0., 2.], [0., 1., 0.]], &Device::Cpu)?; // (out 2, in 3)
//! let layer = Linear::new(weight, None)?;
//! let x = Tensor::new(&[[1f32, 2., 3.]], &Device::Cpu)?;
//! assert_eq!(layer.forward(&x)?.to_vec2::<f32>()?, [[7., 2.]]);
//! # Ok::<(), candle_core::Error>(())
//! ```

mod activation;
mod attention;
#[cfg_attr(not(feature = "cuda"), path = "cuda/absent.rs")]
mod cuda;
mod device;
mod dropout;
mod error;
mod fetch;
mod free_memory;
mod layer_norm;
pub mod limits;
mod linear;
mod packed;
mod parallel;
mod parameters;
mod pool;
mod random;
mod simd;
mod step;
mod training;
mod vector_math;

pub use activation::Activation;
pub use attention::{
    KvSlot, WIDEST_SINGLE_QUERY, prefix_attention, prefix_attention_on_gpu, side_by_side, slot_attention,
    window_attention, write_tokens, zeroed_memory,
};
pub use candle_nn::ops::softmax;
pub use cuda::{Recording, prepared};
pub use device::{DeviceError, open_cuda, open_metal, use_tf32};
pub use dropout::dropout;
pub use error::KernelError;
pub use free_memory::free_memory;
pub use layer_norm::LayerNorm;
pub use linear::{Linear, Matrix};
pub use packed::{MatrixBytes, PackedMatrix, StoredFloat, StoredOrder, WeightFormat};
pub use parallel::map_items;
pub use parameters::ParameterSource;
pub use pool::{set_thread_count, thread_count};
pub use random::RandomStream;
pub use step::step_attention;
pub use training::{
    AdamWStep, AttentionDropout, Before, adamw_step, add_positions, causal_attention_reference,
    causal_self_attention, gradients, head_loss, head_loss_reference, is_trained_on_cpu, low_rank_sum,
    recomputed, squared_norm, sum, without_gradients,
};
