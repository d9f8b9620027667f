//! Errors in a model's configuration and inputs.

use candle_core::DType;
use thiserror::Error;

use crate::{bounded_message, excerpt};

/// Error for a `config.json` that is invalid or requires unsupported features.
///
/// [`Gpt2Config::from_json`](crate::Gpt2Config::from_json) returns it.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// The text is not JSON.
    #[error("not valid JSON: {}", bounded_message(.0))]
    NotJson(String),
    /// The text is a Git LFS pointer, which replaces a file that Git LFS stores.
    #[error(
        "a Git LFS pointer in place of the file; run `git lfs pull` in its folder, or download the file itself"
    )]
    Pointer,
    /// The text is JSON, but not an object.
    #[error("expected a JSON object, found {found}")]
    NotAnObject {
        /// JSON type of the value.
        found: &'static str,
    },
    /// A required size is missing.
    #[error("the key `{key}` is missing{aliases}", aliases = bounded_message(.aliases))]
    MissingKey {
        /// Name of the key.
        key: &'static str,
        /// Accepted aliases, as part of the message; empty if there are none.
        aliases: String,
    },
    /// A value has the wrong type or is out of range.
    #[error("`{key}`: expected {expected}, found {found}", key = excerpt(.key), expected = bounded_message(.expected), found = bounded_message(.found))]
    WrongValue {
        /// Key, as spelled in the file.
        key: String,
        /// Description of valid values.
        expected: String,
        /// Value in the file.
        found: String,
    },
    /// A key and its alias disagree.
    #[error("`{key}` is {value}, but its alias `{alias}` is {other}; remove one of them", key = excerpt(.key), value = bounded_message(.value), alias = excerpt(.alias), other = bounded_message(.other))]
    Conflict {
        /// Name of the key.
        key: String,
        /// Value of the key.
        value: String,
        /// Name of the alias.
        alias: String,
        /// Value of the alias.
        other: String,
    },
    /// The number of heads does not divide the hidden size.
    #[error("`n_head` = {n_head} does not divide `n_embd` = {n_embd}; every head needs the same width")]
    HeadsDoNotDivideWidth {
        /// Number of heads.
        n_head: usize,
        /// Hidden size.
        n_embd: usize,
    },
    /// The parameters exceed the address space of this machine.
    #[error("the model exceeds this machine's address space; choose smaller sizes")]
    TooLarge,
    /// The file requires arithmetic that this crate does not implement.
    #[error("`{key}` = {found} is not supported: {reason}", key = excerpt(.key), found = bounded_message(.found), reason = bounded_message(.reason))]
    Unsupported {
        /// Name of the key.
        key: String,
        /// Value of the key.
        found: String,
        /// Reason, and alternatives.
        reason: String,
    },
    /// No preset has this name.
    #[error("unknown preset `{found}`; the presets are {known}", found = bounded_message(.found), known = bounded_message(.known))]
    UnknownPreset {
        /// Unknown name.
        found: String,
        /// Names of all presets.
        known: String,
    },
}

/// Error for invalid model input, wrapped in candle's error type.
///
/// Most of these errors come from [`Gpt2LMHeadModel::forward_with`](crate::Gpt2LMHeadModel::forward_with).
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModelError {
    /// The cache belongs to a different model.
    #[error("the cache has {found} blocks, but the model has {expected}; create a cache for this model")]
    CacheLayers {
        /// Number of blocks in the model.
        expected: usize,
        /// Number of blocks in the cache.
        found: usize,
    },
    /// The pass starts or stops at a block that does not exist.
    #[error("block {layer} is out of range; the model has {n_layer} blocks, counted from 0")]
    NoSuchBlock {
        /// Index of the block.
        layer: usize,
        /// Number of blocks in the model.
        n_layer: usize,
    },
    /// Passes over one cache stop at different blocks.
    #[error(
        "every pass over a cache must stop at the same block, after running at least one block; use a new cache"
    )]
    StopWithCache,
    /// The pool has no capacity for the keys and values of a row.
    #[error(
        "no memory left for the keys and values of {tokens} more tokens; request fewer tokens or a larger cache"
    )]
    NoCacheRoom {
        /// Number of tokens in the row.
        tokens: usize,
    },
    /// The cache does not have this row.
    #[error("key-value cache: row {row} is out of range; the cache has {held} rows")]
    NoSuchRow {
        /// Index of the row.
        row: usize,
        /// Number of rows in the cache.
        held: usize,
    },
    /// An earlier change to the cache failed in some of its layers.
    #[error(
        "an earlier change to this cache failed partway, so its layers are inconsistent; create a new cache"
    )]
    BrokenCache,
    /// Rows cannot move into a cache of a different pool.
    #[error("rows can only move between caches of the same pool; copy them instead")]
    OtherPool,
    /// The configuration has fewer blocks than the parameters.
    #[error(
        "`n_layer` is {n_layer}, but the parameters include `h.{n_layer}`; set `n_layer` to the number of blocks, or run fewer blocks with `Pass::stopping_at`"
    )]
    MoreBlocks {
        /// Configured number of blocks.
        n_layer: usize,
    },
    /// A part of a model does not match the configuration.
    #[error("{part}: expected {expected:?}, found {found:?}")]
    Part {
        /// Name of the part.
        part: &'static str,
        /// Shape or number in the configuration.
        expected: Vec<usize>,
        /// Shape or number of the part.
        found: Vec<usize>,
    },
    /// The output of a replaced attention or MLP has the wrong shape.
    #[error(
        "a layer in place of attention or MLP must return the shape of its input, {expected:?}; found {found:?}"
    )]
    OwnLayer {
        /// Shape of the residual stream.
        expected: Vec<usize>,
        /// Shape of the output.
        found: Vec<usize>,
    },
    /// Requested logits are past the last token.
    #[error("logits of {count} tokens from token {first} are out of range; the input has {tokens} tokens")]
    NoSuchLogits {
        /// Index of the first token.
        first: usize,
        /// Number of tokens.
        count: usize,
        /// Number of tokens in the input.
        tokens: usize,
    },
    /// The input has no tokens.
    #[error("the model needs at least one token")]
    NoTokens,
    /// A token ID is outside the vocabulary.
    #[error("token {id} is outside the vocabulary of {vocab_size} tokens")]
    NoSuchToken {
        /// ID of the token, which may be negative.
        id: i64,
        /// Vocabulary size.
        vocab_size: usize,
    },
    /// The configuration belongs to a model with a different head.
    #[error("expected a configuration for {expected}, found one for {found}")]
    OtherHead {
        /// Transformers class that was requested.
        expected: &'static str,
        /// Transformers class of the configuration.
        found: &'static str,
    },
    /// A summary token is out of range, or there is not exactly one per row.
    #[error("summary tokens: expected {expected}, found {found}", found = bounded_message(.found), expected = bounded_message(.expected))]
    NoSummary {
        /// Description of the input.
        found: String,
        /// Description of valid input.
        expected: String,
    },
    /// Encoder hidden states were passed to a model without cross-attention.
    #[error(
        "the model has no cross-attention, so it cannot attend to encoder hidden states; \
         omit them, or use a model with `add_cross_attention`"
    )]
    NoCrossAttention,
    /// Encoder hidden states have the wrong shape or dtype.
    #[error(
        "encoder hidden states: expected floating-point numbers of shape (1, S, {width}){}, found {found:?}",
        if *rows > 1 { format!(" or ({rows}, S, {width})") } else { String::new() }
    )]
    EncoderStates {
        /// Number of rows in the pass.
        rows: usize,
        /// Hidden size of the model.
        width: usize,
        /// Shape and dtype of the states.
        found: (Vec<usize>, DType),
    },
    /// A row is empty or exceeds the context length.
    #[error("row {row} (counted from 0) has {tokens} tokens; expected 1 to {n_positions}")]
    RowLength {
        /// Index of the row.
        row: usize,
        /// Number of tokens in the row.
        tokens: usize,
        /// Number of positions that the model supports.
        n_positions: usize,
    },
    /// The token tensor of a pass over packed rows does not match the rows.
    #[error("packed rows: expected token IDs of shape (1, {expected}), found shape {found:?}")]
    NotTheRows {
        /// Number of tokens in all rows.
        expected: usize,
        /// Shape of the token tensor.
        found: (usize, usize),
    },
    /// The tokens do not fit into the context.
    #[error("{past} cached and {added} new tokens exceed the context length of {n_positions} tokens")]
    ContextExceeded {
        /// Number of cached tokens.
        past: usize,
        /// Number of new tokens.
        added: usize,
        /// Number of positions that the model supports.
        n_positions: usize,
    },
}

impl From<ModelError> for candle_core::Error {
    fn from(error: ModelError) -> Self {
        candle_gpt2_kernels::carry(error)
    }
}

impl From<ConfigError> for candle_core::Error {
    fn from(error: ConfigError) -> Self {
        candle_gpt2_kernels::carry(error)
    }
}
