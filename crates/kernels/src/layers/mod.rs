//! The layers and operations of a transformer: each checks shapes and chooses who computes: `training` if a kernel
//! has a way back, `cpu` and `cuda` if not, else a composition of candle's operations.

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
pub use kv_memory::{KvMemory, TakenSlot};
pub use layer_norm::LayerNorm;
pub use linear::Linear;
pub use matrix::{AdaptedMatrix, Matrix};
pub use parameters::{ByOutput, DEVIATION, ParameterSource};
pub use size::ParameterSize;
pub use step::step_attention;
