//! Training from data files to a folder: identical files after interruptions, and invalid options.

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

/// Creates a training job on a fixed text in a folder.
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

/// Log entries without times.
fn log(job: &TrainJob) -> Vec<Value> {
    let log = String::from_utf8(read(job, "log.jsonl")).unwrap();
    let entries = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    entries.map(|entry| json!([entry["step"], entry["loss"], entry["held_out_loss"]])).collect()
}

/// Covers interruptions between and within steps, in both passes, and within and after evaluations.
#[test]
fn resumed_training_writes_identical_files() {
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
    let mut check = 1;
    let resumed = loop {
        // The first interruption is within the first batch. The interval grows so that the training finishes.
        let interrupter = Arc::new(Interrupter::new(check));
        check = check * 9 / 8 + 1;
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
    // The temporary token files are in `tokens.partial-*`.
    let mut names = fs::read_dir(&interrupted.out).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(names.all(|name| !name.to_string_lossy().starts_with("tokens")));
}

#[test]
fn interruption_before_the_first_step_leaves_no_state() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), "out", TrainOptions { steps: 2, batch_size: 2, ..TrainOptions::default() });
    // Interrupt while the tokenizer is trained, and while the data is encoded. In the latter phase, the
    // folder exists and is removed again.
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
fn kept_model_equals_a_shorter_training() {
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
    assert!(!longer.out.join("step-9").exists(), "the training has no step 9");
}

#[test]
fn fine_tuning_reports_samples_and_events() {
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
    let mut events = Vec::new();
    let report = job
        .run(&silent(), &mut |event| {
            events.push(match event {
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
    assert_eq!(events, expected);
    let keys = serde_json::to_value(&report).unwrap();
    assert_eq!(keys["steps"], 4);
    assert_eq!(keys["best_step"].as_u64().unwrap() % 2, 0);
    let header = String::from_utf8_lossy(&read(&job, "model.safetensors")[..400]).into_owned();
    assert!(header.contains("\"F16\""), "{header}");
    assert!(job.out.join("adapter/adapter_model.safetensors").exists());
    let vocabulary = |file: &[u8]| serde_json::from_slice::<Value>(file).unwrap()["model"]["vocab"].clone();
    let original = fs::read(tiny.file("tokenizer.json")).unwrap();
    assert_eq!(vocabulary(&read(&job, "tokenizer.json")), vocabulary(&original));
}

/// Covers generation settings, special tokens and chat template, which might be lost silently.
#[test]
fn fine_tuning_keeps_checkpoint_settings() {
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
    for step in ["", "step-1/"] {
        for (name, text) in settings {
            assert_eq!(read(&job, &format!("{step}{name}")), text.as_bytes(), "{step}{name}");
        }
        assert!(
            read(&job, &format!("{step}tokenizer.json")) == fs::read(tiny.file("tokenizer.json")).unwrap()
        );
        let config: Value = serde_json::from_slice(&read(&job, &format!("{step}config.json"))).unwrap();
        assert_eq!(config["task_specific_params"]["x"], 1);
    }
}

#[test]
fn invalid_options_are_rejected_before_any_work() {
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
            "`dropout`: expected a rate of at least 0 and below 1, found 1",
        ),
        (TrainOptions { eval_every: 0, ..default() }, "`eval_every`: expected at least 1, found 0"),
        (TrainOptions { save_every: 0, ..default() }, "`save_every`: expected at least 1, found 0"),
        (TrainOptions { patience: Some(0), ..default() }, "`patience`: expected at least 1, found 0"),
        (TrainOptions { steps: 0, ..default() }, "`steps`: expected at least 1, found 0"),
        (
            TrainOptions { lora_alpha: Some(2.0), ..default() },
            "`lora_alpha` applies only to adapters; set `lora_rank`",
        ),
        (
            TrainOptions { n_head: Some(2), ..default() },
            "`n_head` applies only to checkpoints: the configuration defines the number of heads",
        ),
    ] {
        assert_eq!(refused(options), expected);
    }
    let huge = TrainOptions { batch_size: 1 << 20, ..default() };
    let error = refused(huge.clone());
    assert!(
        error.ends_with(
            "lower `batch_size` (and raise `accumulate`) or `context`, or add `recompute`; `ignore_memory` skips this check"
        ),
        "{error}"
    );
    // Without the memory check, a text shorter than a window fails before anything large is allocated.
    let short = (folder.path().join("short.txt"), "The dog was found.");
    fs::write(&short.0, short.1).unwrap();
    let unchecked = TrainOptions { ignore_memory: true, held_out: 0.0, ..huge.clone() };
    let tiny = tiny();
    let start = Start::Checkpoint(tiny.path().to_owned());
    let error = run(&TrainJob { data: vec![short.0], start, ..job(folder.path(), "tried", unchecked) });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("one window needs 49"), "{error}");
    let error = refused(TrainOptions { recompute: true, ..huge });
    assert!(
        error.ends_with(
            "lower `batch_size` (and raise `accumulate`) or `context`; `ignore_memory` skips this check"
        ),
        "{error}"
    );
}

/// A checkpoint whose end token is in its own vocabulary.
fn tiny() -> CheckpointFolder {
    CheckpointFolder::tiny().with_config(json!({"eos_token_id": 0, "bos_token_id": 0}))
}

/// Creates a job that fine-tunes a checkpoint on a file with these contents.
fn fine_tuning(
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
fn unusable_data_is_reported_with_file_and_line() {
    let folder = tempfile::tempdir().unwrap();
    let tiny = tiny();
    let completion = format!("{{\"prompt\": \"a\", \"completion\": \"{}\"}}\n", "many words ".repeat(60));
    let labels = "expected 2 to 1000 labels, found 1 in the rows up to this one (ham)";
    for (task, name, content, expected) in [
        (Task::Text, "empty.txt", "", "the file is empty"),
        (Task::Text, "short.txt", "aba", "one window needs"),
        (Task::Text, "no.jsonl", "not json\n", "line 1: not valid JSON"),
        (Task::Classify, "empty.jsonl", "{\"text\": \"a\", \"label\": \"\"}\n", "line 1: `label` is empty"),
        (Task::Classify, "same.tsv", "ham\ta\nham\tb\n", &format!("line 2: {labels}")),
        (Task::Classify, "textless.tsv", "ham\ta\nspam\t\n", "line 2: `text` has no tokens"),
        (Task::Answer, "half.jsonl", "\n{\"completion\": \"a\"}\n", "line 2: the object has no `prompt`"),
        (Task::Answer, "long.jsonl", &completion, "line 1: `completion` has"),
    ] {
        let job = fine_tuning(
            folder.path(),
            &tiny,
            (name, content),
            TrainOptions { task, ..TrainOptions::default() },
        );
        let error = run(&job).unwrap_err();
        let message = error.to_string();
        let is_named = name == "short.txt" || message.contains(name);
        assert!(
            !error.is_usage() && message.contains(expected) && is_named,
            "`{expected}` is not in: {message}"
        );
    }
    // Enough text for a window, but too little for a tokenizer of this vocabulary size.
    let config = Gpt2Config { vocab_size: 9000, ..Gpt2Config::from_json(CONFIG).unwrap() };
    let large = TrainJob {
        start: Start::Config(config.into()),
        ..job(folder.path(), "out", TrainOptions::default())
    };
    let message = run(&large).unwrap_err().to_string();
    assert!(message.contains("tokens; lower it to "), "{message}");
    // A tokenizer with more tokens than the model.
    let tokenizer = folder.path().join("tokenizer.json");
    fs::write(&tokenizer, candle_gpt2_stories::TOKENIZER).unwrap();
    let start = Start::Checkpoint(tiny.path().to_owned());
    let one = job(folder.path(), "out", TrainOptions { steps: 1, ..TrainOptions::default() });
    let message =
        run(&TrainJob { start: start.clone(), tokenizer: Some(tokenizer), ..one }).unwrap_err().to_string();
    assert!(message.contains("the tokenizer does not match the model"), "{message}");
    let mimetic = TrainOptions { initialization: Initialization::Mimetic, ..TrainOptions::default() };
    let error = run(&TrainJob { start, ..job(folder.path(), "out", mimetic) }).unwrap_err();
    let expected =
        "`initialization` applies only to models trained from scratch: a checkpoint already has weights";
    assert!(error.is_usage() && error.to_string() == expected, "{error}");
}

#[test]
fn labels_must_match_the_existing_head() {
    let folder = tempfile::tempdir().unwrap();
    let heads = CheckpointFolder::of("heads/sequence");
    let config: Value = serde_json::from_slice(&fs::read(heads.file("config.json")).unwrap()).unwrap();
    let known = ["0", "3"].map(|id| config["id2label"][id].as_str().unwrap());
    let rows = |last: &str| {
        let row = |label: &str, text: &str| format!("{}\n", json!({"text": text, "label": label}));
        row(known[0], "one").repeat(12) + &row(known[1], "two").repeat(12) + &row(last, "three")
    };
    let classifier = |checkpoint: &CheckpointFolder, last: &str, options: TrainOptions| {
        fine_tuning(folder.path(), checkpoint, ("rows.jsonl", &rows(last)), options)
    };
    let classify = || TrainOptions { task: Task::Classify, ..TrainOptions::default() };
    let error = run(&classifier(&heads, "nowhere", classify())).unwrap_err().to_string();
    assert!(
        error.contains("line 25: unknown label `nowhere`; expected one of the model's labels: "),
        "{error}"
    );
    let refused = |job: TrainJob, expected: &str| {
        let error = run(&job).unwrap_err();
        assert!(error.is_usage() && error.to_string().contains(expected), "{error}");
    };
    let weights = Some("nowhere=2".parse().unwrap());
    let weighted = TrainOptions { class_weights: weights, ..classify() };
    refused(classifier(&heads, "3", weighted), "`class_weights`: expected labels from ");
    let answer = TrainOptions { task: Task::Answer, ..TrainOptions::default() };
    let rows = ("answers.jsonl", r#"{"prompt": "a", "completion": "b"}"#);
    refused(fine_tuning(folder.path(), &heads, rows, answer), "`task` answer trains language models");
    for (name, class) in
        [("heads/token", "GPT2ForTokenClassification"), ("heads/multi_label", "multi_label_classification")]
    {
        refused(classifier(&CheckpointFolder::of(name), "3", classify()), class);
    }
    // Numbers in the data refer to labels, as in data for transformers.
    let numbered = classifier(&heads, "3", classify());
    let report = run(&numbered).unwrap();
    let labels = report.classification.unwrap().labels.len();
    assert_eq!(labels, config["id2label"].as_object().unwrap().len());
    assert_eq!(report.training_rows, Some(25 - 2), "the last of 12 rows and of 13 rows is held out");
    let trained: Value = serde_json::from_slice(&read(&numbered, "config.json")).unwrap();
    assert_eq!(trained["id2label"], config["id2label"]);
}

/// Reporter that collects notes.
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
fn long_rows_lose_their_first_tokens_with_a_note() {
    let folder = tempfile::tempdir().unwrap();
    let rows = "ham\tone two three four five six\nspam\ta\n".repeat(20);
    let options = TrainOptions { task: Task::Classify, context: Some(4), ..TrainOptions::default() };
    let notes = Arc::new(Notes::default());
    let reporter: Arc<dyn Reporter> = notes.clone();
    let report =
        fine_tuning(folder.path(), &tiny(), ("rows.tsv", &rows), options).run(&reporter, &mut |_| {});
    assert!(report.unwrap().training_tokens <= 36 * 4);
    let expected = "20 of 40 rows are longer than the context of 4 tokens; their first tokens are dropped";
    assert!(notes.0.lock().unwrap().iter().any(|note| note == expected), "{notes:?}", notes = notes.0);
}

/// Checks that a run is not resumed with different options or rows.
#[test]
fn training_with_changed_options_or_rows_is_not_resumed() {
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
    let job = |options, rows: &str| fine_tuning(folder.path(), &tiny, ("rows.tsv", rows), options);
    run(&job(weighted(Some(1), Some("spam=2")), &rows)).unwrap();
    for (options, rows, expected) in [
        (weighted(None, Some("spam=2")), &rows, "different options: train_blocks was 1 and is now null"),
        (weighted(Some(1), None), &rows, "class_weights was [1.0,2.0] and is now null"),
        (weighted(Some(1), Some("spam=2")), &rows.replace("word 7", "word 8"), "a run with different data"),
    ] {
        let error = run(&job(options, rows)).unwrap_err().to_string();
        assert!(error.contains(expected), "`{expected}` is not in: {error}");
    }
}

#[test]
fn non_finite_loss_stops_and_names_the_last_checkpoint() {
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
    let error = run(&job(folder.path(), "out", options)).unwrap_err().to_string();
    assert!(error.contains("is not finite") && error.contains("the last good checkpoint is"), "{error}");
}

#[test]
fn non_empty_folder_is_not_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let options = TrainOptions { steps: 1, batch_size: 2, ..TrainOptions::default() };
    let job = job(folder.path(), "out", options.clone());
    run(&job).unwrap();
    let error = run(&job).unwrap_err().to_string();
    assert!(error.contains("add `resume` to continue the job in it"), "{error}");
    let resumed = TrainOptions { resume: true, steps: 2, ..options };
    let error = run(&TrainJob { options: resumed, ..job }).unwrap_err().to_string();
    assert!(error.contains("different options: steps was 1 and is now 2"), "{error}");
}

/// Covers the lock, which the operating system releases when its process ends.
#[test]
fn only_one_training_can_write_a_folder() {
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
                "{}: another process is writing to this folder; wait until it finishes, or choose another folder",
                second.out.display()
            )
        );
    }
    assert_eq!(candle_gpt2_testing::entries(&first.out), before, "refused trainings change nothing");
    drop(running);
    run(&job(folder.path(), "out", TrainOptions { resume: true, ..options })).unwrap();
    assert!(!candle_gpt2_testing::entries(&first.out).contains(&".lock".to_owned()));
}

/// Covers a killed process's leftovers and other files with similar names.
#[test]
fn resumed_training_removes_only_its_own_leftovers() {
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
    assert_eq!(candle_gpt2_testing::entries(&first.out), before, "a refused training removes nothing");
    run(&job(folder.path(), "out", TrainOptions { resume: true, ..options })).unwrap();
    let left: Vec<String> = before.into_iter().filter(|name| !OWN[..2].contains(&name.as_str())).collect();
    assert_eq!(candle_gpt2_testing::entries(&first.out), left);
    assert_eq!(candle_gpt2_testing::entries(&first.out.join("adapter")), ["content"]);
}

/// Covers a process killed while writing a kept step, which leaves partial folders behind.
#[test]
fn resumed_training_removes_partial_files_of_kept_steps() {
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
fn damaged_state_is_not_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let options = TrainOptions { steps: 3, batch_size: 2, ..TrainOptions::default() };
    let first = job(folder.path(), "out", options.clone());
    run(&first).unwrap();
    let resumed = job(folder.path(), "out", TrainOptions { resume: true, ..options });
    let path = first.out.join("training-state.safetensors");
    let state = fs::read(&path).unwrap();
    let refused = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        let error = run(&resumed).unwrap_err().to_string();
        assert!(error.contains("training-state.safetensors: not a valid training state: "), "{error}");
        assert!(error.contains("; remove the file to start over"), "{error}");
        error
    };
    for offset in (0..state.len()).step_by(state.len() / 97) {
        let mut flipped = state.clone();
        flipped[offset] ^= 1 << (offset % 8);
        refused(&flipped);
    }
    assert!(refused(&state[..state.len() - 4]).len() < 500);

    // States from before checksums were introduced have none in front of the progress.
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
    let error = refused(&old("\\\"steps_done\\\":3", "\\\"steps_done\\\":9223372036854775808"));
    assert!(error.contains("`steps_done`: expected at most 3, found 9223372036854775808"), "{error}");
    let error = refused(&old("\"dtype\":\"F32\"", "\"dtype\":\"I32\""));
    assert!(error.contains("expected F32 of") && error.contains("found I32 of"), "{error}");
    fs::write(&path, old("", "")).unwrap();
    assert_eq!(run(&resumed).unwrap().steps, 3);
}

#[test]
fn truncated_or_edited_log_is_noted() {
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
        let is_noted =
            notes.0.lock().unwrap().iter().any(|note| note.contains("log.jsonl: modified after the state"));
        assert_eq!(is_noted, is_changed, "{content}");
    }
}

/// Covers special files, which a downloaded folder may contain.
#[cfg(unix)]
#[test]
fn fifos_and_devices_do_not_block_a_resumed_training() {
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
            let error = run(&job).unwrap_err().to_string();
            assert!(
                error.contains("not a regular file") || error.contains("a symbolic link"),
                "{name}: {error}"
            );
        }
    }
}

/// Simulates a full disk before there is a state to resume from.
#[test]
fn training_can_be_retried_if_the_first_save_fails() {
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
                // A file cannot replace a folder.
                fs::create_dir(&blocked).unwrap();
            }
        });
        let message = error.unwrap_err().to_string();
        assert!(message.starts_with(&format!("{}: cannot be written: ", blocked.display())), "{message}");
        fs::remove_dir(&blocked).unwrap();
        assert_eq!(candle_gpt2_testing::entries(&job.out), ["log.jsonl"], "held out: {held_out}");
        run(&job).unwrap();
        assert_eq!(log(&job).len(), if held_out > 0.0 { 2 } else { 1 }, "the log starts over");
    }
}

#[test]
fn user_file_named_like_the_log_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let job = job(folder.path(), "out", TrainOptions { steps: 1, batch_size: 2, ..TrainOptions::default() });
    fs::create_dir(&job.out).unwrap();
    let own = job.out.join("log.jsonl");
    fs::write(&own, "{\"mine\": 1}\n").unwrap();
    let error = run(&job).unwrap_err().to_string();
    assert!(error.contains("the folder is not empty; choose another name"), "{error}");
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
