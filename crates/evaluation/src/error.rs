//! Evaluation errors; each message states the problem and a remedy.

use std::borrow::Cow;
use std::path::PathBuf;

use candle_gpt2::{Diagnose, ErrorKind, bounded_message, excerpt};
use candle_gpt2_engine::{EngineError, HubError};
use candle_gpt2_generation::GenerationError;
use thiserror::Error;

/// An error in a data entry.
///
/// [`Data::records`](crate::Data::records) and the methods of [`Record`](crate::Record) return it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{file}: line {line}: {what}", what = bounded_message(.what))]
pub struct DataError {
    /// File name.
    pub file: String,
    /// Line number, from 1; for Parquet, the row number.
    pub line: usize,
    /// Field, expected value and found value.
    pub what: String,
}

/// An evaluation error.
///
/// ```
/// use candle_gpt2_evaluation::{EvaluationError, EvaluationOptions};
///
/// let error = EvaluationOptions::new(["lambada:lm-evil"]).check().err().ok_or("expected an error")?;
/// assert!(matches!(&error, EvaluationError::UnknownProtocol { name, .. } if name == "lambada:lm-evil"));
/// assert!(error.is_usage());
/// assert!(error.to_string().contains("lambada:lm-eval"), "{error}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EvaluationError {
    /// Error from the model, its tokenizer or the Hub.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Error in a data entry.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Unknown protocol name.
    #[error("unknown protocol `{name}`; {hint}", name = excerpt(.name), hint = bounded_message(.hint))]
    UnknownProtocol {
        /// The name.
        name: String,
        /// Similar names, or a pointer to the full list.
        hint: String,
    },
    /// Setting that the protocol or the model does not support.
    #[error("{what}: expected {expected}, found {found}", what = bounded_message(.what), expected = bounded_message(.expected), found = bounded_message(.found))]
    Setting {
        /// Name of the setting.
        what: String,
        /// Supported values.
        expected: String,
        /// Found value.
        found: String,
    },
    /// Conflicting options.
    #[error("{what}", what = bounded_message(.what))]
    Call {
        /// Option, expected value and found value.
        what: String,
    },
    /// `kl` requested without a second model.
    #[error("`kl` compares two models, and the second model is missing; set `base` or `base_dtype`")]
    NoBase,
    /// Interruption by the user; the log keeps the results up to that point.
    #[error("interrupted")]
    Interrupted,
    /// File that cannot be read or written.
    #[error("{}: {cause}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Underlying I/O error.
        cause: std::io::Error,
    },
    /// Data that is unusable as a whole.
    #[error("{file}: {what}", file = bounded_message(.file), what = bounded_message(.what))]
    Unusable {
        /// File name.
        file: String,
        /// Expected value, found value and remedy.
        what: String,
    },
    /// Recomputed result that differs from the one in the resumed run's log.
    #[error(
        "item {index} of the log: the model now produces a different result, so the log was written with other weights or \
         data; choose another log file"
    )]
    OtherResult {
        /// Index of the item in the data, from 0.
        index: usize,
    },
    /// Log that cannot be resumed because it belongs to another run.
    #[error("{}: {what}", path.display(), what = bounded_message(.what))]
    Log {
        /// Path of the log.
        path: PathBuf,
        /// Expected value, found value and remedy.
        what: String,
    },
}

impl EvaluationError {
    /// Whether the cause is the caller's options rather than the data or the machine.
    pub fn is_usage(&self) -> bool {
        self.kind().is_usage()
    }
}

impl Diagnose for EvaluationError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Engine(error) => error.kind(),
            Self::UnknownProtocol { .. } | Self::Setting { .. } | Self::Call { .. } => ErrorKind::Usage,
            Self::File { cause, .. } => ErrorKind::of_io(cause),
            _ => ErrorKind::Failed,
        }
    }

    fn hint(&self) -> Option<Cow<'static, str>> {
        let hint = match self {
            Self::Engine(EngineError::Hub(HubError::Unreachable { .. })) => "`data` FILE",
            Self::Engine(error) => return error.hint(),
            Self::UnknownProtocol { .. } => "`gpt2 eval --list`",
            Self::Log { .. } => "`items`, `resume`, `against`",
            Self::OtherResult { .. } => "`items`",
            _ => return None,
        };
        Some(hint.into())
    }
}

impl From<GenerationError> for EvaluationError {
    fn from(error: GenerationError) -> Self {
        Self::Engine(error.into())
    }
}
