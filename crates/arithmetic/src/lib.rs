#![doc = include_str!("../README.md")]
//!
//! In the source, `simd` says what differs between processors, `threads` how they share work, `tile` is the one matrix kernel in
//! f32; packed weights, attention, and the forward and backward passes of training are built on them.

#![allow(
    clippy::needless_range_loop,
    clippy::manual_memcpy,
    clippy::manual_slice_fill,
    reason = "loops over numbers are inlined into their instruction set in every profile; iterators and closures may stay calls"
)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod attention;
mod byte_group;
mod element;
mod epilogue;
mod fetch;
mod integer_exponentials;
pub mod large_pages;
pub mod limits;
mod log_softmax;
mod packed;
mod random;
mod simd;
mod threads;
mod tile;
mod training;

pub use attention::{Heads, KvFormat, KvMemory, KvSizes, KvSlot, slot_attention, text_attention};
pub use epilogue::{Epilogue, Finish, PanelBias};
pub use integer_exponentials::integer_exponentials;
pub use log_softmax::{exponentials, log_sum_exp, relative_entropy};
pub use packed::{MatrixBytes, PackError, PackedMatrix, StoredFloat, StoredOrder, Strided, WeightFormat};
pub use random::{RandomStream, mix_bits};
pub use simd::{Number, rounded_to_nearest};
pub use threads::{map_items, region_count, set_thread_count, thread_count};
pub use training::{
    AdamWStep, AddedScores, Attention, Dropout, ElementFunction, Elementwise, Float, LOGITS_AT_ONCE,
    LayerNormGradients, LowRank, LowRankGradients, MatrixView, SparseRows,
};
