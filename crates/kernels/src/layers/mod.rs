//! Layers and operations of a transformer.
//!
//! Each one checks shapes and picks an implementation. It uses `training` if gradients need a backward pass
//! and `cpu` or `cuda` otherwise. If no kernel applies, it falls back to a composition of candle operations.

mod attention;
mod dropout;
mod kv_memory;
mod layer_norm;
mod linear;
mod matrix;
mod modules;
mod parameters;
mod size;
mod step;

pub use attention::prefix_attention_on_gpu;
pub use dropout::dropout;
pub use kv_memory::{KvMemory, SlotGuard};
pub use layer_norm::LayerNorm;
pub use linear::Linear;
pub use matrix::{AdaptedMatrix, Matrix};
pub use parameters::{ByOutput, Packed, ParameterSource};
pub use size::ParameterSize;
pub use step::step_attention;
