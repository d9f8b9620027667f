//! What can be wrong with an attention layer's sizes and inputs.
//!
//! The layers return candle's error type; these travel inside it, and [`carried`](candle_gpt2_kernels::carried) takes them out.

use candle_core::DType;
use thiserror::Error;

use crate::Site;

/// A size or an input that an attention layer cannot work with.
/// [`MultiHeadAttention`](crate::MultiHeadAttention) and the others return it inside candle's error type.
#[derive(Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttentionError {
    /// A size that must be positive is zero.
    #[error("attention: {name} must be at least 1, found 0")]
    ZeroSize {
        /// Which size.
        name: &'static str,
    },
    /// The heads do not divide the width among them.
    #[error(
        "attention: {num_heads} heads do not divide a width of {width}; choose a number of heads that divides it"
    )]
    HeadsDoNotDivideWidth {
        /// Number of heads.
        num_heads: usize,
        /// Width to be divided.
        width: usize,
    },
    /// Two layers that feed each other have different widths.
    #[error("attention: {what} is {found} wide, expected {expected}")]
    WidthMismatch {
        /// Which layer or input.
        what: &'static str,
        /// The width that would fit.
        expected: usize,
        /// The width that was given.
        found: usize,
    },
    /// An observer returned something that cannot take the place of what it saw.
    #[error("{site}: expected {expected:?} in its place, found {found:?}")]
    Replacement {
        /// Where.
        site: Site,
        /// Shape and type of what was there.
        expected: (Vec<usize>, DType),
        /// Shape and type of what was given.
        found: (Vec<usize>, DType),
    },
    /// The tokens do not fit into the cache.
    #[error("key-value cache: {past} tokens held and {added} more do not fit into a capacity of {capacity}")]
    CacheFull {
        /// Tokens the fullest row holds.
        past: usize,
        /// Tokens to be added.
        added: usize,
        /// Tokens the cache can hold for each row.
        capacity: usize,
    },
    /// The cache was made for other sizes.
    #[error("key-value cache: made for (batch, heads, head_dim) {expected:?}, found {found:?}")]
    CacheShape {
        /// Batch, heads and head width of the cache.
        expected: (usize, usize, usize),
        /// Those of the keys.
        found: (usize, usize, usize),
    },
    /// A cache was given to cross-attention.
    #[error(
        "attention: a key-value cache holds a layer's own tokens and cannot be used with a separate memory"
    )]
    CacheWithMemory,
    /// A cache was given to a pass in training.
    #[error("attention: no gradient goes through a key-value cache; train without one")]
    CacheInTraining,
    /// A pass over rows of different lengths has another number of rows than the cache.
    #[error(
        "key-value cache: it has {rows} rows, and the pass has {found}; give a length for each row of the cache"
    )]
    CacheRows {
        /// Rows of the cache.
        rows: usize,
        /// Rows of the pass.
        found: usize,
    },
    /// A mask of packed sequences was given to other tokens.
    #[error("attention: expected texts of {tokens} tokens in all, found {queries} queries and {keys} keys")]
    Rows {
        /// Tokens of the texts.
        tokens: usize,
        /// Queries that were given.
        queries: usize,
        /// Keys that were given.
        keys: usize,
    },
    /// Rows of a cache were given another mask than the causal one, see [`Pass::of_rows`](crate::Pass::of_rows).
    #[error("attention: tokens of several rows of a cache are causal; give `AttentionMask::Causal`")]
    RowsMask,
    /// A mask of packed sequences was given with a cache.
    #[error(
        "attention: `AttentionMask::CausalRows` works without a cache; give `Causal` with `Pass::of_rows`"
    )]
    PackedWithCache,
    /// A pass at positions in memory ([`Pass::at`](crate::Pass::at)) is something else than causal inference with a
    /// cache.
    #[error(
        "attention: a step at positions in memory needs a fused projection, a cache with adjacent rows, the causal mask, no dropout and no observer"
    )]
    NotAStep,
    /// A row to be copied does not exist.
    #[error("key-value cache: there are no rows {rows:?}; it has {held}")]
    NoSuchRow {
        /// The rows that were wanted.
        rows: Vec<usize>,
        /// Rows of the cache.
        held: usize,
    },
    /// A slot of another memory was given to a cache.
    #[error("key-value cache: the slot was taken from another memory; take one from the cache's own")]
    OtherMemory,
    /// A row was cut to more tokens than it holds.
    #[error("key-value cache: cannot keep {kept} tokens of row {row}, which holds {held}")]
    Truncate {
        /// The row.
        row: usize,
        /// Tokens to keep.
        kept: usize,
        /// Tokens held.
        held: usize,
    },
}

/// Refuses sizes of zero: there is no softmax over no keys, and nothing to compute without queries.
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
