//! Errors from attention layers: invalid sizes and inputs.
//!
//! The layers return these inside candle's error type; [`carried`](candle_gpt2_kernels::carried) extracts
//! them.

use candle_core::DType;
use thiserror::Error;

use crate::Site;

/// Invalid size or input of an attention layer.
///
/// [`MultiHeadAttention`](crate::MultiHeadAttention) and the other layers return it inside candle's error
/// type.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttentionError {
    /// A size that must be positive is zero.
    #[error("attention: the {name} must be at least 1, found 0")]
    ZeroSize {
        /// Name of the size.
        name: &'static str,
    },
    /// The number of heads does not divide the width.
    #[error(
        "attention: the width {width} is not divisible by the number of heads, {num_heads}; \
         choose a number of heads that divides the width"
    )]
    HeadsDoNotDivideWidth {
        /// Number of heads.
        num_heads: usize,
        /// Width to divide among the heads.
        width: usize,
    },
    /// The widths of two connected layers differ.
    #[error("attention: {what} has width {found}, expected {expected}")]
    WidthMismatch {
        /// Name of the layer or input.
        what: &'static str,
        /// Expected width.
        expected: usize,
        /// Actual width.
        found: usize,
    },
    /// The observer's replacement does not match the original value.
    #[error("{site}: expected a replacement of shape and dtype {expected:?}, found {found:?}")]
    Replacement {
        /// Hook point of the value.
        site: Site,
        /// Shape and dtype of the original value.
        expected: (Vec<usize>, DType),
        /// Shape and dtype of the replacement.
        found: (Vec<usize>, DType),
    },
    /// The tokens do not fit into the cache.
    #[error("key-value cache: {past} cached and {added} new tokens exceed the capacity of {capacity} tokens")]
    CacheFull {
        /// Number of tokens in the row.
        past: usize,
        /// Number of tokens to add.
        added: usize,
        /// Capacity of the row in tokens.
        capacity: usize,
    },
    /// The shape of the keys does not match the cache.
    #[error("key-value cache: expected keys with (batch, heads, head_dim) {expected:?}, found {found:?}")]
    CacheShape {
        /// Batch size, number of heads and head width of the cache.
        expected: (usize, usize, usize),
        /// Batch size, number of heads and head width of the keys.
        found: (usize, usize, usize),
    },
    /// Cross-attention was called with a cache.
    #[error(
        "attention: a key-value cache is only for self-attention and cannot be used with a separate memory"
    )]
    CacheWithMemory,
    /// A training pass was called with a cache.
    #[error("attention: training with a key-value cache is not supported; train without a cache")]
    CacheInTraining,
    /// Queries, keys or values with gradients were combined with a cache.
    #[error(
        "attention: the input or a projection tracks gradients, which do not pass through a key-value cache; \
         call the layer inside `without_gradients`, or without a cache"
    )]
    CacheWithGradients,
    /// The input of the layer has the wrong shape.
    #[error("attention: expected {what} of shape ({axes}, {width}), found {found:?}")]
    InputShape {
        /// Name of the input.
        what: &'static str,
        /// Axes before the last one.
        axes: &'static str,
        /// Width of the last axis.
        width: usize,
        /// Actual shape.
        found: Vec<usize>,
    },
    /// An additive mask is not floating-point.
    #[error(
        "attention: expected a floating-point mask, which is added to the scores, found dtype {found:?}; \
         convert ones and zeros with `AttentionMask::hiding`, in which ones hide keys"
    )]
    MaskDType {
        /// Dtype of the mask.
        found: DType,
    },
    /// An additive mask does not broadcast to the attention scores.
    #[error(
        "attention: expected a mask that broadcasts to (B, H, {queries}, {keys}), found shape {found:?}; \
         reshape a mask of keys (B, {keys}) to (B, 1, 1, {keys})"
    )]
    MaskShape {
        /// Number of queries.
        queries: usize,
        /// Number of keys, including cached ones.
        keys: usize,
        /// Shape of the mask.
        found: Vec<usize>,
    },
    /// The number of packed rows in the pass differs from the number of rows in the cache.
    #[error(
        "key-value cache: the cache has {rows} rows, but the pass has {found}; \
         pass one length for each row of the cache"
    )]
    CacheRows {
        /// Number of rows in the cache.
        rows: usize,
        /// Number of rows in the pass.
        found: usize,
    },
    /// The total number of tokens in packed rows differs from the number of queries or keys.
    #[error(
        "attention: the packed rows have {tokens} tokens in total, but there are {queries} queries and \
         {keys} keys"
    )]
    Rows {
        /// Total number of tokens in the packed rows.
        tokens: usize,
        /// Number of queries.
        queries: usize,
        /// Number of keys.
        keys: usize,
    },
    /// Packed rows were used with a cache but without the causal mask.
    ///
    /// See [`Pass::of_rows`](crate::Pass::of_rows).
    #[error("attention: packed rows with a cache require a causal mask; use `AttentionMask::Causal`")]
    RowsMask,
    /// The mask for packed rows was combined with a cache.
    #[error(
        "attention: `AttentionMask::CausalRows` cannot be combined with a cache; use `Causal` with `Pass::of_rows`"
    )]
    PackedWithCache,
    /// A pass used [`Pass::at`](crate::Pass::at) outside of causal inference with a cache.
    #[error(
        "attention: a step with positions in device memory requires a fused projection, a cache with adjacent rows \
         and the causal mask; dropout and observers are not supported"
    )]
    NotAStep,
    /// A row does not exist in the cache.
    #[error("key-value cache: rows {rows:?} are out of range; the cache has {held} rows")]
    NoSuchRow {
        /// Requested rows.
        rows: Vec<usize>,
        /// Number of rows in the cache.
        held: usize,
    },
    /// The slot belongs to a `KvMemory` other than the cache's.
    #[error(
        "key-value cache: the slot belongs to a different `KvMemory`; use a slot from the cache's own memory"
    )]
    OtherMemory,
    /// A row was truncated to more tokens than it has.
    #[error("key-value cache: cannot keep {kept} tokens of row {row}; the row has {held} tokens")]
    Truncate {
        /// Index of the row.
        row: usize,
        /// Number of tokens to keep.
        kept: usize,
        /// Number of tokens in the row.
        held: usize,
    },
}

/// Rejects sizes of zero.
///
/// A softmax over zero keys is undefined, and without queries there is nothing to compute.
pub(crate) fn expect_sizes(sizes: &[(&'static str, usize)]) -> candle_core::Result<()> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((name, _)) => Err(AttentionError::ZeroSize { name }.into()),
        None => Ok(()),
    }
}

impl From<AttentionError> for candle_core::Error {
    fn from(error: AttentionError) -> Self {
        candle_gpt2_kernels::carry(error)
    }
}
