//! One model, text and seed give the same bytes with every instruction set that this processor has, on any number of threads.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use candle_gpt2_arithmetic::limits::instruction_sets;
use candle_gpt2_testing::{CheckpointFolder, SAMPLERS};
use serde_json::Value;

use crate::common::path;

/// What the program writes with these instructions, without times.
fn written(instructions: &str, threads: usize, arguments: &[impl AsRef<OsStr>]) -> Value {
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
    for (dtype, kv_dtype) in [("f32", "f32"), ("f16", "f16"), ("q8", "q8"), ("q6", "f16"), ("q4", "q8")] {
        let types = ["--dtype", dtype, "--kv-dtype", kv_dtype];
        let score = ["score", "But soft, what light through yonder window breaks?", "--json"];
        let mut calls =
            vec![[&score[..], &types].concat().into_iter().map(str::to_owned).collect::<Vec<_>>()];
        for sampler in SAMPLERS {
            let sampler = flags(sampler);
            let texts: &[&str] = match sampler.iter().any(|flag| flag == "--num-beams") {
                true => &["--num-return-sequences", "2"],
                false => &["--seed", "7", "--num-return-sequences", "4"],
            };
            let generate = ["generate", "ROMEO: I", "--json", "--max-new-tokens", "24"];
            let given = [&generate[..], texts, &types].concat();
            calls.push(given.into_iter().map(str::to_owned).chain(sampler).collect());
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

/// The flags of the program for these options; a beam search is asked for by its beams alone.
fn flags(options: &str) -> Vec<String> {
    let options: serde_json::Map<String, Value> = serde_json::from_str(options).unwrap();
    let mut flags = Vec::new();
    for (name, value) in options.into_iter().filter(|(name, _)| name != "do_sample") {
        flags.push(format!("--{}", name.replace('_', "-")));
        match value {
            Value::Bool(true) => {}
            Value::String(text) => flags.push(text),
            value => flags.push(value.to_string()),
        }
    }
    flags
}
