//! Why a training cannot start or continue: each message says what was found and what to do.

use std::fmt;
use std::path::PathBuf;

use candle_gpt2::{ConfigError, bounded_message};
use candle_gpt2_weights::{WeightsError, grouped};
use serde_json::Value;
use thiserror::Error;

/// A training that cannot start or continue. [`Trainer::step`](crate::Trainer::step) and the others return it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TrainingError {
    /// A number of the training is out of its range.
    #[error("`{option}`: expected {expected}, found {found}", expected = bounded_message(.expected), found = bounded_message(.found))]
    OptionOutOfRange {
        /// The number's name.
        option: &'static str,
        /// Its range.
        expected: String,
        /// What was given.
        found: String,
    },
    /// Options do not go together, or with the folder.
    #[error("{what}", what = bounded_message(.what))]
    Call {
        /// Why, and what to do.
        what: String,
    },
    /// The training does not fit into the memory that is free.
    #[error(
        "training {} parameters on {windows} windows of {tokens} tokens takes about {} MiB, and {} MiB are free; {advice}",
        grouped(*.parameters), .needed >> 20, .free >> 20
    )]
    NoRoom {
        /// Parameters of the model.
        parameters: usize,
        /// Windows in a batch.
        windows: usize,
        /// Tokens in a window.
        tokens: usize,
        /// Bytes that it takes.
        needed: u64,
        /// Bytes that are free.
        free: u64,
        /// The options that help.
        advice: String,
    },
    /// Another process writes the folder.
    #[error("{folder}: another process is writing this folder; wait until it ends, or choose another name")]
    InUse {
        /// The folder.
        folder: PathBuf,
    },
    /// The job was interrupted.
    #[error(
        "interrupted{}",
        .state.as_ref().map_or(String::new(), |path| format!("; {} holds the state to resume from", path.display()))
    )]
    Interrupted {
        /// Where the state is, if there is one.
        state: Option<PathBuf>,
    },
    /// The data gives fewer tokens than the configuration has.
    #[error(
        "{config}: `vocab_size` is {vocab_size}, but the tokenizer trained on the data has only {found} tokens; lower it to {found}, or give more text"
    )]
    SmallTokenizer {
        /// The configuration's name.
        config: String,
        /// Tokens that it has.
        vocab_size: usize,
        /// Tokens that the data gives.
        found: usize,
    },
    /// A data file cannot be trained on.
    #[error("{path}: {what}", what = bounded_message(.what))]
    Data {
        /// The file.
        path: PathBuf,
        /// Why, and what to do.
        what: String,
    },
    /// There are fewer tokens than one window takes.
    #[error(
        "the {part} data has {found} tokens, and one window of the context takes {needed}; give more text, or take a shorter context"
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
        "the tokenizer does not belong to this model: it gives the token id {id}, and the vocabulary has {vocab_size} tokens; take the model's own"
    )]
    Vocabulary {
        /// The token.
        id: u32,
        /// Tokens of the vocabulary.
        vocab_size: usize,
    },
    /// The loss or the gradient is not a number.
    #[error(
        "step {step}: the {what} is not a number; lower the learning rate, or clip the gradient{}",
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
    /// The saved state is damaged, or none at all.
    #[error("{path}: not a state of a training: {what}; remove it to start again", what = bounded_message(.what))]
    DamagedState {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The saved state is that of another training.
    #[error("{path}: it is of {difference}, or take another folder")]
    OtherState {
        /// The file.
        path: PathBuf,
        /// How the trainings differ.
        difference: StateDifference,
    },
    /// A `config.json` cannot be used.
    #[error("{path}: {error}")]
    ConfigFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: ConfigError,
    },
    /// The configuration cannot be computed with.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A file of the run cannot be read or written.
    #[error("{path}: {error}")]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// A checkpoint cannot be read or written, or a text not be encoded.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The arithmetic failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl TrainingError {
    /// Whether the job was interrupted, wherever it was.
    pub fn is_interrupted(&self) -> bool {
        matches!(self, Self::Interrupted { .. } | Self::Weights(WeightsError::Interrupted))
    }

    /// Whether it is a usage error, as opposed to a failed job.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::OptionOutOfRange { .. } | Self::Call { .. } | Self::NoRoom { .. })
    }
}

/// How a saved training differs from the one that is to resume it. Part of a [`TrainingError::OtherState`].
///
/// ```
/// use candle_gpt2_training::StateDifference;
///
/// let said = StateDifference::Data.to_string();
/// assert_eq!(said, "a run with other data, or another tokenizer; give the same ones");
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum StateDifference {
    /// The model or its adapters have another configuration.
    Model,
    /// Numbers differ: the name of each, its value there and its value here.
    Numbers(Vec<(String, Value, Value)>),
    /// The tokens differ: other data, or another tokenizer.
    Data,
}

impl fmt::Display for StateDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Model => {
                f.write_str("another model, or a model with another configuration; give the same one")
            }
            Self::Numbers(differing) => {
                let differing = differing
                    .iter()
                    .map(|(name, there, here)| format!("{name} is {there} there and {here} here"));
                write!(
                    f,
                    "a run with other options: {}; give the same ones",
                    differing.collect::<Vec<_>>().join(", ")
                )
            }
            Self::Data => f.write_str("a run with other data, or another tokenizer; give the same ones"),
        }
    }
}
