#![doc = include_str!("../README.md")]
//!
//! See [`steps`], [`MultiHeadAttention`] and [`transformer`].
//!
//! Rows are tokens: `softmax(Q Kᵀ / sqrt(d)) V`. Literature whose columns are tokens transposes every matrix:
//! `V softmax(Kᵀ Q / sqrt(d))`. In shapes, `B` is the batch size, `T` the number of query tokens, `S` the
//! number of key tokens, `H` the number of heads, and `D` the width of a head.

#![cfg_attr(docsrs, feature(doc_cfg))]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod cache;
mod error;
mod feed_forward;
mod mask;
mod memory;
mod modules;
mod multi_head;
mod pass;
mod position;
mod projection;
mod scaled_dot_product;
mod site;
pub mod steps;
pub mod transformer;

pub use cache::{KvCache, KvCacheShape};
pub use candle_gpt2_arithmetic::KvSlot;
pub use error::AttentionError;
pub use feed_forward::FeedForward;
pub use mask::AttentionMask;
pub use multi_head::MultiHeadAttention;
pub use pass::{Observer, Pass, Placement};
pub use position::SinusoidalPositions;
pub use projection::{AttentionMemory, HeadWidth, MultiHeadAttentionConfig, ProjectionLayout, QkvProjection};
pub use scaled_dot_product::ScaledDotProduct;
pub use site::{Site, SiteKind};
