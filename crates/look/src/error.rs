//! Analysis errors.
//!
//! Each message states the problem and what to do about it. Errors from lower-level crates pass through
//! unchanged.

use std::borrow::Cow;
use std::io;
use std::path::PathBuf;

use candle_gpt2::{Diagnose, ErrorKind, bounded_message};
use candle_gpt2_engine::EngineError;
use candle_gpt2_interpret::{FileError, InterpretError};
use candle_gpt2_weights::WeightsError;
use thiserror::Error;

/// Error that an analysis reports.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_look::{Lens, Look, Reader, Text};
///
/// let opened = ModelOptions::default().open(&Silent)?;
/// let reader = Reader::without_bos(opened.vocabulary());
/// let error = Lens::new(Text::Ids(vec![4096])).check(&reader).err().ok_or("expected an error")?;
/// assert!(error.is_usage());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LookError {
    /// An option does not fit the model, the text or another option.
    #[error("{}", bounded_message(.0))]
    InvalidOption(String),
    /// Error from the interpret crate, such as a head index that is out of range.
    #[error(transparent)]
    Interpret(#[from] InterpretError),
    /// Error from the engine, such as a text that cannot be encoded.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Error in a tensor file, or a file or folder that cannot be written.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// Invalid tensors or configuration of a dictionary, a lens, transcoders or a control vector.
    #[error("{}", path.display())]
    File {
        /// Path of the file or folder.
        path: PathBuf,
        /// Problem with the contents of the file or folder.
        #[source]
        error: FileError,
    },
    /// A text file, configuration or folder cannot be read.
    #[error("{}", path.display())]
    Read {
        /// Path of the file or folder.
        path: PathBuf,
        /// Error from the operating system.
        #[source]
        error: io::Error,
    },
    /// Error with the file or option that caused it.
    #[error("{origin}", origin = bounded_message(.origin))]
    In {
        /// File or option.
        origin: String,
        /// Underlying error.
        #[source]
        error: Box<Self>,
    },
    /// A computation failed.
    #[error(transparent)]
    Compute(#[from] candle_core::Error),
}

impl LookError {
    /// Whether the user's input is at fault, rather than a file, the model or the machine.
    pub fn is_usage(&self) -> bool {
        self.kind().is_usage()
    }
}

impl Diagnose for LookError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::InvalidOption(_)
            | Self::File {
                error: FileError::OtherModel { .. } | FileError::OtherDepth { .. } | FileError::Hook { .. },
                ..
            } => ErrorKind::Usage,
            Self::Interpret(error) => error.kind(),
            Self::Engine(error) => error.kind(),
            Self::Weights(error) => error.kind(),
            Self::In { error, .. } => error.kind(),
            Self::Read { error, .. } => ErrorKind::of_io(error),
            Self::File { .. } | Self::Compute(_) => ErrorKind::Failed,
        }
    }

    fn hint(&self) -> Option<Cow<'static, str>> {
        match self {
            Self::Engine(error) => error.hint(),
            Self::Weights(error) => error.hint(),
            Self::In { error, .. } => error.hint(),
            _ => None,
        }
    }
}

/// Creates an error about an invalid option.
pub(crate) fn invalid_option(what: impl Into<String>) -> LookError {
    LookError::InvalidOption(what.into())
}

/// Result type of this crate.
pub(crate) type Result<T> = std::result::Result<T, LookError>;
