//! `gpt2 train` as its users call it: results, resuming after a kill, refusals.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use candle_gpt2_testing::CheckpointFolder;
use serde_json::{Value, json};

use crate::common::{FAILURE, SUCCESS, USAGE};

#[cfg(unix)]
const INTERRUPTED: i32 = 130;

const CONFIG: &str = r#"{"vocab_size": 280, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}"#;

/// A folder with a text, a configuration, and room for results.
struct Bench(tempfile::TempDir);

impl Bench {
    fn new() -> Self {
        let bench = Self(tempfile::tempdir().unwrap());
        bench.write("config.json", CONFIG);
        let text: String = (0..400)
            .map(|line| {
                format!("FIRST CITIZEN {}:\nWhat say you, neighbour {}?\n\n", line % 7, line * 37 % 101)
            })
            .collect();
        bench.write("text.txt", text);
        bench
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.0.path().join(name), content).unwrap();
    }

    /// `gpt2 train` from scratch on the file `data` into the folder `out`, with further arguments.
    fn command(&self, data: &str, out: &str, more: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
        command.args(["train", "--data", &self.path(data), "--config", &self.path("config.json")]);
        command.args(["--out", &self.path(out), "--batch-size", "2"]).args(more);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn train(&self, out: &str, more: &[&str]) -> Output {
        self.command("text.txt", out, more).output().unwrap()
    }
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
pub(crate) fn assert_success(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(SUCCESS), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

#[track_caller]
pub(crate) fn assert_refused(output: &Output, code: i32, expected: &str) {
    let message = stderr(output);
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert!(message.contains(expected), "`{expected}` is not in: {message}");
    assert!(!message.contains("internal error"), "{message}");
}

/// Kills a training once its folder holds a state.
///
/// # Panics
/// When it fails first.
#[track_caller]
fn kill_once_saved(training: &mut Child, folder: &str) {
    let state = Path::new(folder).join("training-state.safetensors");
    while !state.exists() {
        if let Some(status) = training.try_wait().unwrap() {
            assert!(state.exists(), "the training ended without a state: {status}");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    training.kill().unwrap();
    training.wait().unwrap();
}

pub(crate) fn read(folder: &str, name: &str) -> Vec<u8> {
    fs::read(Path::new(folder).join(name)).unwrap()
}

#[test]
fn a_training_lowers_the_loss_and_leaves_a_checkpoint_that_generates() {
    let bench = Bench::new();
    let run = ["--steps", "60", "--lr", "0.01", "--eval-every", "20", "--seed", "3", "--json"];
    let output = bench.train("model", &[&run[..], &["--sample", "WHAT"]].concat());
    let samples = stderr(&output);
    assert_eq!(samples.matches(": WHAT").count(), 3, "a sample at every evaluation: {samples}");
    let report = assert_success(&output);
    let loss = report["held_out_loss"].as_f64().unwrap();
    // A model that only guesses has ln 280 = 5.63.
    assert!(loss < 4.0, "held-out loss {loss}");
    let folder = bench.path("model");
    let log = String::from_utf8(read(&folder, "log.jsonl")).unwrap();
    let entries: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(entries.iter().filter(|entry| entry["loss"].is_number()).count(), 60);
    assert_eq!(entries.iter().filter(|entry| entry["held_out_loss"].is_number()).count(), 3);
    let curve = String::from_utf8(read(&folder, "loss.svg")).unwrap();
    assert!(curve.contains("<svg") && curve.contains("held out"), "a picture with a legend");
    assert!(!Path::new(&folder).join("training.tokens").exists());

    let program =
        |arguments: &[&str]| Command::new(env!("CARGO_BIN_EXE_gpt2")).args(arguments).output().unwrap();
    let verified = program(&["verify", "--model", &folder]);
    assert_eq!(verified.status.code(), Some(SUCCESS), "{}", stderr(&verified));
    let generated = program(&["generate", "FIRST", "--model", &folder, "--greedy", "--max-new-tokens", "5"]);
    assert_eq!(generated.status.code(), Some(SUCCESS), "{}", stderr(&generated));
    assert!(generated.stdout.len() > 2);
}

#[test]
fn a_training_killed_ten_times_ends_with_the_same_weights() {
    const RUN: [&str; 10] =
        ["--steps", "60", "--eval-every", "7", "--save-every", "5", "--dropout", "0.1", "--seed", "9"];
    let bench = Bench::new();
    let whole = bench.train("whole", &RUN);
    assert_eq!(whole.status.code(), Some(SUCCESS), "{}", stderr(&whole));
    let resumed = [&RUN[..], &["--resume"]].concat();
    let steps_in_log = || {
        let log = fs::read_to_string(Path::new(&bench.path("killed")).join("log.jsonl"));
        log.unwrap_or_default().matches("\"loss\"").count()
    };
    for attempt in 0..10u64 {
        let mut child = bench.command("text.txt", "killed", &resumed).spawn().unwrap();
        // The first before there is any step; the others some steps on, and at unequal times, so that they fall into steps,
        // evaluations and saving.
        let wanted = usize::try_from(5 * attempt).unwrap();
        while steps_in_log() < wanted && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(attempt * 7 % 10));
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().code(), None, "kill {attempt} came after the end");
    }
    let last = bench.train("killed", &resumed);
    assert_eq!(last.status.code(), Some(SUCCESS), "{}", stderr(&last));
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        assert_eq!(read(&bench.path("whole"), name), read(&bench.path("killed"), name), "{name}");
    }
    let state = |folder: &str| {
        let path = Path::new(&bench.path(folder)).join("training-state.safetensors");
        candle_core::safetensors::load(path, &candle_core::Device::Cpu).unwrap()
    };
    let (whole, killed) = (state("whole"), state("killed"));
    assert_eq!(whole.len(), 3 * 28);
    for (name, tensor) in &whole {
        let bits = |tensor: &candle_core::Tensor| -> Vec<u32> {
            let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            values.into_iter().map(f32::to_bits).collect()
        };
        assert_eq!(bits(tensor), bits(&killed[name]), "{name}");
    }
    let steps = |folder: &str| -> Vec<Value> {
        let log = String::from_utf8(read(&bench.path(folder), "log.jsonl")).unwrap();
        let entries = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        entries
            .map(|entry| serde_json::json!([entry["step"], entry["loss"], entry["held_out_loss"]]))
            .collect()
    };
    assert_eq!(steps("whole"), steps("killed"), "the logs tell the same");
}

/// Ctrl-C, again and again: nothing but the step in hand is lost, although states are saved at the end only.
#[cfg(unix)]
#[test]
fn an_interrupt_saves_the_last_step() {
    const RUN: [&str; 10] =
        ["--steps", "40", "--eval-every", "6", "--save-every", "1000", "--accumulate", "2", "--seed", "5"];
    let bench = Bench::new();
    let whole = bench.train("whole", &RUN);
    assert_eq!(whole.status.code(), Some(SUCCESS), "{}", stderr(&whole));
    let resumed = [&RUN[..], &["--resume"]].concat();
    let log = Path::new(&bench.path("stopped")).join("log.jsonl");
    let steps_in_log = || fs::read_to_string(&log).unwrap_or_default().matches("\"loss\"").count();
    for wanted in [1, 8, 20] {
        let mut child = bench.command("text.txt", "stopped", &resumed).spawn().unwrap();
        while steps_in_log() < wanted && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
        let output = child.wait_with_output().unwrap();
        assert_refused(
            &output,
            INTERRUPTED,
            "training-state.safetensors holds the state to go on from (--resume)",
        );
        assert!(steps_in_log() >= wanted, "nothing is forgotten");
    }
    assert_eq!(bench.train("stopped", &resumed).status.code(), Some(SUCCESS));
    for name in ["model.safetensors", "training-state.safetensors", "config.json", "tokenizer.json"] {
        assert_eq!(read(&bench.path("whole"), name), read(&bench.path("stopped"), name), "{name}");
    }
}

#[test]
fn a_checkpoint_of_transformers_is_fine_tuned() {
    let bench = Bench::new();
    let tiny = CheckpointFolder::tiny();
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
    command.args(["train", "--data", &bench.path("text.txt"), "--init", tiny.path().to_str().unwrap()]);
    command.args(["--out", &bench.path("tuned"), "--steps", "20", "--lr", "0.003", "--eval-every", "10"]);
    let report = assert_success(&command.args(["--batch-size", "2", "--json"]).output().unwrap());
    assert_eq!(report["steps"], 20);
    let log = String::from_utf8(read(&bench.path("tuned"), "log.jsonl")).unwrap();
    let losses: Vec<f64> = log
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).unwrap()["loss"].as_f64())
        .collect();
    assert!(losses[19] < losses[0] - 0.5, "{losses:?}");
    let tokenizer =
        |folder: &str| -> Value { serde_json::from_slice(&read(folder, "tokenizer.json")).unwrap() };
    assert_eq!(
        tokenizer(&bench.path("tuned"))["model"]["vocab"],
        tokenizer(tiny.path().to_str().unwrap())["model"]["vocab"]
    );
}

#[test]
fn adapters_are_trained_killed_and_resumed_like_whole_models() {
    let bench = Bench::new();
    let tiny = CheckpointFolder::tiny();
    let train = |out: &str, more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
        command.args(["train", "--data", &bench.path("text.txt"), "--init", tiny.path().to_str().unwrap()]);
        command.args([
            "--out",
            &bench.path(out),
            "--steps",
            "12",
            "--lora-rank",
            "2",
            "--lora-targets",
            "c_attn,c_fc",
        ]);
        command.args(["--batch-size", "2", "--save-every", "3", "--eval-every", "4", "--json"]).args(more);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    assert_success(&train("whole", &[]).wait_with_output().unwrap());
    let mut killed = train("killed", &[]);
    kill_once_saved(&mut killed, &bench.path("killed"));
    assert_success(&train("killed", &["--resume"]).wait_with_output().unwrap());
    for name in ["model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"] {
        assert_eq!(read(&bench.path("whole"), name), read(&bench.path("killed"), name), "{name}");
    }
    let other = train("killed", &["--resume", "--lora-alpha", "9"]).wait_with_output().unwrap();
    assert_refused(&other, FAILURE, "a model with another configuration");
    let wrong = train("new", &["--lora-alpha", "-1"]).wait_with_output().unwrap();
    assert_refused(&wrong, USAGE, "--lora-alpha: expected a number greater than 0");
}

#[test]
fn jsonl_is_read_line_by_line() {
    let bench = Bench::new();
    let lines: String = (0..60)
        .map(|line| format!("{{\"text\": \"Line {line} of the \\u00fcbung, once more.\"}}\n"))
        .collect();
    bench.write("text.jsonl", &lines);
    bench.write("config.json", CONFIG.replace("280", "257"));
    let output = bench.command("text.jsonl", "model", &["--steps", "2", "--json"]).output().unwrap();
    assert_success(&output);
    bench.write("text.jsonl", format!("{lines}{{\"txt\": 1}}\n"));
    let output = bench.command("text.jsonl", "other", &["--steps", "2"]).output().unwrap();
    assert_refused(&output, FAILURE, "line 61: the object has no `text`");
}

#[test]
fn bad_data_is_refused_with_a_reason() {
    let bench = Bench::new();
    for (name, content, expected) in [
        ("empty.txt", &b""[..], "the file is empty"),
        ("binary.txt", b"ab\0cd", "a binary file"),
        ("latin.txt", b"caf\xe9 and more text", "not valid UTF-8 at byte 3"),
        ("short.txt", b"aba", "lower it to"),
        ("text.jsonl", b"not json\n", "line 1: not valid JSON"),
    ] {
        bench.write(name, content);
        let output = bench.command(name, &format!("out-{name}"), &["--steps", "1"]).output().unwrap();
        assert_refused(&output, FAILURE, expected);
    }
    let missing = bench.command("nothing.txt", "out", &[]).output().unwrap();
    assert_refused(&missing, FAILURE, "nothing.txt");
    // Enough for the tokenizer, and shorter than one window.
    bench.write("config.json", CONFIG.replace("\"n_positions\": 16", "\"n_positions\": 50000"));
    let short = bench.train("out", &["--steps", "1"]);
    assert_refused(&short, FAILURE, "one window of the context takes 50001");
}

#[test]
fn wrong_calls_are_refused_before_any_work() {
    let bench = Bench::new();
    for (arguments, expected) in [
        (&["--steps", "0"][..], "--steps: expected at least 1"),
        (&["--batch-size", "0"], "--batch-size: expected"),
        (&["--context", "17"], "from 1 to the model's context of 16"),
        (&["--lr", "-1"], "--lr: expected a number greater than 0"),
        (&["--lr", "NaN"], "--lr: expected"),
        (&["--grad-clip", "-1"], "--grad-clip: expected"),
        (&["--weight-decay", "-0.1"], "--weight-decay: expected"),
        (&["--warmup-steps", "2000"], "--warmup-steps: expected"),
        (&["--held-out", "1"], "--held-out: expected"),
        (&["--eval-every", "0"], "--eval-every: expected"),
        (&["--dropout", "1"], "a rate from 0 to below 1"),
        (&["--schedule", "exponential"], "constant, linear, cosine"),
        (&["--dtype", "q8_0"], "f32, f16, bf16"),
        (&["--batch-size", "1000000", "--context", "16"], "lower --batch-size"),
        (&["--init", "somewhere"], "cannot be used with"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
        command.args(["train", "--data", &bench.path("text.txt"), "--config", &bench.path("config.json")]);
        command.args(["--out", &bench.path("out")]).args(arguments);
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert_refused(&output, USAGE, expected);
        assert_eq!(output.stdout, b"");
    }
    bench.write("full", "");
    assert_refused(&bench.train("full", &[]), USAGE, "it is no folder");
    fs::create_dir(bench.0.path().join("taken")).unwrap();
    bench.write("taken/file", "");
    assert_refused(&bench.train("taken", &[]), USAGE, "the folder is not empty");
}

#[test]
fn another_run_is_not_resumed() {
    let bench = Bench::new();
    let output = bench.train("model", &["--steps", "2"]);
    assert_eq!(output.status.code(), Some(SUCCESS), "{}", stderr(&output));
    assert_refused(&bench.train("model", &["--steps", "2"]), USAGE, "add --resume");
    let longer = bench.train("model", &["--steps", "3", "--lr", "0.5", "--resume"]);
    assert_refused(&longer, FAILURE, "other options: steps is 2 there and 3 here");
    assert_refused(&longer, FAILURE, "learning_rate is 0.001 there and 0.5 here; give the same ones");
    assert!(!stderr(&longer).contains("--batch-size: expected"), "{}", stderr(&longer));
    bench.write("text.txt", "Another text, which has other tokens. ".repeat(500));
    let other = bench.train("model", &["--steps", "2", "--resume"]);
    assert_eq!(other.status.code(), Some(FAILURE), "{}", stderr(&other));
}

#[test]
fn recomputation_changes_no_number() {
    let bench = Bench::new();
    let run = ["--steps", "8", "--dropout", "0.2", "--accumulate", "2", "--eval-every", "4"];
    // candle computes SiLU, between operations of ours.
    for (activation, adapters) in [("gelu_new", &[][..]), ("silu", &[]), ("relu", &["--lora-rank", "2"])] {
        let name = format!("\"activation_function\": \"{activation}\", \"n_head\"");
        bench.write("config.json", CONFIG.replace("\"n_head\"", &name));
        let [kept, again] = ["kept", "again"].map(|folder| format!("{folder}-{activation}"));
        for (folder, more) in [(&kept, &[][..]), (&again, &["--recompute"])] {
            let output = bench.train(folder, &[&run[..], adapters, more].concat());
            assert_eq!(output.status.code(), Some(SUCCESS), "{}", stderr(&output));
        }
        assert_eq!(
            read(&bench.path(&kept), "training-state.safetensors"),
            read(&bench.path(&again), "training-state.safetensors"),
            "{activation}"
        );
    }
}

#[test]
fn a_tokenizer_of_another_model_is_refused() {
    let bench = Bench::new();
    bench.write("config.json", CONFIG.replace("280", "380"));
    let output = bench.train("large", &["--steps", "1"]);
    assert_eq!(output.status.code(), Some(SUCCESS), "{}", stderr(&output));
    let tiny = CheckpointFolder::tiny();
    let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
    command.args(["train", "--data", &bench.path("text.txt"), "--init", tiny.path().to_str().unwrap()]);
    command.args(["--tokenizer", &bench.path("large"), "--out", &bench.path("out"), "--steps", "1"]);
    let output = command.output().unwrap();
    assert_refused(&output, FAILURE, "the tokenizer does not belong to this model");
    assert!(!Path::new(&bench.path("out")).join("model.safetensors").exists());
}

/// The tiny configuration names no end token, so GPT-2's 50,256 stands in, of a vocabulary of 300.
#[test]
fn an_end_token_beyond_the_vocabulary_is_left_out_and_said() {
    let bench = Bench::new();
    let tiny = CheckpointFolder::tiny().with_config(json!({"eos_token_id": []}));
    let beyond = CheckpointFolder::tiny().with_config(json!({"eos_token_id": 50_256}));
    let lines: String = (0..60).map(|line| format!("{{\"text\": \"Citizen {line} speaks.\"}}\n")).collect();
    bench.write("text.jsonl", lines);
    let train = |init: &CheckpointFolder, out: &str, more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gpt2"));
        command.args(["train", "--data", &bench.path("text.jsonl"), "--init", init.path().to_str().unwrap()]);
        command.args([
            "--out",
            &bench.path(out),
            "--batch-size",
            "2",
            "--steps",
            "4",
            "--save-every",
            "2",
            "--json",
        ]);
        command.args(more).output().unwrap()
    };
    let note = "eos_token_id 50256 is beyond the vocabulary of 300 tokens, and ends no text";
    let without = train(&tiny, "without", &[]);
    let left_out = train(&beyond, "beyond", &["--sample", "Citizen"]);
    assert!(stderr(&left_out).contains(note) && !stderr(&without).contains(note), "{}", stderr(&left_out));
    let (without, left_out) = (assert_success(&without), assert_success(&left_out));
    assert_eq!(left_out["loss"], without["loss"], "texts are joined without a token in both");
    assert_eq!(left_out["training_tokens"], without["training_tokens"]);
    let resumed = train(&beyond, "beyond", &["--resume"]);
    assert!(stderr(&resumed).contains(note), "{}", stderr(&resumed));
    assert_success(&resumed);
}

/// The program where files may not grow beyond 60 KiB: more than the weights take, less than the state.
#[cfg(unix)]
fn on_a_full_disk(program: &Command) -> Output {
    let mut limited = Command::new("sh");
    // Without the signal that would end the program, writing fails as it does on a full disk.
    limited.args(["-c", "trap '' XFSZ; ulimit -f 120; exec \"$@\"", "sh"]);
    limited.arg(program.get_program()).args(program.get_args()).output().unwrap()
}

#[cfg(unix)]
#[test]
fn a_full_disk_in_the_first_step_is_told_and_the_same_call_works_when_there_is_room() {
    let bench = Bench::new();
    for held_out in ["0", "0.1"] {
        let out = format!("held-out-{held_out}");
        let run = ["--steps", "1", "--eval-every", "1", "--save-every", "1", "--held-out", held_out];
        let output = on_a_full_disk(&bench.command("text.txt", &out, &run));
        let state = Path::new(&bench.path(&out)).join("training-state.safetensors");
        assert_refused(&output, FAILURE, &format!("{}: cannot be written: ", state.display()));
        assert!(!stderr(&output).contains("the state before"), "{}", stderr(&output));
        let again = bench.train(&out, &run);
        assert_eq!(again.status.code(), Some(SUCCESS), "{}", stderr(&again));
        assert!(state.is_file() && !Path::new(&bench.path(&out)).join(".lock").exists());
    }
}

/// The second with and without `--resume`, while the first is at it; and after a kill the lock is nobody's.
#[test]
fn two_trainings_do_not_share_a_folder() {
    let bench = Bench::new();
    let run = ["--steps", "5000", "--save-every", "2", "--eval-every", "5000"];
    let mut first = bench.command("text.txt", "model", &run).spawn().unwrap();
    let state = Path::new(&bench.path("model")).join("training-state.safetensors");
    while !state.exists() {
        assert!(first.try_wait().unwrap().is_none(), "the training ended without a state");
        std::thread::sleep(Duration::from_millis(1));
    }
    let told = format!("error: {}: another process is writing this folder", bench.path("model"));
    for more in [&[][..], &["--resume"]] {
        let second = bench.train("model", &[&run[..], more].concat());
        assert_refused(&second, FAILURE, &told);
        assert!(first.try_wait().unwrap().is_none(), "the first goes on");
    }
    first.kill().unwrap();
    first.wait().unwrap();
    let other = bench.train("model", &["--steps", "1", "--resume"]);
    assert_refused(&other, FAILURE, "steps is 5000 there and 1 here");
}

#[cfg(unix)]
#[test]
fn a_full_disk_leaves_the_last_state() {
    let bench = Bench::new();
    let run = ["--steps", "300", "--save-every", "20", "--eval-every", "300", "--resume"];
    let state = Path::new(&bench.path("model")).join("training-state.safetensors");
    let mut first = bench.command("text.txt", "model", &run).spawn().unwrap();
    kill_once_saved(&mut first, &bench.path("model"));
    let saved = fs::read(&state).unwrap();
    assert!(saved.len() > 60 << 10, "{} bytes", saved.len());

    let output = on_a_full_disk(&bench.command("text.txt", "model", &run));
    assert_refused(&output, FAILURE, "the state before it is still there");
    assert!(fs::read(&state).unwrap() == saved, "the state has changed");
    let names = |folder: &str| -> Vec<String> {
        let entries = fs::read_dir(bench.path(folder)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    let is_partial = |name: &String| name.contains("tmp") || name.contains("partial");
    assert!(!names("model").iter().any(is_partial), "{:?}", names("model"));

    let output = bench.train("model", &run);
    assert_eq!(output.status.code(), Some(SUCCESS), "{}", stderr(&output));
}

#[test]
fn a_loss_that_is_not_a_number_stops_and_names_the_last_checkpoint() {
    let bench = Bench::new();
    let run =
        ["--steps", "40", "--lr", "1e30", "--grad-clip", "0", "--warmup-steps", "0", "--save-every", "1"];
    let output = bench.train("model", &run);
    assert_refused(&output, FAILURE, "is not a number");
    assert!(stderr(&output).contains("the last good checkpoint is"), "{}", stderr(&output));
}
