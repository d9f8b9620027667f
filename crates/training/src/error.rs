//! Why a training cannot start or go on: each message says what was found and what to do.

use std::path::PathBuf;

use gpt2_weights::WeightsError;
use thiserror::Error;

/// A training that cannot start or go on.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TrainingError {
    /// A number of the training is out of its range.
    #[error("{option}: expected {expected}, found {found}")]
    OptionOutOfRange {
        /// The number's name.
        option: &'static str,
        /// Its range.
        expected: String,
        /// What was given.
        found: String,
    },
    /// A data file cannot be trained on.
    #[error("{path}: {what}")]
    Data {
        /// The file.
        path: PathBuf,
        /// Why, and what to do.
        what: String,
    },
    /// There are fewer tokens than one window takes.
    #[error(
        "the {part} data has {found} tokens, and one window of the context takes {needed}; give more text, or a shorter --context"
    )]
    TooFewTokens {
        /// Which part of the data.
        part: &'static str,
        /// Its tokens.
        found: usize,
        /// Tokens that one window takes.
        needed: usize,
    },
    /// A token of the data is not in the model's vocabulary.
    #[error(
        "the tokenizer does not belong to this model: it gives the token id {id}, and the vocabulary has {vocab_size} tokens; name the model's own with --tokenizer"
    )]
    Vocabulary {
        /// The token.
        id: u32,
        /// Tokens of the vocabulary.
        vocab_size: usize,
    },
    /// The loss or the gradient is not a number.
    #[error(
        "step {step}: the {what} is not a number; lower --lr, or clip with --grad-clip{}",
        .last_checkpoint.as_ref().map_or(String::new(), |path| format!("; the last good checkpoint is {}", path.display()))
    )]
    NotFinite {
        /// The step.
        step: u64,
        /// Loss or gradient.
        what: &'static str,
        /// Where the last saved state is.
        last_checkpoint: Option<PathBuf>,
    },
    /// A parameter got no gradient: a mistake in an operation.
    #[error("the parameter `{name}` got no gradient")]
    NoGradient {
        /// The parameter.
        name: String,
    },
    /// The saved state is not that of this training.
    #[error("{path}: {what}")]
    State {
        /// The file.
        path: PathBuf,
        /// Why, and what to do.
        what: String,
    },
    /// A file of the run cannot be read or written.
    #[error("{path}: {error}")]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// The loss curve cannot be drawn.
    #[error("{path}: the loss curve cannot be drawn: {what}")]
    Curve {
        /// The file.
        path: PathBuf,
        /// Why.
        what: String,
    },
    /// A checkpoint cannot be read or written, or a text not be encoded.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The arithmetic failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl TrainingError {
    /// Whether the call is wrong, as opposed to the job having failed.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::OptionOutOfRange { .. })
    }
}
