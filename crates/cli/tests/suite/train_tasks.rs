//! `gpt2 train` on labels and on answers as its users call it: results, resuming after kills, refusals.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use candle_gpt2_testing::CheckpointFolder;
use serde_json::{Value, json};

use crate::common::{FAILURE, SUCCESS, USAGE};
use crate::train::{assert_refused, assert_success, read, stderr};

const NAMES: [&str; 6] = ["ada", "bob", "cid", "dan", "eve", "fay"];
const CONFIG: &str = r#"{"vocab_size": 270, "n_positions": 20, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}"#;

/// A folder with rows, a configuration, and room for results.
struct Bench(tempfile::TempDir);

impl Bench {
    fn new() -> Self {
        let bench = Self(tempfile::tempdir().unwrap());
        bench.write("config.json", CONFIG);
        let (mut labelled, mut answers) = (String::new(), String::new());
        // Everybody and everybody else, in many ways: of the same words two rows are made, with two labels.
        for verb in ["met", "saw", "heard", "told", "asked", "left"] {
            for name in NAMES {
                for other in NAMES.into_iter().filter(|other| *other != name) {
                    labelled.push_str(&format!("{name}\t{name} {verb} {other}\n"));
                    let row =
                        json!({"prompt": format!("who {verb} {other}?"), "completion": format!(" {name}")});
                    answers.push_str(&format!("{row}\n"));
                }
            }
        }
        bench.write("rows.tsv", labelled);
        bench.write("rows.jsonl", answers);
        bench
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.0.path().join(name), content).unwrap();
    }

    /// `gpt2 train` on the file `data` into the folder `out`, with further arguments.
    fn command(&self, task: &str, data: &str, out: &str, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
        command.args(["train", "--task", task, "--data", &self.path(data), "--out", &self.path(out)]);
        command.args(more).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn train(&self, task: &str, data: &str, out: &str, more: &[&str]) -> Output {
        self.command(task, data, out, more).output().unwrap()
    }
}

/// The tiny checkpoint with an end token of its own vocabulary.
fn tiny() -> CheckpointFolder {
    CheckpointFolder::tiny().with_config(json!({"eos_token_id": 0, "bos_token_id": 0}))
}

/// Who comes first: of the same words two rows are made, so that no bag of words could tell more than a half of them.
#[test]
fn a_classifier_learns_what_the_order_of_words_says() {
    let bench = Bench::new();
    let config = bench.path("config.json");
    let run =
        ["--config", &config, "--steps", "150", "--lr", "0.003", "--batch-size", "16", "--eval-every", "75"];
    let report =
        assert_success(&bench.train("classify", "rows.tsv", "model", &[&run[..], &["--json"]].concat()));
    let classification = &report["classification"];
    assert!(classification["accuracy"].as_f64().unwrap() >= 0.99, "{classification}");
    assert!(classification["macro_f1"].as_f64().unwrap() >= 0.99, "{classification}");
    let rows = (report["training_rows"].as_u64().unwrap(), report["held_out_rows"].as_u64().unwrap());
    assert_eq!(rows, (162, 18), "a tenth of the 30 rows of each label");
    let labels: Vec<&str> = classification["labels"]
        .as_array()
        .unwrap()
        .iter()
        .map(|label| label["label"].as_str().unwrap())
        .collect();
    assert_eq!(labels, NAMES);
    let counts = classification["confusion"].as_array().unwrap();
    let sum: u64 =
        counts.iter().flat_map(|row| row.as_array().unwrap()).map(|count| count.as_u64().unwrap()).sum();
    assert_eq!((counts.len(), sum), (6, 18));
    let folder = bench.path("model");
    let picture = String::from_utf8(read(&folder, "confusion.svg")).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains(">eve<"), "{picture}");
    let log = String::from_utf8(read(&folder, "log.jsonl")).unwrap();
    assert_eq!(log.matches("\"accuracy\"").count(), 2);
    let config: Value = serde_json::from_slice(&read(&folder, "config.json")).unwrap();
    assert_eq!(config["architectures"], json!(["GPT2ForSequenceClassification"]));
    assert_eq!(config["id2label"]["4"], "eve");

    let program =
        |arguments: &[&str]| Command::new(env!("CARGO_BIN_EXE_gpt2")).args(arguments).output().unwrap();
    for (text, label) in [("bob told eve", "bob"), ("eve told bob", "eve")] {
        let said = program(&["classify", text, "--model", &folder, "--json"]);
        assert_eq!(assert_success(&said)["labels"][0]["label"], label, "{text}");
    }
    let told = bench.train("classify", "rows.tsv", "model", &[&run[..], &["--resume"]].concat());
    let told = String::from_utf8(told.stdout).unwrap();
    for expected in
        ["162 rows of ", "nats per row", "accuracy 1.0000", "\nbob ", "what was said of them", "written to "]
    {
        assert!(told.contains(expected), "`{expected}` is not in: {told}");
    }
}

/// Ten kills, and then to the end: the files of a run in peace. All weights, the last block, adapters; labels and answers.
#[test]
fn fine_tuning_killed_ten_times_ends_with_the_same_files() {
    const RUN: [&str; 12] = [
        "--steps",
        "50",
        "--batch-size",
        "2",
        "--eval-every",
        "7",
        "--save-every",
        "5",
        "--dropout",
        "0.1",
        "--seed",
        "9",
    ];
    let bench = Bench::new();
    let tiny = tiny();
    let init = ["--init", tiny.path().to_str().unwrap()];
    let kinds: [(&str, &str, &[&str]); 6] = [
        ("classify", "rows.tsv", &["--class-weights", "balanced", "--accumulate", "2"]),
        ("classify", "rows.tsv", &["--train-blocks", "1"]),
        ("classify", "rows.tsv", &["--lora-rank", "2"]),
        ("answer", "rows.jsonl", &["--accumulate", "2"]),
        ("answer", "rows.jsonl", &["--train-blocks", "1"]),
        ("answer", "rows.jsonl", &["--lora-rank", "2"]),
    ];
    for (kind, (task, data, options)) in kinds.into_iter().enumerate() {
        let (whole, killed) = (format!("whole-{kind}"), format!("killed-{kind}"));
        let run = [&RUN[..], &init, options].concat();
        let output = bench.train(task, data, &whole, &run);
        assert_eq!(output.status.code(), Some(SUCCESS), "{}", stderr(&output));
        let resumed = [&run[..], &["--resume"]].concat();
        let log = Path::new(&bench.path(&killed)).join("log.jsonl");
        let steps_in_log = || fs::read_to_string(&log).unwrap_or_default().matches("\"loss\"").count();
        for attempt in 0..10u64 {
            let mut child = bench.command(task, data, &killed, &resumed).spawn().unwrap();
            let wanted = usize::try_from(4 * attempt).unwrap();
            while steps_in_log() < wanted && child.try_wait().unwrap().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(attempt * 7 % 10));
            child.kill().unwrap();
            assert_eq!(child.wait().unwrap().code(), None, "{options:?}: kill {attempt} came after the end");
        }
        let last = bench.train(task, data, &killed, &resumed);
        assert_eq!(last.status.code(), Some(SUCCESS), "{}", stderr(&last));
        let mut names =
            vec!["model.safetensors", "training-state.safetensors", "config.json", "tokenizer.json"];
        names.extend(options.contains(&"--lora-rank").then_some("adapter/adapter_model.safetensors"));
        names.extend((task == "classify").then_some("confusion.svg"));
        for name in names {
            let is_same = read(&bench.path(&whole), name) == read(&bench.path(&killed), name);
            assert!(is_same, "{task} {options:?}: {name}");
        }
        let steps = |folder: &str| -> Vec<Value> {
            let log = String::from_utf8(read(&bench.path(folder), "log.jsonl")).unwrap();
            let entries = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            entries
                .map(|entry| json!([entry["step"], entry["loss"], entry["held_out_loss"], entry["accuracy"]]))
                .collect()
        };
        assert_eq!(steps(&whole), steps(&killed), "{task} {options:?}: the logs tell the same");
    }
}

#[test]
fn an_answer_and_its_end_are_learnt() {
    let bench = Bench::new();
    let rows: String = NAMES
        .iter()
        .map(|name| {
            format!(
                "{}\n",
                json!({"prompt": format!("name {name}:"), "completion": format!(" {name}{name}")})
            )
        })
        .collect();
    bench.write("rows.jsonl", rows.repeat(10));
    let tiny = tiny();
    let init = tiny.path().to_str().unwrap().to_owned();
    let run = [
        "--init",
        &init,
        "--steps",
        "120",
        "--lr",
        "0.005",
        "--batch-size",
        "6",
        "--eval-every",
        "60",
        "--json",
    ];
    let report = assert_success(&bench.train("answer", "rows.jsonl", "model", &run));
    assert!(report["held_out_loss"].as_f64().unwrap() < 0.05, "{report}");
    assert_eq!((report["training_rows"].as_u64(), report["held_out_rows"].as_u64()), (Some(54), Some(6)));
    assert!(
        report["held_out_loss_per_character"].is_null() && report.get("classification").is_none(),
        "{report}"
    );
    let output = Command::new(env!("CARGO_BIN_EXE_gpt2"))
        .args([
            "generate",
            "name eve:",
            "--model",
            &bench.path("model"),
            "--greedy",
            "--max-new-tokens",
            "12",
        ])
        .output()
        .unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(
        said.trim_end(),
        " eveeve",
        "the end is learnt, too: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn rows_that_are_none_are_refused_with_their_lines() {
    let bench = Bench::new();
    let tiny = tiny();
    let init = tiny.path().to_str().unwrap().to_owned();
    let long = "many words ".repeat(60);
    let completion = format!("{{\"prompt\": \"a\", \"completion\": \"{long}\"}}\n");
    for (task, name, content, expected) in [
        (
            "classify",
            "unlabelled.jsonl",
            "{\"text\": \"a\", \"label\": 1}\n{\"text\": \"b\"}\n",
            "line 2: the object has no `label`",
        ),
        ("classify", "empty.jsonl", "{\"text\": \"a\", \"label\": \"\"}\n", "line 1: `label` is empty"),
        (
            "classify",
            "same.tsv",
            "ham\ta\nham\tb\n",
            "line 2: the rows up to here have 1 labels (ham); a classifier has from 2 to 1000",
        ),
        ("classify", "textless.tsv", "ham\ta\nspam\t\n", "line 2: `text` has no tokens"),
        ("classify", "rows.txt", "ham\ta\n", "expected a .jsonl or .ndjson file with `text` and `label`"),
        (
            "answer",
            "silent.jsonl",
            "{\"prompt\": \"a\", \"completion\": \"\"}\n",
            "line 1: `completion` is empty",
        ),
        ("answer", "half.jsonl", "\n{\"completion\": \"a\"}\n", "line 2: the object has no `prompt`"),
        ("answer", "long.jsonl", &completion, "line 1: `completion` has"),
    ] {
        bench.write(name, content);
        let output = bench.train(task, name, &format!("out-{name}"), &["--init", &init, "--steps", "1"]);
        assert_refused(&output, FAILURE, expected);
        assert_refused(&output, FAILURE, name);
    }
}

#[test]
fn labels_that_a_head_does_not_have_are_refused() {
    let bench = Bench::new();
    let heads = CheckpointFolder::of("heads/sequence");
    let init = heads.path().to_str().unwrap().to_owned();
    let config: Value = serde_json::from_slice(&fs::read(heads.file("config.json")).unwrap()).unwrap();
    let known =
        [&config["id2label"]["0"], &config["id2label"]["3"]].map(|name| name.as_str().unwrap().to_owned());
    let rows = |last: &str| {
        let row = |label: &str, text: &str| format!("{}\n", json!({"text": text, "label": label}));
        row(&known[0], "one").repeat(12) + &row(&known[1], "two").repeat(12) + &row(last, "three")
    };
    bench.write("unknown.jsonl", rows("nowhere"));
    let run = ["--init", &init, "--steps", "2", "--batch-size", "4", "--json"];
    let output = bench.train("classify", "unknown.jsonl", "unknown", &run);
    assert_refused(&output, FAILURE, "line 25: the label `nowhere` is none of the model's: ");
    // The number of a label stands for it, as in data for transformers.
    bench.write("numbered.jsonl", rows("3"));
    let report = assert_success(&bench.train("classify", "numbered.jsonl", "numbered", &run));
    assert_eq!(
        report["classification"]["labels"].as_array().unwrap().len(),
        config["id2label"].as_object().unwrap().len()
    );
    assert_eq!(report["training_rows"].as_u64(), Some(25 - 2), "the last of 12 and of 13 rows");
    let trained: Value = serde_json::from_slice(&read(&bench.path("numbered"), "config.json")).unwrap();
    assert_eq!(trained["id2label"], config["id2label"]);
    let weights = [&run[..], &["--class-weights", "nowhere=2"]].concat();
    assert_refused(
        &bench.train("classify", "numbered.jsonl", "other", &weights),
        USAGE,
        "--class-weights: expected labels of ",
    );

    assert_refused(
        &bench.train("answer", "rows.jsonl", "other", &run),
        USAGE,
        "--task answer trains language models",
    );
    for (name, class) in
        [("heads/token", "GPT2ForTokenClassification"), ("heads/multi_label", "multi_label_classification")]
    {
        let other = CheckpointFolder::of(name);
        let run = ["--init", other.path().to_str().unwrap(), "--steps", "2"];
        assert_refused(&bench.train("classify", "rows.tsv", "other", &run), USAGE, class);
    }
}

#[test]
fn what_does_not_go_with_a_task_is_refused_before_any_work() {
    let bench = Bench::new();
    let tiny = tiny();
    let init = ["--init", tiny.path().to_str().unwrap()];
    for (task, options, expected) in [
        ("text", &["--class-weights", "balanced"][..], "--class-weights is of the task classify"),
        ("classify", &["--sample", "a"], "--sample is of the tasks text and answer"),
        ("classify", &["--class-weights", "even"], "`balanced`, or a number greater than 0 for each label"),
        (
            "classify",
            &["--train-blocks", "1", "--lora-rank", "2"],
            "--train-blocks does not go with --lora-rank",
        ),
        (
            "classify",
            &["--train-blocks", "9"],
            "--train-blocks: expected at most the model's 3 blocks, found 9",
        ),
        ("classify", &["--held-out", "1"], "--held-out: expected a share from 0 to below 1"),
        ("sort", &[], "one of text, classify, answer"),
    ] {
        let output = bench.train(task, "rows.tsv", "out", &[&init[..], options].concat());
        assert_refused(&output, USAGE, expected);
    }
    let output = bench.train(
        "classify",
        "rows.tsv",
        "out",
        &["--config", &bench.path("config.json"), "--train-blocks", "1"],
    );
    assert_eq!(output.status.code(), Some(USAGE), "{}", stderr(&output));
}

#[test]
fn another_run_is_not_resumed() {
    let bench = Bench::new();
    let tiny = tiny();
    let run = ["--init", tiny.path().to_str().unwrap(), "--steps", "2", "--batch-size", "2", "--resume"];
    let blocks = [&run[..], &["--train-blocks", "1", "--class-weights", "bob=2"]].concat();
    let output = bench.train("classify", "rows.tsv", "model", &blocks);
    assert_eq!(output.status.code(), Some(SUCCESS), "{}", stderr(&output));
    for (options, expected) in [
        (&["--class-weights", "bob=2"][..], "other options: train_blocks is 1 there and null here"),
        (&["--train-blocks", "2", "--class-weights", "bob=2"], "train_blocks is 1 there and 2 here"),
        (&["--train-blocks", "1"], "class_weights is [1.0,2.0,1.0,1.0,1.0,1.0] there and null here"),
    ] {
        let other = bench.train("classify", "rows.tsv", "model", &[&run[..], options].concat());
        assert_refused(&other, FAILURE, expected);
    }
    let rows = String::from_utf8(read(&bench.path(""), "rows.tsv")).unwrap();
    bench.write("rows.tsv", rows.replace("heard", "liked"));
    assert_refused(&bench.train("classify", "rows.tsv", "model", &blocks), FAILURE, "a run with other data");
}

#[test]
fn rows_longer_than_the_context_lose_their_first_tokens_and_that_is_said() {
    let bench = Bench::new();
    let tiny = tiny();
    let run = [
        "--init",
        tiny.path().to_str().unwrap(),
        "--steps",
        "2",
        "--batch-size",
        "3",
        "--context",
        "4",
        "--json",
    ];
    let output = bench.train("classify", "rows.tsv", "cut", &run);
    let said = stderr(&output);
    assert!(
        said.contains(" of 180 rows are longer than the context of 4 tokens, and lose their first ones"),
        "{said}"
    );
    let report = assert_success(&output);
    assert!(report["training_tokens"].as_u64().unwrap() <= 4 * 162, "{report}");
}
