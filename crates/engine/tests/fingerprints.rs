//! Every machine computes the same bits: the hashes of logits in `fingerprints.json`, which other tests read too, in other processes
//! with other instructions and thread counts, and under Node.
//!
//! After a change of the arithmetic `WRITE_FINGERPRINTS=1 cargo test -p candle-gpt2-engine --test fingerprints` writes them anew.

use std::path::PathBuf;

use candle_gpt2_engine::{BUILT_IN, ModelOptions, Opened, Silent, fingerprint, process};
use candle_gpt2_testing::CheckpointFolder;
use candle_gpt2_weights::GivenFiles;
use serde_json::Value;

/// The file: a list of models, each with what is changed in the configuration of the tiny checkpoint, and its hash by type.
fn file() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fingerprints.json")
}

/// Types of weights, and of keys and values.
const TYPES: [(&str, &str); 5] =
    [("f32", "f32"), ("f16", "f16"), ("q8", "f16"), ("q6", "f16"), ("q4", "f16")];

/// With the instructions that `GPT2_INSTRUCTION_SET` names, or the fastest.
#[test]
fn logits_have_the_bits_of_every_other_machine() {
    if let Ok(name) = std::env::var(process::INSTRUCTION_SET) {
        process::use_instruction_set(&name).unwrap();
    }
    let mut models: Vec<Value> = serde_json::from_slice(&std::fs::read(file()).unwrap()).unwrap();
    assert!(models.len() > 8, "{} models", models.len());
    let is_writing = std::env::var_os("WRITE_FINGERPRINTS").is_some();
    for model in &mut models {
        let folder = model.get("config").map(|changes| CheckpointFolder::tiny().with_config(changes.clone()));
        // WebAssembly rounds twice where a weight in f32 is multiplied, see the book's page on the arithmetic.
        let types = if cfg!(target_family = "wasm") { &TYPES[1..] } else { &TYPES };
        for (dtype, kv_dtype) in types {
            let options = ModelOptions {
                model: BUILT_IN.into(),
                dtype: Some(dtype.parse().unwrap()),
                kv_dtype: Some(kv_dtype.parse().unwrap()),
                ..ModelOptions::default()
            };
            let loaded = open(&options, folder.as_ref()).load(&Silent).unwrap();
            let found = Value::from(fingerprint(loaded.model(), &Silent).unwrap());
            if is_writing {
                model["fingerprints"][dtype] = found;
            } else {
                assert_eq!(model["fingerprints"][dtype], found, "{:?}, {dtype}", model.get("config"));
            }
        }
    }
    if is_writing {
        let text = serde_json::to_string_pretty(&models).unwrap() + "\n";
        std::fs::write(file(), text).unwrap();
    }
}

/// The files of a folder, which WebAssembly can only be given, or the built-in model.
fn open(options: &ModelOptions, folder: Option<&CheckpointFolder>) -> Opened {
    let Some(folder) = folder else { return options.open(&Silent).unwrap() };
    let mut files = GivenFiles::new("tiny");
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        files = files.with_bytes(name, std::fs::read(folder.path().join(name)).unwrap());
    }
    options.open_given(files, &Silent).unwrap()
}
