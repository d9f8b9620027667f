//! Errors in compression and decompression.
//!
//! Each message contains what was found and what to do.

use std::borrow::Cow;
use std::io;

use candle_gpt2::{Diagnose, ErrorKind};
use candle_gpt2_engine::EngineError;
use candle_gpt2_generation::GenerationError;
use thiserror::Error;

/// Error in compression or decompression.
///
/// ```
/// use candle_gpt2_compression::{Compressed, CompressionError};
///
/// let error = Compressed::open(&b"just a text"[..]).err().ok_or("no error")?;
/// assert!(matches!(error, CompressionError::NotCompressed));
/// assert!(!error.is_usage() && !error.is_interrupted());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CompressionError {
    /// Error from the engine, for example while running the model.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The context is outside the model's range.
    #[error("`context`: expected 2 to {n_positions} tokens (the model's limit), found {found}")]
    Context {
        /// Number of positions that the model supports.
        n_positions: usize,
        /// Requested context.
        found: usize,
    },
    /// The model is not on the CPU.
    #[error(
        "compression requires a model on the CPU, because only CPU results are reproducible across machines; found {device}"
    )]
    NotOnCpu {
        /// Name of the device.
        device: String,
    },
    /// The tokenizer cannot represent every byte.
    #[error(
        "the tokenizer has no token for byte {byte:#04x}; use a model with a byte-level tokenizer, such as GPT-2's"
    )]
    MissingByteToken {
        /// First byte that has no token.
        byte: u8,
    },
    /// The input cannot be read.
    #[error("cannot read the input")]
    Read(#[source] io::Error),
    /// The output cannot be written.
    #[error("cannot write the output")]
    Write(#[source] io::Error),
    /// The input is not a compressed file.
    #[error("the input is not in gpt2z format: it was not written by `gpt2 compress`")]
    NotCompressed,
    /// The version of the format is unsupported.
    #[error(
        "the file has format version {found}, but this program reads version {known}; use a newer version of the program"
    )]
    Version {
        /// Format version of the file.
        found: u8,
        /// Format version that this program reads.
        known: u8,
    },
    /// The arithmetic profile differs from this program's.
    #[error(
        "the file was compressed with arithmetic profile {found}, but this program uses profile {known}; use the program version that compressed it"
    )]
    Profile {
        /// Arithmetic profile of the file.
        found: u8,
        /// Arithmetic profile of this program.
        known: u8,
    },
    /// This program does not support the file's dtypes.
    #[error(
        "the file was compressed with {found}, which this program does not support; use the program version that compressed it"
    )]
    UnknownDType {
        /// Dtypes in the file.
        found: String,
    },
    /// The file is truncated.
    #[error("the file is truncated")]
    Truncated,
    /// The content of the file is damaged.
    #[error("the file is damaged: {what}")]
    Damaged {
        /// Description of the damage.
        what: &'static str,
    },
    /// The model's weights or KV cache have different dtypes from the file's.
    #[error(
        "the file was compressed with {expected}, but the model is loaded with {found}; load the model with the file's dtypes"
    )]
    DTypeMismatch {
        /// Dtypes in the file.
        expected: String,
        /// Dtypes of the model.
        found: String,
    },
    /// The model is not the one that compressed the file.
    #[error("the file was compressed with a different model, `{name}`; decompress it with that model")]
    ModelMismatch {
        /// Name of the model when the file was compressed.
        name: String,
    },
    /// The model is correct, but this machine computes different logits.
    #[error(
        "this machine computes different logits than the machine that compressed the file; decompress it on that machine, or set a different GPT2_INSTRUCTION_SET"
    )]
    ArithmeticMismatch,
}

impl CompressionError {
    /// Whether the request is at fault, rather than a file, the model or the machine.
    pub fn is_usage(&self) -> bool {
        self.kind().is_usage()
    }

    /// Whether the job was interrupted, which is not a failure.
    pub fn is_interrupted(&self) -> bool {
        self.kind() == ErrorKind::Interrupted
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

impl Diagnose for CompressionError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Engine(error) => error.kind(),
            Self::Context { .. } | Self::NotOnCpu { .. } => ErrorKind::Usage,
            _ => ErrorKind::Failed,
        }
    }

    fn hint(&self) -> Option<Cow<'static, str>> {
        match self {
            Self::Engine(error) => error.hint(),
            Self::ModelMismatch { .. } => Some("`model`".into()),
            _ => None,
        }
    }
}
