//! What can be wrong with a question about a model.

use candle_gpt2::{Site, bounded_message};

/// A question that a model cannot answer. [`Run::new`](crate::Run::new) and the others return it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InterpretError {
    /// No tokens, or too many.
    #[error("the text has {tokens} tokens; the model takes 1 to {n_positions}")]
    Length {
        /// Tokens of the text.
        tokens: usize,
        /// The context of the model.
        n_positions: usize,
    },
    /// A token is none.
    #[error("token {id} is outside the vocabulary of {vocab_size}")]
    UnknownToken {
        /// The token.
        id: u32,
        /// Tokens of the vocabulary.
        vocab_size: usize,
    },
    /// A position is beyond the end of the text.
    #[error("position {position} is beyond the end of the text, whose {tokens} tokens are counted from 0")]
    Position {
        /// The position.
        position: usize,
        /// Tokens of the text.
        tokens: usize,
    },
    /// A block is not there.
    #[error("there is no layer {layer}; the model's {n_layer} layers are counted from 0")]
    Layer {
        /// The block.
        layer: usize,
        /// Blocks of the model.
        n_layer: usize,
    },
    /// A head is not there.
    #[error(
        "there is no head {layer}.{head}; the model has {n_layer} layers of {n_head} heads, counted from 0"
    )]
    Head {
        /// Its block.
        layer: usize,
        /// The head.
        head: usize,
        /// Blocks of the model.
        n_layer: usize,
        /// Heads of a block.
        n_head: usize,
    },
    /// Two texts are compared position by position, and one is longer.
    #[error(
        "the texts have {clean} and {corrupted} tokens; position by position only texts of as many tokens can be compared"
    )]
    Lengths {
        /// Tokens of the one.
        clean: usize,
        /// Tokens of the other.
        corrupted: usize,
    },
    /// Both texts give the same number, so that no part of the difference can be told.
    #[error(
        "both texts give the same value, {value}; there is no difference to explain: give texts that differ in what they predict, or another answer"
    )]
    NoDifference {
        /// The number.
        value: String,
    },
    /// The site has not what is asked for.
    #[error("{site} cannot be used here; {reason}")]
    Site {
        /// The site.
        site: Site,
        /// Why, and what can.
        reason: &'static str,
    },
    /// No feature of the transcoders is active.
    #[error(
        "no feature of the transcoders is active in this text; check that they are of this model, and read what they were trained on"
    )]
    NothingActive,
    /// An attribution graph would take too much memory.
    #[error(
        "the graph of {features} active features takes about {needed} MiB, more than the limit of {limit} MiB; \
         lower the number of feature nodes, allow more memory, or give a shorter text"
    )]
    GraphMemory {
        /// Features that are active.
        features: usize,
        /// What the graph takes, in MiB.
        needed: u64,
        /// What it may take, in MiB.
        limit: u64,
    },
    /// What was given does not fit together otherwise.
    #[error("{}", bounded_message(.0))]
    Mismatch(String),
    /// The model could not compute it.
    #[error(transparent)]
    Compute(#[from] candle_core::Error),
}

impl InterpretError {
    /// Whether the question is wrong, not the computing.
    pub fn is_usage(&self) -> bool {
        !matches!(self, Self::Compute(_))
    }
}

/// A result of this crate.
pub(crate) type Result<T> = std::result::Result<T, InterpretError>;
