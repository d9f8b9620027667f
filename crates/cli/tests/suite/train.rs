//! Tests of `gpt2 train`: files and output, kills and interrupts, full disks, and flags.
//!
//! The crates `training` and `jobs` test what is learned and which data and options are rejected.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use candle_gpt2_testing::CheckpointFolder;
use serde_json::{Value, json};

use crate::common::{FAILURE, SUCCESS, USAGE, wait_until};

#[cfg(unix)]
const INTERRUPTED: i32 = 130;

const CONFIG: &str = r#"{"vocab_size": 280, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}"#;
/// Model wide enough to learn word order.
const ROWS_CONFIG: &str = r#"{"vocab_size": 270, "n_positions": 20, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}"#;
const NAMES: [&str; 6] = ["ada", "bob", "cid", "dan", "eve", "fay"];
const STATE: &str = "training-state.safetensors";

/// Folder with a text, rows for both tasks, configurations and results.
struct Bench(tempfile::TempDir);

impl Bench {
    fn new() -> Self {
        let bench = Self(tempfile::tempdir().unwrap());
        bench.write("config.json", CONFIG);
        bench.write("rows-config.json", ROWS_CONFIG);
        let line =
            |line| format!("FIRST CITIZEN {}:\nWhat say you, neighbour {}?\n\n", line % 7, line * 37 % 101);
        bench.write("text.txt", (0..400).map(line).collect::<String>());
        let (mut labeled, mut answers) = (String::new(), String::new());
        // Use every ordered pair of names with each verb, so that the same words form two rows with different
        // labels.
        for verb in ["met", "saw", "heard", "told", "asked", "left"] {
            for name in NAMES {
                for other in NAMES.into_iter().filter(|other| *other != name) {
                    labeled.push_str(&format!("{name}\t{name} {verb} {other}\n"));
                    let prompt = format!("who {verb} {other}?");
                    let row = json!({"prompt": prompt, "completion": format!(" {name}")});
                    answers.push_str(&format!("{row}\n"));
                }
            }
        }
        bench.write("rows.tsv", labeled);
        bench.write("rows.jsonl", answers);
        bench
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.0.path().join(name), content).unwrap();
    }

    fn read(&self, folder: &str, name: &str) -> Vec<u8> {
        fs::read(self.0.path().join(folder).join(name)).unwrap()
    }

    /// Returns the `gpt2 train` command with this starting point, data file, output folder and flags.
    fn command(&self, start: [&str; 2], data: &str, out: &str, flags: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
        command.args(["train", "--data", &self.path(data), "--out", &self.path(out)]);
        command.args(start).args(flags.split_whitespace());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn train(&self, start: [&str; 2], data: &str, out: &str, flags: &str) -> Output {
        self.command(start, data, out, flags).output().unwrap()
    }

    /// Returns the number of steps in a folder's log.
    fn steps_in_log(&self, out: &str) -> usize {
        let log = fs::read_to_string(self.0.path().join(out).join("log.jsonl"));
        log.unwrap_or_default().matches("\"loss\"").count()
    }

    /// Waits until a folder's log has this number of steps, or the training has ended.
    fn wait_for_steps(&self, out: &str, steps: usize, training: &mut Child) {
        wait_until("the steps are not logged", || {
            self.steps_in_log(out) >= steps || training.try_wait().unwrap().is_some()
        });
    }

    /// Returns the log entries without their times.
    fn logged(&self, out: &str) -> Vec<Value> {
        let log = String::from_utf8(self.read(out, "log.jsonl")).unwrap();
        let entries = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        entries
            .map(|entry| json!([entry["step"], entry["loss"], entry["held_out_loss"], entry["accuracy"]]))
            .collect()
    }
}

/// Returns the tiny checkpoint with an end token from its own vocabulary.
fn tiny() -> CheckpointFolder {
    CheckpointFolder::tiny().with_config(json!({"eos_token_id": 0, "bos_token_id": 0}))
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns the standard output of a successful run.
#[track_caller]
fn printed(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(SUCCESS), "{}", stderr(output));
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[track_caller]
fn report(output: &Output) -> Value {
    serde_json::from_str(&printed(output)).expect("one JSON object")
}

#[track_caller]
fn assert_refused(output: &Output, code: i32, expected: &str) {
    let message = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert!(message.contains(expected), "`{expected}` is not in: {message}");
    assert!(!message.contains("internal error"), "{message}");
}

fn program(arguments: &[&str]) -> String {
    printed(&Command::new(env!("CARGO_BIN_EXE_gpt2")).args(arguments).output().unwrap())
}

#[test]
fn training_lowers_the_loss_and_writes_a_usable_checkpoint() {
    let bench = Bench::new();
    let config = bench.path("config.json");
    let flags = "--batch-size 2 --steps 60 --lr 0.01 --eval-every 20 --seed 3 --sample WHAT --json";
    let output = bench.train(["--config", &config], "text.txt", "model", flags);
    let samples = stderr(&output);
    assert_eq!(samples.matches(": WHAT").count(), 3, "a sample at every evaluation: {samples}");
    let loss = report(&output)["held_out_loss"].as_f64().unwrap();
    // A model that only guesses has a loss of ln 280 = 5.63.
    assert!(loss < 4.0, "held-out loss {loss}");
    let entries = bench.logged("model");
    assert_eq!(entries.iter().filter(|entry| entry[1].is_number()).count(), 60);
    assert_eq!(entries.iter().filter(|entry| entry[2].is_number()).count(), 3);
    let curve = String::from_utf8(bench.read("model", "loss.svg")).unwrap();
    assert!(curve.contains("<svg") && curve.contains("held out"), "a picture with a legend");
    let folder = bench.path("model");
    program(&["verify", "--model", &folder]);
    let text = program(&["generate", "FIRST", "--model", &folder, "--greedy", "--max-new-tokens", "5"]);
    assert!(text.len() > 2);
}

/// Checks that a classifier learns word order.
///
/// The same words form two rows with different labels, so a bag-of-words model is right for at most half.
#[test]
fn classifier_learns_word_order() {
    let bench = Bench::new();
    let config = bench.path("rows-config.json");
    let train = |more: &str| {
        let flags = format!("--task classify --steps 150 --lr 0.003 --batch-size 16 --eval-every 75 {more}");
        bench.train(["--config", &config], "rows.tsv", "model", &flags)
    };
    let report = report(&train("--json"));
    let classification = &report["classification"];
    assert!(classification["accuracy"].as_f64().unwrap() >= 0.99, "{classification}");
    assert!(classification["macro_f1"].as_f64().unwrap() >= 0.99, "{classification}");
    // A tenth of each label's 30 rows is held out.
    assert_eq!([&report["training_rows"], &report["held_out_rows"]], [162, 18]);
    let labels = classification["labels"].as_array().unwrap().iter().map(|label| &label["label"]);
    assert_eq!(labels.collect::<Vec<_>>(), NAMES);
    let picture = String::from_utf8(bench.read("model", "confusion.svg")).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains(">eve<"), "{picture}");
    assert_eq!(bench.logged("model").iter().filter(|entry| entry[3].is_number()).count(), 2);
    let config: Value = serde_json::from_slice(&bench.read("model", "config.json")).unwrap();
    assert_eq!(config["architectures"], json!(["GPT2ForSequenceClassification"]));
    assert_eq!(config["id2label"]["4"], "eve");

    for (text, label) in [("bob told eve", "bob"), ("eve told bob", "eve")] {
        let classified = program(&["classify", text, "--model", &bench.path("model"), "--json"]);
        let classified: Value = serde_json::from_str(&classified).unwrap();
        assert_eq!(classified["labels"][0]["label"], label, "{text}");
    }
    let table = printed(&train("--resume"));
    for expected in
        ["162 rows with ", "nats per row", "accuracy 1.0000", "\nbob ", "confusion matrix", "written to "]
    {
        assert!(table.contains(expected), "`{expected}` is not in: {table}");
    }
}

#[test]
fn answers_and_their_end_are_learned() {
    let bench = Bench::new();
    let row = |name: &str| json!({"prompt": format!("name {name}:"), "completion": format!(" {name}{name}")});
    bench.write("rows.jsonl", NAMES.map(|name| format!("{}\n", row(name))).concat().repeat(10));
    let tiny = tiny();
    let init = tiny.path().to_str().unwrap();
    let flags = "--task answer --steps 120 --lr 0.005 --batch-size 6 --json";
    let report = report(&bench.train(["--init", init], "rows.jsonl", "model", flags));
    assert!(report["held_out_loss"].as_f64().unwrap() < 0.05, "{report}");
    assert!(report["held_out_loss_per_character"].is_null() && report.get("classification").is_none());
    let model = bench.path("model");
    let completion =
        program(&["generate", "name eve:", "--model", &model, "--greedy", "--max-new-tokens", "12"]);
    assert_eq!(completion.trim_end(), " eveeve", "the end token is learned, too");
}

/// Checks that ten kills and resumes leave the same files as an uninterrupted run.
///
/// This covers new models, all weights, the last block and adapters, with texts, labels and answers.
#[test]
fn training_killed_ten_times_writes_the_same_files() {
    const RUN: &str = "--steps 60 --batch-size 2 --eval-every 7 --save-every 5 --dropout 0.1 --seed 9";
    let bench = Bench::new();
    let (config, tiny) = (bench.path("config.json"), tiny());
    let (new, pretrained) = (["--config", &config], ["--init", tiny.path().to_str().unwrap()]);
    let kinds = [
        ("text", "text.txt", new, ""),
        ("text", "text.txt", pretrained, "--lora-rank 2 --lora-targets c_attn,c_fc"),
        ("classify", "rows.tsv", pretrained, "--class-weights balanced --accumulate 2"),
        ("classify", "rows.tsv", pretrained, "--train-blocks 1"),
        ("classify", "rows.tsv", pretrained, "--lora-rank 2"),
        ("answer", "rows.jsonl", pretrained, "--accumulate 2"),
        ("answer", "rows.jsonl", pretrained, "--train-blocks 1"),
        ("answer", "rows.jsonl", pretrained, "--lora-rank 2"),
    ];
    for (kind, (task, data, start, options)) in kinds.into_iter().enumerate() {
        let (whole, killed) = (format!("whole-{kind}"), format!("killed-{kind}"));
        let flags = format!("{RUN} --task {task} {options}");
        printed(&bench.train(start, data, &whole, &flags));
        let resumed = format!("{flags} --resume");
        for attempt in 0..10u64 {
            let mut child = bench.command(start, data, &killed, &resumed).spawn().unwrap();
            // The first kill comes before any step. Each later kill comes some steps after the previous kill,
            // at uneven times, to hit steps, evaluations and saves.
            let wanted = usize::try_from(4 * attempt).unwrap();
            bench.wait_for_steps(&killed, wanted, &mut child);
            std::thread::sleep(Duration::from_millis(attempt * 7 % 10));
            child.kill().unwrap();
            // A killed process has no exit code on Unix, but has one on Windows.
            let killed = if cfg!(windows) { Some(FAILURE) } else { None };
            assert_eq!(
                child.wait().unwrap().code(),
                killed,
                "{options}: the run finished before kill {attempt}"
            );
        }
        printed(&bench.train(start, data, &killed, &resumed));
        let mut names = vec!["model.safetensors", STATE, "config.json", "tokenizer.json"];
        if options.contains("--lora-rank") {
            names.extend(["adapter/adapter_model.safetensors", "adapter/adapter_config.json"]);
        }
        names.extend((task == "classify").then_some("confusion.svg"));
        for name in names {
            assert!(bench.read(&whole, name) == bench.read(&killed, name), "{task} {options}: {name}");
        }
        assert_eq!(bench.logged(&whole), bench.logged(&killed), "{task} {options}: the logs match");
    }
}

/// Checks that repeated Ctrl-C loses only the current step.
///
/// The options would otherwise save the state only at the end.
#[cfg(unix)]
#[test]
fn interrupt_saves_the_last_step() {
    let bench = Bench::new();
    let config = bench.path("config.json");
    let start = ["--config", &config];
    let flags = "--steps 40 --eval-every 6 --save-every 1000 --accumulate 2";
    printed(&bench.train(start, "text.txt", "whole", flags));
    let resumed = format!("{flags} --resume");
    for wanted in [1, 8, 20] {
        let mut child = bench.command(start, "text.txt", "stopped", &resumed).spawn().unwrap();
        bench.wait_for_steps("stopped", wanted, &mut child);
        Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        let output = child.wait_with_output().unwrap();
        assert_refused(&output, INTERRUPTED, &format!("{STATE} holds the state to resume from (--resume)"));
        assert!(bench.steps_in_log("stopped") >= wanted, "a step is missing from the log");
    }
    printed(&bench.train(start, "text.txt", "stopped", &resumed));
    for name in ["model.safetensors", STATE] {
        assert_eq!(bench.read("whole", name), bench.read("stopped", name), "{name}");
    }
}

#[test]
fn invalid_calls_are_rejected_before_any_work() {
    let bench = Bench::new();
    let (config, tiny) = (bench.path("config.json"), tiny());
    let (new, pretrained) = (["--config", &config], ["--init", tiny.path().to_str().unwrap()]);
    bench.write("latin.txt", b"caf\xe9 and more text");
    bench.write("file", "");
    for (code, start, data, out, flags, expected) in [
        (USAGE, new, "text.txt", "out", "--steps 0", "--steps: expected at least 1"),
        (USAGE, new, "text.txt", "out", "--lr -1", "--lr: expected a number greater than 0"),
        (USAGE, new, "text.txt", "out", "--grad-clip -1", "--grad-clip: expected"),
        (USAGE, new, "text.txt", "out", "--schedule exponential", "constant, linear, cosine"),
        (USAGE, new, "text.txt", "out", "--dtype q8_0", "f32, f16, bf16"),
        (USAGE, new, "text.txt", "out", "--task sort", "one of text, classify, answer"),
        (USAGE, new, "text.txt", "out", "--batch-size 1000000", "lower --batch-size"),
        (USAGE, new, "text.txt", "out", "--init somewhere", "cannot be used with"),
        (USAGE, new, "text.txt", "out", "--train-blocks 1", "--train-blocks applies only to checkpoints"),
        (
            USAGE,
            pretrained,
            "text.txt",
            "out",
            "--class-weights balanced",
            "--class-weights needs --task classify",
        ),
        (USAGE, pretrained, "text.txt", "out", "--lora-rank 1 --lora-alpha -1", "--lora-alpha: expected"),
        (USAGE, new, "text.txt", "file", "", "not a folder"),
        (FAILURE, new, "nothing.txt", "out", "", "nothing.txt"),
        (FAILURE, new, "latin.txt", "out", "", "not valid UTF-8 at byte 3"),
    ] {
        let output = bench.train(start, data, out, flags);
        assert_refused(&output, code, expected);
        assert_eq!(output.stdout, b"");
        assert!(!Path::new(&bench.path("out")).exists(), "{flags}");
    }
}

#[test]
fn run_with_different_options_is_not_resumed() {
    let bench = Bench::new();
    let config = bench.path("config.json");
    let train = |flags: &str| {
        bench.train(["--config", &config], "text.txt", "model", &format!("--batch-size 2 {flags}"))
    };
    printed(&train("--steps 2"));
    assert_refused(&train("--steps 2"), USAGE, "add --resume");
    let longer = train("--steps 3 --lr 0.5 --resume");
    assert_refused(&longer, FAILURE, "different options: steps was 2 and is now 3");
    assert_refused(&longer, FAILURE, "learning_rate was 0.001 and is now 0.5; use the same options");
    assert!(!stderr(&longer).contains("--batch-size: expected"), "{}", stderr(&longer));
}

/// Checks that an end token beyond the vocabulary is ignored with a note.
///
/// GPT-2's default is 50,256, and the tiny vocabulary has 300 tokens.
#[test]
fn out_of_vocabulary_eos_token_is_ignored_with_a_note() {
    let bench = Bench::new();
    let lines: String = (0..60).map(|line| format!("{{\"text\": \"Citizen {line} speaks.\"}}\n")).collect();
    bench.write("text.jsonl", lines);
    let train = |end: Value, out: &str, more: &str| {
        let init = CheckpointFolder::tiny().with_config(json!({ "eos_token_id": end }));
        let flags = format!("--batch-size 2 --steps 2 --json {more}");
        let output = bench.train(["--init", init.path().to_str().unwrap()], "text.jsonl", out, &flags);
        let report = report(&output);
        let note = "eos_token_id 50256 is outside the vocabulary of 300 tokens and is ignored";
        assert_eq!(stderr(&output).contains(note), end == 50_256, "{}", stderr(&output));
        (report["loss"].clone(), report["training_tokens"].clone())
    };
    let without = train(json!([]), "without", "");
    assert_eq!(train(json!(50_256), "beyond", "--sample Citizen"), without);
    train(json!(50_256), "beyond", "--resume");
}

#[cfg(unix)]
#[test]
fn full_disk_leaves_the_last_state_intact() {
    let bench = Bench::new();
    let config = bench.path("config.json");
    let start = ["--config", &config];
    let flags = "--batch-size 2 --steps 300 --save-every 20 --eval-every 300 --resume";
    let state = bench.0.path().join("model").join(STATE);
    let mut first = bench.command(start, "text.txt", "model", flags).spawn().unwrap();
    wait_until("the training writes no state", || {
        assert!(first.try_wait().unwrap().is_none(), "the training ended without a state");
        state.exists()
    });
    // While the first run is active, no other may write to the folder.
    let expected = format!("error: {}: another process is writing to this folder", bench.path("model"));
    assert_refused(&bench.train(start, "text.txt", "model", flags), FAILURE, &expected);
    first.kill().unwrap();
    first.wait().unwrap();
    let saved = fs::read(&state).unwrap();
    assert!(saved.len() > 60 << 10, "{} bytes", saved.len());

    // Files may not exceed 60 KiB, which is more than the weights and less than the state. Ignore the signal
    // that would end the program, so that writing fails as on a full disk.
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 120; exec \"$@\"", "sh"]);
    let program = bench.command(start, "text.txt", "model", flags);
    let output = limited.arg(program.get_program()).args(program.get_args()).output().unwrap();
    assert_refused(&output, FAILURE, "the previous state is intact");
    assert!(fs::read(&state).unwrap() == saved, "the state has changed");
    let left = candle_gpt2_testing::entries(&bench.0.path().join("model"));
    assert!(!left.iter().any(|name| name.contains("tmp") || name.contains("partial")), "{left:?}");
    printed(&bench.train(start, "text.txt", "model", flags));
}
