//! Tests of `--encoder-states` in `score` and `generate`.
//!
//! The crate `engine` tests the numbers.

use candle_gpt2_testing::{fixture_path, json_fixture, temporary_folder};
use serde_json::Value;

use crate::common::{FAILURE, USAGE, assert_refused, path, run};

/// Returns arguments for the fixture's model and its encoder hidden states.
fn arguments() -> [String; 4] {
    let folder = fixture_path("cross-attention");
    let states = folder.join("states.safetensors");
    ["--model", path(&folder), "--encoder-states", path(&states)].map(str::to_owned)
}

fn with_states<'a>(command: &'a [&'a str], arguments: &'a [String]) -> Vec<&'a str> {
    command.iter().copied().chain(arguments.iter().map(String::as_str)).collect()
}

fn rows() -> Vec<Value> {
    json_fixture("cross-attention/expected")["rows"].as_array().unwrap().clone()
}

#[test]
fn score_and_generate_use_the_encoder_states() {
    let (arguments, row) = (arguments(), rows().remove(0));
    let text = row["text"].as_str().unwrap();
    let score = |with: usize| run(&with_states(&["score", text, "--json"], &arguments[..with])).json();
    assert_ne!(score(4)["loss"], score(2)["loss"], "with and without states");
    let generate = ["generate", text, "--json", "--greedy", "--max-new-tokens", "16"];
    assert_eq!(run(&with_states(&generate, &arguments)).json()["ids"], row["greedy"]);
}

/// Checks that all prompts in a file attend to the same encoder hidden states.
#[test]
fn all_prompts_attend_to_the_same_encoder_states() {
    let (folder, arguments) = (temporary_folder(), arguments());
    let (prompts, output) = (folder.path().join("prompts.txt"), folder.path().join("texts.jsonl"));
    let texts: Vec<String> = rows().iter().map(|row| row["text"].as_str().unwrap().to_owned()).collect();
    std::fs::write(&prompts, texts.join("\n")).unwrap();
    let generate = ["generate", "--prompts-file", path(&prompts), "--greedy", "--max-new-tokens", "16"];
    let printed = run(&with_states(&generate, &arguments));
    let found: Vec<Value> = printed.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(found.len(), 3);
    for (found, row) in found.iter().zip(rows()) {
        assert_eq!(found["ids"], row["greedy"], "{}", printed.stderr);
    }
    let with_output = [&generate[..], &["--output", path(&output)]].concat();
    assert_eq!(run(&with_states(&with_output, &arguments)).code, 0);
    let written = std::fs::read_to_string(&output).unwrap();
    assert_eq!(written, printed.stdout);
}

#[test]
fn unusable_encoder_states_are_rejected() {
    let arguments = arguments();
    for command in ["score", "generate"] {
        let tiny = fixture_path("tiny-checkpoint");
        let other = run(&[command, "The dog", "--model", path(&tiny), "--encoder-states", &arguments[3]]);
        assert_refused(&other, USAGE, "the model has no cross-attention");
        let missing = [command, "The dog", "--model", &arguments[1], "--encoder-states", "/no/such/file"];
        assert_refused(&run(&missing), FAILURE, "/no/such/file: ");
    }
}
