#![doc = include_str!("../README.md")]
//!
//! Source layout: `simd` holds everything that depends on the instruction set, including the matrix kernel in
//! floating point. `threads` runs parallel regions. `tile` stores the results of a tile. Packed weights,
//! attention and the forward and backward passes of training build on these modules.

#![allow(
    clippy::needless_range_loop,
    clippy::manual_memcpy,
    clippy::manual_slice_fill,
    reason = "plain loops are inlined into their instruction set in every profile; iterators and closures may remain calls"
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
mod number_type;
mod packed;
mod random;
mod simd;
mod threads;
mod tile;
mod training;

pub use attention::{Heads, KvMemory, KvSizes, KvSlot, sequence_attention, slot_attention};
pub use epilogue::{Epilogue, Finish, PanelBias};
pub use integer_exponentials::integer_exponentials;
pub use log_softmax::{exponentials, log_sum_exp, relative_entropy};
pub use number_type::{NumberType, UnknownNumberType, uses};
pub use packed::{MatrixBytes, PackError, PackedMatrix, StoredOrder, Strided};
pub use random::{RandomStream, mix_bits};
pub use simd::{Number, rounded_to_nearest};
pub use threads::{map_items, region_count, set_thread_count, thread_count};
pub use training::{
    AdamWStep, AddedScores, Attention, Dropout, ElementFunction, Elementwise, Float, LayerNormGradients,
    LowRank, LowRankGradients, MAX_CHUNK_LOGITS, MatrixView, QUICK_GELU_FACTOR, SparseRows,
};
