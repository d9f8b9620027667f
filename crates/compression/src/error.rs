//! Why bytes cannot be compressed, or a file not be restored: each message says what was found and what to do.

use std::io;

use candle_gpt2_engine::EngineError;
use candle_gpt2_generation::GenerationError;
use thiserror::Error;

/// A model that cannot compress, or a file that it cannot restore.
///
/// ```
/// use candle_gpt2_compression::{Compressed, CompressionError};
///
/// let error = Compressed::open(&b"just a text"[..]).err().ok_or("it is one")?;
/// assert!(matches!(error, CompressionError::NotCompressed));
/// assert!(!error.is_usage() && !error.is_interrupted());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CompressionError {
    /// The model.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The context is none of the model's.
    #[error("`context`: expected from 2 to the model's {n_positions} positions, found {found}")]
    Context {
        /// Positions of the model.
        n_positions: usize,
        /// The context that was asked for.
        found: usize,
    },
    /// The model is on a GPU.
    #[error("compression needs the CPU, whose results are the same everywhere; found {device}")]
    NotOnCpu {
        /// The device's name.
        device: String,
    },
    /// The tokenizer cannot express every byte.
    #[error(
        "the tokenizer has no token for the byte {byte:#04x}; only a model with byte-level tokens, such as GPT-2's, can compress"
    )]
    NoTokenOfByte {
        /// The first such byte.
        byte: u8,
    },
    /// The input cannot be read.
    #[error("cannot read")]
    Read(#[source] io::Error),
    /// The output cannot be written.
    #[error("cannot write")]
    Write(#[source] io::Error),
    /// The input does not begin as a compressed file.
    #[error("not in gpt2z format: it was not written by `gpt2 compress`")]
    NotCompressed,
    /// A later version of the format.
    #[error(
        "the file has version {found} of the format, and this program reads version {known}; use a newer program"
    )]
    Version {
        /// The file's version.
        found: u8,
        /// The one that is read here.
        known: u8,
    },
    /// Other rules of arithmetic than this program's.
    #[error(
        "the file was compressed with arithmetic profile {found}, and this program computes by profile {known}; use the program that compressed it"
    )]
    Profile {
        /// The file's profile.
        found: u8,
        /// The one that is computed here.
        known: u8,
    },
    /// The file ends too early.
    #[error("the file is truncated")]
    Truncated,
    /// The file is not what was written.
    #[error("the file is damaged: {what}")]
    Damaged {
        /// What is wrong.
        what: &'static str,
    },
    /// The model holds weights or keys in other types.
    #[error(
        "the file was compressed with {expected}, and the model is loaded with {found}; load it as the file says"
    )]
    OtherTypes {
        /// The types in the file.
        expected: String,
        /// Those of the model.
        found: String,
    },
    /// The model is another one.
    #[error("the file was compressed with another model, called `{name}`; decompress it with that one")]
    OtherModel {
        /// Its name, as it was given when the file was compressed.
        name: String,
    },
    /// The model is the right one, and its logits are not those of the machine that compressed.
    #[error(
        "this machine computes other logits than the one that compressed the file; decompress it there, or with another GPT2_INSTRUCTION_SET"
    )]
    OtherArithmetic,
}

impl CompressionError {
    /// Whether the request is at fault, and not a file, the model or the machine.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Engine(error) => error.is_usage(),
            Self::Context { .. } | Self::NotOnCpu { .. } => true,
            _ => false,
        }
    }

    /// Whether the job was interrupted, and nothing is wrong.
    pub fn is_interrupted(&self) -> bool {
        matches!(self, Self::Engine(error) if error.is_interrupted())
    }
}

impl From<GenerationError> for CompressionError {
    fn from(error: GenerationError) -> Self {
        Self::Engine(error.into())
    }
}

impl From<candle_core::Error> for CompressionError {
    fn from(error: candle_core::Error) -> Self {
        GenerationError::from(error).into()
    }
}
