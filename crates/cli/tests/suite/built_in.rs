//! The model inside the program: it needs no file and no network, from any folder.

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
    let arguments = ["generate", "One day", "--max-new-tokens", "30", "--seed", "5", "--offline"];
    let text = String::from_utf8(run_in_an_empty_folder(&arguments).stdout).unwrap();
    assert!(text.chars().filter(|c| c.is_alphabetic()).count() > 20, "{text}");
    assert_eq!(run_in_an_empty_folder(&arguments).stdout, text.as_bytes(), "the same seed, the same text");
}

#[test]
fn the_built_in_model_is_a_checkpoint_like_others() {
    let output = run_in_an_empty_folder(&["inspect", "--model", "built-in", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let parameters = report["parameters"]["unique"].as_u64().unwrap();
    assert_eq!(parameters, 3_161_088);
    run_in_an_empty_folder(&["verify", "--model", "built-in"]);
}

/// Its numbers, recorded on 2026-11-26 from this program: other weights, another tokenizer or wrong arithmetic give others.
#[test]
fn the_built_in_model_is_the_one_that_was_trained() {
    /// Other vector instructions round the last bits of sums in another way.
    const TOLERANCE: f64 = 1e-4;
    let json = |arguments: &[&str]| -> serde_json::Value {
        serde_json::from_slice(&run_in_an_empty_folder(arguments).stdout).unwrap()
    };
    let report = json(&["generate", "One day", "--greedy", "--max-new-tokens", "16", "--json"]);
    assert_eq!(report["prompt_ids"], serde_json::json!([1865, 547]));
    let ids = [1871, 350, 274, 262, 341, 348, 78, 12, 322, 302, 350, 274, 656, 1258, 12, 295];
    assert_eq!(report["ids"], serde_json::json!(ids));
    assert_eq!(report["text"], " early in the autumn, I was in the little yard, and");
    let loss = json(&["score", "Mia had a red ball.", "--json"])["loss"].as_f64().unwrap();
    assert!((loss - 2.681_07).abs() < TOLERANCE, "{loss}");
}
