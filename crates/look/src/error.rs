//! Why an analysis is not possible: each message says what was found and what to do. The errors of the crates below come through as
//! they are.

use std::io;
use std::path::PathBuf;

use candle_gpt2::bounded_message;
use candle_gpt2_engine::EngineError;
use candle_gpt2_interpret::{FileError, InterpretError};
use candle_gpt2_weights::WeightsError;
use thiserror::Error;

/// A look that is not possible.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Silent};
/// use candle_gpt2_look::{Lens, Look, Reader, Text};
///
/// let opened = ModelOptions::default().open(&Silent)?;
/// let reader = Reader::without_bos(opened.vocabulary());
/// let error = Lens::new(Text::Ids(vec![2048])).check(&reader).err().ok_or("there is such a token")?;
/// assert!(error.is_usage());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LookError {
    /// An option does not fit the model, the text or another option.
    #[error("{}", bounded_message(.0))]
    Wrong(String),
    /// The question.
    #[error(transparent)]
    Interpret(#[from] InterpretError),
    /// The text, or the model.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A file of tensors.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The tensors or the configuration of an autoencoder or of a lens.
    #[error("{}", path.display())]
    File {
        /// Their file.
        path: PathBuf,
        /// What is wrong with them.
        #[source]
        error: FileError,
    },
    /// A file of text that cannot be read.
    #[error("{}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        error: io::Error,
    },
    /// Something that was read from somewhere.
    #[error("{origin}", origin = bounded_message(.origin))]
    In {
        /// A file, or an option.
        origin: String,
        /// What is wrong with it.
        #[source]
        error: Box<Self>,
    },
    /// The model could not compute it.
    #[error(transparent)]
    Compute(#[from] candle_core::Error),
}

impl LookError {
    /// Whether the question is at fault, and not a file, the model or the machine.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Wrong(_) => true,
            Self::Interpret(error) => error.is_usage(),
            Self::Engine(error) => error.is_usage(),
            Self::File { error, .. } => {
                matches!(
                    error,
                    FileError::OtherModel { .. } | FileError::OtherDepth { .. } | FileError::Hook { .. }
                )
            }
            Self::In { error, .. } => error.is_usage(),
            Self::Weights(_) | Self::Read { .. } | Self::Compute(_) => false,
        }
    }
}

/// A wrong option.
pub(crate) fn wrong(what: impl Into<String>) -> LookError {
    LookError::Wrong(what.into())
}

/// A result of this crate.
pub(crate) type Result<T> = std::result::Result<T, LookError>;
