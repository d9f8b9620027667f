//! Hashes in `fingerprints.json` that must be the same on every machine.
//!
//! They cover logits, and the built-in model's scores, samples and search results. Other tests check the
//! same file in other processes, with other instruction sets and thread counts, and under Node.
//!
//! After a change of the arithmetic, `WRITE_FINGERPRINTS=1 cargo test -p candle-gpt2-engine --test
//! fingerprints` updates the file.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::ops::ControlFlow;
use std::path::PathBuf;

use candle_gpt2_engine::{
    BUILT_IN, CompletionDriver, LoadedModel, ModelOptions, Opened, Silent, fingerprint, process,
};
use candle_gpt2_generation::{Event, GenerationConfig, Request, SchedulerOptions, score};
use candle_gpt2_testing::{CheckpointFolder, SAMPLERS};
use candle_gpt2_weights::GivenFiles;
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Path of `fingerprints.json`.
///
/// The file lists models. Each has its changes to the tiny checkpoint's configuration and its hashes by
/// type.
fn file() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fingerprints.json")
}

/// Types of the weights and of the KV cache.
const TYPES: [(&str, &str); 5] =
    [("f32", "f32"), ("f16", "f16"), ("q8", "f16"), ("q6", "f16"), ("q4", "f16")];

/// Uses the instruction set named by `GPT2_INSTRUCTION_SET`, or the fastest one.
#[test]
fn logits_completions_and_scores_match_the_stored_hashes() {
    if let Ok(name) = std::env::var(process::INSTRUCTION_SET) {
        process::use_instruction_set(&name).unwrap();
    }
    let mut models: Vec<Value> = serde_json::from_slice(&std::fs::read(file()).unwrap()).unwrap();
    assert!(models.len() > 8, "{} models", models.len());
    let is_writing = std::env::var_os("WRITE_FINGERPRINTS").is_some();
    for model in &mut models {
        let folder = model.get("config").map(|changes| CheckpointFolder::tiny().with_config(changes.clone()));
        // WebAssembly rounds twice in products with f32 weights; see the book's page on arithmetic.
        let types = if cfg!(target_family = "wasm") { &TYPES[1..] } else { &TYPES };
        for (dtype, kv_dtype) in types {
            let options = ModelOptions {
                model: BUILT_IN.into(),
                dtype: Some(dtype.parse().unwrap()),
                kv_dtype: Some(kv_dtype.parse().unwrap()),
                ..ModelOptions::default()
            };
            let loaded = open(&options, folder.as_ref()).load(&Silent).unwrap();
            let mut found = vec![("fingerprints", fingerprint(loaded.model(), &Silent).unwrap())];
            if folder.is_none() {
                found.push(("texts", hash_of_completions(&loaded)));
            }
            for (what, hash) in found {
                if is_writing {
                    model[what][dtype] = hash.into();
                } else {
                    assert_eq!(model[what][dtype], hash, "{what}, {:?}, {dtype}", model.get("config"));
                }
            }
        }
    }
    if is_writing {
        let text = serde_json::to_string_pretty(&models).unwrap() + "\n";
        std::fs::write(file(), text).unwrap();
    }
}

/// Hashes the log-probabilities of a text and the tokens from every sampler and search.
fn hash_of_completions(loaded: &LoadedModel) -> String {
    let encode = |text: &str| loaded.vocabulary().encode(text).unwrap();
    let mut hash = Sha256::new();
    let scored = encode("But soft, what light through yonder window breaks?");
    for logprob in score(loaded.model(), &scored, 256, 0, &|_| ()).unwrap().logprobs.into_iter().flatten() {
        hash.update(logprob.to_le_bytes());
    }
    let scheduler = SchedulerOptions { max_texts: 8, kv_tokens: 1024, chunk_tokens: 16 };
    let mut texts = CompletionDriver::new(loaded.scheduler(scheduler).unwrap());
    for sampler in SAMPLERS {
        let config = GenerationConfig { do_sample: true, seed: 7, max_new_tokens: 16, ..Default::default() };
        let mut config = config.with_json(sampler).unwrap();
        config.num_return_sequences = if config.do_sample { 4 } else { 2 };
        let mut ids = vec![Vec::new(); config.num_return_sequences];
        texts.begin(Request::each(&[encode("ROMEO: I")], &config), ());
        while !texts.is_idle() {
            while let Some((_, _, taken)) = texts.feed(8) {
                taken.unwrap();
            }
            let (events, failure) = texts.step(&|| ControlFlow::Continue(()));
            assert!(failure.is_none(), "{failure:?}");
            for event in events {
                match event.event {
                    Event::Token { sequence, id, .. } => ids[sequence].push(id),
                    Event::Found { texts, .. } => {
                        ids = texts.into_iter().map(|found| found.ids).collect();
                    }
                    _ => {}
                }
            }
        }
        for text in ids {
            assert!(!text.is_empty(), "{sampler}");
            text.iter().for_each(|id| hash.update(id.to_le_bytes()));
        }
    }
    format!("{:x}", hash.finalize())
}

/// Opens the built-in model, or a folder's files as bytes, as WebAssembly requires.
fn open(options: &ModelOptions, folder: Option<&CheckpointFolder>) -> Opened {
    let Some(folder) = folder else { return options.open(&Silent).unwrap() };
    let mut files = GivenFiles::new("tiny");
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        files = files.with_bytes(name, std::fs::read(folder.path().join(name)).unwrap());
    }
    options.open_given(files, &Silent).unwrap()
}
