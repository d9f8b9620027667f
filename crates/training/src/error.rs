//! Errors that prevent training from starting or continuing, with the reason and a remedy.

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;

use candle_gpt2::{ConfigError, Diagnose, ErrorKind, bounded_message};
use candle_gpt2_weights::{WeightsError, grouped};
use serde_json::Value;
use thiserror::Error;

/// Training error, returned by [`Trainer::step`](crate::Trainer::step) and other functions.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TrainingError {
    /// A hyperparameter is out of range.
    #[error("`{option}`: expected {expected}, found {found}", expected = bounded_message(.expected), found = bounded_message(.found))]
    OptionOutOfRange {
        /// Name of the hyperparameter.
        option: &'static str,
        /// Valid range.
        expected: String,
        /// Rejected value.
        found: String,
    },
    /// Options are incompatible with each other or with the folder.
    #[error("{what}", what = bounded_message(.what))]
    Call {
        /// Reason and remedy.
        what: String,
    },
    /// Training does not fit into free memory.
    #[error(
        "training {} parameters on {windows} windows of {tokens} tokens needs about {} MiB, but only {} \
         MiB are free; {advice}",
        grouped(*.parameters), .needed >> 20, .free >> 20
    )]
    NoRoom {
        /// Number of model parameters.
        parameters: usize,
        /// Number of windows per batch.
        windows: usize,
        /// Number of tokens per window.
        tokens: usize,
        /// Required bytes.
        needed: u64,
        /// Free bytes.
        free: u64,
        /// Options that reduce the required memory.
        advice: String,
    },
    /// Another process is writing the folder.
    #[error(
        "{folder}: another process is writing to this folder; \
        wait until it finishes, or choose another folder"
    )]
    InUse {
        /// Folder.
        folder: PathBuf,
    },
    /// The job was interrupted.
    #[error(
        "interrupted{}",
        .state.as_ref().map_or(String::new(), |path| format!("; {} holds the state to resume from", path.display()))
    )]
    Interrupted {
        /// Path of the saved state, if there is one.
        state: Option<PathBuf>,
    },
    /// The tokenizer trained on the data has fewer tokens than the configuration's vocabulary.
    #[error(
        "{config}: `vocab_size` is {vocab_size}, but the tokenizer trained on the data has only {found} \
         tokens; lower it to {found}, or provide more text"
    )]
    SmallTokenizer {
        /// Name of the configuration.
        config: String,
        /// Vocabulary size of the configuration.
        vocab_size: usize,
        /// Number of tokens in the trained tokenizer.
        found: usize,
    },
    /// A data file cannot be used for training.
    #[error("{path}: {what}", what = bounded_message(.what))]
    Data {
        /// Path of the file.
        path: PathBuf,
        /// Reason and remedy.
        what: String,
    },
    /// There are fewer tokens than one window needs.
    #[error(
        "the {part} data has {found} tokens, but one window needs {needed}; \
         provide more text, or shorten the context"
    )]
    TooFewTokens {
        /// Part of the data, `training` or `held-out`.
        part: &'static str,
        /// Number of tokens in this part.
        found: usize,
        /// Number of tokens that one window needs.
        needed: usize,
    },
    /// A token in the data is not in the model's vocabulary.
    #[error(
        "the tokenizer does not match the model: token id {id} is outside the vocabulary of {vocab_size} \
         tokens; \
         use the model's own tokenizer"
    )]
    Vocabulary {
        /// Token ID.
        id: u32,
        /// Vocabulary size.
        vocab_size: usize,
    },
    /// The loss or gradient is not finite.
    #[error(
        "step {step}: the {what} is not finite; lower the learning rate, or clip the gradient{}",
        .last_checkpoint.as_ref().map_or(String::new(), |path| format!("; the last good checkpoint is {}", path.display()))
    )]
    NotFinite {
        /// Number of the step.
        step: u64,
        /// Loss or gradient.
        what: &'static str,
        /// Path of the last saved state.
        last_checkpoint: Option<PathBuf>,
    },
    /// A parameter received no gradient, because of a bug in an operation.
    #[error("parameter `{name}` received no gradient")]
    NoGradient {
        /// Name of the parameter.
        name: String,
    },
    /// The saved state is damaged, or the file is not a training state.
    #[error("{path}: not a valid training state: {what}; remove the file to start over", what = bounded_message(.what))]
    DamagedState {
        /// Path of the file.
        path: PathBuf,
        /// Description of the damage.
        what: String,
    },
    /// The saved state belongs to a different training run.
    #[error("{path}: written by {difference}, or choose another folder")]
    OtherState {
        /// Path of the file.
        path: PathBuf,
        /// Difference between the training runs.
        difference: StateDifference,
    },
    /// A `config.json` is invalid.
    #[error("{path}: {error}")]
    ConfigFile {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        error: ConfigError,
    },
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A run's file cannot be read or written.
    #[error("{path}: {error}")]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Error from the operating system.
        error: std::io::Error,
    },
    /// A checkpoint cannot be read or written, or text cannot be encoded.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The computation failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl TrainingError {
    /// Whether the job was interrupted at any stage.
    pub fn is_interrupted(&self) -> bool {
        self.kind() == ErrorKind::Interrupted
    }

    /// Whether this is a usage error, as opposed to a failed job.
    pub fn is_usage(&self) -> bool {
        self.kind().is_usage()
    }
}

impl Diagnose for TrainingError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::OptionOutOfRange { .. } | Self::Call { .. } | Self::NoRoom { .. } => ErrorKind::Usage,
            Self::Interrupted { .. } => ErrorKind::Interrupted,
            Self::Weights(error) => error.kind(),
            Self::File { error, .. } => ErrorKind::of_io(error),
            _ => ErrorKind::Failed,
        }
    }

    fn hint(&self) -> Option<Cow<'static, str>> {
        let hint = match self {
            Self::Weights(error) => return error.hint(),
            Self::TooFewTokens { .. } => "`context`",
            Self::Vocabulary { .. } => "`tokenizer`",
            Self::NotFinite { .. } => "`lr`, `grad_clip`",
            Self::OtherState { .. } => "`out`",
            Self::Interrupted { state: Some(_) } => "`resume`",
            _ => return None,
        };
        Some(hint.into())
    }
}

/// Difference between a saved training run and the run that should resume it.
///
/// Part of a [`TrainingError::OtherState`].
///
/// ```
/// use candle_gpt2_training::StateDifference;
///
/// let message = StateDifference::Data.to_string();
/// assert_eq!(message, "a run with different data or a different tokenizer; use the same data and tokenizer");
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum StateDifference {
    /// The configuration of the model or its adapters differs.
    Model,
    /// Hyperparameters differ: name, saved value, current value.
    Hyperparameters(Vec<(String, Value, Value)>),
    /// The tokens differ, because of different data or a different tokenizer.
    Data,
}

impl fmt::Display for StateDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Model => f.write_str(
                "a run with a different model or configuration; use the same model and configuration",
            ),
            Self::Hyperparameters(differing) => {
                let differing = differing
                    .iter()
                    .map(|(name, there, here)| format!("{name} was {there} and is now {here}"));
                write!(
                    f,
                    "a run with different options: {}; use the same options",
                    differing.collect::<Vec<_>>().join(", ")
                )
            }
            Self::Data => f.write_str(
                "a run with different data or a different tokenizer; \
                use the same data and tokenizer",
            ),
        }
    }
}
