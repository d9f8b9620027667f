//! `gpt2 classify`, and what the other commands make of classifiers. `scripts/reference/heads.py` made the checkpoints and what is
//! expected of them.

use std::fs;

use candle_gpt2_testing::{CheckpointFolder, fixture_path, json_fixture};
use serde_json::{Value, json};

use crate::common::{FAILURE, Run, SUCCESS, USAGE, assert_refused, path, run, run_with_input, settings_line};

/// f32 sums through three blocks, in another order than PyTorch's.
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

#[track_caller]
fn assert_close(found: &Value, expected: &Value) {
    let difference = (found.as_f64().unwrap() - expected.as_f64().unwrap()).abs();
    assert!(difference <= TOLERANCE, "expected {expected}, found {found}");
}

/// Checks labels against transformers' pipeline, and the logits of `ids` against its model.
#[track_caller]
fn assert_labels(found: &Value, expected: &Value, index: usize) {
    let pipeline = expected["pipeline"][index].as_array().unwrap();
    assert_eq!(found["labels"].as_array().unwrap().len(), pipeline.len());
    for (label, expected) in found["labels"].as_array().unwrap().iter().zip(pipeline) {
        assert_eq!(label["label"], expected["label"]);
        assert_close(&label["score"], &expected["score"]);
    }
    let sum = |values: &mut dyn Iterator<Item = f64>| json!(values.sum::<f64>());
    let logits = expected["logits"][index].as_array().unwrap();
    let labels = found["labels"].as_array().unwrap();
    assert_close(
        &sum(&mut labels.iter().map(|label| label["logit"].as_f64().unwrap())),
        &sum(&mut logits.iter().map(|logit| logit.as_f64().unwrap())),
    );
}

#[test]
fn a_text_is_classified_as_transformers_does() {
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
    let of_tokens = expected("token");
    for spot in of_tokens["pipeline"][1].as_array().unwrap() {
        let token = &found["tokens"][usize::try_from(spot["index"].as_u64().unwrap()).unwrap()];
        assert_eq!((&token["start"], &token["end"]), (&spot["start"], &spot["end"]));
        assert_eq!(token["labels"][0]["label"], spot["entity"]);
        assert_close(&token["labels"][0]["score"], &spot["score"]);
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
fn weights_of_every_type_and_f16_shards_classify() {
    let expected = expected("sequence");
    let text = expected_text();
    for dtype in ["f32", "f16", "q8", "q4"] {
        let found = classify("sequence", &[&text, "--json", "--dtype", dtype]).json();
        assert_eq!(found["labels"].as_array().unwrap().len(), 5);
        let tolerance = match dtype {
            "f32" => TOLERANCE,
            "f16" => 1e-2,
            "q8" => 0.1,
            _ => 1.0,
        };
        let names = ["red", "green", "naïve café", "blue", "LABEL_4"];
        for label in found["labels"].as_array().unwrap() {
            let id = names.iter().position(|name| label["label"] == json!(name)).unwrap();
            let difference = label["logit"].as_f64().unwrap() - expected["logits"][2][id].as_f64().unwrap();
            assert!(difference.abs() <= tolerance, "{dtype}: {label} is off by {difference}");
        }
    }
    let tokenizer = fixture_path("tiny-checkpoint");
    let found = classify("pytorch-shards", &[&text, "--json", "--tokenizer", path(&tokenizer)]).json();
    assert_eq!(found["labels"][0]["label"], expected["pipeline"][2][0]["label"]);
}

fn expected_text() -> String {
    expected("texts")[2].as_str().unwrap().to_owned()
}

#[test]
fn a_file_of_texts_gives_the_labels_of_its_lines() {
    let (texts, of_texts) = (expected("texts"), expected("sequence"));
    let lines: String =
        texts.as_array().unwrap().iter().map(|text| format!("{}\n", text.as_str().unwrap())).collect();
    // Rows of labelled texts, token ids, and lines that cannot be read.
    let rows: String = [
        json!({"text": texts[0], "label": "red"}).to_string(),
        json!({"ids": of_texts["ids"][1]}).to_string(),
        "nonsense".into(),
        json!({"prompt": texts[2]}).to_string(),
        json!({"ids": [999]}).to_string(),
        json!({"text": 5}).to_string(),
    ]
    .map(|row| format!("{row}\n"))
    .concat();
    let folder = CheckpointFolder::tiny().with("texts.txt", lines).with("rows.jsonl", rows);
    let (file, rows) = (folder.file("texts.txt"), folder.file("rows.jsonl"));
    let run = classify("sequence", &["--prompts-file", path(&file)]);
    assert_eq!(run.code, SUCCESS, "{}", run.stderr);
    let found = objects(&run.stdout);
    assert_eq!(found.len(), 5);
    for (index, found) in found.iter().enumerate() {
        assert_eq!((&found["line"], &found["prompt"]), (&json!(index + 1), &texts[index]));
        assert_eq!(found["prompt_ids"], of_texts["ids"][index]);
        assert_labels(found, &of_texts, index);
    }
    for size in ["1", "2", "64"] {
        let other = classify("sequence", &["--prompts-file", path(&file), "--batch-size", size]);
        for (index, found) in objects(&other.stdout).iter().enumerate() {
            assert_labels(found, &of_texts, index);
        }
    }
    let run = classify("sequence", &["--prompts-file", path(&rows)]);
    assert_eq!(run.code, FAILURE, "{}", run.stderr);
    for told in
        ["line 3: not {\"prompt\": TEXT}", "line 5: token id 999", "line 6: `prompt`: expected a text"]
    {
        assert!(run.stderr.contains(told), "{told}: {}", run.stderr);
    }
    let found = objects(&run.stdout);
    let are_classified: Vec<bool> = found.iter().map(|line| line["labels"].is_array()).collect();
    assert_eq!(are_classified, [true, true, false, true, false, false]);
    assert_labels(&found[1], &of_texts, 1);

    let choices = "{\"prompt\": \"The sky is\", \"choices\": [\" blue\", \" green\"]}\n{\"ids\": [[5, 6], [7]]}\n\
                   {\"prompt\": \"The\", \"choices\": 5}\n{\"prompt\": \"The\"}\n";
    let folder = folder.with("choices.jsonl", choices);
    let run = classify("double", &["--prompts-file", path(&folder.file("choices.jsonl"))]);
    assert_eq!(run.code, FAILURE);
    assert!(run.stderr.contains("line 3: `choices`: expected a list of texts"), "{}", run.stderr);
    assert!(run.stderr.contains("line 4: there are no choices"), "{}", run.stderr);
    let found = objects(&run.stdout);
    assert_eq!(found[0]["choices"].as_array().unwrap().len(), 2);
    assert_eq!(found[1]["prompt_ids"], json!([[5, 6], [7]]));
    let alone =
        classify("double", &["The sky is", "--choice", " blue", "--choice", " green", "--json"]).json();
    assert_eq!(found[0]["prompt_ids"], alone["prompt_ids"]);
}

#[test]
fn an_interrupted_run_goes_on_to_the_same_file() {
    let lines: String = (0..30).map(|number| format!("citizen number {number}\n")).collect();
    let folder = CheckpointFolder::tiny().with("texts.txt", lines);
    let (file, output) = (folder.file("texts.txt"), folder.file("labels"));
    let flags = ["--prompts-file", path(&file), "--output", path(&output), "--batch-size", "4"];
    let whole = classify("sequence", &flags);
    assert_eq!((whole.code, whole.stdout.as_str()), (SUCCESS, ""), "{}", whole.stderr);
    let expected = fs::read_to_string(&output).unwrap();
    assert_eq!(expected.lines().count(), 30);
    let partial = folder.file("labels.partial");
    let settings =
        settings_line(&folder, &["classify", "--model", &model("sequence"), "--prompts-file", path(&file)]);
    for cut in [0, 1, 3, 4, 17, 29, 30] {
        let _ = fs::remove_file(&output);
        let kept: String = expected.lines().take(cut).map(|line| format!("{line}\n")).collect();
        fs::write(&partial, format!("{settings}{kept}{{\"line\":{}", cut + 1)).unwrap();
        let resumed = classify("sequence", &[&flags[..], &["--resume"]].concat());
        assert_eq!(resumed.code, SUCCESS, "{cut}: {}", resumed.stderr);
        assert_eq!(fs::read_to_string(&output).unwrap(), expected, "{cut} lines were there");
        assert!(!partial.exists());
    }
    fs::remove_file(&output).unwrap();
    fs::write(&partial, &settings).unwrap();
    let refused = |flags: &[&str], told: &str| {
        assert_refused(&classify("sequence", flags), FAILURE, told);
    };
    refused(&flags, "go on with --resume, or remove it");
    refused(&[&flags[..], &["--resume", "--dtype", "q8"]].concat(), "the interrupted run had `dtype` null");
    refused(
        &[&flags[..], &["--resume", "--keep-last", "9"]].concat(),
        "the interrupted run had `keep_last` null",
    );
    let other = run(&[&["classify", "--model", &model("multi_label")][..], &flags, &["--resume"]].concat());
    assert_refused(&other, FAILURE, "the interrupted run had `labels`");
}

#[test]
fn choices_go_on_too() {
    let row = |number: usize| json!({ "prompt": format!("The {number}"), "choices": [" dog", format!(" {number}")] });
    let lines: String = (0..30).map(|number| format!("{}\n", row(number))).collect();
    let folder = CheckpointFolder::tiny().with("choices.jsonl", lines);
    let (file, output) = (folder.file("choices.jsonl"), folder.file("chosen"));
    let flags = ["--prompts-file", path(&file), "--output", path(&output), "--batch-size", "4"];
    let whole = classify("double", &flags);
    assert_eq!(whole.code, SUCCESS, "{}", whole.stderr);
    let expected = fs::read_to_string(&output).unwrap();
    assert_eq!(expected.matches("\"choices\"").count(), 30, "once a line");
    let settings =
        settings_line(&folder, &["classify", "--model", &model("double"), "--prompts-file", path(&file)]);
    for cut in [1, 7] {
        fs::remove_file(&output).unwrap();
        let kept: String = expected.lines().take(cut).map(|line| format!("{line}\n")).collect();
        fs::write(folder.file("chosen.partial"), format!("{settings}{kept}")).unwrap();
        let resumed = classify("double", &[&flags[..], &["--resume"]].concat());
        assert_eq!(resumed.code, SUCCESS, "{cut}: {}", resumed.stderr);
        assert_eq!(fs::read_to_string(&output).unwrap(), expected, "{cut} lines were there");
    }
}

#[test]
fn wrong_calls_are_refused() {
    let refused = |name: &str, arguments: &[&str], told: &str| {
        assert_refused(&classify(name, arguments), USAGE, told);
    };
    refused("sequence", &["a", "--choice", "b"], "chooses among no texts");
    refused("double", &["a"], "give each with --choice");
    refused("sequence", &["--ids", "1,300"], "300");
    refused("sequence", &["a", "--keep-last", "0"], "--keep-last: expected at least 1, found 0");
    let long = "citizen ".repeat(60);
    refused("sequence", &[&long], "(--keep-last)");
    assert_eq!(classify("sequence", &[&long, "--keep-last", "40"]).code, SUCCESS);
    refused(
        "sequence",
        &[&long, "--keep-last", "41"],
        "41 tokens are to be kept, the model's context has 40",
    );
    refused("sequence", &["a", "--batch-size", "2"], "--prompts-file");
    refused("sequence", &["a", "--ids", "1"], "cannot be used with");
    let language_model = run(&["classify", "a"]);
    assert_refused(&language_model, USAGE, "GPT2LMHeadModel, a language model");
    assert!(language_model.stderr.contains("(`gpt2 train --task classify`)"), "{}", language_model.stderr);
}

#[test]
fn other_commands_say_what_a_classifier_is() {
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
    for told in [
        "class        GPT2ForSequenceClassification",
        "output head  none over the vocabulary",
        "`score` says which of 5 labels a text has",
        "the other head",
        "score.weight",
    ] {
        assert!(shown.stdout.contains(told), "{told}: {}", shown.stdout);
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
        "the head of a language model only, and this is a GPT2ForSequenceClassification",
    );
    let damaged =
        CheckpointFolder::of("heads/token").with_tensors(|tensors| _ = tensors.remove("classifier.bias"));
    let refused = run(&["classify", "a", "--model", path(damaged.path())]);
    assert_refused(&refused, FAILURE, "tensor `classifier.bias` is missing: expected (7)");
    let verified = run(&["verify", "--model", path(damaged.path())]);
    assert_eq!(verified.code, FAILURE);
    assert!(verified.stdout.contains("tensor `classifier.bias` is missing"), "{}", verified.stdout);
}
