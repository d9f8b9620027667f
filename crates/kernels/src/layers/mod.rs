//! The layers and operations of a transformer: each checks shapes and chooses who computes: `training` where gradients are
//! wanted on a CPU, `cpu` and `cuda` where not, else a composition of candle's operations.

mod activation;
mod attention;
mod dropout;
mod layer_norm;
mod linear;
mod matrix;
mod parameters;
mod slots;
mod step;
mod write_tokens;

pub use activation::Activation;
pub use attention::{prefix_attention, prefix_attention_on_gpu, slot_attention, window_attention};
pub use dropout::dropout;
pub use layer_norm::LayerNorm;
pub use linear::Linear;
pub use matrix::{AdaptedMatrix, Matrix};
pub use parameters::ParameterSource;
pub use slots::{side_by_side, zeroed_memory};
pub use step::step_attention;
pub use write_tokens::write_tokens;
