#![doc = include_str!("README.md")]

/// The model's sizes, under the keys of a checkpoint's `config.json`.
pub const CONFIG: &[u8] = include_bytes!("config.json");

/// Its byte-level BPE, as the `tokenizers` library writes one.
pub const TOKENIZER: &[u8] = include_bytes!("tokenizer.json");

/// Its weights in f16, under the names of a Hugging Face checkpoint.
pub const WEIGHTS: &[u8] = include_bytes!("model.safetensors");

/// Transcoders of its MLPs, one for each block: a `cfg.json` and the tensors in bf16, as SAELens has them.
pub const TRANSCODERS: [(&str, &[u8]); 6] = [
    (
        include_str!("transcoders/layer_0/cfg.json"),
        include_bytes!("transcoders/layer_0/sae_weights.safetensors"),
    ),
    (
        include_str!("transcoders/layer_1/cfg.json"),
        include_bytes!("transcoders/layer_1/sae_weights.safetensors"),
    ),
    (
        include_str!("transcoders/layer_2/cfg.json"),
        include_bytes!("transcoders/layer_2/sae_weights.safetensors"),
    ),
    (
        include_str!("transcoders/layer_3/cfg.json"),
        include_bytes!("transcoders/layer_3/sae_weights.safetensors"),
    ),
    (
        include_str!("transcoders/layer_4/cfg.json"),
        include_bytes!("transcoders/layer_4/sae_weights.safetensors"),
    ),
    (
        include_str!("transcoders/layer_5/cfg.json"),
        include_bytes!("transcoders/layer_5/sae_weights.safetensors"),
    ),
];
