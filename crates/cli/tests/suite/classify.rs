//! Tests of `gpt2 classify`, and of other commands when they open classifiers.
//!
//! `scripts/reference/heads.py` generated the checkpoints and the expected values.

use std::fs;

use candle_gpt2_testing::{CheckpointFolder, fixture_path, json_fixture};
use serde_json::{Value, json};

use crate::common::{FAILURE, Run, SUCCESS, USAGE, assert_refused, path, run, run_with_input, settings_line};

/// Tolerance for f32 sums in three blocks, which PyTorch computes in a different order.
const TOLERANCE: f64 = 1e-4;

fn model(name: &str) -> String {
    fixture_path("heads").join(name).to_str().unwrap().to_owned()
}

fn classify(name: &str, arguments: &[&str]) -> Run {
    run(&[&["classify", "--model", &model(name)][..], arguments].concat())
}

fn expected(name: &str) -> Value {
    json_fixture("heads/expected")[name].clone()
}

fn objects(lines: &str) -> Vec<Value> {
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Checks that the labels are in the same order as in transformers' pipeline.
///
/// The engine's tests compare the scores.
#[track_caller]
fn assert_labels(found: &Value, expected: &Value, index: usize) {
    let names = |labels: &Value| -> Vec<String> {
        let name = |label: &Value| label["label"].as_str().unwrap().to_owned();
        labels.as_array().unwrap().iter().map(name).collect()
    };
    assert_eq!(names(&found["labels"]), names(&expected["pipeline"][index]));
}

#[test]
fn labels_match_transformers() {
    let texts = expected("texts");
    for name in ["sequence", "multi_label"] {
        let expected = expected(name);
        let text = texts[1].as_str().unwrap();
        let found = classify(name, &[text, "--json"]).json();
        assert_eq!(found["prompt_ids"], expected["ids"][1]);
        assert_labels(&found, &expected, 1);
        let ids: Vec<u32> = serde_json::from_value(expected["ids"][1].clone()).unwrap();
        let ids = ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        assert_eq!(classify(name, &["--ids", &ids, "--json"]).json(), found);
        let piped = run_with_input(&["classify", "--model", &model(name), "--json"], text.as_bytes());
        assert_eq!(piped.json(), found);
    }
    let shown = classify("sequence", &["naïve café 🤗"]);
    assert_eq!(shown.code, SUCCESS, "{}", shown.stderr);
    let best = expected("sequence")["pipeline"][1][0]["label"].as_str().unwrap().to_owned();
    assert!(shown.stdout.lines().nth(1).unwrap().ends_with(&best), "{}", shown.stdout);
    assert_eq!(shown.stdout.lines().count(), 6);

    let found = classify("token", &[texts[1].as_str().unwrap(), "--json"]).json();
    let expected_tokens = expected("token");
    for entity in expected_tokens["pipeline"][1].as_array().unwrap() {
        let token = &found["tokens"][usize::try_from(entity["index"].as_u64().unwrap()).unwrap()];
        assert_eq!((&token["start"], &token["end"]), (&entity["start"], &entity["end"]));
        assert_eq!(token["labels"][0]["label"], entity["entity"]);
    }
    let shown = classify("token", &[texts[1].as_str().unwrap()]);
    assert_eq!(shown.stdout.lines().count(), 1 + found["tokens"].as_array().unwrap().len());

    let flags = ["The sky is", "--choice", " blue", "--choice", " green", "--json"];
    let found = classify("double", &flags).json();
    let choices = found["choices"].as_array().unwrap();
    assert!(choices[0]["logit"].as_f64() >= choices[1]["logit"].as_f64());
    assert_eq!(found["prompt_ids"].as_array().unwrap().len(), 2);
    assert_eq!(choices.iter().filter(|choice| choice["text"] == " blue").count(), 1);
}

#[test]
fn prompts_file_gets_labels_for_each_line() {
    let (texts, expected_labels) = (expected("texts"), expected("sequence"));
    let lines: String =
        texts.as_array().unwrap().iter().map(|text| format!("{}\n", text.as_str().unwrap())).collect();
    let folder =
        CheckpointFolder::tiny().with("texts.txt", lines).with("rows.jsonl", "nonsense\n{\"ids\": [999]}\n");
    let (file, rows) = (folder.file("texts.txt"), folder.file("rows.jsonl"));
    for size in ["1", "2", "64"] {
        let run = classify("sequence", &["--prompts-file", path(&file), "--batch-size", size]);
        assert_eq!(run.code, SUCCESS, "{}", run.stderr);
        let found = objects(&run.stdout);
        assert_eq!(found.len(), 5);
        for (index, found) in found.iter().enumerate() {
            assert_eq!((&found["line"], &found["prompt"]), (&json!(index + 1), &texts[index]));
            assert_eq!(found["prompt_ids"], expected_labels["ids"][index]);
            assert_labels(found, &expected_labels, index);
        }
    }
    let run = classify("sequence", &["--prompts-file", path(&rows)]);
    assert_eq!(run.code, FAILURE, "{}", run.stderr);
    for message in ["line 1: expected {\"prompt\": TEXT}", "line 2: token id 999"] {
        assert!(run.stderr.contains(message), "{message}: {}", run.stderr);
    }
}

#[test]
fn run_with_different_options_is_not_resumed() {
    let folder = CheckpointFolder::tiny().with("texts.txt", "citizen\n".repeat(30));
    let (file, output) = (folder.file("texts.txt"), folder.file("labels"));
    let flags = ["--prompts-file", path(&file), "--output", path(&output)];
    let settings =
        settings_line(&folder, &["classify", "--model", &model("sequence"), "--prompts-file", path(&file)]);
    fs::write(folder.file("labels.partial"), settings).unwrap();
    let refused = |name: &str, more: &[&str], expected: &str| {
        assert_refused(&classify(name, &[&flags[..], more].concat()), FAILURE, expected);
    };
    refused("sequence", &[], "use --resume to continue it, or remove the file");
    refused("sequence", &["--resume", "--dtype", "q8"], "the interrupted run had `dtype` null");
    refused("sequence", &["--resume", "--keep-last", "9"], "the interrupted run had `keep_last` null");
    refused("multi_label", &["--resume"], "the interrupted run had `labels`");
    assert_eq!(classify("sequence", &[&flags[..], &["--resume"]].concat()).code, SUCCESS);
    assert_eq!(fs::read_to_string(&output).unwrap().lines().count(), 30);
}

#[test]
fn invalid_calls_are_rejected() {
    let refused = |name: &str, arguments: &[&str], expected: &str| {
        assert_refused(&classify(name, arguments), USAGE, expected);
    };
    refused("sequence", &["a", "--choice", "b"], "cannot rank choices");
    refused("double", &["a"], "pass each with --choice");
    refused("sequence", &["--ids", "1,300"], "300");
    refused("sequence", &["a", "--keep-last", "0"], "--keep-last: expected at least 1, found 0");
    let long = "citizen ".repeat(60);
    refused("sequence", &[&long], "(--keep-last)");
    assert_eq!(classify("sequence", &[&long, "--keep-last", "40"]).code, SUCCESS);
    refused("sequence", &[&long, "--keep-last", "41"], "cannot keep 41 tokens: the model's context has 40");
    refused("sequence", &["a", "--batch-size", "2"], "--prompts-file");
    refused("sequence", &["a", "--ids", "1"], "cannot be used with");
    let unnamed = run(&["classify", "a"]);
    assert_refused(&unnamed, USAGE, "for --model, pass one from `gpt2 train");
    assert!(unnamed.stderr.contains("`gpt2 score --choice` ranks texts"), "{}", unnamed.stderr);
    let tiny = fixture_path("tiny-checkpoint");
    let language_model = run(&["classify", "a", "--model", tiny.to_str().unwrap()]);
    assert_refused(&language_model, USAGE, "GPT2LMHeadModel, a language model");
    assert!(language_model.stderr.contains("(`gpt2 train --task classify`)"), "{}", language_model.stderr);
}

#[test]
fn other_commands_recognize_classifiers() {
    let model = model("sequence");
    let model = model.as_str();
    for arguments in [
        &["generate", "a", "--model", model][..],
        &["generate", "--interactive", "--model", model],
        &["score", "a", "--model", model],
        &["look", "attention", "a", "--model", model],
        &["bench", "--model", model],
    ] {
        let run = run(arguments);
        assert_refused(&run, USAGE, "GPT2ForSequenceClassification, a classifier");
        assert!(run.stderr.contains("(`gpt2 classify`)"), "{}", run.stderr);
    }
    let shown = run(&["inspect", "--model", model]);
    assert_eq!(shown.code, SUCCESS, "{}", shown.stderr);
    for expected in [
        "class        GPT2ForSequenceClassification",
        "output head  no language model head",
        "`score` labels each text (5 labels)",
        "the other head",
        "score.weight",
    ] {
        assert!(shown.stdout.contains(expected), "{expected}: {}", shown.stdout);
    }
    let shown = run(&["inspect", "--model", model, "--json"]).json();
    assert_eq!(
        (&shown["class"], &shown["tied_head"]),
        (&json!("GPT2ForSequenceClassification"), &json!(false))
    );
    assert_eq!(shown["config"]["id2label"]["2"], "naïve café");
    assert_eq!(shown["parameters"]["head"], 120);
    let verified = run(&["verify", "--model", model, "--json"]).json();
    assert_eq!(verified["sound"], true);
    assert!(
        verified["batch_difference"].as_f64().unwrap() < TOLERANCE && verified["cache_difference"].is_null()
    );
    let folder = CheckpointFolder::tiny();
    let (copy, gguf) = (folder.file("copy"), folder.file("copy.gguf"));
    let written = run(&["convert", model, path(&copy), "--dtype", "f16"]);
    assert_eq!(written.code, SUCCESS, "{}", written.stderr);
    assert_eq!(run(&["classify", "a", "--model", path(&copy)]).code, SUCCESS);
    let refused = run(&["convert", model, path(&gguf)]);
    assert_refused(
        &refused,
        FAILURE,
        "only the language-model head, but this is a GPT2ForSequenceClassification",
    );
    let damaged =
        CheckpointFolder::of("heads/token").with_tensors(|tensors| _ = tensors.remove("classifier.bias"));
    let refused = run(&["classify", "a", "--model", path(damaged.path())]);
    assert_refused(&refused, FAILURE, "tensor `classifier.bias` is missing: expected shape (7)");
    let verified = run(&["verify", "--model", path(damaged.path())]);
    assert_eq!(verified.code, FAILURE);
    assert!(verified.stdout.contains("tensor `classifier.bias` is missing"), "{}", verified.stdout);
}
