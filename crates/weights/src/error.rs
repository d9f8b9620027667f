//! Why a checkpoint could not be opened or loaded: each message says what was found and what to do.

use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use candle_gpt2::{ConfigError, HeadKind, bounded_message, excerpt};
use thiserror::Error;

use crate::WeightDType;

/// A checkpoint that cannot be used. [`Checkpoint::open`](crate::Checkpoint::open) and the others return it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// There is nothing at the path.
    #[error(
        "{path}: no such file or folder; give a checkpoint folder (config.json and model.safetensors) or a weights file"
    )]
    NotFound {
        /// The path.
        path: PathBuf,
    },
    /// A file could not be read.
    #[error("{path}: cannot be read: {error}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// A tensor could not be read.
    #[error("{path}: tensor `{name}` cannot be read: {error}", name = excerpt(.name))]
    ReadTensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        name: String,
        /// What the system says.
        error: std::io::Error,
    },
    /// A folder without a configuration, or a weights file without one beside it.
    #[error(
        "{folder}: there is no {name}; copy it from the checkpoint's source (it holds the model's sizes)"
    )]
    NoConfig {
        /// The folder.
        folder: PathBuf,
        /// The file that checkpoints of this format have.
        name: &'static str,
    },
    /// Nothing tells the number of heads, and the usual heads do not divide the width.
    #[error(
        "{folder}: the number of attention heads is unknown for a model of width {n_embd}; \
         give it, or add a config.json"
    )]
    UnknownHeads {
        /// The folder.
        folder: PathBuf,
        /// The model's width.
        n_embd: usize,
    },
    /// Another number of heads was named than the files tell.
    #[error(
        "{path}: its configuration has {told} attention heads, not the {named} that were given; leave the number out"
    )]
    OtherHeads {
        /// The weights file.
        path: PathBuf,
        /// Heads of the configuration.
        told: usize,
        /// Heads that were named.
        named: usize,
    },
    /// The configuration cannot be used.
    #[error("{path}: {error}")]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: ConfigError,
    },
    /// A folder without weights that can be read.
    #[error("{folder}: there is no model.safetensors{found}", found = bounded_message(.found))]
    NoWeights {
        /// The folder.
        folder: PathBuf,
        /// What is there instead, and what to do.
        found: String,
    },
    /// A file is not what its place says.
    #[error("{path}: {what}", what = bounded_message(.what))]
    NotWeights {
        /// The file.
        path: PathBuf,
        /// What the file is, and what to do.
        what: String,
    },
    /// The tensors are not those of the configured model.
    #[error("{path}: the tensors are not those of the model that {configuration} describes{}:{}", bounded_message(.hint), ListOf(.mismatches))]
    Mismatches {
        /// The file.
        path: PathBuf,
        /// The name of the configuration, such as `config.json`.
        configuration: String,
        /// The sizes that differ and what to do, if that is known.
        hint: String,
        /// Every difference.
        mismatches: Vec<Mismatch>,
    },
    /// An adapter that cannot be used.
    #[error("{path}: {what}", what = bounded_message(.what))]
    Adapter {
        /// Its folder, or one of its files.
        path: PathBuf,
        /// What is wrong, and what to do.
        what: String,
    },
    /// An adapter whose tensors do not fit its settings or the model.
    #[error(
        "{path}: the adapter does not fit {}; {}:{}",
        model.display(),
        right_model(base.as_deref()),
        Lines(faults)
    )]
    AdapterMismatch {
        /// The file of the adapter's tensors.
        path: PathBuf,
        /// The weights file of the model.
        model: PathBuf,
        /// The base model that the adapter names.
        base: Option<String>,
        /// Each tensor that does not fit: its name, and what was expected and found.
        faults: Vec<String>,
    },
    /// The CPU does not hold weights of this type.
    #[error("{dtype}: the CPU holds weights in {}", WeightDType::names_on_cpu())]
    NotOnCpu {
        /// The type.
        dtype: WeightDType,
    },
    /// A GPU does not hold weights of this type.
    #[error("{dtype}: a GPU holds weights in f32, f16 or bf16")]
    NotOnGpu {
        /// The type.
        dtype: WeightDType,
    },
    /// There is no tokenizer.
    #[error("{folder}: there is no tokenizer.json, no vocab.json with merges.txt, no spiece.model and no vocab.txt; {}", instead_of_tokenizer(.found.as_deref()))]
    NoTokenizer {
        /// The folder.
        folder: PathBuf,
        /// The name of a file in it that may be a tokenizer.
        found: Option<String>,
    },
    /// A tokenizer file cannot be used.
    #[error("{path}: not a usable tokenizer: {error}", error = bounded_message(.error))]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: String,
    },
    /// No tokenizer can be trained from the data.
    #[error("the tokenizer cannot be trained: {error}", error = bounded_message(.error))]
    TrainTokenizer {
        /// Why, and what to do.
        error: String,
    },
    /// A checkpoint cannot be written.
    #[error("{path}: {what}", what = bounded_message(.what))]
    Unwritable {
        /// The file or folder to be written.
        path: PathBuf,
        /// Why, and what to do.
        what: String,
    },
    /// The model has another head than the job needs.
    #[error("{path}: it is a {}, {}", found.class_name(), what_it_does(*.found))]
    OtherHead {
        /// The weights file.
        path: PathBuf,
        /// Its head.
        found: HeadKind,
    },
    /// The job was ended before its end, see [`ReadProgress::is_interrupted`](crate::ReadProgress::is_interrupted).
    #[error("interrupted")]
    Interrupted,
    /// A text cannot be turned into tokens.
    #[error("the tokenizer cannot encode the text: {error}", error = bounded_message(.error))]
    Encode {
        /// What is wrong.
        error: String,
    },
    /// The model could not be built on the device.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl WeightsError {
    /// The error of a read that [`open_regular`](crate::open_regular) or a size limit may have rejected.
    pub(crate) fn unreadable(path: &Path, error: std::io::Error) -> Self {
        let path = path.to_owned();
        match error.kind() {
            ErrorKind::InvalidInput | ErrorKind::FileTooLarge => {
                Self::NotWeights { path, what: error.to_string() }
            }
            _ => Self::Read { path, error },
        }
    }
}

/// What to do without a tokenizer, in a folder with a file that may be one.
fn instead_of_tokenizer(found: Option<&str>) -> String {
    match found {
        Some("meta.pkl") => "found nanoGPT's meta.pkl, a pickle, which is not read; write its `stoi` as vocab.json (a space as Ġ, a line \
             feed as Ċ) with a merges.txt of the one line `#version: 0.2`"
            .into(),
        Some(found) => format!("found {found}; give it as the tokenizer"),
        None => "copy them from the checkpoint's source, or name another tokenizer".into(),
    }
}

/// A difference between the tensors of a file and those of the configured model. Names and shapes are the file's.
/// [`Checkpoint::check`](crate::Checkpoint::check) lists them.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mismatch {
    /// A tensor is absent.
    Missing {
        /// Its name.
        name: String,
        /// Its shape.
        expected: Vec<usize>,
    },
    /// A tensor has no place in the model.
    Surplus {
        /// Its name.
        name: String,
        /// Its shape.
        found: Vec<usize>,
    },
    /// A tensor has another shape than the model needs.
    Shape {
        /// Its name.
        name: String,
        /// The shape the model needs.
        expected: Vec<usize>,
        /// The shape in the file.
        found: Vec<usize>,
    },
    /// The output head differs from the token embedding, and the configuration ties them.
    TieContradiction {
        /// The head's name.
        name: String,
        /// The embedding's name.
        embedding: String,
        /// How many values differ.
        differing: usize,
        /// How many values each has.
        elements: usize,
    },
    /// A head has another number of labels than the configuration.
    Labels {
        /// The head's name.
        name: String,
        /// Rows in the file: one for each label.
        rows: usize,
        /// Labels of the configuration.
        labels: usize,
    },
    /// A tensor is stored in a type that holds no weights.
    DType {
        /// Its name.
        name: String,
        /// The type in the file.
        found: String,
    },
}

impl Mismatch {
    /// The tensor's name.
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
                write!(f, "tensor `{name}` is missing: expected {}", ShapeOf(expected))
            }
            Self::Surplus { found, .. } => {
                write!(
                    f,
                    "tensor `{name}` is surplus: found {}, and the model has no such parameter",
                    ShapeOf(found)
                )
            }
            Self::Shape { expected, found, .. } => {
                write!(f, "tensor `{name}`: expected {}, found {}", ShapeOf(expected), ShapeOf(found))
            }
            Self::TieContradiction { embedding, differing, elements, .. } => write!(
                f,
                "tensor `{name}` differs from `{embedding}` in {differing} of {elements} values, and config.json ties \
                 them; set `tie_word_embeddings` to false to use it, or remove it"
            ),
            Self::Labels { rows, labels, .. } => write!(
                f,
                "tensor `{name}` has rows for {rows} labels, and config.json names {labels} (2 by default); \
                 name one for each row in `id2label` and `label2id`"
            ),
            Self::DType { found, .. } => {
                write!(f, "tensor `{name}`: expected F32, F16, BF16 or F64, found {found}")?;
                // Types of GGUF that only llama.cpp computes with.
                let is_ggml = ["IQ", "TQ", "MXFP", "Q4_0_", "an unknown type of ggml"]
                    .iter()
                    .any(|start| found.starts_with(start));
                f.write_str(if is_ggml { ", which is not read; convert the model to q8_0" } else { "" })
            }
        }
    }
}

/// What a model with this head is for, in errors of other uses.
fn what_it_does(head: HeadKind) -> &'static str {
    match head {
        HeadKind::LanguageModel => {
            "a language model: it generates and scores texts, and has no labels; fine-tune it on labelled texts first"
        }
        HeadKind::SequenceClassification => {
            "a classifier: it labels texts, and neither generates nor scores texts; ask it to classify"
        }
        HeadKind::TokenClassification => {
            "a classifier: it labels tokens, and neither generates nor scores texts; ask it to classify"
        }
        HeadKind::DoubleHeads => {
            "a language model that also chooses among several texts, and has no labels; give it choices"
        }
    }
}

/// Prints a shape as `(24, 72)`.
pub(crate) struct ShapeOf<'a>(pub(crate) &'a [usize]);

impl fmt::Display for ShapeOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Sizes in one message; weights have at most four.
        const MOST_SIZES: usize = 8;
        let mut sizes: Vec<String> = self.0.iter().take(MOST_SIZES).map(usize::to_string).collect();
        if self.0.len() > MOST_SIZES {
            sizes.push(format!("… {} sizes", self.0.len()));
        }
        write!(f, "({})", sizes.join(", "))
    }
}

/// What to do with an adapter that does not fit.
fn right_model(base: Option<&str>) -> String {
    match base {
        Some(base) => format!("give its own base model, {base}, or download the adapter again"),
        None => "give the model that it was trained on, or save the adapter again".into(),
    }
}

/// Prints one line each.
struct Lines<'a>(&'a [String]);

impl fmt::Display for Lines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Most lines in one message.
        const MOST_LINES: usize = 40;
        self.0.iter().take(MOST_LINES).try_for_each(|line| write!(f, "\n  {line}"))?;
        match self.0.len().checked_sub(MOST_LINES) {
            Some(more) if more > 0 => write!(f, "\n  and {more} more"),
            _ => Ok(()),
        }
    }
}

/// Prints one difference a line.
struct ListOf<'a>(&'a [Mismatch]);

impl fmt::Display for ListOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Most lines in one message: an absurd configuration would otherwise fill the terminal for minutes.
        const MOST_LINES: usize = 1000;
        for mismatch in self.0.iter().take(MOST_LINES) {
            write!(f, "\n  {mismatch}")?;
        }
        match self.0.len().checked_sub(MOST_LINES) {
            Some(more) if more > 0 => write!(f, "\n  and {more} more"),
            _ => Ok(()),
        }
    }
}
