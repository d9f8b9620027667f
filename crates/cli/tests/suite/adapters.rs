//! `--adapter`: on every command that runs a model, and merged by `convert`.

use candle_gpt2_testing::{CheckpointFolder, fixture_path, temporary_folder};
use serde_json::{Value, json};

use crate::common::{FAILURE, SUCCESS, USAGE, assert_refused, path, run};

const IDS: &str = "5,299,17,130,8,201,77,1";

fn score(more: &[&str]) -> Value {
    let reply = run(&[&["score", "--json", "--ids", IDS][..], more].concat());
    assert_eq!((reply.code, reply.stderr.as_str()), (SUCCESS, ""), "{more:?}");
    reply.json()["logprobs"].clone()
}

/// An adapter whose settings a test changes.
fn changed(name: &str, changes: &Value) -> tempfile::TempDir {
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
    let own_base = changed("plain", &json!({ "base_model_name_or_path": base }));
    assert_eq!(adapted, score(&["--adapter", path(own_base.path())]));

    let folder = temporary_folder();
    let [merged, of_base, twice] = ["merged", "of-base", "twice"].map(|name| folder.path().join(name));
    let convert = |more: &[&str]| {
        let reply = run(&[&["convert"][..], more].concat());
        assert_eq!(reply.code, SUCCESS, "{}", reply.stderr);
    };
    convert(&[base, path(&merged), "--adapter", plain]);
    assert_eq!(adapted, score(&["--model", path(&merged)]));
    convert(&[path(&of_base), "--adapter", path(own_base.path())]);
    assert_eq!(adapted, score(&["--model", path(&of_base)]));
    let half = format!("{plain}=0.5");
    convert(&[base, path(&twice), "--adapter", &half, "--adapter", &half]);
    let difference = run(&["inspect", "--model", path(&twice), "--diff", path(&merged), "--json"]).json();
    assert!(difference["largest"].as_f64().is_none_or(|largest| largest < 1e-6), "{difference}");
}

#[test]
fn adapters_that_cannot_be_used_are_refused() {
    let tiny = fixture_path("tiny-checkpoint");
    let adapter = fixture_path("adapters/plain");
    for command in ["generate", "score"] {
        let reply = run(&[command, "x", "--model", path(&adapter)]);
        let expected = format!("use `--adapter {0}` in place of `--model {0}`", adapter.display());
        assert_refused(&reply, FAILURE, &expected);
    }
    let dora = changed("plain", &json!({ "use_dora": true }));
    let reply = run(&["score", "x", "--model", path(&tiny), "--adapter", path(dora.path())]);
    assert_refused(&reply, FAILURE, "DoRA");
    let unnamed = changed("plain", &json!({ "base_model_name_or_path": null }));
    let reply = run(&["score", "x", "--adapter", path(unnamed.path())]);
    assert_refused(&reply, USAGE, "names no base model");
    let reply = run(&["score", "x", "--model", "built-in", "--adapter", path(&adapter)]);
    assert_refused(&reply, FAILURE, "expected (3, 192), found (3, 28)");
    assert_refused(&run(&["convert", "out"]), USAGE, "<OUT>");
}

#[test]
fn an_adapter_next_to_weights_is_named() {
    let both = ["adapter_config.json", "adapter_model.safetensors"]
        .into_iter()
        .fold(CheckpointFolder::tiny(), |folder, name| {
            folder.with(name, std::fs::read(fixture_path("adapters/plain").join(name)).unwrap())
        });
    let reply = run(&["score", "--ids", IDS, "--model", path(both.path())]);
    let note = format!("is not applied; to apply it, add `--adapter {}`", both.path().display());
    assert!(reply.code == SUCCESS && reply.stderr.contains(&note), "{}", reply.stderr);
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
    let reply = run(&["convert", path(&tiny), path(&file), "--json"]);
    assert_eq!(reply.code, SUCCESS, "{}", reply.stderr);
    let report = reply.json();
    assert_eq!((&report["format"], &report["output"]), (&json!("safetensors"), &json!(path(&file))));
    let note = report["notes"][0].as_str().unwrap();
    assert!(note.contains("config.json") && note.contains("tokenizer.json"), "{note}");
    assert!(file.is_file());
    for name in ["config.json", "tokenizer.json"] {
        std::fs::copy(tiny.join(name), folder.path().join(name)).unwrap();
    }
    assert_eq!(score(&["--model", path(&file)]), score(&["--model", path(&tiny)]));
    let again = run(&["convert", path(&tiny), path(&file)]);
    assert_refused(&again, FAILURE, "it exists already");
    let integers =
        run(&["convert", path(&tiny), path(&folder.path().join("y.safetensors")), "--dtype", "q8_0"]);
    assert_refused(&integers, USAGE, "a safetensors file holds f32, f16 or bf16");
}
