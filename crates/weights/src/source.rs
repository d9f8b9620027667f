//! Common result of all format readers: tensors and model information found in the files.

use std::path::PathBuf;

use candle_gpt2::Gpt2Config;
use tokenizers::Tokenizer;

use crate::checkpoint_file::CheckpointFile;
use crate::gguf_header::Metadata;
use crate::stored::StoredTensor;

macro_rules! formats {
    ($($(#[$doc:meta])* $format:ident $name:literal;)+) => {
        /// Checkpoint file format, as returned by [`Checkpoint::format`](crate::Checkpoint::format).
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Format {
            $($(#[$doc])* $format,)+
        }

        impl Format {
            /// Returns the name of the format.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$format => $name,)+
                }
            }
        }
    };
}

formats! {
    /// Hugging Face's safetensors, in one file or in shards.
    Safetensors "safetensors";
    /// PyTorch's `torch.save` since version 1.6: a zip archive.
    PyTorchZip "pytorch (zip)";
    /// PyTorch's `torch.save` before version 1.6: pickles followed by raw data.
    PyTorchLegacy "pytorch (legacy)";
    /// TensorFlow checkpoint, as published by OpenAI for GPT-2.
    TensorFlow "tensorflow";
    /// llama.cpp's GGUF format.
    Gguf "gguf";
    /// llm.c's `.bin` format.
    LlmC "llm.c";
}

/// Checkpoint as returned by a format reader, with the file's tensor names, shapes and dtypes.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) format: Format,
    /// Description of the bytes that identify the format.
    pub(crate) evidence: String,
    /// Opened path: the file, or the index of its shards.
    pub(crate) path: PathBuf,
    pub(crate) files: Vec<CheckpointFile>,
    pub(crate) tensors: Vec<StoredTensor>,
    /// Configuration, if the files contain one.
    pub(crate) config: Option<Gpt2Config>,
    /// Tokenizer, if the files contain one.
    pub(crate) tokenizer: Option<Tokenizer>,
    /// Whether linear layers and norms have no biases; the model then uses zeros.
    pub(crate) is_bias_free: bool,
    /// Whether each tensor has its own bytes; PyTorch views may share theirs.
    pub(crate) has_own_bytes: bool,
    /// Whether the embedding may have padding rows after the vocabulary.
    ///
    /// llm.c pads the embedding; all other files record the number of tokens.
    pub(crate) may_be_padded: bool,
    /// Descriptions of the reader's decisions, for `inspect`.
    pub(crate) rules: Vec<String>,
    /// Notes shown to users when the files are opened.
    pub(crate) notes: Vec<String>,
    /// GGUF metadata without the token arrays.
    pub(crate) metadata: Metadata,
}

impl Source {
    /// Creates a source with no tensors or other information yet.
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
            has_own_bytes: false,
            may_be_padded: false,
            rules: Vec::new(),
            notes: Vec::new(),
            metadata: Vec::new(),
        }
    }
}
