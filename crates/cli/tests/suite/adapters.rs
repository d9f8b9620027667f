//! Tests of `--adapter` in commands that run a model, and of merging with `convert`.

use candle_gpt2_testing::{CheckpointFolder, fixture_path, temporary_folder};
use serde_json::{Value, json};

use crate::common::{FAILURE, SUCCESS, USAGE, assert_refused, path, run};

const IDS: &str = "5,299,17,130,8,201,77,1";

fn score(more: &[&str]) -> Value {
    let result = run(&[&["score", "--json", "--ids", IDS][..], more].concat());
    assert_eq!((result.code, result.stderr.as_str()), (SUCCESS, ""), "{more:?}");
    result.json()["logprobs"].clone()
}

/// Copies an adapter with changed settings.
fn changed_adapter(name: &str, changes: &Value) -> tempfile::TempDir {
    let (folder, from) = (temporary_folder(), fixture_path("adapters").join(name));
    let settings = std::fs::read(from.join("adapter_config.json")).unwrap();
    let mut settings: Value = serde_json::from_slice(&settings).unwrap();
    for (name, value) in changes.as_object().unwrap() {
        settings[name] = value.clone();
    }
    std::fs::write(folder.path().join("adapter_config.json"), settings.to_string()).unwrap();
    let tensors = "adapter_model.safetensors";
    std::fs::copy(from.join(tensors), folder.path().join(tensors)).unwrap();
    folder
}

#[test]
fn adapters_are_applied_and_merged() {
    let tiny = fixture_path("tiny-checkpoint");
    let (base, plain) = (path(&tiny), fixture_path("adapters/plain"));
    let plain = path(&plain);
    let adapted = score(&["--model", base, "--adapter", plain]);
    assert_ne!(adapted, score(&["--model", base]));
    assert_eq!(adapted, score(&["--model", base, "--lora", plain]));
    assert_ne!(adapted, score(&["--model", base, "--adapter", &format!("{plain}=0.5")]));
    let own_base = changed_adapter("plain", &json!({ "base_model_name_or_path": base }));
    assert_eq!(adapted, score(&["--adapter", path(own_base.path())]));

    let folder = temporary_folder();
    let [merged, from_own_base, twice] = ["merged", "of-base", "twice"].map(|name| folder.path().join(name));
    let convert = |more: &[&str]| {
        let result = run(&[&["convert"][..], more].concat());
        assert_eq!(result.code, SUCCESS, "{}", result.stderr);
    };
    convert(&[base, path(&merged), "--adapter", plain]);
    assert_eq!(adapted, score(&["--model", path(&merged)]));
    convert(&[path(&from_own_base), "--adapter", path(own_base.path())]);
    assert_eq!(adapted, score(&["--model", path(&from_own_base)]));
    let half = format!("{plain}=0.5");
    convert(&[base, path(&twice), "--adapter", &half, "--adapter", &half]);
    let difference = run(&["inspect", "--model", path(&twice), "--diff", path(&merged), "--json"]).json();
    assert!(difference["largest"].as_f64().is_none_or(|largest| largest < 1e-6), "{difference}");
}

#[test]
fn unusable_adapters_are_rejected() {
    let tiny = fixture_path("tiny-checkpoint");
    let adapter = fixture_path("adapters/plain");
    for command in ["generate", "score"] {
        let result = run(&[command, "x", "--model", path(&adapter)]);
        let expected = format!("use `--adapter {0}` in place of `--model {0}`", adapter.display());
        assert_refused(&result, FAILURE, &expected);
    }
    let dora = changed_adapter("plain", &json!({ "use_dora": true }));
    let result = run(&["score", "x", "--model", path(&tiny), "--adapter", path(dora.path())]);
    assert_refused(&result, FAILURE, "DoRA");
    let unnamed = changed_adapter("plain", &json!({ "base_model_name_or_path": null }));
    let result = run(&["score", "x", "--adapter", path(unnamed.path())]);
    assert_refused(&result, USAGE, "does not name a base model");
    let result = run(&["score", "x", "--model", "built-in", "--adapter", path(&adapter)]);
    assert_refused(&result, FAILURE, "expected shape (3, 256), found (3, 28)");
    assert_refused(&run(&["convert", "out"]), USAGE, "<OUT>");
}

#[test]
fn unapplied_adapter_next_to_weights_gets_a_note() {
    let both = ["adapter_config.json", "adapter_model.safetensors"]
        .into_iter()
        .fold(CheckpointFolder::tiny(), |folder, name| {
            folder.with(name, std::fs::read(fixture_path("adapters/plain").join(name)).unwrap())
        });
    let result = run(&["score", "--ids", IDS, "--model", path(both.path())]);
    let note = format!("is not applied; to apply it, add `--adapter {}`", both.path().display());
    assert!(result.code == SUCCESS && result.stderr.contains(&note), "{}", result.stderr);
    let plain = fixture_path("adapters/plain");
    let tiny = fixture_path("tiny-checkpoint");
    assert_eq!(
        score(&["--model", path(both.path()), "--adapter", path(both.path())]),
        score(&["--model", path(&tiny), "--adapter", path(&plain)])
    );
}

#[test]
fn convert_writes_a_safetensors_file() {
    let tiny = fixture_path("tiny-checkpoint");
    let folder = temporary_folder();
    let file = folder.path().join("x.safetensors");
    let result = run(&["convert", path(&tiny), path(&file), "--json"]);
    assert_eq!(result.code, SUCCESS, "{}", result.stderr);
    let report = result.json();
    assert_eq!((&report["format"], &report["output"]), (&json!("safetensors"), &json!(path(&file))));
    let note = report["notes"][0].as_str().unwrap();
    assert!(note.contains("config.json") && note.contains("tokenizer.json"), "{note}");
    assert!(file.is_file());
    for name in ["config.json", "tokenizer.json"] {
        std::fs::copy(tiny.join(name), folder.path().join(name)).unwrap();
    }
    assert_eq!(score(&["--model", path(&file)]), score(&["--model", path(&tiny)]));
    let again = run(&["convert", path(&tiny), path(&file)]);
    assert_refused(&again, FAILURE, "already exists");
    let integers =
        run(&["convert", path(&tiny), path(&folder.path().join("y.safetensors")), "--dtype", "q8_0"]);
    assert_refused(&integers, USAGE, "a safetensors file can only store f32, f16 or bf16");
}
