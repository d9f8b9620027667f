//! Errors from opening and using a model.
//!
//! Each message states the problem and how to fix it. Errors of the underlying crates are passed on
//! unchanged.

use std::borrow::Cow;
use std::path::PathBuf;

use candle_gpt2::{Diagnose, ErrorKind, bounded_message};
use candle_gpt2_generation::GenerationError;
use candle_gpt2_kernels::DeviceError;
use candle_gpt2_weights::WeightsError;
use thiserror::Error;

use crate::HubError;

/// Error for an unusable model, or for a request that does not fit the model.
///
/// ```
/// use candle_gpt2_engine::{EngineError, ModelOptions, Silent};
///
/// let options = ModelOptions { model: "no/such/folder".into(), ..ModelOptions::default() };
/// let error = options.open(&Silent).err().ok_or("expected an error")?;
/// assert!(matches!(error, EngineError::Weights(_)));
/// assert!(error.to_string().contains("no/such/folder"));
/// assert!(!error.is_interrupted());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// Error in the checkpoint, its tokenizer, or a text to encode.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// Error in the options or the prompt of a generation request.
    #[error(transparent)]
    Generation(#[from] GenerationError),
    /// Error while fetching a model from the Hub.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// Error while opening the device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The built-in model was requested, but the program does not contain it.
    #[error("{name}: this program was built without the feature `built-in`, which contains this model")]
    NoBuiltIn {
        /// Name of the model.
        name: &'static str,
    },
    /// The setting for large pages is neither `on` nor `off`.
    #[error("GPT2_LARGE_PAGES: expected on or off, found `{found}`")]
    LargePages {
        /// Supplied value.
        found: String,
    },
    /// The processor lacks the requested instruction set, or the kernels already use another one.
    #[error("GPT2_INSTRUCTION_SET: expected an instruction set that this processor supports ({}), found `{found}`", available.join(", "))]
    InstructionSet {
        /// Requested instruction set.
        found: String,
        /// Names of the supported instruction sets.
        available: Vec<&'static str>,
    },
    /// TF32 was requested for a device other than an NVIDIA GPU.
    #[error("TF32 requires an NVIDIA GPU, but the device is {device}; disable TF32")]
    NoTf32 {
        /// Name of the device.
        device: String,
    },
    /// The weights do not fit in a GPU's memory.
    #[error(
        "not enough GPU memory: {} is free, but the model needs {} for its weights in {dtype} and {} for the \
         KV cache of a full context; f16 and bf16 need half as much as f32",
        Mebibytes(*.free as u64), Mebibytes(*.weights as u64), Mebibytes(*.cache as u64)
    )]
    GpuRoom {
        /// Free GPU memory in bytes.
        free: usize,
        /// Size of the weights in bytes.
        weights: usize,
        /// Type of the weights.
        dtype: &'static str,
        /// Size of the KV cache of one full context, in bytes.
        cache: usize,
    },
    /// The weights do not fit in the free memory.
    #[error(
        "the weights need {} of memory in {dtype}, but only {} is free; {}",
        Mebibytes(*.weights), Mebibytes(*.free), in_other_type(*.fitting)
    )]
    WeightRoom {
        /// Free memory in bytes, including swap.
        free: u64,
        /// Size of the weights in bytes.
        weights: u64,
        /// Type of the weights.
        dtype: &'static str,
        /// Widest type in which the weights fit, and their size in bytes.
        fitting: Option<(&'static str, u64)>,
    },
    /// The KV cache of a request does not fit in the free memory.
    #[error(
        "a batch of {rows} sequences of up to {tokens} tokens needs {} of KV cache, but only {} is \
         free; use a smaller batch or shorter sequences",
        Mebibytes(*.needed as u64), Mebibytes(*.available as u64)
    )]
    NoRoom {
        /// Number of concurrent sequences or beams.
        rows: usize,
        /// Maximum number of tokens per sequence, including the prompt.
        tokens: usize,
        /// Required memory in bytes.
        needed: usize,
        /// Free memory in bytes.
        available: usize,
    },
    /// The tokenizer produces ids outside the model's vocabulary.
    #[error(
        "the tokenizer does not match this checkpoint: it produces token id {id}, but the vocabulary has \
         {vocab_size} tokens"
    )]
    ForeignTokenizer {
        /// The invalid id.
        id: u32,
        /// Vocabulary size.
        vocab_size: usize,
    },
    /// A request's options are invalid or in conflict.
    #[error("{what}", what = bounded_message(.what))]
    Options {
        /// The affected options, and how to fix the request.
        what: String,
    },
    /// The table of published values is invalid or lacks the model.
    #[error("{what}", what = bounded_message(.what))]
    Published {
        /// The problem, and how to fix it.
        what: String,
    },
    /// A line in a file is not a valid row.
    #[error("{what}", what = bounded_message(.what))]
    Row {
        /// The expected format, and how to fix the line.
        what: String,
    },
    /// The output of an interrupted bulk job exists, and `resume` is not set.
    #[error("{}: contains the output of an interrupted run; use `resume` to continue it, or remove the file", path.display())]
    Unfinished {
        /// Path of the file that contains the lines written so far.
        path: PathBuf,
    },
    /// A bulk job cannot write its lines, or the existing lines belong to another job.
    #[error("{}: {what}", path.display(), what = bounded_message(.what))]
    PartialFile {
        /// Path of the partial output file.
        path: PathBuf,
        /// The problem, and how to fix it.
        what: String,
    },
    /// An output line of a bulk job could not be written.
    #[error(transparent)]
    Output(Box<dyn std::error::Error + Send + Sync>),
    /// The models to compare have different vocabulary sizes.
    #[error("the vocabulary sizes differ: this model has {found} tokens, but {other_path} has {other}")]
    OtherVocabulary {
        /// Vocabulary size of the first model.
        found: usize,
        /// Vocabulary size of the other model.
        other: usize,
        /// Path of the other model.
        other_path: PathBuf,
    },
    /// The models to compare have different heads or labels.
    #[error("the models have different heads: this model has {found}, but {other_path} has {other}", found = bounded_message(.found), other = bounded_message(.other))]
    OtherHead {
        /// Head and labels of the first model.
        found: String,
        /// Head and labels of the other model.
        other: String,
        /// Path of the other model.
        other_path: PathBuf,
    },
    /// The job was interrupted; see [`Reporter::is_interrupted`](crate::Reporter::is_interrupted).
    #[error("interrupted")]
    Interrupted,
    /// The `generation_config.json` next to the weights cannot be used.
    #[error("{what}", what = bounded_message(.what))]
    Defaults {
        /// The file, and the problem with it.
        what: String,
    },
}

impl EngineError {
    /// Whether the request is at fault, rather than the model, the machine or the network.
    pub fn is_usage(&self) -> bool {
        self.kind().is_usage()
    }

    /// Whether the job was interrupted, which is not a failure.
    pub fn is_interrupted(&self) -> bool {
        self.kind() == ErrorKind::Interrupted
    }
}

impl Diagnose for EngineError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Generation(error) => error.kind(),
            Self::Weights(error) => error.kind(),
            Self::Device(DeviceError::NotBuilt { .. } | DeviceError::NoSuchGpu { .. })
            | Self::InstructionSet { .. }
            | Self::LargePages { .. }
            | Self::NoTf32 { .. }
            | Self::NoRoom { .. }
            | Self::Options { .. } => ErrorKind::Usage,
            Self::Interrupted | Self::Hub(HubError::Stopped { .. }) => ErrorKind::Interrupted,
            _ => ErrorKind::Failed,
        }
    }

    fn option(&self) -> Option<&'static str> {
        match self {
            Self::Generation(error) => error.option(),
            Self::Unfinished { .. } => Some("resume"),
            _ => None,
        }
    }

    fn hint(&self) -> Option<Cow<'static, str>> {
        let hint = match self {
            Self::Generation(error) => return error.hint(),
            Self::Weights(error) => return error.hint(),
            Self::Hub(HubError::NotCached { .. } | HubError::Incomplete { .. }) => {
                "drop `offline` or HF_HUB_OFFLINE to download it"
            }
            Self::Hub(HubError::Unreachable { .. }) => "`model` built-in needs no network",
            Self::Device(DeviceError::NoDriver { .. } | DeviceError::NotBuilt { .. }) => "`device` cpu",
            Self::Device(_) => "`device`",
            Self::NoTf32 { .. } => "`tf32`",
            Self::GpuRoom { .. } => "`dtype` f16, `dtype` bf16",
            Self::WeightRoom { fitting: Some(_), .. } => "`dtype`",
            Self::NoRoom { .. } => "`batch_size`, `num_beams`, `max_new_tokens`, `kv_dtype` f16",
            _ => return None,
        };
        Some(hint.into())
    }
}

fn in_other_type(fitting: Option<(&str, u64)>) -> String {
    match fitting {
        Some((dtype, bytes)) => format!("in {dtype} they need {}", Mebibytes(bytes)),
        None => "no smaller dtype fits either".to_owned(),
    }
}

/// Formats a byte count as `474.7 MiB`, or as `12.5 GiB` from 10 GiB upward.
struct Mebibytes(u64);

impl std::fmt::Display for Mebibytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        const GIBIBYTE: u64 = 1 << 30;
        match self.0 {
            bytes if bytes >= 10 * GIBIBYTE => write!(f, "{:.1} GiB", bytes as f64 / GIBIBYTE as f64),
            bytes => write!(f, "{:.1} MiB", bytes as f64 / f64::from(1 << 20)),
        }
    }
}
