//! Tests of `gpt2 generate` with options, prompt files and interruptions, and of `gpt2 score --choice`.

use std::fs;
use std::process::Stdio;

use candle_gpt2_testing::CheckpointFolder;
use serde_json::{Value, json};

use crate::common::{
    self, FAILURE, Run, SUCCESS, USAGE, assert_refused, path, program, run, run_with_input, wait_until,
};

/// Runs `gpt2 generate` with these arguments on a checkpoint.
fn generate(folder: &CheckpointFolder, arguments: &[&str]) -> Run {
    run(&[&["generate", "--model", path(folder.path())][..], arguments].concat())
}

fn objects(lines: &str) -> Vec<Value> {
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn without_speed(mut report: Value) -> Value {
    report
        .as_object_mut()
        .unwrap()
        .retain(|key, _| !matches!(key.as_str(), "tokens_per_s" | "time_to_first_token_s"));
    report
}

/// Checks that flags select a search; the `generation` crate compares results with transformers.
#[test]
fn flags_select_the_search() {
    let folder = CheckpointFolder::tiny();
    let ids = |flags: &[&str]| {
        generate(&folder, &[&["--ids", "5,9,70", "--json", "--max-new-tokens", "18"], flags].concat()).json()
    };
    let beams = ids(&["--num-beams", "3", "--num-return-sequences", "3", "--length-penalty", "2"]);
    let sequences = beams["sequences"].as_array().unwrap();
    let scores: Vec<f64> = sequences.iter().map(|sequence| sequence["score"].as_f64().unwrap()).collect();
    assert!(scores.len() == 3 && scores.is_sorted_by(|a, b| a >= b), "{beams}");
    let ended = ids(&["--greedy", "--eos-token-id", &ids(&["--greedy"])["ids"][2].to_string()]);
    assert_eq!(ended["stop_reason"], "eos");
    let contrastive = ids(&["--penalty-alpha", "0.6", "--top-k", "4"]);
    assert!(!contrastive["ids"].as_array().unwrap().is_empty(), "{contrastive}");
}

/// Checks that drafts do not change the completions and that `--json` reports their number.
///
/// Drafts come from an assistant model or from prompt lookup, for one prompt or a file of prompts.
#[test]
fn drafts_are_counted_and_do_not_change_the_output() {
    let (folder, assistant) = (CheckpointFolder::tiny(), CheckpointFolder::tiny());
    let ids = ["--ids", "5,9,70,5,9,70,5,9", "--max-new-tokens", "30", "--json"];
    for sampling in [&["--greedy"][..], &["--seed", "3", "--top-k", "5"]] {
        let plain = without_speed(generate(&folder, &[&ids[..], sampling].concat()).json());
        assert_eq!((&plain["drafted"], &plain["accepted"]), (&Value::Null, &Value::Null));
        let model = ["--assistant-model", path(assistant.path()), "--num-assistant-tokens", "4"];
        // The assistant is the same model and samples with the same random numbers, so every draft is
        // accepted.
        for (drafts, all_accepted) in [(&model[..], true), (&["--prompt-lookup", "6"], false)] {
            let mut report = without_speed(generate(&folder, &[&ids[..], sampling, drafts].concat()).json());
            let mut count =
                |key: &str| report.as_object_mut().unwrap().remove(key).unwrap().as_u64().unwrap();
            let (drafted, accepted) = (count("drafted"), count("accepted"));
            assert!(drafted > 0 && accepted <= drafted, "{accepted} of {drafted}");
            assert!(accepted == drafted || !all_accepted, "{accepted} of {drafted}");
            assert_eq!(report, plain);
        }
    }
    let prompts = CheckpointFolder::tiny().with("prompts.txt", "The dog\nA cat and a cat and\n");
    let prompts_file = prompts.file("prompts.txt");
    let file = ["--prompts-file", path(&prompts_file), "--max-new-tokens", "9", "--greedy"];
    let plain = objects(&generate(&folder, &file).stdout);
    let drafted = objects(&generate(&folder, &[&file[..], &["--prompt-lookup", "3"]].concat()).stdout);
    for (plain, drafted) in plain.iter().zip(&drafted) {
        assert_eq!((&plain["ids"], &plain["text"]), (&drafted["ids"], &drafted["text"]));
        assert!(drafted["drafted"].is_u64() && plain["drafted"].is_null());
    }
    assert_eq!(drafted.len(), 2);
}

#[test]
fn invalid_assistants_are_rejected() {
    let (folder, own) = (CheckpointFolder::tiny(), CheckpointFolder::tiny());
    let other = CheckpointFolder::tiny().with_config(json!({"vocab_size": 299})).with_tensors(|tensors| {
        let key = tensors.keys().find(|key| key.ends_with("wte.weight")).unwrap().clone();
        let rows = tensors[&key].narrow(0, 0, 299).unwrap();
        tensors.insert(key, rows);
    });
    let refused = |arguments: &[&str], code, expected: &str| {
        assert_refused(&generate(&folder, &[&["--ids", "5,9"], arguments].concat()), code, expected);
    };
    let (own, other) = (path(own.path()), path(other.path()));
    refused(
        &["--assistant-model", other],
        USAGE,
        "the assistant's vocabulary has 299 tokens, but the model's has 300",
    );
    refused(&["--assistant-model", own, "--num-beams", "2"], USAGE, "--assistant-model");
    refused(&["--assistant-model", own, "--prompt-lookup", "3"], USAGE, "--prompt-lookup");
    refused(&["--num-assistant-tokens", "3"], USAGE, "--assistant-model");
    refused(&["--prompt-lookup", "3", "--num-beams", "2"], USAGE, "--prompt-lookup");
    refused(&["--assistant-model", "nowhere/at/all"], FAILURE, "nowhere/at/all");
}

/// Checks that values from generation_config.json apply unless an argument overrides them.
#[test]
fn generation_config_json_sets_the_defaults() {
    let with = |config: Value| CheckpointFolder::tiny().with("generation_config.json", config.to_string());
    let ids = |folder: &CheckpointFolder, flags: &[&str]| {
        generate(folder, &[&["The dog", "--json"][..], flags].concat()).json()["ids"].clone()
    };
    let plain = with(json!({}));
    let flags =
        ["--max-new-tokens", "6", "--temperature", "0.7", "--repetition-penalty", "1.4", "--seed", "3"];
    let by_file = with(json!({
        "max_new_tokens": 6, "temperature": 0.7, "repetition_penalty": 1.4, "seed": 3, "do_sample": true
    }));
    assert_eq!(ids(&by_file, &[]), ids(&plain, &flags));
    assert_ne!(ids(&by_file, &["--seed", "4"]), ids(&by_file, &[]));
    assert_eq!(
        ids(&by_file, &["--greedy", "--repetition-penalty", "1"]),
        ids(&plain, &["--greedy", "--max-new-tokens", "6"])
    );
    let greedy = with(json!({"do_sample": false, "max_new_tokens": 6}));
    assert_eq!(ids(&greedy, &[]), ids(&plain, &["--greedy", "--max-new-tokens", "6"]));
    // `max_length` in the file includes the five prompt tokens, and `--max-new-tokens` overrides it.
    let by_length = with(json!({"max_length": 9, "do_sample": false}));
    assert_eq!(ids(&by_length, &[]).as_array().unwrap().len(), 4);
    assert_eq!(ids(&by_length, &["--max-new-tokens", "6"]).as_array().unwrap().len(), 6);
    let beams = with(json!({"num_beams": 3, "max_new_tokens": 6}));
    assert_eq!(ids(&beams, &[]), ids(&plain, &["--num-beams", "3", "--max-new-tokens", "6"]));
    // An argument for another decoding method replaces the file's method.
    let sampled = ids(&beams, &["--temperature", "0.7", "--seed", "3"]);
    assert_eq!(sampled, ids(&plain, &["--temperature", "0.7", "--seed", "3", "--max-new-tokens", "6"]));
    assert_eq!(ids(&greedy, &["--seed", "3"]), ids(&plain, &["--seed", "3", "--max-new-tokens", "6"]));
    assert_eq!(ids(&beams, &["--greedy"]), ids(&greedy, &[]));
    // An argument also replaces an invalid value in the file.
    for (file, flags) in [
        (json!({"do_sample": true, "temperature": 0.0}), ["--temperature", "0.7"]),
        (json!({"do_sample": true, "top_p": 7}), ["--top-p", "0.9"]),
        (json!({"eos_token_id": 999}), ["--eos-token-id", "1"]),
        (json!({"do_sample": true, "num_beams": 4}), ["--seed", "1"]),
        (json!({"num_beams": 4}), ["--length-penalty", "2"]),
    ] {
        assert_eq!(generate(&with(file.clone()), &[&["x"][..], &flags].concat()).code, SUCCESS, "{file}");
    }
    assert_eq!(
        generate(&plain, &["x", "--min-new-tokens", "90"]).code,
        SUCCESS,
        "below the default maximum of 100"
    );
    for (config, expected) in [
        (json!({"repetition_penalty": 0}), "generation_config.json: `repetition_penalty`: expected"),
        (json!({"do_sample": true, "top_p": 2}), "generation_config.json: `top_p`: expected"),
        (json!({"pad_token_id": 999}), "generation_config.json: `pad_token_id`: expected token ids below"),
    ] {
        assert_refused(&generate(&with(config), &["x"]), FAILURE, expected);
    }
    let unsupported = with(json!({"guidance_scale": 2.0}));
    assert_refused(&generate(&unsupported, &["x"]), FAILURE, "`guidance_scale` 2.0 is not supported");
}

#[test]
fn stop_string_ends_the_completion() {
    let folder = CheckpointFolder::tiny();
    let flags = ["The dog", "--greedy", "--max-new-tokens", "30"];
    let whole = generate(&folder, &flags).stdout;
    let middle: String = whole.chars().skip(5).take(3).collect();
    let found = whole.find(&middle).unwrap();
    let stopped = generate(&folder, &[&flags[..], &["--stop", &middle]].concat());
    assert_eq!(stopped.stdout, format!("{}\n", &whole[..found]));
    let report = generate(&folder, &[&flags[..], &["--stop", &middle, "--json"]].concat()).json();
    assert_eq!((&report["stop_reason"], &report["text"]), (&json!("stop_string"), &json!(whole[..found])));
    let bare = folder.without("tokenizer.json").without("vocab.json").without("merges.txt");
    // Without a tokenizer there is no text, so stop strings are rejected.
    let first = generate(&bare, &["--ids", "1,2", "--greedy", "--max-new-tokens", "1", "--json"]).json();
    assert_eq!(first["text"], Value::Null);
    let ids = generate(&bare, &["--ids", "1,2", "--stop", "x"]);
    assert_refused(&ids, USAGE, "stop_strings");
}

#[test]
fn tokens_and_words_can_be_banned_or_forced() {
    let folder = CheckpointFolder::tiny();
    let ids = |flags: &[&str]| {
        let base = ["The dog", "--greedy", "--max-new-tokens", "12", "--json"];
        let report = generate(&folder, &[&base[..], flags].concat()).json();
        serde_json::from_value::<Vec<u32>>(report["ids"].clone()).unwrap()
    };
    let free = ids(&[]);
    let first = free[0].to_string();
    assert!(!ids(&["--logit-bias", &format!("{first}=-inf")]).contains(&free[0]));
    assert_eq!(ids(&["--logit-bias", "7=1e6"]), [7; 12]);
    // A token is forced only after a one-token prompt, as in transformers.
    assert_eq!(ids(&["--forced-bos-token-id", "55"]), free);
    let one = ["--ids", "40", "--greedy", "--max-new-tokens", "2", "--json", "--forced-bos-token-id", "55"];
    assert_eq!(generate(&folder, &one).json()["ids"][0], 55);
    let text =
        generate(&folder, &["The dog", "--greedy", "--max-new-tokens", "1", "--json"]).json()["text"].clone();
    let banned = ids(&["--bad-word", text.as_str().unwrap()]);
    assert!(!banned.contains(&free[0]), "{banned:?}");
    let repeated = ids(&["--no-repeat-ngram-size", "1"]);
    assert!((1..12).all(|index| !repeated[..index].contains(&repeated[index])), "{repeated:?}");
}

/// Checks the note about an ordinary end-of-text token (huggingface/transformers#7275).
#[test]
fn ordinary_eos_token_gets_a_note() {
    let ordinary =
        CheckpointFolder::tiny().with("generation_config.json", json!({"eos_token_id": 5}).to_string());
    let run = generate(&ordinary, &["The dog", "--greedy"]);
    assert_eq!(run.code, SUCCESS);
    assert!(run.stderr.contains("note: eos_token_id 5 is the ordinary token"), "{}", run.stderr);
    assert_eq!(generate(&CheckpointFolder::tiny(), &["The dog", "--greedy"]).stderr, "");
    let report = common::run(&["verify", "--json", "--model", path(ordinary.path())]).json();
    assert!(
        report["notes"][0].as_str().unwrap().contains("eos_token_id 5 is the ordinary token"),
        "{report}"
    );
}

/// Checks that an end-of-text token outside the vocabulary is ignored with a note.
///
/// transformers assumes 50256 if a configuration names no end-of-text token, whatever its size. Such a call
/// is therefore valid.
#[test]
fn out_of_vocabulary_eos_token_is_ignored_with_a_note() {
    let note = "note: eos_token_id 50256 is outside the vocabulary of 300 tokens and is ignored";
    let no_eos =
        CheckpointFolder::tiny().without("generation_config.json").with_config(json!({"eos_token_id": null}));
    let by_file =
        CheckpointFolder::tiny().with("generation_config.json", json!({"eos_token_id": [50256]}).to_string());
    let flags = ["The dog", "--greedy", "--max-new-tokens", "60", "--json"];
    for folder in [&no_eos, &by_file] {
        let run = generate(folder, &flags);
        assert!(run.stderr.contains(note), "{}", run.stderr);
        let report = run.json();
        assert_eq!(
            (&report["stop_reason"], report["ids"].as_array().unwrap().len()),
            (&json!("context"), 44)
        );
        let named = generate(folder, &[&flags[..], &["--eos-token-id", "0"]].concat());
        assert_eq!(
            (named.code, named.stderr.as_str()),
            (SUCCESS, ""),
            "an explicit end token replaces the missing one"
        );
        let refused = generate(folder, &[&flags[..], &["--eos-token-id", "50256"]].concat());
        assert_refused(
            &refused,
            USAGE,
            "--eos-token-id: expected token ids below the vocabulary size of 300",
        );
    }
    let some = CheckpointFolder::tiny()
        .with("generation_config.json", json!({"eos_token_id": [299, 50256]}).to_string());
    let run = generate(&some, &["The dog", "--greedy"]);
    assert!(run.code == SUCCESS && run.stderr.contains(note), "{}", run.stderr);
}

#[test]
fn long_prompts_follow_the_configured_policy() {
    let folder = CheckpointFolder::tiny();
    let ids = |range: std::ops::Range<u32>| range.map(|id| id.to_string()).collect::<Vec<_>>().join(",");
    let report = |flags: &[&str]| {
        without_speed(
            generate(&folder, &[flags, &["--greedy", "--json", "--max-new-tokens", "5"]].concat()).json(),
        )
    };
    let refused = generate(&folder, &["--ids", &ids(0..60)]);
    assert_refused(
        &refused,
        USAGE,
        "the prompt has 60 tokens, but the model's context has 48; shorten the prompt by 12",
    );
    let last = report(&["--ids", &ids(0..60), "--keep-last", "30"]);
    assert_eq!(last["ids"], report(&["--ids", &ids(30..60)])["ids"]);
    let both = [ids(0..4), ids(30..60)].join(",");
    let head = report(&["--ids", &ids(0..60), "--keep-last", "30", "--keep-head", "4"]);
    assert_eq!(head["ids"], report(&["--ids", &both])["ids"]);
    let too_many = generate(&folder, &["--ids", &ids(0..60), "--keep-last", "49"]);
    assert_refused(&too_many, USAGE, "cannot keep 49 tokens: the model's context has 48");
    let full = generate(&folder, &["--ids", &ids(0..40), "--greedy", "--json"]).json();
    assert_eq!((&full["stop_reason"], full["ids"].as_array().unwrap().len()), (&json!("context"), 9));
    let slid = generate(&folder, &["--ids", &ids(0..40), "--greedy", "--json", "--slide"]).json();
    assert_eq!(
        (&slid["stop_reason"], slid["ids"].as_array().unwrap().len()),
        (&json!("max_new_tokens"), 100)
    );
    assert_eq!(slid["ids"].as_array().unwrap()[..9], full["ids"].as_array().unwrap()[..]);
}

#[test]
fn max_time_ends_the_completion() {
    let folder = CheckpointFolder::tiny();
    let report = generate(&folder, &["The dog", "--greedy", "--json", "--max-time", "0.000001"]).json();
    assert_eq!((&report["stop_reason"], report["ids"].as_array().unwrap().len()), (&json!("max_time"), 1));
    assert!(report["time_to_first_token_s"].as_f64().unwrap() > 0.0);
}

#[test]
fn suppressed_tokens_and_max_length_are_applied() {
    let folder = CheckpointFolder::tiny();
    let ids = |flags: &[&str]| {
        let flags = [&["--ids", "1,2,3", "--greedy", "--json", "-n", "6"][..], flags].concat();
        let report = generate(&folder, &flags).json();
        report["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect::<Vec<_>>()
    };
    let plain = ids(&[]);
    assert_eq!(plain.len(), 6);
    let first = plain[0].to_string();
    assert!(!ids(&["--suppress-tokens", &first]).contains(&plain[0]));
    assert_ne!(ids(&["--begin-suppress-tokens", &first])[0], plain[0]);
    assert_ne!(ids(&["--bad-words-ids", &format!("3,{first}")])[0], plain[0]);
    assert_eq!(ids(&["--bad-words-ids", &format!("2,{first}")])[0], plain[0], "the preceding token is not 2");
    let short = ["--ids", "1,2,3", "--greedy", "--json", "--max-length", "5"];
    assert_eq!(generate(&folder, &short).json()["ids"], json!(plain[..2]));
}

#[test]
fn invalid_options_exit_2() {
    let folder = CheckpointFolder::tiny();
    let refuse = |flags: &[&str], expected: &str| {
        assert_refused(&generate(&folder, &[&["x"][..], flags].concat()), USAGE, expected);
    };
    for (flag, value, expected) in [
        ("--min-p", "1.5", "--min-p: expected from 0 to 1, found 1.5"),
        ("--presence-penalty", "nan", "--presence-penalty: expected a number that is finite"),
        ("--no-repeat-ngram-size", "-1", "--no-repeat-ngram-size"),
        ("--max-time", "0", "--max-time: expected a number of seconds greater than 0"),
        ("--num-beams", "0", "--num-beams: expected from 1 to 4096"),
        (
            "--eos-token-id",
            "300",
            "--eos-token-id: expected token ids below the vocabulary size of 300, found 300",
        ),
        ("--logit-bias", "300=1", "--logit-bias: expected token ids below"),
        ("--logit-bias", "3", "expected a token id, an equals sign and a number"),
        ("--logit-bias", "3=nan", "--logit-bias: expected numbers that are finite in f32"),
        ("--stop", "", "--stop: expected non-empty strings"),
        ("--keep-last", "0", "--keep-last: expected at least 1, found 0"),
        ("--early-stopping", "soon", "--early-stopping"),
        ("--output", "x.jsonl", "--prompts-file"),
        ("--batch-size", "3", "--prompts-file"),
        ("--keep-head", "3", "--keep-last"),
        ("--length-penalty", "2", "--num-beams"),
        ("--early-stopping", "never", "--num-beams"),
    ] {
        refuse(&[flag, value], expected);
    }
    for (flags, expected) in [
        (&["--greedy", "--temperature", "0.5"][..], "cannot be used with"),
        (&["--num-beams", "2", "--temperature", "0.5"], "cannot be used with"),
        (&["--num-beams", "4", "--num-beam-groups", "3", "--diversity-penalty", "1"], "does not divide"),
        (&["--num-beams", "4", "--num-beam-groups", "2"], "--diversity-penalty"),
        (&["--num-beams", "2", "--num-return-sequences", "3"], "exceeds --num-beams 2"),
        (&["--num-beams", "2", "--stop", "x"], "--stop"),
        (&["--num-beams", "2", "--slide"], "--slide cannot be combined"),
        (&["--greedy", "--num-return-sequences", "2"], "the same"),
        (&["--num-beams", "18446744073709551615"], "--num-beams: expected from 1 to 4096"),
        (&["--min-new-tokens", "9", "--max-new-tokens", "5"], "exceeds --max-new-tokens 5"),
        (&["--min-new-tokens", "101"], "exceeds --max-new-tokens 100"),
        (&["--threads", "0"], "0 is not in 1..=1024"),
        (&["--threads", "65535"], "65535 is not in 1..=1024"),
        (&["--slide", "--keep-head", "40"], "cannot keep 64 tokens"),
        (&["--logit-bias", "5=1e300"], "finite in f32"),
        (&["--bad-word", ""], "--bad-word: expected non-empty strings"),
        (&["--interactive"], "cannot be used with"),
        (&["--prompts-file", "x"], "cannot be used with"),
    ] {
        refuse(flags, expected);
    }
}

/// Prompts of different lengths, one of them empty and one with a Windows line break.
const PROMPTS: &str = "The dog\nThe\n\nFirst citizen: speak\r\nThe dog\n";

#[test]
fn prompts_file_completions_match_single_prompts() {
    let folder = CheckpointFolder::tiny().with("prompts.txt", PROMPTS);
    let file = folder.file("prompts.txt");
    let flags = ["--max-new-tokens", "9", "--seed", "5", "--repetition-penalty", "1.1"];
    let found = objects(&generate(&folder, &[&["--prompts-file", path(&file)][..], &flags].concat()).stdout);
    assert_eq!(found.len(), 5);
    for (index, (found, prompt)) in found.iter().zip(PROMPTS.lines()).enumerate() {
        assert_eq!((&found["line"], &found["prompt"]), (&json!(index + 1), &json!(prompt)));
        let single = generate(&folder, &[&[prompt, "--json"][..], &flags].concat()).json();
        for key in ["prompt_ids", "ids", "text", "stop_reason"] {
            assert_eq!(found[key], single[key], "{key} of {prompt:?}");
        }
    }
    let other = [&["--prompts-file", path(&file), "--batch-size", "3"][..], &flags].concat();
    assert_eq!(objects(&generate(&folder, &other).stdout), found);
}

#[test]
fn invalid_lines_are_reported_and_do_not_stop_the_run() {
    let lines = "{\"prompt\": \"The dog\", \"other\": 1}\nnonsense\n{\"ids\": [999]}\n";
    let folder = CheckpointFolder::tiny().with("prompts.jsonl", lines);
    let (file, output) = (folder.file("prompts.jsonl"), folder.file("texts.jsonl"));
    let flags =
        ["--prompts-file", path(&file), "--output", path(&output), "--greedy", "--max-new-tokens", "3"];
    let run = generate(&folder, &flags);
    assert_eq!((run.code, run.stdout.as_str()), (FAILURE, ""), "{}", run.stderr);
    for message in
        ["prompts.jsonl: line 2: expected {\"prompt\": TEXT}", "prompts.jsonl: line 3: token id 999"]
    {
        assert!(run.stderr.contains(message), "{message}: {}", run.stderr);
    }
    let found = objects(&fs::read_to_string(&output).unwrap());
    assert_eq!(found.iter().map(|line| line["ids"].is_array()).collect::<Vec<_>>(), [true, false, false]);
    assert!(!folder.file("texts.jsonl.partial").exists());
    assert_refused(&generate(&folder, &flags), FAILURE, "already exists");
    let missing = generate(&folder, &["--prompts-file", "/no/such/file"]);
    assert_refused(&missing, FAILURE, "/no/such/file");
}

/// Checks that a kill at any moment neither loses nor repeats a line.
#[test]
fn killed_run_resumes_without_losing_a_line() {
    let prompts: String = (0..40).map(|number| format!("The dog number {number}\n")).collect();
    let folder = CheckpointFolder::tiny().with("prompts.txt", &prompts);
    let (file, whole, output) = (folder.file("prompts.txt"), folder.file("whole"), folder.file("texts"));
    let flags = ["--prompts-file", path(&file), "--max-new-tokens", "25", "--seed", "9"];
    let arguments_for = |output: &std::path::Path| -> Vec<String> {
        let model = path(folder.path());
        let all = [&["generate", "--model", model][..], &flags, &["--output", path(output)]].concat();
        all.into_iter().map(str::to_owned).collect()
    };
    let arguments = arguments_for(&whole);
    assert_eq!(run(&arguments.iter().map(String::as_str).collect::<Vec<_>>()).code, SUCCESS);
    let expected = fs::read_to_string(&whole).unwrap();
    assert_eq!(expected.lines().count(), 40);

    let arguments = arguments_for(&output);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let partial = folder.file("texts.partial");
    let mut child = program(&arguments).stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // Kill the run once some lines are written.
    let lines = || fs::read(&partial).map_or(0, |bytes| bytes.iter().filter(|byte| **byte == b'\n').count());
    wait_until("no lines arrived", || lines() >= 4 || child.try_wait().unwrap().is_some());
    let _ = child.kill();
    child.wait().unwrap();
    if output.exists() {
        // The run finished before the kill, so undo its last part.
        let settings = settings_line(&folder, &flags);
        let kept: String = expected.lines().take(7).map(|line| format!("{line}\n")).collect();
        fs::write(&partial, format!("{settings}{kept}{{\"line\":8,\"pro")).unwrap();
        fs::remove_file(&output).unwrap();
    }
    assert_refused(&run(&arguments), FAILURE, "use --resume to continue it, or remove the file");
    let other = run(&[&arguments[..], &["--resume", "--temperature", "0.5"]].concat());
    assert_refused(&other, FAILURE, "the interrupted run had `temperature` 1.0, but this run has 0.5");
    let other = run(&[&arguments[..], &["--resume", "--kv-dtype", "f16"]].concat());
    assert_refused(&other, FAILURE, "the interrupted run had `kv_dtype` null, but this run has \"f16\"");
    let resumed = run(&[&arguments[..], &["--resume"]].concat());
    assert_eq!(resumed.code, SUCCESS, "{}", resumed.stderr);
    assert_eq!(fs::read_to_string(&output).unwrap(), expected);
    assert!(!partial.exists());
}

/// Checks that a batch whose KV cache exceeds the memory is rejected before it starts.
#[cfg(target_os = "linux")]
#[test]
fn batch_larger_than_memory_is_rejected() {
    // The first line is invalid. Its error is not written before the other lines are checked.
    let lines = [&b"\xe9\n"[..], "x\n".repeat(10_000).as_bytes()].concat();
    let folder = CheckpointFolder::tiny().with("prompts.txt", lines);
    let (file, output) = (folder.file("prompts.txt"), folder.file("texts"));
    let flags = ["--prompts-file", path(&file), "--output", path(&output), "--num-return-sequences", "4096"];
    let rejected = generate(&folder, &[&flags[..], &["--batch-size", "1000000000"]].concat());
    // The other 10,000 lines have 4,096 sequences each, and each of a sequence's 48 tokens takes
    // 2 · 3 · 28 values of 4 bytes.
    let expected = "a batch of 40960000 sequences of up to 48 tokens needs 1230.5 GiB of KV cache, but only ";
    assert_refused(&rejected, USAGE, expected);
    assert!(rejected.stderr.contains("--batch-size"), "{}", rejected.stderr);
    assert!(!folder.file("texts.partial").exists() && !output.exists(), "nothing is left behind");
}

/// Compares completions from one thread with completions from several threads.
#[test]
fn thread_count_does_not_change_completions() {
    let folder = CheckpointFolder::tiny().with("prompts.txt", PROMPTS);
    let file = folder.file("prompts.txt");
    let flags =
        ["--prompts-file", path(&file), "--max-new-tokens", "20", "--seed", "11", "--temperature", "1.2"];
    let texts = |threads: &str| generate(&folder, &[&flags[..], &["--threads", threads]].concat()).stdout;
    let one = texts("1");
    assert_eq!(objects(&one).len(), 5);
    assert_eq!([texts("2"), texts("3")], [one.clone(), one]);
}

/// Interrupts `gpt2 generate` with these options and returns the first line of its partial output.
fn settings_line(folder: &CheckpointFolder, flags: &[&str]) -> String {
    common::settings_line(folder, &[&["generate", "--model", path(folder.path())][..], flags].concat())
}

#[test]
fn interactive_mode_completes_each_prompt() {
    let folder = CheckpointFolder::tiny();
    let flags = ["generate", "--model", path(folder.path()), "--greedy", "--max-new-tokens", "6"];
    let completion = |prompt: &str| run(&[&flags[..], &[prompt]].concat()).stdout;
    let long = "x ".repeat(60);
    let lines = format!("The dog\n\n{long}\nThe first\n");
    let found = run_with_input(&[&flags[..], &["--interactive"]].concat(), lines.as_bytes());
    assert_eq!((found.code, found.stdout), (SUCCESS, completion("The dog") + &completion("The first")));
    assert!(found.stderr.contains("the prompt has"), "{}", found.stderr);
}

/// Checks that Ctrl-C ends the current completion and that the next prompt works as usual.
#[cfg(unix)]
#[test]
fn ctrl_c_ends_the_completion_but_not_the_program() {
    use std::io::{Read, Write};
    let folder = CheckpointFolder::tiny();
    // A completion that does not end by itself.
    let flags = ["generate", "--model", path(folder.path()), "--interactive", "--greedy", "--slide"];
    let mut child =
        program(&[&flags[..], &["--max-new-tokens", "100000000", "--eos-token-id", "299"]].concat())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let mut read = vec![0; 200];
    for prompt in ["The dog\n", "The first\n"] {
        input.write_all(prompt.as_bytes()).unwrap();
        output.read_exact(&mut read).unwrap();
        // Read the output during the interrupt, because the program would block on a full pipe.
        let interrupt = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
        assert!(interrupt.unwrap().success());
        while !read.ends_with(b"\n") || read.len() < 200 {
            let mut byte = [0];
            output.read_exact(&mut byte).unwrap();
            read = [&read[..], &byte].concat();
            assert!(read.len() < 100_000, "the completion did not stop");
        }
        read = vec![0; 200];
    }
    drop(input);
    assert_eq!(child.wait().unwrap().code(), Some(SUCCESS));
}

/// Compares three choices, each of which is best by a different measure.
#[test]
fn choices_are_ranked_by_each_measure() {
    let folder = CheckpointFolder::tiny();
    let choices = [" a", " was", " naïve"];
    let mut flags = vec!["score", "The dog", "--model", path(folder.path())];
    flags.extend(choices.iter().flat_map(|choice| ["--choice", choice]));
    let table = run(&flags).stdout;
    assert_eq!(
        table.lines().last().unwrap(),
        r#"best by sum " a", per token " was", per character " was", per byte " naïve""#
    );
    assert!(table.starts_with("       sum  per token  per character  per byte\n"), "{table}");
    flags.push("--json");
    let report = run(&flags).json();
    assert_eq!(
        report["best"],
        json!({"sum": 0, "mean": 1, "per_token": 1, "per_character": 1, "per_byte": 2})
    );
    for (index, line) in table.lines().skip(1).take(3).enumerate() {
        let per_byte = report["choices"][index]["per_byte"].as_f64().unwrap();
        assert!(line.ends_with(&format!("  {per_byte:.4}  {:?}", choices[index])), "{line}");
    }
    let empty = run(&["score", "The dog", "--model", path(folder.path()), "--choice", ""]);
    assert_refused(&empty, USAGE, "empty");
}

/// Checks the scores of a prompts file; the engine's tests cover resuming.
#[test]
fn prompts_file_scores_match_single_prompts() {
    let folder = CheckpointFolder::tiny().with("prompts.txt", PROMPTS);
    let (file, output) = (folder.file("prompts.txt"), folder.file("scores"));
    let flags = ["score", "--model", path(folder.path()), "--prompts-file", path(&file), "--top", "2"];
    let found = run(&flags);
    assert_eq!(found.code, FAILURE);
    assert!(
        found.stderr.contains("prompts.txt: line 3: the text has 0 tokens; scoring needs at least 2"),
        "{}",
        found.stderr
    );
    let single = run(&["score", "The dog", "--model", path(folder.path()), "--top", "2", "--json"]).json();
    let first = &objects(&found.stdout)[0];
    assert_eq!((&first["line"], &first["prompt_ids"]), (&json!(1), &single["ids"]));
    for key in ["logprobs", "loss", "perplexity", "alternatives"] {
        assert_eq!(first[key], single[key], "{key}");
    }
    let to_file = run(&[&flags[..], &["--output", path(&output)]].concat());
    assert_eq!((to_file.code, fs::read_to_string(&output).unwrap()), (FAILURE, found.stdout));
    assert_refused(&run(&[&flags[..], &["--batch-size", "2"]].concat()), USAGE, "one by one");
    assert_refused(&run(&[&flags[..], &["--choice", "a"]].concat()), USAGE, "cannot be used with");
}

#[test]
fn hyphen_reads_the_prompt_from_stdin() {
    let folder = CheckpointFolder::tiny();
    let arguments = ["generate", "--model", path(folder.path()), "--greedy", "--json"];
    let found = run_with_input(&[&arguments[..], &["-"]].concat(), b"One day").json();
    let expected = generate(&folder, &["One day", "--greedy", "--json"]).json();
    assert_eq!(without_speed(found), without_speed(expected));
    let literal = generate(&folder, &["--prompt", "-", "--greedy", "--json"]).json();
    assert_ne!(literal["prompt_ids"], json!([]));
}

#[test]
fn top_p_0_keeps_only_the_most_likely_token() {
    let folder = CheckpointFolder::tiny();
    let ids = |flags: &[&str]| {
        generate(&folder, &[&["--ids", "5,9,70", "--json"], flags].concat()).json()["ids"].clone()
    };
    assert_eq!(ids(&["--top-p", "0", "--seed", "3"]), ids(&["--greedy"]));
}
