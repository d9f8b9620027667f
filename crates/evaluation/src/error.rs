//! Why something cannot be measured: each message says what was found and what to do.

use std::path::PathBuf;

use candle_gpt2::{bounded_message, excerpt};
use candle_gpt2_engine::EngineError;
use candle_gpt2_generation::GenerationError;
use thiserror::Error;

/// An error in an entry of the data.
///
/// Given by [`Data::records`](crate::Data::records) and the methods of [`Record`](crate::Record).
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{file}: line {line}: {what}", what = bounded_message(.what))]
pub struct DataError {
    /// The file.
    pub file: String,
    /// The line, from 1; of Parquet the row.
    pub line: usize,
    /// The field, what was expected, what was found.
    pub what: String,
}

/// A measurement that cannot be made.
///
/// ```
/// use candle_gpt2_evaluation::{EvaluationError, EvaluationOptions};
///
/// let error = EvaluationOptions::new(["lambada:lm-evil"]).check().err().ok_or("there is one")?;
/// assert!(matches!(&error, EvaluationError::UnknownProtocol { name, .. } if name == "lambada:lm-evil"));
/// assert!(error.is_usage());
/// assert!(error.to_string().contains("lambada:lm-eval"), "{error}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EvaluationError {
    /// The model, its tokenizer, the Hub.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// An entry of the data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// There is no protocol of this name.
    #[error("there is no protocol `{name}`; {hint}", name = excerpt(.name), hint = bounded_message(.hint))]
    UnknownProtocol {
        /// The name.
        name: String,
        /// The nearest names, or where to find them all.
        hint: String,
    },
    /// A setting that the protocol or the model cannot have.
    #[error("{what}: expected {expected}, found {found}", what = bounded_message(.what), expected = bounded_message(.expected), found = bounded_message(.found))]
    Setting {
        /// The setting.
        what: String,
        /// What it may be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// Options that do not go together.
    #[error("{what}", what = bounded_message(.what))]
    Call {
        /// The option, what was expected, what was found.
        what: String,
    },
    /// Two models are to be compared, and there is one.
    #[error("`kl` compares two models, and there is no second one")]
    NoBase,
    /// The user ended the run; what was known until then is in the log.
    #[error("interrupted")]
    Interrupted,
    /// A file that cannot be read or written.
    #[error("{}: {cause}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        cause: std::io::Error,
    },
    /// Data that cannot be used as a whole.
    #[error("{file}: {what}", file = bounded_message(.file), what = bounded_message(.what))]
    Unusable {
        /// The file.
        file: String,
        /// What was expected, what was found, what to do.
        what: String,
    },
    /// The model's result for an item differs from that of the run that is resumed.
    #[error(
        "item {index} of the log: the model now gives another result; the log is of other weights or other data: choose another name"
    )]
    OtherResult {
        /// The item's place in the data, from 0.
        index: usize,
    },
    /// The log that is to be resumed is not of this run.
    #[error("{}: {what}", path.display(), what = bounded_message(.what))]
    Log {
        /// The log.
        path: PathBuf,
        /// What was expected, what was found, what to do.
        what: String,
    },
}

impl EvaluationError {
    /// Whether it is a usage error, and not one of the data or the machine.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Engine(error) => error.is_usage(),
            Self::UnknownProtocol { .. } | Self::Setting { .. } | Self::Call { .. } => true,
            _ => false,
        }
    }
}

impl From<GenerationError> for EvaluationError {
    fn from(error: GenerationError) -> Self {
        Self::Engine(error.into())
    }
}
