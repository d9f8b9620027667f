//! The result of the readers of all formats: tensors in files, and what the files say about the model.

use std::path::PathBuf;

use candle_gpt2::Gpt2Config;
use tokenizers::Tokenizer;

use crate::checkpoint_file::CheckpointFile;
use crate::gguf_header::Metadata;
use crate::stored::StoredTensor;

macro_rules! formats {
    ($($(#[$doc:meta])* $format:ident $name:literal;)+) => {
        /// A format of checkpoint files. [`Checkpoint::format`](crate::Checkpoint::format) says which a checkpoint has.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Format {
            $($(#[$doc])* $format,)+
        }

        impl Format {
            /// The format's name.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$format => $name,)+
                }
            }
        }
    };
}

formats! {
    /// Hugging Face's safetensors, in one file or several.
    Safetensors "safetensors";
    /// PyTorch's `torch.save` since version 1.6: a zip archive.
    PyTorchZip "pytorch (zip)";
    /// PyTorch's `torch.save` before version 1.6: pickles with raw data after them.
    PyTorchLegacy "pytorch (legacy)";
    /// TensorFlow's checkpoint, as OpenAI published GPT-2.
    TensorFlow "tensorflow";
    /// llama.cpp's GGUF.
    Gguf "gguf";
    /// llm.c's `.bin`.
    LlmC "llm.c";
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
    /// The configuration, if the files themselves hold one.
    pub(crate) config: Option<Gpt2Config>,
    /// The tokenizer, if the files themselves hold one.
    pub(crate) tokenizer: Option<Tokenizer>,
    /// Whether linear layers and norms have no biases: the model is then built with zeros.
    pub(crate) is_bias_free: bool,
    /// Whether each tensor has bytes of its own: views of PyTorch may share theirs.
    pub(crate) has_own_bytes: bool,
    /// Whether there may be rows after those of the vocabulary: llm.c pads the embedding, every other file says how many tokens it
    /// has.
    pub(crate) may_be_padded: bool,
    /// What the reader decided, in words, for `inspect`.
    pub(crate) rules: Vec<String>,
    /// What users should know when the files are opened.
    pub(crate) notes: Vec<String>,
    /// Metadata of a GGUF file, without the lists of tokens.
    pub(crate) metadata: Metadata,
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
            has_own_bytes: false,
            may_be_padded: false,
            rules: Vec::new(),
            notes: Vec::new(),
            metadata: Vec::new(),
        }
    }
}
