//! A training from files to a folder: interrupted or not it ends with the same files; wrong options are told by their names.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_gpt2::Gpt2Config;
use candle_gpt2_engine::{HubOptions, Progress, Reporter, Silent, Unit};
use candle_gpt2_jobs::{JobError, Start, TrainEvent, TrainJob, TrainOptions, TrainReport};
use candle_gpt2_testing::CheckpointFolder;
use candle_gpt2_training::{Initialization, Schedule, Task, TrainingError};
use candle_gpt2_weights::WrittenDType;
use serde_json::{Value, json};

use crate::interrupter::{Interrupter, scenes};

const CONFIG: &str = r#"{"vocab_size": 270, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}"#;

/// A training on some lines that are always the same, in a folder.
pub(crate) fn job(folder: &Path, out: &str, options: TrainOptions) -> TrainJob {
    let data = folder.join("text.txt");
    if !data.exists() {
        fs::write(&data, scenes(200)).unwrap();
    }
    TrainJob {
        data: vec![data],
        start: Start::Config(Box::new(Gpt2Config::from_json(CONFIG).unwrap())),
        tokenizer: None,
        out: folder.join(out),
        options,
        hub: HubOptions::default(),
    }
}

fn run(job: &TrainJob) -> Result<TrainReport, JobError> {
    job.run(&silent(), &mut |_| {})
}

fn silent() -> Arc<dyn Reporter> {
    Arc::new(Silent)
}

fn read(job: &TrainJob, name: &str) -> Vec<u8> {
    fs::read(job.out.join(name)).unwrap()
}

/// The log without its times.
fn log(job: &TrainJob) -> Vec<Value> {
    let log = String::from_utf8(read(job, "log.jsonl")).unwrap();
    let entries = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    entries.map(|entry| json!([entry["step"], entry["loss"], entry["held_out_loss"]])).collect()
}

/// Between steps, within the batches of a step, forwards and backwards, within and after evaluations.
#[test]
fn a_training_interrupted_anywhere_goes_on_to_the_same_files() {
    let folder = tempfile::tempdir().unwrap();
    let options = TrainOptions {
        steps: 9,
        batch_size: 2,
        accumulate: 2,
        eval_every: 2,
        save_every: 5,
        dropout: Some(0.1),
        lr: Some(0.01),
        held_out: 0.03,
        seed: 4,
        ..TrainOptions::default()
    };
    let whole = job(folder.path(), "whole", options.clone());
    let report = run(&whole).unwrap();
    assert_eq!((report.steps, report.stopped_early, log(&whole).len()), (9, false, 9 + 5));

    let interrupted = job(folder.path(), "interrupted", TrainOptions { resume: true, ..options });
    let mut steps = Vec::new();
    let mut saved_unevaluated = 0;
    let mut questions = 1;
    let resumed = loop {
        // Within the first batch, and far enough to come to an end.
        let interrupter = Arc::new(Interrupter::new(questions));
        questions = questions * 9 / 8 + 1;
        let reporter: Arc<dyn Reporter> = interrupter.clone();
        let mut steps_done = 0;
        let done = interrupted.run(&reporter, &mut |event| match event {
            TrainEvent::Start { steps_done: done, .. } => {
                steps_done = done;
                interrupter.begin();
            }
            TrainEvent::Entry(entry) => steps_done = entry.step,
            _ => {}
        });
        steps.push(steps_done);
        match done {
            Ok(report) => break report,
            Err(JobError::Training(TrainingError::Interrupted { state })) => {
                let Some(state) = state else { continue };
                let bytes = fs::read(state).unwrap();
                let text = String::from_utf8_lossy(&bytes);
                assert!(
                    text.contains(&format!("steps_done\\\":{steps_done}")),
                    "step {steps_done} is not saved"
                );
                saved_unevaluated += usize::from(text.contains("is_evaluation_due"));
            }
            Err(error) => panic!("{error}"),
        }
    };
    assert!(steps.len() > 6 && saved_unevaluated > 0, "{steps:?}, {saved_unevaluated}");
    let without_time = |report: TrainReport| TrainReport { elapsed_s: 0.0, out: "".into(), ..report };
    assert_eq!(without_time(resumed), without_time(report));
    for name in ["model.safetensors", "training-state.safetensors", "tokenizer.json", "config.json"] {
        assert_eq!(read(&interrupted, name), read(&whole, name), "{name}");
    }
    assert_eq!(log(&interrupted), log(&whole));
    assert!(!interrupted.out.join("training.tokens").exists());
}

#[test]
fn an_interrupt_before_the_first_step_leaves_no_state() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), "out", TrainOptions { steps: 2, batch_size: 2, ..TrainOptions::default() });
    // While the tokenizer is trained, and while the data is encoded, when there is a folder, which goes again.
    for at in [1, 4] {
        let interrupter = Interrupter::new(at);
        interrupter.begin();
        let reporter: Arc<dyn Reporter> = Arc::new(interrupter);
        let error = job.run(&reporter, &mut |_| {}).unwrap_err();
        assert!(matches!(error, JobError::Training(TrainingError::Interrupted { state: None })), "{error}");
        assert_eq!((error.to_string().as_str(), job.out.exists()), ("interrupted", false));
    }
    run(&job).unwrap();
}

#[test]
fn a_model_that_is_kept_is_what_a_shorter_training_ends_with() {
    let folder = tempfile::tempdir().unwrap();
    let options = |steps| TrainOptions {
        steps,
        batch_size: 2,
        schedule: Schedule::Constant,
        warmup_steps: Some(0),
        held_out: 0.0,
        keep_steps: Some(vec![0, 2, 9]),
        ..TrainOptions::default()
    };
    let longer = job(folder.path(), "longer", options(3));
    let shorter = job(folder.path(), "shorter", options(2));
    run(&longer).unwrap();
    run(&shorter).unwrap();
    for name in ["model.safetensors", "config.json", "tokenizer.json"] {
        assert_eq!(read(&longer, &format!("step-2/{name}")), read(&shorter, name), "{name}");
    }
    let weights = |step: &str| read(&longer, &format!("{step}model.safetensors"));
    assert!(weights("step-0/") != weights("step-2/") && weights("step-2/") != weights(""));
    assert!(!longer.out.join("step-9").exists(), "there is no such step");
}

#[test]
fn a_checkpoint_is_trained_further_with_samples_and_events() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = CheckpointFolder::tiny();
    let options = TrainOptions {
        steps: 4,
        batch_size: 2,
        eval_every: 2,
        sample: Some("WHAT".into()),
        lora_rank: Some(2),
        dtype: WrittenDType::F16,
        ..TrainOptions::default()
    };
    let start = Start::Checkpoint(tiny.path().to_owned());
    let job = TrainJob { start, ..job(folder.path(), "out", options) };
    let mut told = Vec::new();
    let report = job
        .run(&silent(), &mut |event| {
            told.push(match event {
                TrainEvent::Start { steps, steps_done } => format!("{steps_done} of {steps}"),
                TrainEvent::Entry(entry) if entry.loss.is_some() => format!("step {}", entry.step),
                TrainEvent::Entry(entry) => format!("held out {}", entry.step),
                TrainEvent::Sample { step, text, .. } => {
                    assert!(text.starts_with("WHAT") && text.len() > 8, "{text}");
                    format!("sample {step}")
                }
                _ => String::new(),
            });
        })
        .unwrap();
    let expected = [
        "0 of 4",
        "step 1",
        "step 2",
        "held out 2",
        "sample 2",
        "step 3",
        "step 4",
        "held out 4",
        "sample 4",
    ];
    assert_eq!(told, expected);
    let keys = serde_json::to_value(&report).unwrap();
    assert_eq!(keys["steps"], 4);
    assert_eq!(keys["best_step"].as_u64().unwrap() % 2, 0);
    let header = String::from_utf8_lossy(&read(&job, "model.safetensors")[..400]).into_owned();
    assert!(header.contains("\"F16\""), "{header}");
    assert!(job.out.join("adapter/adapter_model.safetensors").exists());
    let vocabulary = |file: &[u8]| serde_json::from_slice::<Value>(file).unwrap()["model"]["vocab"].clone();
    let given = fs::read(tiny.file("tokenizer.json")).unwrap();
    assert_eq!(vocabulary(&read(&job, "tokenizer.json")), vocabulary(&given));
}

/// The end tokens, the settings of generation and the chat template would otherwise be lost silently.
#[test]
fn a_training_from_a_checkpoint_keeps_its_settings() {
    let folder = tempfile::tempdir().unwrap();
    let settings = [
        ("generation_config.json", r#"{"repetition_penalty": 1.90, "eos_token_id": [5, 3], "mine": 1}"#),
        ("tokenizer_config.json", r#"{"pad_token": "<|endoftext|>", "mine": [1, 2]}"#),
        ("special_tokens_map.json", r#"{"pad_token": "<|endoftext|>"}"#),
        ("chat_template.jinja", "{{ messages }}"),
    ];
    let mut tiny = CheckpointFolder::tiny().with_config(json!({"task_specific_params": {"x": 1}}));
    for (name, text) in settings {
        tiny = tiny.with(name, text);
    }
    let options = TrainOptions {
        steps: 2,
        batch_size: 2,
        eval_every: 2,
        keep_steps: Some(vec![1]),
        context: Some(16),
        ..TrainOptions::default()
    };
    let job = TrainJob { start: Start::Checkpoint(tiny.path().into()), ..job(folder.path(), "out", options) };
    run(&job).unwrap();
    for place in ["", "step-1/"] {
        for (name, text) in settings {
            assert_eq!(read(&job, &format!("{place}{name}")), text.as_bytes(), "{place}{name}");
        }
        assert!(
            read(&job, &format!("{place}tokenizer.json")) == fs::read(tiny.file("tokenizer.json")).unwrap()
        );
        let config: Value = serde_json::from_slice(&read(&job, &format!("{place}config.json"))).unwrap();
        assert_eq!(config["task_specific_params"]["x"], 1);
    }
}

#[test]
fn wrong_options_are_told_by_their_names_before_any_work() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |options: TrainOptions| {
        let job = job(folder.path(), "out", options);
        let error = run(&job).unwrap_err();
        assert!(error.is_usage() && !job.out.exists(), "{error}");
        error.to_string()
    };
    let default = TrainOptions::default;
    for (options, expected) in [
        (
            TrainOptions { dropout: Some(1.0), ..default() },
            "`dropout`: expected a rate from 0 to below 1, found 1",
        ),
        (TrainOptions { eval_every: 0, ..default() }, "`eval_every`: expected at least 1, found 0"),
        (TrainOptions { save_every: 0, ..default() }, "`save_every`: expected at least 1, found 0"),
        (TrainOptions { patience: Some(0), ..default() }, "`patience`: expected at least 1, found 0"),
        (TrainOptions { steps: 0, ..default() }, "`steps`: expected at least 1, found 0"),
        (
            TrainOptions { lora_alpha: Some(2.0), ..default() },
            "`lora_alpha` is of adapters; give `lora_rank`",
        ),
        (
            TrainOptions { n_head: Some(2), ..default() },
            "`n_head` is for checkpoints: here the configuration says it",
        ),
    ] {
        assert_eq!(refused(options), expected);
    }
    let much = TrainOptions { batch_size: 1 << 20, ..default() };
    let told = refused(much.clone());
    assert!(
        told.ends_with(
            "lower `batch_size` (and raise `accumulate`) or `context`, or add `recompute`; `ignore_memory` trains all the same"
        ),
        "{told}"
    );
    // A text without a window takes no memory.
    let short = (folder.path().join("short.txt"), "The dog was found.");
    fs::write(&short.0, short.1).unwrap();
    let tried = TrainOptions { ignore_memory: true, held_out: 0.0, ..much.clone() };
    let tiny = tiny();
    let start = Start::Checkpoint(tiny.path().to_owned());
    let tried = run(&TrainJob { data: vec![short.0], start, ..job(folder.path(), "tried", tried) });
    let tried = tried.unwrap_err().to_string();
    assert!(tried.contains("one window of the context takes 49"), "{tried}");
    let told = refused(TrainOptions { recompute: true, ..much });
    assert!(
        told.ends_with(
            "lower `batch_size` (and raise `accumulate`) or `context`; `ignore_memory` trains all the same"
        ),
        "{told}"
    );
}

/// A checkpoint whose end token is in its own vocabulary.
fn tiny() -> CheckpointFolder {
    CheckpointFolder::tiny().with_config(json!({"eos_token_id": 0, "bos_token_id": 0}))
}

/// A training of a checkpoint on a file of this content.
fn further(
    folder: &Path,
    checkpoint: &CheckpointFolder,
    data: (&str, &str),
    options: TrainOptions,
) -> TrainJob {
    fs::write(folder.join(data.0), data.1).unwrap();
    let start = Start::Checkpoint(checkpoint.path().to_owned());
    let options = TrainOptions { steps: 2, batch_size: 4, ..options };
    TrainJob { data: vec![folder.join(data.0)], start, ..job(folder, "out", options) }
}

#[test]
fn data_that_cannot_be_learned_from_are_told_with_file_and_line() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = tiny();
    let completion = format!("{{\"prompt\": \"a\", \"completion\": \"{}\"}}\n", "many words ".repeat(60));
    let labels = "the rows up to here have 1 labels (ham); a classifier has from 2 to 1000";
    for (task, name, content, expected) in [
        (Task::Text, "empty.txt", "", "the file is empty"),
        (Task::Text, "short.txt", "aba", "one window of the context takes"),
        (Task::Text, "no.jsonl", "not json\n", "line 1: not valid JSON"),
        (Task::Classify, "empty.jsonl", "{\"text\": \"a\", \"label\": \"\"}\n", "line 1: `label` is empty"),
        (Task::Classify, "same.tsv", "ham\ta\nham\tb\n", &format!("line 2: {labels}")),
        (Task::Classify, "textless.tsv", "ham\ta\nspam\t\n", "line 2: `text` has no tokens"),
        (Task::Answer, "half.jsonl", "\n{\"completion\": \"a\"}\n", "line 2: the object has no `prompt`"),
        (Task::Answer, "long.jsonl", &completion, "line 1: `completion` has"),
    ] {
        let job =
            further(folder.path(), &tiny, (name, content), TrainOptions { task, ..TrainOptions::default() });
        let error = run(&job).unwrap_err();
        let told = error.to_string();
        let is_named = name == "short.txt" || told.contains(name);
        assert!(!error.is_usage() && told.contains(expected) && is_named, "`{expected}` is not in: {told}");
    }
    // Enough for a window, and too little for a tokenizer of so many tokens.
    let config = Gpt2Config { vocab_size: 9000, ..Gpt2Config::from_json(CONFIG).unwrap() };
    let large = TrainJob {
        start: Start::Config(config.into()),
        ..job(folder.path(), "out", TrainOptions::default())
    };
    let told = run(&large).unwrap_err().to_string();
    assert!(told.contains("tokens; lower it to "), "{told}");
    // A tokenizer of more tokens than the model has.
    let tokenizer = folder.path().join("tokenizer.json");
    fs::write(&tokenizer, candle_gpt2_stories::TOKENIZER).unwrap();
    let start = Start::Checkpoint(tiny.path().to_owned());
    let one = job(folder.path(), "out", TrainOptions { steps: 1, ..TrainOptions::default() });
    let told =
        run(&TrainJob { start: start.clone(), tokenizer: Some(tokenizer), ..one }).unwrap_err().to_string();
    assert!(told.contains("the tokenizer does not belong to this model"), "{told}");
    let mimetic = TrainOptions { initialization: Initialization::Mimetic, ..TrainOptions::default() };
    let error = run(&TrainJob { start, ..job(folder.path(), "out", mimetic) }).unwrap_err();
    let expected = "`initialization` is for models trained from scratch: a checkpoint already has weights";
    assert!(error.is_usage() && error.to_string() == expected, "{error}");
}

#[test]
fn labels_are_those_of_a_head_that_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let heads = CheckpointFolder::of("heads/sequence");
    let config: Value = serde_json::from_slice(&fs::read(heads.file("config.json")).unwrap()).unwrap();
    let known = ["0", "3"].map(|id| config["id2label"][id].as_str().unwrap());
    let rows = |last: &str| {
        let row = |label: &str, text: &str| format!("{}\n", json!({"text": text, "label": label}));
        row(known[0], "one").repeat(12) + &row(known[1], "two").repeat(12) + &row(last, "three")
    };
    let of = |checkpoint: &CheckpointFolder, last: &str, options: TrainOptions| {
        further(folder.path(), checkpoint, ("rows.jsonl", &rows(last)), options)
    };
    let classify = || TrainOptions { task: Task::Classify, ..TrainOptions::default() };
    let told = run(&of(&heads, "nowhere", classify())).unwrap_err().to_string();
    assert!(told.contains("line 25: the label `nowhere` is none of the model's: "), "{told}");
    let refused = |job: TrainJob, expected: &str| {
        let error = run(&job).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains(expected), "{error}");
    };
    let weights = Some("nowhere=2".parse().unwrap());
    let weighted = TrainOptions { class_weights: weights, ..classify() };
    refused(of(&heads, "3", weighted), "`class_weights`: expected labels of ");
    let answer = TrainOptions { task: Task::Answer, ..TrainOptions::default() };
    let rows = ("answers.jsonl", r#"{"prompt": "a", "completion": "b"}"#);
    refused(further(folder.path(), &heads, rows, answer), "`task` answer trains language models");
    for (name, class) in
        [("heads/token", "GPT2ForTokenClassification"), ("heads/multi_label", "multi_label_classification")]
    {
        refused(of(&CheckpointFolder::of(name), "3", classify()), class);
    }
    // The number of a label stands for it, as in data for transformers.
    let numbered = of(&heads, "3", classify());
    let report = run(&numbered).unwrap();
    let labels = report.classification.unwrap().labels.len();
    assert_eq!(labels, config["id2label"].as_object().unwrap().len());
    assert_eq!(report.training_rows, Some(25 - 2), "the last of 12 and of 13 rows");
    let trained: Value = serde_json::from_slice(&read(&numbered, "config.json")).unwrap();
    assert_eq!(trained["id2label"], config["id2label"]);
}

/// Keeps what is worth knowing.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Reporter for Notes {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        Silent.start(what, total, unit)
    }

    fn note(&self, note: &str) {
        self.0.lock().unwrap().push(note.to_owned());
    }
}

#[test]
fn rows_longer_than_the_context_lose_their_first_tokens_and_that_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let rows = "ham\tone two three four five six\nspam\ta\n".repeat(20);
    let options = TrainOptions { task: Task::Classify, context: Some(4), ..TrainOptions::default() };
    let notes = Arc::new(Notes::default());
    let reporter: Arc<dyn Reporter> = notes.clone();
    let report = further(folder.path(), &tiny(), ("rows.tsv", &rows), options).run(&reporter, &mut |_| {});
    assert!(report.unwrap().training_tokens <= 36 * 4);
    let told = "20 of 40 rows are longer than the context of 4 tokens, and lose their first ones";
    assert!(notes.0.lock().unwrap().iter().any(|note| note == told), "{notes:?}", notes = notes.0);
}

/// What is resumed, and what with.
#[test]
fn another_training_of_rows_is_not_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = tiny();
    let rows: String = (0..40).map(|row| format!("{}\tword {row}\n", ["ham", "spam"][row % 2])).collect();
    let weighted = |train_blocks, weights: Option<&str>| TrainOptions {
        task: Task::Classify,
        resume: true,
        train_blocks,
        class_weights: weights.map(|weights| weights.parse().unwrap()),
        ..TrainOptions::default()
    };
    let job = |options, rows: &str| further(folder.path(), &tiny, ("rows.tsv", rows), options);
    run(&job(weighted(Some(1), Some("spam=2")), &rows)).unwrap();
    for (options, rows, expected) in [
        (weighted(None, Some("spam=2")), &rows, "other options: train_blocks is 1 there and null here"),
        (weighted(Some(1), None), &rows, "class_weights is [1.0,2.0] there and null here"),
        (weighted(Some(1), Some("spam=2")), &rows.replace("word 7", "word 8"), "a run with other data"),
    ] {
        let told = run(&job(options, rows)).unwrap_err().to_string();
        assert!(told.contains(expected), "`{expected}` is not in: {told}");
    }
}

#[test]
fn a_loss_that_is_not_a_number_stops_and_names_the_last_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let options = TrainOptions {
        steps: 40,
        batch_size: 2,
        lr: Some(1e30),
        grad_clip: 0.0,
        warmup_steps: Some(0),
        save_every: 1,
        ..TrainOptions::default()
    };
    let told = run(&job(folder.path(), "out", options)).unwrap_err().to_string();
    assert!(told.contains("is not a number") && told.contains("the last good checkpoint is"), "{told}");
}

#[test]
fn a_folder_that_holds_something_is_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let options = TrainOptions { steps: 1, batch_size: 2, ..TrainOptions::default() };
    let job = job(folder.path(), "out", options.clone());
    run(&job).unwrap();
    let told = run(&job).unwrap_err().to_string();
    assert!(told.contains("add `resume` to continue what is in it"), "{told}");
    let resumed = TrainOptions { resume: true, steps: 2, ..options };
    let told = run(&TrainJob { options: resumed, ..job }).unwrap_err().to_string();
    assert!(told.contains("other options: steps is 1 there and 2 here"), "{told}");
}

/// A lock of the system, which ends with its process.
#[test]
fn one_training_at_a_time_writes_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let options = TrainOptions { steps: 2, batch_size: 2, ..TrainOptions::default() };
    let first = job(folder.path(), "out", options.clone());
    let running = first.open(&silent()).unwrap();
    let before = candle_gpt2_testing::entries(&first.out);
    for resume in [false, true] {
        let second = job(folder.path(), "out", TrainOptions { resume, ..options.clone() });
        let refused = second.open(&silent()).err().unwrap();
        assert!(!refused.is_usage());
        assert_eq!(
            refused.to_string(),
            format!(
                "{}: another process is writing this folder; wait until it ends, or choose another name",
                second.out.display()
            )
        );
    }
    assert_eq!(candle_gpt2_testing::entries(&first.out), before, "the refused ones have touched nothing");
    drop(running);
    run(&job(folder.path(), "out", TrainOptions { resume: true, ..options })).unwrap();
    assert!(!candle_gpt2_testing::entries(&first.out).contains(&".lock".to_owned()));
}

/// Names that a process which was killed leaves, and names of others that look alike.
#[test]
fn a_resumed_training_removes_its_own_leftovers_only() {
    const OWN: [&str; 3] = ["model.safetensors.partial-aB3dE6", "tokens.partial-000000", "adapter"];
    const OTHERS: [&str; 4] = [".tmpfile", "notes.partial-aB3dE6", "log.jsonl.partial-short", "tokens"];
    let folder = tempfile::tempdir().unwrap();
    let options = TrainOptions { steps: 2, batch_size: 2, ..TrainOptions::default() };
    let first = job(folder.path(), "out", options.clone());
    run(&first).unwrap();
    for name in OWN.iter().chain(&OTHERS[1..]) {
        fs::create_dir(first.out.join(name)).unwrap();
        fs::write(first.out.join(name).join("content"), "x").unwrap();
    }
    fs::create_dir(first.out.join("adapter/adapter_config.json.partial-aB3dE6")).unwrap();
    fs::write(first.out.join(OTHERS[0]), "x").unwrap();
    let before = candle_gpt2_testing::entries(&first.out);

    let refused = job(folder.path(), "out", TrainOptions { resume: true, steps: 3, ..options.clone() });
    run(&refused).unwrap_err();
    assert_eq!(
        candle_gpt2_testing::entries(&first.out),
        before,
        "a training that is refused removes nothing"
    );
    run(&job(folder.path(), "out", TrainOptions { resume: true, ..options })).unwrap();
    let left: Vec<String> = before.into_iter().filter(|name| !OWN[..2].contains(&name.as_str())).collect();
    assert_eq!(candle_gpt2_testing::entries(&first.out), left);
    assert_eq!(candle_gpt2_testing::entries(&first.out.join("adapter")), ["content"]);
}

/// A process killed while writing a kept step leaves a partial folder in that step's folder.
#[test]
fn a_resumed_training_removes_the_partial_files_of_kept_steps() {
    let folder = tempfile::tempdir().unwrap();
    let options =
        TrainOptions { steps: 2, batch_size: 2, keep_steps: Some(vec![0, 1]), ..TrainOptions::default() };
    let first = job(folder.path(), "out", options.clone());
    run(&first).unwrap();
    let step = first.out.join("step-1");
    let before = candle_gpt2_testing::entries(&step);
    for name in ["model.safetensors", "config.json", "W_enc_0.safetensors"] {
        let partial = step.join(format!("{name}.partial-aB3dE6"));
        fs::create_dir(&partial).unwrap();
        fs::write(partial.join(name), "x").unwrap();
    }
    fs::create_dir(step.join("notes.partial-aB3dE6")).unwrap();
    fs::create_dir_all(first.out.join("step-x/config.json.partial-aB3dE6")).unwrap();
    run(&job(folder.path(), "out", TrainOptions { resume: true, ..options })).unwrap();
    let after = candle_gpt2_testing::entries(&step);
    let own: Vec<&String> = after.iter().filter(|name| *name != "notes.partial-aB3dE6").collect();
    assert_eq!(own, before.iter().collect::<Vec<_>>());
    assert!(first.out.join("step-x/config.json.partial-aB3dE6").is_dir(), "not a kept step's folder");
}

#[test]
fn a_damaged_state_is_not_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let options = TrainOptions { steps: 3, batch_size: 2, ..TrainOptions::default() };
    let first = job(folder.path(), "out", options.clone());
    run(&first).unwrap();
    let resumed = job(folder.path(), "out", TrainOptions { resume: true, ..options });
    let path = first.out.join("training-state.safetensors");
    let state = fs::read(&path).unwrap();
    let refused = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let told = run(&resumed).unwrap_err().to_string();
        assert!(told.contains("training-state.safetensors: not a state of a training: "), "{told}");
        assert!(told.contains("; remove it to start again"), "{told}");
        told
    };
    for place in (0..state.len()).step_by(state.len() / 97) {
        let mut flipped = state.clone();
        flipped[place] ^= 1 << (place % 8);
        refused(&flipped);
    }
    assert!(refused(&state[..state.len() - 4]).len() < 500);

    // States from before there were checksums have none in front of the progress.
    let header = u64::from_le_bytes(state[..8].try_into().unwrap());
    let text = String::from_utf8(state[8..8 + usize::try_from(header).unwrap()].to_vec()).unwrap();
    let start = text.find("\"gpt2-training\":\"").unwrap() + "\"gpt2-training\":\"".len();
    let old = |from: &str, to: &str| {
        let text = text[..start].to_owned() + &text[start + 8..];
        assert!(text.contains(from), "{from}");
        let text = text.replacen(from, to, 1);
        let length = u64::try_from(text.len()).unwrap();
        [&length.to_le_bytes()[..], text.as_bytes(), &state[8 + usize::try_from(header).unwrap()..]].concat()
    };
    let told = refused(&old("\\\"steps_done\\\":3", "\\\"steps_done\\\":9223372036854775808"));
    assert!(told.contains("`steps_done`: expected at most 3, found 9223372036854775808"), "{told}");
    let told = refused(&old("\"dtype\":\"F32\"", "\"dtype\":\"I32\""));
    assert!(told.contains("expected F32 of") && told.contains("found I32 of"), "{told}");
    fs::write(&path, old("", "")).unwrap();
    assert_eq!(run(&resumed).unwrap().steps, 3);
}

#[test]
fn a_log_that_was_cut_or_edited_is_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let options = TrainOptions { steps: 3, batch_size: 2, ..TrainOptions::default() };
    let first = job(folder.path(), "out", options.clone());
    run(&first).unwrap();
    let path = first.out.join("log.jsonl");
    let log = fs::read_to_string(&path).unwrap();
    let cut = &log[..log.len() / 2];
    let edited = log.replacen("\"step\":2", "\"step\":1", 1);
    for (content, is_changed) in [(&log[..], false), (cut, true), (&edited, true), ("", true)] {
        fs::write(&path, content).unwrap();
        let notes = Arc::new(Notes::default());
        let reporter: Arc<dyn Reporter> = notes.clone();
        let resumed = job(folder.path(), "out", TrainOptions { resume: true, ..options.clone() });
        resumed.run(&reporter, &mut |_| {}).unwrap();
        let is_told =
            notes.0.lock().unwrap().iter().any(|note| note.contains("log.jsonl: it was changed since"));
        assert_eq!(is_told, is_changed, "{content}");
    }
}

/// A downloaded folder can hold anything.
#[cfg(unix)]
#[test]
fn fifos_and_devices_of_a_folder_do_not_block_a_resumed_training() {
    let folder = tempfile::tempdir().unwrap();
    let options = TrainOptions { steps: 1, batch_size: 2, ..TrainOptions::default() };
    for name in ["log.jsonl", "training-state.safetensors", ".lock"] {
        for device in [None, Some("/dev/zero")] {
            let out = format!("{name}-{}", device.is_some());
            let job = job(folder.path(), &out, TrainOptions { resume: true, ..options.clone() });
            fs::create_dir(&job.out).unwrap();
            let path = job.out.join(name);
            match device {
                Some(device) => std::os::unix::fs::symlink(device, &path).unwrap(),
                None => assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success()),
            }
            let told = run(&job).unwrap_err().to_string();
            assert!(
                told.contains("not a regular file") || told.contains("a symbolic link"),
                "{name}: {told}"
            );
        }
    }
}

/// As a full disk does it, before there is a state to resume from.
#[test]
fn a_training_that_cannot_save_its_first_state_can_be_called_again() {
    for held_out in [0.0, 0.05] {
        let folder = tempfile::tempdir().unwrap();
        let once = TrainOptions {
            steps: 1,
            batch_size: 2,
            eval_every: 1,
            save_every: 1,
            held_out,
            ..TrainOptions::default()
        };
        let job = job(folder.path(), "out", once);
        let blocked = job.out.join("training-state.safetensors");
        let error = job.run(&silent(), &mut |event| {
            if let TrainEvent::Entry(_) = event
                && !blocked.exists()
            {
                // No file replaces a folder.
                fs::create_dir(&blocked).unwrap();
            }
        });
        let told = error.unwrap_err().to_string();
        assert!(told.starts_with(&format!("{}: cannot be written: ", blocked.display())), "{told}");
        fs::remove_dir(&blocked).unwrap();
        assert_eq!(candle_gpt2_testing::entries(&job.out), ["log.jsonl"], "held out: {held_out}");
        run(&job).unwrap();
        assert_eq!(log(&job).len(), if held_out > 0.0 { 2 } else { 1 }, "the log is begun anew");
    }
}

#[test]
fn a_user_s_own_file_with_the_name_of_the_log_stays() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), "out", TrainOptions { steps: 1, batch_size: 2, ..TrainOptions::default() });
    fs::create_dir(&job.out).unwrap();
    let own = job.out.join("log.jsonl");
    fs::write(&own, "{\"mine\": 1}\n").unwrap();
    let told = run(&job).unwrap_err().to_string();
    assert!(told.contains("the folder is not empty; choose another name"), "{told}");
    assert_eq!(fs::read_to_string(own).unwrap(), "{\"mine\": 1}\n");
}

#[test]
fn options_are_read_from_json() {
    let text = r#"{"steps": 7, "lora_rank": 2, "lora_targets": ["c_fc"], "schedule": "linear", "dtype": "bf16", "lr": 0.5}"#;
    let options: TrainOptions = serde_json::from_str(text).unwrap();
    let again = serde_json::to_value(&options).unwrap();
    assert_eq!(
        (&again["dtype"], &again["schedule"], &again["steps"]),
        (&json!("bf16"), &json!("linear"), &json!(7))
    );
    assert_eq!(serde_json::from_value::<TrainOptions>(again).unwrap(), options);
    assert_eq!((options.batch_size, options.held_out, options.dtype), (8, 0.1, WrittenDType::BF16));
    let wrong = |text: &str| serde_json::from_str::<TrainOptions>(text).unwrap_err().to_string();
    assert!(wrong(r#"{"dtype": "q8_0"}"#).starts_with("expected one of f32, f16, bf16"));
    assert!(wrong(r#"{"step": 1}"#).starts_with("unknown field `step`"));
}
