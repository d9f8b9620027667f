#![doc = include_str!("README.md")]

/// Sizes of the model, under the keys of a checkpoint's `config.json`.
pub static CONFIG: &[u8] = include_bytes!("config.json");

/// Byte-level BPE tokenizer, in the format of the `tokenizers` library.
pub static TOKENIZER: &[u8] = include_bytes!("tokenizer.json");

/// Weights in q8_0, a GGUF file in llama.cpp's format.
pub static WEIGHTS: &[u8] = include_bytes!("model.gguf");

/// Default sampling options, in the format of transformers.
pub static GENERATION_CONFIG: &[u8] = include_bytes!("generation_config.json");

/// All files of the checkpoint by name, without the transcoders.
pub static FILES: [(&str, &[u8]); 4] = [
    ("config.json", CONFIG),
    ("generation_config.json", GENERATION_CONFIG),
    ("tokenizer.json", TOKENIZER),
    ("model.gguf", WEIGHTS),
];

macro_rules! transcoder {
    ($layer:literal) => {
        (
            include_str!(concat!("transcoders/layer_", $layer, "/cfg.json")),
            include_bytes!(concat!("transcoders/layer_", $layer, "/sae_weights.safetensors")),
        )
    };
}

/// Transcoders of the MLPs, one for each block: a `cfg.json` and tensors in bf16, as in SAELens.
pub static TRANSCODERS: [(&str, &[u8]); 7] = [
    transcoder!(0),
    transcoder!(1),
    transcoder!(2),
    transcoder!(3),
    transcoder!(4),
    transcoder!(5),
    transcoder!(6),
];
