//! Errors returned by the analyses.

use candle_gpt2::{Diagnose, ErrorKind, Site, bounded_message};

/// Error returned by [`Run::new`](crate::Run::new) and the analyses.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InterpretError {
    /// The sequence is empty or exceeds the model's context.
    #[error("the text has {tokens} tokens; the model accepts 1 to {n_positions} tokens")]
    Length {
        /// Number of tokens in the sequence.
        tokens: usize,
        /// Context size of the model.
        n_positions: usize,
    },
    /// A token id is outside the vocabulary.
    #[error("token {id} is outside the vocabulary of {vocab_size} tokens")]
    UnknownToken {
        /// The token id.
        id: u32,
        /// Vocabulary size.
        vocab_size: usize,
    },
    /// A position is past the end of the sequence.
    #[error("position {position} (counted from 0) is out of range; the text has {tokens} tokens")]
    Position {
        /// The position.
        position: usize,
        /// Number of tokens in the sequence.
        tokens: usize,
    },
    /// A layer index is out of range.
    #[error("layer {layer} is out of range; the model has {n_layer} layers, counted from 0")]
    Layer {
        /// The layer index.
        layer: usize,
        /// Number of layers in the model.
        n_layer: usize,
    },
    /// A head index is out of range.
    #[error(
        "head {layer}.{head} is out of range; the model has {n_layer} layers of {n_head} heads, \
         counted from 0"
    )]
    Head {
        /// Layer of the head.
        layer: usize,
        /// Index of the head within its layer.
        head: usize,
        /// Number of layers in the model.
        n_layer: usize,
        /// Number of heads per layer.
        n_head: usize,
    },
    /// The prompts differ in length but must be compared position by position.
    #[error(
        "the texts have {clean} and {corrupted} tokens; a comparison by position needs texts of equal length"
    )]
    Lengths {
        /// Number of tokens in the clean prompt.
        clean: usize,
        /// Number of tokens in the corrupted prompt.
        corrupted: usize,
    },
    /// The two prompts have the same metric, so there is no difference to attribute.
    #[error(
        "both texts have the same metric, {value}, so there is nothing to explain; use texts with different \
         predictions, or another answer"
    )]
    NoDifference {
        /// The metric that the two prompts share.
        value: String,
    },
    /// The hook point does not support the operation.
    #[error("hook point {site}: {reason}")]
    Site {
        /// The hook point.
        site: Site,
        /// Reason, and the supported hook points.
        reason: &'static str,
    },
    /// No transcoder feature is active.
    #[error(
        "no transcoder feature is active in this text; check that the transcoders were trained on this model \
         and this input"
    )]
    NothingActive,
    /// The attribution graph would exceed the memory limit.
    #[error(
        "the graph of {features} active features takes about {needed} MiB, more than the limit of {limit} MiB; \
         lower the number of feature nodes, allow more memory, or use a shorter text"
    )]
    GraphMemory {
        /// Number of active features.
        features: usize,
        /// Memory that the graph needs, in MiB.
        needed: u64,
        /// Memory limit, in MiB.
        limit: u64,
    },
    /// The arguments are inconsistent in some other way.
    #[error("{}", bounded_message(.0))]
    Mismatch(String),
    /// The model's computation failed.
    #[error(transparent)]
    Compute(#[from] candle_core::Error),
}

impl InterpretError {
    /// Whether the arguments are at fault rather than the computation.
    pub fn is_usage(&self) -> bool {
        self.kind().is_usage()
    }
}

impl Diagnose for InterpretError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Compute(_) => ErrorKind::Failed,
            _ => ErrorKind::Usage,
        }
    }
}

/// Result type of this crate.
pub(crate) type Result<T> = std::result::Result<T, InterpretError>;
