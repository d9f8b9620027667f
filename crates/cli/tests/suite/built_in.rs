//! Tests of the built-in model, which works in any folder without files or a network.

use std::process::{Command, Output, Stdio};

fn run_in_empty_folder(arguments: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
    command.args(arguments).current_dir(folder.path()).env_clear().stdin(Stdio::null());
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "no file is left behind");
    output
}

#[test]
fn generate_works_without_a_model_in_any_folder() {
    let arguments = ["generate", "One day", "--max-new-tokens", "30", "--seed", "5", "--offline"];
    let text = String::from_utf8(run_in_empty_folder(&arguments).stdout).unwrap();
    assert!(text.chars().filter(|c| c.is_alphabetic()).count() > 20, "{text}");
    assert_eq!(run_in_empty_folder(&arguments).stdout, text.as_bytes(), "the same seed gives the same text");
}

#[test]
fn built_in_model_can_be_inspected_and_verified() {
    let output = run_in_empty_folder(&["inspect", "--model", "built-in", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let parameters = report["parameters"]["unique"].as_u64().unwrap();
    assert_eq!(parameters, 6_708_480);
    run_in_empty_folder(&["verify", "--model", "built-in"]);
}

/// Compares outputs with values that this program produced on 2026-12-01.
///
/// Other weights, another tokenizer or wrong arithmetic would change them.
#[test]
fn built_in_model_reproduces_recorded_outputs() {
    /// Tolerance for rounding differences between vector instruction sets.
    const TOLERANCE: f64 = 1e-4;
    let json = |arguments: &[&str]| -> serde_json::Value {
        serde_json::from_slice(&run_in_empty_folder(arguments).stdout).unwrap()
    };
    let report = json(&["generate", "One day", "--greedy", "--max-new-tokens", "16", "--json"]);
    assert_eq!(report["prompt_ids"], serde_json::json!([700, 414]));
    let ids = [12, 261, 438, 671, 623, 679, 532, 280, 273, 673, 394, 381, 520, 14, 398, 474];
    assert_eq!(report["ids"], serde_json::json!(ids));
    assert_eq!(report["text"], ", a little girl named Lily went to the park with her mom. They saw");
    let loss = json(&["score", "Mia had a red ball.", "--json"])["loss"].as_f64().unwrap();
    assert!((loss - 2.314_00).abs() < TOLERANCE, "{loss}");
}
