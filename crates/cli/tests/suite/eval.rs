//! Tests of `gpt2 eval`: flags, exit codes, files and output streams.
//!
//! The crate `evaluation` tests the metric values.

use std::fs;
use std::path::PathBuf;

use candle_gpt2_testing::CheckpointFolder;
use serde_json::{Value, json};

use crate::common::{FAILURE, Run, SUCCESS, USAGE, assert_refused, path, program, run};

/// Passages written for these tests.
const PASSAGES: &str = r#"{"text": "First Citizen: Before we proceed any further, hear me speak.\nAll: Speak, speak"}
{"text": "My lord, the king of France is dead, and long live the king"}
{"context": "He said: “Come hither, boy, and give me thy", "continuation": "hand"}
{"text": "What is the city but the people? True, the people are the city."}
"#;
/// Questions written for these tests.
const QUESTIONS: &str = r#"{"ind": 1, "activity_label": "Kings", "ctx_a": "The king sits upon the throne.", "ctx_b": "the queen", "endings": ["speaks to the people.", "eats a  throne [substeps] made of fish.", "sings.", "leaves the court, and all the lords follow her."], "label": 0}
{"ind": 2, "activity_label": "Letters", "ctx_a": "A messenger brings a letter to the duke.", "ctx_b": "", "endings": ["He reads it.", "He drinks the sea and all that therein is.", "He is a letter.", "He gives it to the messenger again."], "label": "3"}
{"ind": 7, "activity_label": "Swords", "ctx_a": "[header] How to draw [title] Take the sword.", "ctx_b": "then", "endings": ["draw it.", "draw it.", "throw the river away.", "xyzzy."], "label": 2}
"#;
/// Folder with evaluation data, in which tests also write logs.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        folder.write("passages.jsonl", PASSAGES);
        folder.write("questions.jsonl", QUESTIONS);
        folder
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        fs::write(self.file(name), contents).unwrap();
    }

    /// Runs `gpt2 eval` in the folder, offline, with the built-in model.
    fn eval(&self, arguments: &[&str]) -> Run {
        let mut command = program(&[&["eval", "--offline"][..], arguments].concat());
        // Hide the user's cache.
        let command = command.current_dir(self.0.path()).env("HF_HUB_CACHE", self.file("no-cache"));
        Run::from_output(&command.output().unwrap())
    }

    fn reports(&self, arguments: &[&str]) -> Vec<Value> {
        let run = self.eval(&[arguments, &["--json"]].concat());
        assert_eq!(run.code, SUCCESS, "{}", run.stderr);
        run.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn report(&self, arguments: &[&str]) -> Value {
        let mut reports = self.reports(arguments);
        assert_eq!(reports.len(), 1);
        reports.remove(0)
    }

    fn log(&self, name: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.file(name)).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn metric_value(report: &Value, name: &str) -> f64 {
    let metrics = report["metrics"].as_array().unwrap();
    metrics.iter().find(|metric| metric["name"] == name).unwrap()["value"].as_f64().unwrap()
}

/// Removes the fields that differ between runs with the same result.
fn without_speed(mut report: Value) -> Value {
    let fields = ["seconds", "tokens_read", "tokens_scored"];
    report.as_object_mut().unwrap().retain(|key, _| !fields.contains(&key.as_str()));
    report
}

#[test]
fn report_describes_the_measurement() {
    let folder = Folder::new();
    let report =
        folder.report(&["lambada:lm-eval", "--data", "passages.jsonl", "--limit", "2", "--dtype", "q8"]);
    let keys: Vec<&str> = report.as_object().unwrap().keys().map(String::as_str).collect();
    let expected = "model dtype kv_dtype device protocol protocol_source dataset metrics cut notes tokens_read \
                    tokens_scored seconds version";
    assert_eq!(keys.join(" "), expected);
    assert_eq!(
        [&report["model"], &report["dtype"], &report["kv_dtype"], &report["protocol"]],
        ["built-in", "q8", "f16", "lambada:lm-eval"]
    );
    let hash = "f6882359662ca0656bc32c49998828bc9980d589180745fd909bd93b32937765";
    assert_eq!(
        report["dataset"],
        json!({
            "name": "LAMBADA, test, OpenAI's variant", "path": "passages.jsonl", "revision": null, "sha256": hash,
            "known": false, "items": 2, "limit": 2,
        })
    );
    assert_eq!(report["metrics"][1]["stderr_kind"], "binomial");
    assert_eq!((&report["metrics"][1]["published"], &report["metrics"][1]["z"]), (&json!([]), &Value::Null));
    assert_eq!(report["cut"], 0);

    let table = folder.eval(&["lambada:lm-eval", "--data", "passages.jsonl", "--limit", "2"]);
    assert_eq!(table.code, SUCCESS, "{}", table.stderr);
    for part in ["protocol ", "± stderr", "published", "the first 2 items", hash, "not the published file"] {
        assert!(table.stdout.contains(part), "`{part}` is not in: {}", table.stdout);
    }
}

#[test]
fn one_call_runs_several_protocols() {
    let folder = Folder::new();
    folder.write("more.jsonl", QUESTIONS.replace("\"ctx_b\"", "\"ctx\": \"The king\", \"ctx_b\""));
    let data = [("lambada:last-token", "passages.jsonl"), ("hellaswag:llm.c", "more.jsonl")];
    let both = data.iter().flat_map(|(protocol, data)| [*protocol, "--data", data]).collect::<Vec<_>>();
    let reports = folder.reports(&both);
    assert_eq!(reports.len(), 2);
    for (report, (protocol, data)) in reports.into_iter().zip(data) {
        assert_eq!(report["protocol"], protocol);
        assert_eq!(report["dataset"]["path"], data);
        assert_eq!(without_speed(report), without_speed(folder.report(&[protocol, "--data", data])));
    }
    let one = folder.reports(&["lambada:lm-eval", "lambada:stop-words", "--data", "passages.jsonl"]);
    assert!(one.len() == 2 && one.iter().all(|report| report["dataset"]["items"] == 4));
}

#[test]
fn interrupted_run_resumes_from_its_log() {
    let folder = Folder::new();
    let arguments = ["lambada:stop-words", "lambada:lm-eval", "--data", "passages.jsonl", "--items"];
    let call = |more: &[&'static str]| [&arguments[..], more].concat();
    let whole = folder.reports(&call(&["whole.jsonl"]));
    let lines = fs::read(folder.file("whole.jsonl")).unwrap();
    folder.write("cut.jsonl", &lines[..lines.len() * 2 / 3]);
    let again = folder.reports(&call(&["cut.jsonl", "--resume"]));
    assert_eq!(fs::read(folder.file("cut.jsonl")).unwrap(), lines);
    let results = |reports: Vec<Value>| reports.into_iter().map(without_speed).collect::<Vec<_>>();
    assert_eq!(results(again), results(whole));
    let done = folder.eval(&call(&["cut.jsonl", "--resume"]));
    assert!(done.stderr.contains("lambada:lm-eval: 4 of 4 items are in the log"), "{}", done.stderr);
    // A resumed run may request more items than before, but not fewer.
    folder.reports(&call(&["limited.jsonl", "--limit", "1"])[1..]);
    folder.reports(&call(&["limited.jsonl", "--resume"])[1..]);
    assert_eq!(folder.log("limited.jsonl")[..], folder.log("whole.jsonl")[4..]);
    let fewer = folder.eval(&call(&["limited.jsonl", "--resume", "--limit", "1"])[1..]);
    assert_refused(&fewer, FAILURE, "limited.jsonl: line 2: the data has only 1 items");

    let refused = |more: &[&'static str], expected: &str| {
        assert_refused(&folder.eval(&call(more)), FAILURE, expected);
        assert_eq!(fs::read(folder.file("whole.jsonl")).unwrap(), lines, "the log is unchanged");
    };
    let another =
        "whole.jsonl: contains the items of another run; resume that run, or choose another log file";
    refused(&["whole.jsonl"], &format!("{another} (--items, --resume, --against)"));
    refused(
        &["whole.jsonl", "--resume", "--dtype", "f16"],
        "whole.jsonl: line 1: written by the run `built-in, q8",
    );
    refused(&["whole.jsonl", "--resume", "--kv-dtype", "f16"], "line 1: written by the run");
}

#[test]
fn damaged_data_is_reported_and_finished_items_are_kept() {
    let folder = Folder::new();
    let passages: Vec<&str> = PASSAGES.lines().collect();
    folder.write("bad.jsonl", format!("{}\n{{\"text\": 7}}\n", passages[..3].join("\n")));
    let arguments = ["lambada:lm-eval", "--data", "bad.jsonl"];
    let damage = "error: bad.jsonl: line 4: field `text`: expected a string, found 7";
    assert_refused(&folder.eval(&arguments), FAILURE, damage);
    // With `--limit`, entries past the limit are not read.
    assert_eq!(folder.report(&[&arguments[..], &["--limit", "1"]].concat())["dataset"]["items"], 1);
    // The call's other protocols are still measured. With `--items`, so are the items before the damage.
    let both = [&arguments[..], &["lambada:last-token", "--data", "passages.jsonl", "--items", "log.jsonl"]];
    let run = folder.eval(&[&both.concat()[..], &["--json"]].concat());
    assert_eq!(run.code, FAILURE, "{}", run.stderr);
    assert_eq!(serde_json::from_str::<Value>(&run.stdout).unwrap()["protocol"], "lambada:last-token");
    for message in [damage, "the 3 items before this entry are evaluated and logged"] {
        assert!(run.stderr.contains(message), "{}", run.stderr);
    }
    assert_eq!(folder.log("log.jsonl").len(), 3 + 4);
    // The run resumes with the repaired data.
    folder.write("bad.jsonl", PASSAGES);
    let again = folder.reports(&[&both.concat()[..], &["--resume"]].concat()).remove(0);
    assert_eq!(without_speed(again), without_speed(folder.report(&arguments)));

    folder.write("bad.jsonl", "{\n");
    let none = folder.eval(&[&arguments[..], &["--items", "none.jsonl"]].concat());
    assert_refused(&none, FAILURE, "error: bad.jsonl: line 1: ");
    assert!(!folder.file("none.jsonl").exists(), "nothing was measured");
}

#[test]
fn kl_compares_with_a_base_model() {
    let folder = Folder::new();
    folder
        .write("text.txt", "The king of France is dead, and all the people speak of the queen. ".repeat(20));
    let arguments = ["kl", "--data", "text.txt", "--context", "64", "--dtype", "q4", "--items"];
    let call = |more: &[&'static str]| [&arguments[..], more].concat();
    let q4 = folder.report(&call(&["q4.jsonl"]));
    assert_eq!(q4["base"], json!({ "model": "built-in", "dtype": "f32" }));
    assert!(metric_value(&q4, "kl") > 0.0);
    let same = folder.report(&call(&["same.jsonl", "--base-dtype", "q4"]));
    assert_eq!((metric_value(&same, "kl"), &same["base"]["dtype"]), (0.0, &json!("q4")));
    let other = folder.eval(&call(&["q4.jsonl", "--resume", "--base-dtype", "q8"]));
    assert_refused(&other, FAILURE, "line 1: written by the run");
    let tiny = CheckpointFolder::tiny();
    let other = folder.eval(&[&arguments[..7], &["--base", path(tiny.path())]].concat());
    assert_refused(
        &other,
        USAGE,
        "vocabulary of the base model: expected 4096 tokens, as in the evaluated model",
    );
}

#[test]
fn against_compares_with_the_items_of_another_run() {
    let folder = Folder::new();
    let arguments = ["hellaswag:lm-eval", "--data", "questions.jsonl"];
    folder.reports(&[&arguments[..], &["--items", "q4.jsonl", "--dtype", "q4"]].concat());
    let call = [&arguments[..], &["--against", "q4.jsonl"]].concat();
    let against = &folder.report(&call)["against"];
    assert_eq!([&against["path"], &against["items"]], [&json!("q4.jsonl"), &json!(3)]);
    assert!(against["run"].as_str().unwrap().starts_with("built-in, q4, "), "{against}");
    assert_eq!((against["answers"].as_array().unwrap().len(), &against["logprob"]), (4, &Value::Null));
    let table = folder.eval(&[&call[..], &["--dtype", "q4"]].concat());
    assert!(
        table.stdout.contains("0 correct only in this run, 0 only in the other, 0 different answers"),
        "{}",
        table.stdout
    );
    let other = folder.eval(&[&arguments[..], &["--against", "none.jsonl"]].concat());
    assert_refused(&other, FAILURE, "none.jsonl: ");
}

#[test]
fn invalid_calls_are_rejected() {
    let folder = Folder::new();
    let no_file = "has no single data file on the Hub; specify its data (any UTF-8 text) with --data";
    folder.write("latin.txt", b"caf\xe9");
    for (code, arguments, expected) in [
        (USAGE, &[][..], "<PROTOCOL>"),
        (USAGE, &["nonsense"], "(`gpt2 eval --list`)"),
        (USAGE, &["text:bits"], no_file),
        (USAGE, &["kl"], no_file),
        (USAGE, &["--list", "lambada:lm-eval"], "cannot be used with"),
        (USAGE, &["lambada:lm-eval", "--resume"], "--items"),
        (USAGE, &["lambada:lm-eval", "--limit", "0"], "--limit: expected at least 1, found 0"),
        (USAGE, &["lambada:lm-eval", "--base-dtype", "q8"], "--base-dtype"),
        (USAGE, &["wikitext:hf-513", "--data", "passages.jsonl"], "expected from 1 to 512"),
        (USAGE, &["kl", "--data", "passages.jsonl", "--context", "1000"], "expected from 3 to 512"),
        (FAILURE, &["lambada:lm-eval", "--data", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (FAILURE, &["text:bits", "--data", "latin.txt"], "latin.txt: "),
    ] {
        assert_refused(&folder.eval(arguments), code, expected);
    }
}

#[test]
fn flags_select_few_shot_examples_and_task_files() {
    let folder = Folder::new();
    let questions = folder.file("questions.jsonl");
    let call = ["hellaswag:lm-eval", "--data", path(&questions), "--num-fewshot", "1"];
    let report = folder.report(&call);
    assert_eq!(report["num_fewshot"], 1);
    let by_seed = |seed: u32| {
        let seed = seed.to_string();
        folder.report(&[&call[..], &["--fewshot-seed", &seed, "--fewshot-data", path(&questions)]].concat())
    };
    let differs = (0..6).any(|seed| by_seed(seed)["tokens_read"] != report["tokens_read"]);
    assert!(differs, "other seeds sample examples of other lengths");
    let tasks = candle_gpt2_testing::fixture_path("evaluation/tasks");
    let report = folder.report(&[path(&tasks.join("choices.yaml")), "--num-fewshot", "3"]);
    assert_eq!((&report["protocol"], &report["num_fewshot"]), (&json!("places"), &json!(3)));
    assert_eq!(report["metrics"].as_array().unwrap().len(), 3);

    let wrong = run(&["eval", "wikitext:lm-eval", "--num-fewshot", "2"]);
    assert_refused(&wrong, USAGE, "--num-fewshot: wikitext:lm-eval does not support examples");
    let wrong = run(&["eval", "piqa:lm-eval", "--fewshot-data", "a.jsonl"]);
    assert_refused(&wrong, USAGE, "--fewshot-data needs --num-fewshot");
    folder.write("code.yaml", "doc_to_text: !function utils.text\n");
    let wrong = run(&["eval", path(&folder.file("code.yaml"))]);
    assert_refused(&wrong, FAILURE, "code.yaml: `!function` is not supported");
}

#[test]
fn unavailable_hub_data_is_reported() {
    let folder = Folder::new();
    let missing = folder.eval(&["lambada:lm-eval"]);
    #[cfg(feature = "hub")]
    assert_refused(
        &missing,
        FAILURE,
        "EleutherAI/lambada_openai is not in the cache, and network access is disabled; the cache",
    );
    #[cfg(not(feature = "hub"))]
    assert_refused(&missing, FAILURE, "this program was built without the feature `hub`");
    let parquet = folder.eval(&["hellaswag:lm-eval"]);
    if cfg!(feature = "parquet") {
        assert_eq!(parquet.code, FAILURE, "{}", parquet.stderr);
    } else {
        assert_refused(
            &parquet,
            USAGE,
            "is in Parquet, and this program was built without the feature `parquet`",
        );
    }
}

#[test]
fn list_shows_every_protocol_with_source_and_figures() {
    let folder = Folder::new();
    let listed: Vec<Value> = folder.reports(&["--list"]);
    let text = folder.eval(&["--list"]).stdout;
    for protocol in &listed {
        for field in ["about", "source"] {
            assert!(protocol[field].as_str().is_some_and(|text| !text.is_empty()), "{protocol}");
        }
        let name = protocol["protocol"].as_str().unwrap();
        assert!(text.contains(&format!("{name}: ")), "{name} is not in {text}");
    }
    let lambada = listed.iter().find(|protocol| protocol["protocol"] == "lambada:lm-eval").unwrap();
    assert_eq!(lambada["published"][0]["value"], 0.3256);
    assert!(text.contains("published: acc 0.3256 of gpt2 (EleutherAI/lm-evaluation-harness#2159)"), "{text}");
}
