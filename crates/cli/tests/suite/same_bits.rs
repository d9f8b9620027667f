//! Tests that results are bit-identical with every instruction set and number of threads.
//!
//! They cover every instruction set of this processor, for a given model, text and seed.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use candle_gpt2_arithmetic::limits::instruction_sets;
use candle_gpt2_testing::{CheckpointFolder, SAMPLERS};
use serde_json::Value;

use crate::common::path;

/// Returns the program's output with this instruction set, without timings.
fn output_json(instructions: &str, threads: usize, arguments: &[impl AsRef<OsStr>]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_gpt2"))
        .args(arguments)
        .args(["--threads", &threads.to_string()])
        .env("GPT2_INSTRUCTION_SET", instructions)
        .output()
        .unwrap();
    assert!(output.status.success(), "{instructions}: {}", String::from_utf8_lossy(&output.stderr));
    let mut report: Value = serde_json::from_slice(&output.stdout).unwrap();
    for time in ["tokens_per_s", "time_to_first_token_s"] {
        report.as_object_mut().unwrap().remove(time);
    }
    report
}

/// Compares with the fingerprints in `crates/engine/tests/fingerprints.json`.
#[test]
fn fingerprints_do_not_depend_on_the_instruction_set() {
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
                let found = output_json(instructions, threads, &verify);
                let case = format!("{name}, {dtype}, {instructions}, {threads} threads");
                assert_eq!(found["fingerprint"], *expected, "{case}");
            }
        }
    }
}

#[test]
fn outputs_do_not_depend_on_the_instruction_set() {
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
            let arguments = [&generate[..], texts, &types].concat();
            calls.push(arguments.into_iter().map(str::to_owned).chain(sampler).collect());
        }
        for call in calls {
            let mut sets = instruction_sets()
                .into_iter()
                .zip(1..)
                .map(|(instructions, threads)| (instructions, output_json(instructions, threads, &call)));
            let (_, expected) = sets.next().unwrap();
            for (instructions, found) in sets {
                assert_eq!(found, expected, "{call:?}, {instructions}");
            }
        }
    }
}

/// Converts options to command-line flags.
///
/// The result has no `do_sample`, because `--num-beams` alone selects beam search.
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
