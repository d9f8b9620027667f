//! What can be wrong with a configuration, or with the tokens given to a model.

use candle_core::DType;
use thiserror::Error;

use crate::{bounded_message, excerpt};

/// A `config.json` that does not describe a GPT-2 this crate can compute exactly.
/// [`Gpt2Config::from_json`](crate::Gpt2Config::from_json) returns it.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// The text is not JSON.
    #[error("not valid JSON: {}", bounded_message(.0))]
    NotJson(String),
    /// The text is what Git leaves in place of a file that Git LFS holds.
    #[error(
        "a Git LFS pointer in place of the file; run `git lfs pull` in its folder, or download the file itself"
    )]
    Pointer,
    /// The text is JSON, but not an object.
    #[error("expected a JSON object, found {found}")]
    NotAnObject {
        /// The kind of value found.
        found: &'static str,
    },
    /// A size that cannot be guessed is absent.
    #[error("the key `{key}` is missing{aliases}", aliases = bounded_message(.aliases))]
    MissingKey {
        /// The key.
        key: &'static str,
        /// The other names it may have, in words; empty if it has none.
        aliases: String,
    },
    /// A value is of another kind than its key needs.
    #[error("`{key}`: expected {expected}, found {found}", key = excerpt(.key), expected = bounded_message(.expected), found = bounded_message(.found))]
    WrongValue {
        /// The key, as the file spells it.
        key: String,
        /// What the key needs.
        expected: String,
        /// What the file has.
        found: String,
    },
    /// A key and its alias disagree.
    #[error("`{key}` is {value}, but its alias `{alias}` is {other}; remove one of them", key = excerpt(.key), value = bounded_message(.value), alias = excerpt(.alias), other = bounded_message(.other))]
    Conflict {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// The alias.
        alias: String,
        /// The alias's value.
        other: String,
    },
    /// The heads do not divide the width.
    #[error("`n_head` = {n_head} does not divide `n_embd` = {n_embd}; every head needs the same width")]
    HeadsDoNotDivideWidth {
        /// Number of heads.
        n_head: usize,
        /// Width.
        n_embd: usize,
    },
    /// The parameters are more than this machine can address.
    #[error("the sizes make a model that is too large for this machine's addresses; take a smaller one")]
    TooLarge,
    /// The file asks for arithmetic that this crate does not have.
    #[error("`{key}` = {found} is not supported: {reason}", key = excerpt(.key), found = bounded_message(.found), reason = bounded_message(.reason))]
    Unsupported {
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// Why, and what would be.
        reason: String,
    },
    /// No preset has this name.
    #[error("unknown preset `{found}`; the presets are {known}", found = bounded_message(.found), known = bounded_message(.known))]
    UnknownPreset {
        /// The name.
        found: String,
        /// All names.
        known: String,
    },
}

/// Tokens that a model cannot take. It travels inside candle's error type.
/// [`Gpt2LMHeadModel::forward_with`](crate::Gpt2LMHeadModel::forward_with) is where most come from.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModelError {
    /// The cache was made for another model.
    #[error("the cache is for {found} blocks, the model has {expected}")]
    CacheLayers {
        /// Blocks of the model.
        expected: usize,
        /// Blocks of the cache.
        found: usize,
    },
    /// The pass is to begin at a block that is not there.
    #[error("there is no block {layer}; the model's {n_layer} blocks are counted from 0")]
    NoSuchBlock {
        /// The block.
        layer: usize,
        /// Blocks of the model.
        n_layer: usize,
    },
    /// Passes with one cache are to stop at different blocks.
    #[error(
        "passes with one cache all stop at the same block, not before the first: in the others the cache lacks tokens; use a new cache"
    )]
    StopWithCache,
    /// There is no room for the keys and values of a row.
    #[error("no room for the keys and values of {tokens} more tokens; ask for fewer, or for more memory")]
    NoCacheRoom {
        /// Tokens of the row.
        tokens: usize,
    },
    /// A row of a cache does not exist.
    #[error("key-value cache: there is no row {row}; it has {held}")]
    NoSuchRow {
        /// The row, counted from 0.
        row: usize,
        /// Rows of the cache.
        held: usize,
    },
    /// A change of a cache ended with an error in some of its layers.
    #[error(
        "the cache was left halfway by a change that failed before, so its rows no longer belong together; make a new one"
    )]
    BrokenCache,
    /// Rows are to move into a cache that has other memory.
    #[error("rows move between caches of one pool only; copy them")]
    OtherPool,
    /// There are no tokens.
    #[error("the model needs at least one token")]
    NoTokens,
    /// The configuration is that of a model with another head.
    #[error("expected the configuration of a {expected}, found that of a {found}")]
    OtherHead {
        /// The class of transformers that was to be loaded.
        expected: &'static str,
        /// That of the configuration.
        found: &'static str,
    },
    /// The token of a row that is to be summarised does not exist, or there is not one for each row.
    #[error("{found} cannot be summarised: {expected}", found = bounded_message(.found), expected = bounded_message(.expected))]
    NoSummary {
        /// What was given.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// Encoder hidden states were given to a model that cannot attend to them.
    #[error(
        "the model has no cross-attention, so it cannot attend to encoder hidden states; leave them out, or take a model with `add_cross_attention`"
    )]
    NoCrossAttention,
    /// Encoder hidden states do not fit.
    #[error(
        "encoder hidden states: expected floating-point numbers of shape (1, S, {width}){}, found {found:?}",
        if *rows > 1 { format!(" or ({rows}, S, {width})") } else { String::new() }
    )]
    EncoderStates {
        /// Rows of the pass.
        rows: usize,
        /// Width of the model.
        width: usize,
        /// Shape and type of what was given.
        found: (Vec<usize>, DType),
    },
    /// A row has no token, or more than the context has positions.
    #[error("row {row}, counted from 0, has {tokens} tokens; a row takes from 1 to {n_positions}")]
    RowLength {
        /// The row, counted from 0.
        row: usize,
        /// Its tokens.
        tokens: usize,
        /// Positions of the model.
        n_positions: usize,
    },
    /// The tokens of a pass over rows are others than those of the rows.
    #[error("the rows of the pass are one text of {expected} tokens, found (texts, tokens) {found:?}")]
    NotTheRows {
        /// Tokens of all rows.
        expected: usize,
        /// Texts and tokens that were given.
        found: (usize, usize),
    },
    /// The tokens do not fit into the context.
    #[error("{past} tokens before and {added} new ones do not fit into a context of {n_positions} positions")]
    ContextExceeded {
        /// Tokens in the cache.
        past: usize,
        /// Tokens to be added.
        added: usize,
        /// Positions of the model.
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
