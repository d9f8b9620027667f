#![doc = include_str!("README.md")]

/// The model's sizes, under the keys of a checkpoint's `config.json`.
pub const CONFIG: &[u8] = include_bytes!("config.json");

/// Its byte-level BPE, as the `tokenizers` library writes one.
pub const TOKENIZER: &[u8] = include_bytes!("tokenizer.json");

/// Its weights in f16, under the names of a Hugging Face checkpoint.
pub const WEIGHTS: &[u8] = include_bytes!("model.safetensors");
