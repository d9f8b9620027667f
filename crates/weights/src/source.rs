//! What the readers of all formats hand on: tensors in files, and what the files say about the model.

use std::path::PathBuf;

use candle_gpt2::Gpt2Config;
use tokenizers::Tokenizer;

use crate::checkpoint_file::CheckpointFile;
use crate::stored::StoredTensor;

/// A format of checkpoint files. [`Checkpoint::format`](crate::Checkpoint::format) says which a checkpoint has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// Hugging Face's safetensors, in one file or several.
    Safetensors,
    /// PyTorch's `torch.save` since version 1.6: a zip archive.
    PyTorchZip,
    /// PyTorch's `torch.save` before version 1.6: pickles with raw data after them.
    PyTorchLegacy,
    /// TensorFlow's checkpoint, as OpenAI published GPT-2.
    TensorFlow,
    /// llama.cpp's GGUF.
    Gguf,
    /// llm.c's `.bin`.
    LlmC,
}

impl Format {
    /// The format's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Safetensors => "safetensors",
            Self::PyTorchZip => "pytorch (zip)",
            Self::PyTorchLegacy => "pytorch (legacy)",
            Self::TensorFlow => "tensorflow",
            Self::Gguf => "gguf",
            Self::LlmC => "llm.c",
        }
    }
}

/// A checkpoint's files as one reader found them. Tensors have the names, shapes and types of the file.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) format: Format,
    /// What in the bytes of the file shows its format.
    pub(crate) evidence: String,
    /// What was opened: the file, or the index of its shards.
    pub(crate) path: PathBuf,
    pub(crate) files: Vec<CheckpointFile>,
    pub(crate) tensors: Vec<StoredTensor>,
    /// The configuration, where the files themselves hold one.
    pub(crate) config: Option<Gpt2Config>,
    /// The tokenizer, where the files themselves hold one.
    pub(crate) tokenizer: Option<Tokenizer>,
    /// Whether linear layers and norms have no biases: the model is then built with zeros.
    pub(crate) is_bias_free: bool,
    /// What the reader decided, in words, for whoever inspects the checkpoint.
    pub(crate) rules: Vec<String>,
}

impl Source {
    /// A source with nothing but its tensors.
    pub(crate) fn new(format: Format, evidence: impl Into<String>, file: CheckpointFile) -> Self {
        Self {
            format,
            evidence: evidence.into(),
            path: file.path().to_owned(),
            files: vec![file],
            tensors: Vec::new(),
            config: None,
            tokenizer: None,
            is_bias_free: false,
            rules: Vec::new(),
        }
    }
}
