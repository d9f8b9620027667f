//! Tests of structured output: `--json-schema`, `--json-object`, `--regex` and `--grammar`.
//!
//! They cover single prompts, beam search, files of prompts and interactive use.

use std::fs;

use candle_gpt2_testing::CheckpointFolder;
use serde_json::{Value, json};

use crate::common::{FAILURE, Run, SUCCESS, USAGE, assert_refused, path, run, run_with_input, settings_line};

const SCHEMA: &str = r#"{"type": "object", "properties": {"a": {"enum": [1, "two"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"], "additionalProperties": false}"#;

/// Runs `gpt2 generate` with these arguments on a checkpoint.
fn generate(folder: &CheckpointFolder, arguments: &[&str]) -> Run {
    run(&[&["generate", "--model", path(folder.path())][..], arguments].concat())
}

/// Returns the tiny checkpoint with valid and broken schemas and grammars next to it.
fn folder() -> CheckpointFolder {
    let grammar = "start: \"(\" start \")\" | \"x\"\n";
    let broken = r#"{"type": "object", "properties": {"a": {"type": "strin"}}}"#;
    CheckpointFolder::tiny()
        .with("s.json", SCHEMA)
        .with("broken.json", broken)
        .with("cut.json", "{\"type\":\n \"object\"")
        .with("g.lark", grammar)
        .with("broken.lark", "start: \"a\" (\n")
}

#[track_caller]
fn assert_matches_schema(text: &Value) {
    let value: Value = serde_json::from_str(text.as_str().unwrap()).expect("JSON");
    assert!(value["a"] == json!(1) || value["a"] == json!("two"), "{value}");
    assert!(value["b"].is_boolean() && value.as_object().unwrap().len() == 2, "{value}");
}

#[test]
fn completions_conform_with_any_seed() {
    let folder = folder();
    let schema = folder.file("s.json");
    for seed in ["1", "2", "3"] {
        let common = ["a", "--json", "--seed", seed, "--temperature", "2", "--top-k", "300"];
        let report = generate(&folder, &[&common[..], &["--json-schema", path(&schema)]].concat()).json();
        assert_matches_schema(&report["text"]);
        assert_eq!(report["stop_reason"], "complete");
        let report = generate(&folder, &[&common[..], &["--regex", "[a-c]{2,4}-[0-9]"]].concat()).json();
        let (letters, digit) = report["text"].as_str().unwrap().split_once('-').unwrap();
        assert!(
            (2..=4).contains(&letters.len()) && letters.bytes().all(|byte| (b'a'..=b'c').contains(&byte))
        );
        assert!(digit.len() == 1 && digit.as_bytes()[0].is_ascii_digit());
        let arguments = ["--json-object", "--max-new-tokens", "40"];
        let report = generate(&folder, &[&common[..], &arguments].concat()).json();
        let text = report["text"].as_str().unwrap();
        assert!(text.starts_with('{'), "{text}");
        assert!(
            report["stop_reason"] == "max_new_tokens"
                || serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
        );
    }
    let grammar = folder.file("g.lark");
    let run = generate(&folder, &["a", "--greedy", "--grammar", path(&grammar), "--max-new-tokens", "40"]);
    assert_eq!(run.code, SUCCESS, "{}", run.stderr);
    let text = run.stdout.trim_end();
    assert!(text.bytes().all(|byte| b"(x)".contains(&byte)) && !text.is_empty(), "{text}");
}

#[test]
fn returned_sequences_and_beams_conform() {
    let folder = folder();
    let schema = folder.file("s.json");
    let schema = path(&schema);
    let sampling = &["--temperature", "2", "--top-k", "300"][..];
    for search in [
        sampling,
        &["--num-beams", "4"],
        &["--num-beams", "4", "--num-beam-groups", "2", "--diversity-penalty", "0.5"],
    ] {
        let arguments =
            ["a", "--json", "--num-return-sequences", "3", "--max-new-tokens", "45", "--json-schema", schema];
        let report = generate(&folder, &[&arguments[..], search].concat()).json();
        let texts = report["sequences"].as_array().unwrap();
        assert_eq!(texts.len(), 3);
        let ended = texts.iter().filter(|text| text["stop_reason"] != "max_new_tokens");
        assert!(ended.clone().count() > 0, "{report}");
        ended.for_each(|text| assert_matches_schema(&text["text"]));
    }
    // Without an end-of-text token, a search cannot finish any sequence.
    let endless = CheckpointFolder::tiny()
        .with("s.json", SCHEMA)
        .with_config(json!({ "eos_token_id": null }))
        .without("generation_config.json");
    let schema = endless.file("s.json");
    let arguments = ["a", "--json-schema", path(&schema), "--num-beams", "4"];
    assert_refused(
        &generate(&endless, &arguments),
        USAGE,
        "s.json: beam and contrastive search need an end-of-text token",
    );
    let report = generate(&endless, &["a", "--json-schema", path(&schema), "--json"]).json();
    assert_matches_schema(&report["text"]);
    assert_eq!(report["stop_reason"], "complete");
}

#[test]
fn prompts_file_completions_conform() {
    let folder = folder().with("prompts.txt", "a\nbc\nd\n");
    let [schema, prompts, output] = ["s.json", "prompts.txt", "out.jsonl"].map(|name| folder.file(name));
    let arguments =
        ["--prompts-file", path(&prompts), "--output", path(&output), "--json-schema", path(&schema)];
    let run = generate(&folder, &arguments);
    assert_eq!(run.code, SUCCESS, "{}", run.stderr);
    let written = fs::read_to_string(&output).unwrap();
    let lines: Vec<Value> = written.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3);
    lines.iter().for_each(|line| assert_matches_schema(&line["text"]));
    for (line, prompt) in lines.iter().zip(["a", "bc", "d"]) {
        let single = generate(&folder, &[prompt, "--json", "--json-schema", path(&schema)]).json();
        assert_eq!(line["ids"], single["ids"], "the same completion as for a single prompt");
    }
}

#[test]
fn run_resumes_only_with_the_same_grammar() {
    let folder = folder().with("prompts.txt", "a\n".repeat(2_000));
    let [schema, prompts, output] = ["s.json", "prompts.txt", "texts"].map(|name| folder.file(name));
    let model = path(folder.path());
    let interrupted =
        ["generate", "--model", model, "--prompts-file", path(&prompts), "--json-schema", path(&schema)];
    fs::write(folder.file("texts.partial"), settings_line(&folder, &interrupted)).unwrap();
    let arguments = [&interrupted[..5], &["--output", path(&output)]].concat();
    let other = run(&[&arguments[..], &["--resume", "--regex", "a+"]].concat());
    assert_refused(&other, FAILURE, "the interrupted run had `conforming` {\"json_schema\":");
    let other = run(&[&arguments[..], &["--resume"]].concat());
    assert_refused(&other, FAILURE, "but this run has null");
}

#[test]
fn interactive_completions_conform() {
    let folder = folder();
    let schema = folder.file("s.json");
    let arguments =
        ["generate", "--model", path(folder.path()), "--interactive", "--json-schema", path(&schema)];
    let run = run_with_input(&arguments, b"a\nb\n");
    assert_eq!(run.code, SUCCESS, "{}", run.stderr);
    let texts: Vec<&str> = run.stdout.lines().filter(|line| line.starts_with('{')).collect();
    assert_eq!(texts.len(), 2, "{}", run.stdout);
    texts.iter().for_each(|text| assert_matches_schema(&json!(text)));
}

#[test]
fn invalid_grammars_are_rejected() {
    let folder = folder();
    let file = |name: &str| folder.file(name).to_str().unwrap().to_owned();
    let cases = [
        (
            ["--json-schema", &file("broken.json")],
            "broken.json: JSON schema: at /properties/a: Invalid type: strin",
        ),
        (
            ["--json-schema", &file("cut.json")],
            "cut.json: not valid JSON: EOF while parsing an object at line 2 column 9",
        ),
        (["--grammar", &file("broken.lark")], "broken.lark: grammar: 1(13): Expected token ')'"),
        (["--regex", "a(b"], "--regex: regular expression: regex parse error"),
        (["--regex", ""], "--regex: regular expression: matches only the empty string"),
    ];
    for (arguments, expected) in cases {
        assert_refused(&generate(&folder, &[&["a"][..], &arguments].concat()), USAGE, expected);
    }
    let schema = file("s.json");
    let both = ["a", "--json-schema", &schema, "--regex", "a"];
    assert_refused(&generate(&folder, &both), USAGE, "cannot be used with");
    let no_tokenizer =
        CheckpointFolder::tiny().without("tokenizer.json").without("vocab.json").without("merges.txt");
    let arguments = ["--ids", "5", "--json-schema", &schema];
    assert_refused(
        &generate(&no_tokenizer, &arguments),
        USAGE,
        "s.json: structured output needs a tokenizer",
    );
}

/// Checks that added tokens appear unchanged in every kind of output (huggingface/tokenizers#1996).
///
/// This covers generation, JSON, beam search and scores.
#[test]
fn added_tokens_appear_unchanged() {
    for token in ["für", "kuća", "ĠĠ", "中文"] {
        let folder = CheckpointFolder::tiny().with_added_token(token);
        let added = ["a", "--logit-bias", "299=1000", "-n", "2"];
        for more in
            [&["--json"][..], &["--json", "--num-beams", "2"], &["--json", "--regex", &format!("({token})+")]]
        {
            let report = generate(&folder, &[&added[..], more].concat()).json();
            assert_eq!(report["text"], json!(format!("{token}{token}")), "{more:?}: {report}");
        }
        let text = format!("a{token}");
        let scored = run(&["score", "--model", path(folder.path()), &text]);
        assert!(scored.stdout.contains(&format!("{token:?}")), "{}", scored.stdout);
    }
}

/// Checks that several options that exclude tokens all apply.
///
/// No token is generated that any of them forbids. If none remains, the error names the options.
#[test]
fn contradictory_options_are_named() {
    let folder = folder();
    for (options, named) in [
        (&["--regex", "b", "--bad-word", "b"][..], "--bad-word or the regular expression"),
        (&["--regex", "b+", "--logit-bias", "66=-inf"], "--logit-bias or the regular expression"),
        (&["--regex", "b", "--bad-word", "b", "--num-beams", "2"], "--bad-word or the regular expression"),
        (
            &["--regex", "aa", "--no-repeat-ngram-size", "1"],
            "--no-repeat-ngram-size or the regular expression",
        ),
        (&["--regex", "a", "--min-new-tokens", "3"], "--min-new-tokens or the regular expression"),
    ] {
        let run = generate(&folder, &[&["W", "--max-new-tokens", "6"][..], options].concat());
        assert_eq!(run.code, FAILURE, "{}", run.stderr);
        assert!(run.stderr.contains(&format!("each is excluded by {named}; ")), "{}", run.stderr);
    }
}

#[test]
fn truncated_completion_gets_a_note() {
    let folder = folder();
    let schema = folder.file("s.json");
    let cut = generate(&folder, &["a", "--json-schema", path(&schema), "--max-new-tokens", "2"]);
    assert_eq!(cut.code, SUCCESS, "{}", cut.stderr);
    assert!(
        cut.stderr.contains("cut off (max_new_tokens)") && cut.stderr.contains("--max-new-tokens"),
        "{}",
        cut.stderr
    );
    for whole in [
        generate(&folder, &["a", "--json-schema", path(&schema), "--max-new-tokens", "45"]),
        generate(&folder, &["a", "--max-new-tokens", "2"]),
    ] {
        assert_eq!((whole.code, whole.stderr.contains("cut off")), (SUCCESS, false), "{}", whole.stderr);
    }
}
