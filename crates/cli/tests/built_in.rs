//! The model inside the program: it needs no file and no network, from any folder.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::process::{Command, Output, Stdio};

fn run_in_an_empty_folder(arguments: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
    command.args(arguments).current_dir(folder.path()).env_clear().stdin(Stdio::null());
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no file is left behind");
    output
}

#[test]
fn text_comes_without_a_model_from_any_folder() {
    let arguments = ["generate", "ROMEO:", "--max-new-tokens", "30", "--seed", "5", "--offline"];
    let text = String::from_utf8(run_in_an_empty_folder(&arguments).stdout).unwrap();
    assert!(text.chars().filter(|c| c.is_alphabetic()).count() > 20, "{text}");
    assert_eq!(run_in_an_empty_folder(&arguments).stdout, text.as_bytes(), "the same seed, the same text");
}

#[test]
fn the_built_in_model_is_a_checkpoint_like_others() {
    let output = run_in_an_empty_folder(&["inspect", "--model", "built-in", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let parameters = report["parameters"]["unique"].as_u64().unwrap();
    assert!((2_000_000..6_000_000).contains(&parameters), "{parameters} parameters");
    run_in_an_empty_folder(&["verify", "--model", "built-in"]);
    let output = run_in_an_empty_folder(&["score", "Speak, speak.", "--json"]);
    let score: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    // A model that only guesses among 1,024 tokens has a loss of 6.9.
    assert!(score["loss"].as_f64().unwrap() < 6.0, "{score}");
}
