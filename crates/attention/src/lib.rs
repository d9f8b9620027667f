//! Attention layers, from one dot product to [`MultiHeadAttention`] with a key-value cache.
//!
//! Read it in this order: [`steps`] builds causal attention the way a textbook does, [`MultiHeadAttention`] is the
//! layer that models use, [`transformer`] stacks it into the original encoder and decoder. Rows are tokens
//! throughout, `softmax(Q Kᵀ / sqrt(d)) V`; a text that writes tokens as columns, `V softmax(Kᵀ Q / sqrt(d))`, means
//! the same with every matrix transposed.
//!
//! Letters in shapes: `B` batch, `T` query tokens, `S` key tokens, `H` heads, `D` width of a head.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use gpt2_attention::{AttentionMask, MultiHeadAttention, MultiHeadAttentionConfig};
//!
//! let parameters = VarMap::new();
//! let vb = VarBuilder::from_varmap(&parameters, DType::F32, &Device::Cpu);
//! let layer = MultiHeadAttention::load(&MultiHeadAttentionConfig::new(768, 768, 12), &vb)?;
//! assert_eq!(layer.parameter_count(), 2_360_064);
//!
//! let x = Tensor::zeros((1, 4, 768), DType::F32, &Device::Cpu)?;
//! assert_eq!(layer.forward(&x, &AttentionMask::Causal)?.dims(), [1, 4, 768]);
//! # Ok::<(), candle_core::Error>(())
//! ```

#![cfg_attr(docsrs, feature(doc_cfg))]

mod cache;
mod error;
mod feed_forward;
mod mask;
mod multi_head;
mod pass;
mod position;
mod scaled_dot_product;
mod site;
pub mod steps;
pub mod transformer;

pub use cache::{KvCache, KvCacheShape};
pub use error::AttentionError;
pub use feed_forward::FeedForward;
pub use gpt2_kernels::{Before, KvDType, KvMemory, KvSlot, gradients, without_gradients};
pub use mask::AttentionMask;
pub use multi_head::{
    AttentionMemory, HeadWidth, MultiHeadAttention, MultiHeadAttentionConfig, ProjectionLayout, QkvProjection,
};
pub use pass::{Observer, Pass};
pub use position::SinusoidalPositions;
pub use scaled_dot_product::ScaledDotProduct;
pub use site::{Site, SiteError, SiteKind};
