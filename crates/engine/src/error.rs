//! Why a model cannot be opened or asked: each message says what was found and what to do. The errors of the crates below
//! come through as they are.

use std::path::PathBuf;

use candle_gpt2::bounded_message;
use candle_gpt2_generation::GenerationError;
use candle_gpt2_kernels::DeviceError;
use candle_gpt2_weights::WeightsError;
use thiserror::Error;

use crate::HubError;

/// A model that cannot be used, or a request that does not fit it.
///
/// ```
/// use candle_gpt2_engine::{EngineError, ModelOptions, Silent};
///
/// let options = ModelOptions { model: "no/such/folder".into(), ..ModelOptions::default() };
/// let error = options.open(&Silent).err().ok_or("it is there")?;
/// assert!(matches!(error, EngineError::Weights(_)));
/// assert!(error.to_string().contains("no/such/folder"));
/// assert!(!error.is_interrupted());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The checkpoint, its tokenizer, or a text for it.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// The options or the prompt of a generation.
    #[error(transparent)]
    Generation(#[from] GenerationError),
    /// A model on the Hub.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The model inside the program was asked for, and there is none.
    #[error("{name}: this program was built without the feature `built-in`, which holds that model")]
    NoBuiltIn {
        /// The model's name.
        name: &'static str,
    },
    /// The choice of large pages is neither `on` nor `off`.
    #[error("GPT2_LARGE_PAGES: expected on or off, found `{found}`")]
    LargePages {
        /// The choice.
        found: String,
    },
    /// The processor has not the instructions that were asked for, or the kernels take others already.
    #[error("GPT2_INSTRUCTION_SET: expected one of this processor's, {}, found `{found}`", available.join(", "))]
    InstructionSet {
        /// The name.
        found: String,
        /// Names of those that it has.
        available: Vec<&'static str>,
    },
    /// TF32 was asked for elsewhere than on an NVIDIA GPU.
    #[error("TF32: only NVIDIA GPUs have it, and this would run on {device}; leave it out")]
    NoTf32 {
        /// The device's name.
        device: String,
    },
    /// The weights do not fit into a GPU's memory.
    #[error(
        "not enough GPU memory: {} are free, and the model needs {} in {dtype} and {} for the KV cache of a \
         full context; f16 or bf16 needs half of f32",
        Mebibytes(*.free as u64), Mebibytes(*.weights as u64), Mebibytes(*.cache as u64)
    )]
    GpuRoom {
        /// Bytes that are free.
        free: usize,
        /// Bytes of the weights.
        weights: usize,
        /// Their type.
        dtype: &'static str,
        /// Bytes of the keys and values of one full context.
        cache: usize,
    },
    /// The weights do not fit into the memory that is free.
    #[error(
        "the weights take {} of memory in {dtype}, and {} are free; {}",
        Mebibytes(*.weights), Mebibytes(*.free), in_other_type(*.fitting)
    )]
    WeightRoom {
        /// Bytes that are free, swap included.
        free: u64,
        /// Bytes of the weights.
        weights: u64,
        /// Their type.
        dtype: &'static str,
        /// The widest type in which they fit, with their bytes in it.
        fitting: Option<(&'static str, u64)>,
    },
    /// The keys and values of a request do not fit into the memory that is free.
    #[error(
        "a batch of {rows} sequences of up to {tokens} tokens needs {} of KV cache, and {} are free; \
         use a smaller batch, or shorter sequences",
        Mebibytes(*.needed as u64), Mebibytes(*.available as u64)
    )]
    NoRoom {
        /// Texts, or beams, that are made at once.
        rows: usize,
        /// Tokens of each, the prompt's included.
        tokens: usize,
        /// Bytes that they take.
        needed: usize,
        /// Bytes that are free.
        available: usize,
    },
    /// The tokenizer gives ids that the model does not have.
    #[error(
        "the tokenizer does not belong to this checkpoint: it gives the token id {id}, and the vocabulary has {vocab_size} \
         tokens"
    )]
    ForeignTokenizer {
        /// The id.
        id: u32,
        /// Tokens of the vocabulary.
        vocab_size: usize,
    },
    /// Options of one request that do not go together.
    #[error("{what}", what = bounded_message(.what))]
    Options {
        /// Which, and what to do.
        what: String,
    },
    /// A table of published values, or a model that has none.
    #[error("{what}", what = bounded_message(.what))]
    Published {
        /// Which, and what to do.
        what: String,
    },
    /// A line of a file that is no row.
    #[error("{what}", what = bounded_message(.what))]
    Row {
        /// What was expected, and what to do.
        what: String,
    },
    /// The lines of an interrupted bulk job are there, and it is not to resume.
    #[error("{}: it holds the lines of an interrupted run; use `resume` to continue it, or remove it", path.display())]
    Unfinished {
        /// The file that holds them.
        path: PathBuf,
    },
    /// The lines of a bulk job cannot be written, or those of an interrupted one are of another job.
    #[error("{}: {what}", path.display(), what = bounded_message(.what))]
    PartialFile {
        /// The file that holds them.
        path: PathBuf,
        /// What is wrong, and what to do.
        what: String,
    },
    /// A line of a bulk job could not be written.
    #[error(transparent)]
    Output(Box<dyn std::error::Error + Send + Sync>),
    /// Two models that are compared have other tokens.
    #[error("the vocabularies differ: {found} tokens here, {other} in {other_path}")]
    OtherVocabulary {
        /// Tokens of the first.
        found: usize,
        /// Tokens of the other.
        other: usize,
        /// The other.
        other_path: PathBuf,
    },
    /// Two models that are compared have other heads, or other labels.
    #[error("the models have different heads: {found} here, {other} in {other_path}", found = bounded_message(.found), other = bounded_message(.other))]
    OtherHead {
        /// What the first one says.
        found: String,
        /// What the other one says.
        other: String,
        /// The other.
        other_path: PathBuf,
    },
    /// The job was ended before its end, see [`Reporter::is_interrupted`](crate::Reporter::is_interrupted).
    #[error("interrupted")]
    Interrupted,
    /// The `generation_config.json` beside the weights cannot be used.
    #[error("{what}", what = bounded_message(.what))]
    Defaults {
        /// The file, and what is wrong with it.
        what: String,
    },
}

impl EngineError {
    /// Whether the request is at fault, and not the model, the machine or the network.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Generation(error) => error.is_usage(),
            Self::Device(error) => {
                matches!(error, DeviceError::NotBuilt { .. } | DeviceError::NoSuchGpu { .. })
            }
            Self::Weights(error) => {
                matches!(
                    error,
                    WeightsError::NotOnCpu { .. }
                        | WeightsError::NotOnGpu { .. }
                        | WeightsError::OtherHead { .. }
                )
            }
            Self::InstructionSet { .. }
            | Self::LargePages { .. }
            | Self::NoTf32 { .. }
            | Self::NoRoom { .. }
            | Self::Options { .. } => true,
            _ => false,
        }
    }

    /// Whether the job was interrupted, and nothing is wrong.
    pub fn is_interrupted(&self) -> bool {
        matches!(
            self,
            Self::Interrupted
                | Self::Weights(WeightsError::Interrupted)
                | Self::Hub(HubError::Stopped { .. })
        )
    }
}

fn in_other_type(fitting: Option<(&str, u64)>) -> String {
    match fitting {
        Some((dtype, bytes)) => format!("in {dtype} they take {}", Mebibytes(bytes)),
        None => "they fit in no smaller type either".to_owned(),
    }
}

/// Prints a number of bytes as `474.7 MiB`, and what is larger than most models as `12.5 GiB`.
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
