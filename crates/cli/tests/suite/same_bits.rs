//! One model, text and seed give the same bytes with every instruction set that this processor has, on any number of threads.

use std::path::Path;
use std::process::Command;

use candle_gpt2_kernels::limits::instruction_sets;
use candle_gpt2_testing::CheckpointFolder;
use serde_json::Value;

use crate::common::path;

/// What the program writes with these instructions, without times.
fn written(instructions: &str, threads: usize, arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_gpt2"))
        .args(arguments)
        .args(["--threads", &threads.to_string()])
        .env("GPT2_INSTRUCTION_SET", instructions)
        .output()
        .unwrap();
    assert!(output.status.success(), "{instructions}: {}", String::from_utf8_lossy(&output.stderr));
    let mut written: Value = serde_json::from_slice(&output.stdout).unwrap();
    for time in ["tokens_per_s", "time_to_first_token_s"] {
        written.as_object_mut().unwrap().remove(time);
    }
    written
}

/// Those of `crates/engine/tests/fingerprints.rs`.
#[test]
fn fingerprints_are_the_same_with_every_instruction_set() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/fingerprints.json");
    let models: Vec<Value> = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let mut threads = 0;
    for model in models {
        let folder = model.get("config").map(|changes| CheckpointFolder::tiny().with_config(changes.clone()));
        let name = folder.as_ref().map_or("built-in", |folder| path(folder.path()));
        for (dtype, expected) in model["fingerprints"].as_object().unwrap() {
            for instructions in instruction_sets() {
                threads = threads % 7 + 1;
                let kv_dtype = if dtype == "f32" { "f32" } else { "f16" };
                let types = ["--dtype", dtype, "--kv-dtype", kv_dtype];
                let verify = [&["verify", "--model", name, "--fingerprint", "--json"], &types[..]].concat();
                let found = written(instructions, threads, &verify);
                let what = format!("{name}, {dtype}, {instructions}, {threads} threads");
                assert_eq!(found["fingerprint"], *expected, "{what}");
            }
        }
    }
}

#[test]
fn scores_texts_and_beams_are_the_same_with_every_instruction_set() {
    const SAMPLERS: [&[&str]; 12] = [
        &["--top-k", "0"],
        &["--temperature", "1.7", "--top-k", "40"],
        &["--top-k", "0", "--top-p", "0.9"],
        &["--top-k", "0", "--min-p", "0.02"],
        &["--top-k", "0", "--typical-p", "0.8"],
        &["--top-k", "0", "--epsilon-cutoff", "0.001"],
        &["--top-k", "0", "--eta-cutoff", "0.002"],
        &["--repetition-penalty", "1.3", "--presence-penalty", "0.2", "--frequency-penalty", "0.1"],
        &["--renormalize-logits", "--no-repeat-ngram-size", "3"],
        &["--num-beams", "4", "--length-penalty", "0.7"],
        &["--num-beams", "4", "--num-beam-groups", "2", "--diversity-penalty", "0.5"],
        &["--num-beams", "3", "--length-penalty", "-1.3", "--early-stopping", "never"],
    ];
    for (dtype, kv_dtype) in [("f32", "f32"), ("f16", "f16"), ("q8", "q8"), ("q6", "f16"), ("q4", "q8")] {
        let types = ["--dtype", dtype, "--kv-dtype", kv_dtype];
        let score = ["score", "But soft, what light through yonder window breaks?", "--json"];
        let mut calls = vec![[&score[..], &types].concat()];
        for sampler in SAMPLERS {
            let texts: &[&str] = match sampler[0] {
                "--num-beams" => &["--num-return-sequences", "2"],
                _ => &["--seed", "7", "--num-return-sequences", "4"],
            };
            let generate = ["generate", "ROMEO: I", "--json", "--max-new-tokens", "24"];
            calls.push([&generate[..], sampler, texts, &types].concat());
        }
        for call in calls {
            let mut sets = instruction_sets()
                .into_iter()
                .zip(1..)
                .map(|(instructions, threads)| (instructions, written(instructions, threads, &call)));
            let (_, expected) = sets.next().unwrap();
            for (instructions, found) in sets {
                assert_eq!(found, expected, "{call:?}, {instructions}");
            }
        }
    }
}
