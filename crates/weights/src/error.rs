//! Errors from opening and loading checkpoints. Each message states the problem and how to fix it.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::{fmt, io};

use candle_gpt2::{ConfigError, Diagnose, ErrorKind, HeadKind, bounded_message, excerpt};
use thiserror::Error;

use crate::WeightDType;

/// Error from opening, loading or writing a checkpoint.
///
/// Returned by [`Checkpoint::open`](crate::Checkpoint::open), among others.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The path does not exist.
    #[error(
        "{path}: no such file or folder; expected a checkpoint folder (config.json and model.safetensors) or a weights file"
    )]
    NotFound {
        /// Path that does not exist.
        path: PathBuf,
    },
    /// A file could not be read.
    #[error("{path}: cannot be read: {error}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Operating system error.
        error: io::Error,
    },
    /// A tensor could not be read.
    #[error("{path}: tensor `{name}` cannot be read: {error}", name = excerpt(.name))]
    ReadTensor {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor in the file.
        name: String,
        /// Operating system error.
        error: io::Error,
    },
    /// A folder has no configuration, or a weights file has none next to it.
    #[error(
        "{folder}: {name} is missing; copy it from the checkpoint's source (it defines the model's sizes)"
    )]
    NoConfig {
        /// Folder of the checkpoint.
        folder: PathBuf,
        /// Configuration file of this format.
        name: &'static str,
    },
    /// The number of heads is missing, and the usual head dimension does not divide the hidden size.
    #[error(
        "{folder}: the number of attention heads is unknown (hidden size {n_embd}); specify it, or add a config.json"
    )]
    UnknownHeads {
        /// Folder of the checkpoint.
        folder: PathBuf,
        /// Hidden size of the model.
        n_embd: usize,
    },
    /// The requested number of heads differs from the number in the files.
    #[error(
        "{path}: the configuration has {configured} attention heads, but {requested} were requested; omit the number"
    )]
    OtherHeads {
        /// Path of the weights file.
        path: PathBuf,
        /// Number of heads in the configuration.
        configured: usize,
        /// Requested number of heads.
        requested: usize,
    },
    /// The configuration is unusable.
    #[error("{path}: {error}")]
    Config {
        /// Path of the file.
        path: PathBuf,
        /// Configuration error.
        error: ConfigError,
    },
    /// A folder contains no readable weights.
    #[error("{folder}: no model.safetensors{found}", found = bounded_message(.found))]
    NoWeights {
        /// Folder without weights.
        folder: PathBuf,
        /// Actual content of the folder, and a suggested fix.
        found: String,
    },
    /// A file is not of the expected type.
    #[error("{path}: {what}", what = bounded_message(.what))]
    NotWeights {
        /// Path of the file.
        path: PathBuf,
        /// Actual content of the file, and a suggested fix.
        what: String,
    },
    /// The tensors do not match the configured model.
    #[error("{path}: the tensors do not match {configuration}{}:{}", bounded_message(.hint), ListOf(.mismatches))]
    Mismatches {
        /// Path of the file.
        path: PathBuf,
        /// Name of the configuration, such as `config.json`.
        configuration: String,
        /// Differing sizes and a suggested fix, if known.
        hint: String,
        /// All differences between the tensors and the model.
        mismatches: Vec<Mismatch>,
    },
    /// An adapter is unusable.
    #[error("{path}: {what}", what = bounded_message(.what))]
    Adapter {
        /// Path of the adapter's folder, or of one of its files.
        path: PathBuf,
        /// Problem and suggested fix.
        what: String,
    },
    /// The tensors of an adapter do not match its settings or the model.
    #[error(
        "{path}: the adapter does not match {}; {}:{}",
        model.display(),
        adapter_remedy(base.as_deref()),
        Lines(faults)
    )]
    AdapterMismatch {
        /// Path of the adapter's weights file.
        path: PathBuf,
        /// Path of the model's weights file.
        model: PathBuf,
        /// Base model that the adapter names.
        base: Option<String>,
        /// Descriptions of the mismatches, one for each tensor.
        faults: Vec<String>,
    },
    /// The CPU does not support weights of this dtype.
    #[error("{dtype} weights are not supported on the CPU; use {}", WeightDType::names_on_cpu())]
    NotOnCpu {
        /// Unsupported dtype.
        dtype: WeightDType,
    },
    /// GPUs do not support weights of this dtype.
    #[error("{dtype} weights are not supported on a GPU; use {}", WeightDType::names_on_gpu())]
    NotOnGpu {
        /// Unsupported dtype.
        dtype: WeightDType,
    },
    /// The tokenizer is missing.
    #[error("{folder}: no tokenizer found{}", tokenizer_remedy(.found.as_deref()))]
    NoTokenizer {
        /// Folder without a tokenizer.
        folder: PathBuf,
        /// Name of a file in the folder that may be the tokenizer.
        found: Option<String>,
    },
    /// A tokenizer file is unusable.
    #[error("{path}: not a usable tokenizer: {error}", error = bounded_message(.error))]
    Tokenizer {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem.
        error: String,
    },
    /// The data is unsuitable for training a tokenizer.
    #[error("the tokenizer cannot be trained: {error}", error = bounded_message(.error))]
    TrainTokenizer {
        /// Reason and suggested fix.
        error: String,
    },
    /// A checkpoint cannot be written.
    #[error("{path}: {what}", what = bounded_message(.what))]
    Unwritable {
        /// Path of the output file or folder.
        path: PathBuf,
        /// Reason and suggested fix.
        what: String,
    },
    /// The model's head is unsuitable for the task.
    #[error("{path}: the model is a {}, {}", found.class_name(), describe_head(*.found))]
    UnsupportedHead {
        /// Path of the weights file.
        path: PathBuf,
        /// Head of the model.
        found: HeadKind,
    },
    /// The job was interrupted; see [`ReadProgress::is_interrupted`](crate::ReadProgress::is_interrupted).
    #[error("interrupted")]
    Interrupted,
    /// A text cannot be tokenized.
    #[error("the tokenizer cannot encode the text: {error}", error = bounded_message(.error))]
    Encode {
        /// Description of the problem.
        error: String,
    },
    /// The model could not be built on the device.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl Diagnose for WeightsError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::NotOnCpu { .. } | Self::NotOnGpu { .. } | Self::UnsupportedHead { .. } => ErrorKind::Usage,
            Self::NoTokenizer { .. } | Self::Encode { .. } => ErrorKind::Input,
            Self::NotFound { .. } | Self::NoConfig { .. } | Self::NoWeights { .. } => ErrorKind::NotFound,
            Self::Read { error, .. } => ErrorKind::of_io(error),
            Self::Interrupted => ErrorKind::Interrupted,
            _ => ErrorKind::Failed,
        }
    }

    fn hint(&self) -> Option<Cow<'static, str>> {
        let hint = match self {
            Self::NotOnCpu { .. } => "without `dtype`, the checkpoint's dtype is used, bf16 as f32",
            Self::NotOnGpu { .. } => "a quantized `dtype` needs `device` cpu",
            Self::NotFound { path } => of_missing(&path.to_string_lossy()),
            Self::UnknownHeads { .. } | Self::OtherHeads { .. } => "`n_head`",
            Self::NoTokenizer { .. } => "`tokenizer` FILE, or `ids` in place of text",
            Self::UnsupportedHead { found: HeadKind::LanguageModel, .. } => "`gpt2 train --task classify`",
            Self::UnsupportedHead { .. } => "`gpt2 classify`",
            _ => return None,
        };
        Some(hint.into())
    }
}

/// Returns advice for a model name that is not a file.
///
/// Other programs use addresses and tags in Hub names.
fn of_missing(name: &str) -> &'static str {
    if name.contains("hf.co/") || name.contains("huggingface.co/") {
        return "a model on the Hub is named owner/name, without the URL";
    }
    match name.rsplit_once(':') {
        // A single letter before the colon is a Windows drive.
        Some((before, tag)) if before.len() > 1 && !tag.contains(['/', '\\']) => {
            "names have no tags; use gpt2, or owner/name on the Hub"
        }
        _ => "gpt2 downloads GPT-2, built-in selects the bundled model",
    }
}

impl WeightsError {
    /// Converts a read error that may come from [`open_regular`](crate::open_regular) or a size limit.
    pub(crate) fn unreadable(path: &Path, error: io::Error) -> Self {
        let path = path.to_owned();
        match error.kind() {
            io::ErrorKind::InvalidInput | io::ErrorKind::FileTooLarge => {
                Self::NotWeights { path, what: error.to_string() }
            }
            _ => Self::Read { path, error },
        }
    }
}

/// Suggests a fix for a missing tokenizer; `found` is a file in the folder that may be one.
fn tokenizer_remedy(found: Option<&str>) -> String {
    match found {
        Some("meta.pkl") => ", only nanoGPT's meta.pkl, an unsupported pickle; write its `stoi` as vocab.json (space as Ġ, line feed \
             as Ċ), with a merges.txt that contains only the line `#version: 0.2`"
            .into(),
        Some(found) => format!(", but {found} may be one; pass it as the tokenizer"),
        None => "; copy tokenizer.json, vocab.json with merges.txt, spiece.model or vocab.txt from the checkpoint's source, or use \
                 another tokenizer"
            .into(),
    }
}

/// Difference between a file's tensors and the configured model.
///
/// Names and shapes are quoted from the file. [`Checkpoint::check`](crate::Checkpoint::check) lists
/// the differences.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mismatch {
    /// A tensor is missing.
    Missing {
        /// Name of the tensor.
        name: String,
        /// Shape of the missing tensor.
        expected: Vec<usize>,
    },
    /// A tensor does not belong to the model.
    Surplus {
        /// Name of the tensor.
        name: String,
        /// Shape of the tensor.
        found: Vec<usize>,
    },
    /// A tensor has the wrong shape.
    Shape {
        /// Name of the tensor.
        name: String,
        /// Shape that the model requires.
        expected: Vec<usize>,
        /// Shape in the file.
        found: Vec<usize>,
    },
    /// The output head differs from the token embedding, although the configuration ties the two.
    TieContradiction {
        /// Name of the head.
        name: String,
        /// Name of the embedding.
        embedding: String,
        /// Number of values that differ.
        differing: usize,
        /// Number of values in each tensor.
        elements: usize,
    },
    /// A head has a different number of labels than the configuration.
    Labels {
        /// Name of the head.
        name: String,
        /// Number of rows in the file, one for each label.
        rows: usize,
        /// Number of labels in the configuration.
        labels: usize,
    },
    /// A tensor has a dtype that cannot hold weights.
    DType {
        /// Name of the tensor.
        name: String,
        /// Dtype in the file.
        found: String,
    },
}

impl Mismatch {
    /// Returns the name of the tensor.
    pub fn name(&self) -> &str {
        match self {
            Self::Missing { name, .. }
            | Self::Surplus { name, .. }
            | Self::Shape { name, .. }
            | Self::TieContradiction { name, .. }
            | Self::Labels { name, .. }
            | Self::DType { name, .. } => name,
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = excerpt(self.name());
        match self {
            Self::Missing { expected, .. } => {
                write!(f, "tensor `{name}` is missing: expected shape {}", ShapeOf(expected))
            }
            Self::Surplus { found, .. } => {
                write!(f, "tensor `{name}` of shape {} is not a parameter of the model", ShapeOf(found))
            }
            Self::Shape { expected, found, .. } => {
                write!(f, "tensor `{name}`: expected shape {}, found {}", ShapeOf(expected), ShapeOf(found))
            }
            Self::TieContradiction { embedding, differing, elements, .. } => write!(
                f,
                "tensor `{name}` differs from `{embedding}` in {differing} of {elements} values, but config.json ties \
                 them; set `tie_word_embeddings` to false to use this tensor, or remove it"
            ),
            Self::Labels { rows, labels, .. } => write!(
                f,
                "tensor `{name}` has {rows} rows, one per label, but config.json defines {labels} labels (2 by default); \
                 define one label per row in `id2label` and `label2id`"
            ),
            Self::DType { found, .. } => {
                write!(f, "tensor `{name}`: expected dtype F32, F16, BF16 or F64, found {found}")?;
                // GGUF types that only llama.cpp can compute with.
                let is_ggml = ["IQ", "TQ", "MXFP", "Q4_0_", "an unknown ggml type"]
                    .iter()
                    .any(|start| found.starts_with(start));
                f.write_str(if is_ggml { ", which is unsupported; convert the model to q8_0" } else { "" })
            }
        }
    }
}

/// Describes the purpose of a model with this head, for errors about unsupported uses.
fn describe_head(head: HeadKind) -> &'static str {
    match head {
        HeadKind::LanguageModel => {
            "a language model: it generates and scores text but has no labels; fine-tune it on labeled text first"
        }
        HeadKind::SequenceClassification => {
            "a classifier: it labels texts but cannot generate or score them; use it to classify"
        }
        HeadKind::TokenClassification => {
            "a classifier: it labels tokens but cannot generate or score text; use it to classify"
        }
        HeadKind::DoubleHeads => {
            "a language model that also chooses among several texts but has no labels; use it to choose among texts"
        }
    }
}

/// Displays a shape as `(24, 72)`.
pub(crate) struct ShapeOf<'a>(pub(crate) &'a [usize]);

impl fmt::Display for ShapeOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Maximum number of dimensions in a message; weights have at most four.
        const MAX_SIZES: usize = 8;
        let mut sizes: Vec<String> = self.0.iter().take(MAX_SIZES).map(usize::to_string).collect();
        if self.0.len() > MAX_SIZES {
            sizes.push(format!("… {} dimensions", self.0.len()));
        }
        write!(f, "({})", sizes.join(", "))
    }
}

/// Suggests a fix for an adapter that does not match the model.
fn adapter_remedy(base: Option<&str>) -> String {
    match base {
        Some(base) => format!("use its base model, {base}, or download the adapter again"),
        None => "use the model it was trained on, or save the adapter again".into(),
    }
}

/// Displays each string on its own line.
struct Lines<'a>(&'a [String]);

impl fmt::Display for Lines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Maximum number of lines in a message.
        const MAX_LINES: usize = 40;
        self.0.iter().take(MAX_LINES).try_for_each(|line| write!(f, "\n  {line}"))?;
        match self.0.len().checked_sub(MAX_LINES) {
            Some(more) if more > 0 => write!(f, "\n  and {more} more"),
            _ => Ok(()),
        }
    }
}

/// Displays one difference per line.
struct ListOf<'a>(&'a [Mismatch]);

impl fmt::Display for ListOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Maximum number of lines in a message; an absurd configuration could flood the terminal.
        const MAX_LINES: usize = 1000;
        for mismatch in self.0.iter().take(MAX_LINES) {
            write!(f, "\n  {mismatch}")?;
        }
        match self.0.len().checked_sub(MAX_LINES) {
            Some(more) if more > 0 => write!(f, "\n  and {more} more"),
            _ => Ok(()),
        }
    }
}
