//! Checkpoint jobs: inspection, verification, conversion, and their interruption.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{Device, Tensor};
use candle_gpt2_engine::{
    Comparison, ConvertOptions, EngineError, InspectOptions, Inspected, ModelOptions, Progress, Reporter,
    Silent, Unit, Verification, VerifyOptions,
};
use candle_gpt2_testing::{CheckpointFolder, fixture_path};
use candle_gpt2_weights::{WeightsError, WrittenDType};
use serde_json::json;

fn options(model: impl Into<PathBuf>) -> ModelOptions {
    ModelOptions { model: model.into(), ..ModelOptions::default() }
}

fn inspect_options() -> InspectOptions {
    let hub = ModelOptions::default().hub;
    InspectOptions { model: None, preset: None, tensors: false, diff: None, n_head: None, hub }
}

/// Reporter that interrupts a job at check number `last`.
struct InterruptAfter {
    checks: AtomicUsize,
    last: usize,
}

impl Reporter for InterruptAfter {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        Silent.start(what, total, unit)
    }

    fn note(&self, _: &str) {}

    fn is_interrupted(&self) -> bool {
        self.checks.fetch_add(1, Ordering::Relaxed) + 1 >= self.last
    }
}

fn assert_interruptible_at_every_check<T>(
    what: &str,
    job: impl Fn(&InterruptAfter) -> Result<T, EngineError>,
) {
    let endless = InterruptAfter { checks: AtomicUsize::new(0), last: usize::MAX };
    job(&endless).unwrap();
    let checks = endless.checks.into_inner();
    assert!(checks > 20, "{what} checks {checks} times");
    for last in 1..=checks {
        let reporter = InterruptAfter { checks: AtomicUsize::new(0), last };
        let ended =
            job(&reporter).err().unwrap_or_else(|| panic!("{what} continued after check {last} of {checks}"));
        assert!(ended.is_interrupted() && !ended.is_usage(), "{what}, {last}: {ended}");
    }
}

#[test]
fn jobs_can_be_interrupted_at_every_check() {
    let (folder, other) = (CheckpointFolder::tiny(), fixture_path("tiny-checkpoint"));
    let model = options(folder.path());
    assert_interruptible_at_every_check("load", |reporter| model.open(reporter)?.load(reporter));
    let against = VerifyOptions { against: Some(other.clone()), ..VerifyOptions::default() };
    assert_interruptible_at_every_check("verify", |reporter| model.verify(&against, reporter));
    let inspect = |options: InspectOptions| {
        let options = InspectOptions { model: Some(folder.path().into()), ..options };
        assert_interruptible_at_every_check("inspect", |reporter| options.inspect(reporter));
    };
    inspect(InspectOptions { tensors: true, ..inspect_options() });
    inspect(InspectOptions { diff: Some(other), ..inspect_options() });
    let target = tempfile::tempdir().unwrap();
    assert_interruptible_at_every_check("convert", |reporter| {
        let output = target.path().join("copy");
        let options = ConvertOptions { output, dtype: WrittenDType::F32 };
        let written = model.convert(&options, reporter);
        if written.is_ok() {
            std::fs::remove_dir_all(&options.output).unwrap();
        }
        assert_eq!(std::fs::read_dir(target.path()).unwrap().count(), 0, "the target folder is not empty");
        written
    });
}

#[test]
fn conflicting_options_are_rejected() {
    let preset = Some("gpt2".to_owned());
    let error_message = |options: InspectOptions| {
        let error = options.inspect(&Silent).unwrap_err();
        assert!(error.is_usage(), "{error}");
        error.to_string()
    };
    let of_preset = || InspectOptions { preset: preset.clone(), ..inspect_options() };
    let without_values = "`diff` and `tensors` need `model`: a preset has no weights";
    assert_eq!(error_message(InspectOptions { tensors: true, ..of_preset() }), without_values);
    assert_eq!(error_message(InspectOptions { diff: Some("x".into()), ..of_preset() }), without_values);
    assert_eq!(
        error_message(InspectOptions { n_head: Some(2), ..of_preset() }),
        "`n_head` applies only to checkpoints; the preset defines the number of heads"
    );
    let (model, diff) = (Some("x".into()), Some("y".into()));
    assert_eq!(
        error_message(InspectOptions { model, diff, tensors: true, ..inspect_options() }),
        "`diff` and `tensors` are mutually exclusive"
    );
    assert!(error_message(inspect_options()).contains("specify `model` or `preset`"));
    let dtype = WrittenDType::Q8_0;
    let convert = ConvertOptions { output: "folder".into(), dtype };
    let error = options("x").convert(&convert, &Silent).unwrap_err();
    assert!(
        error.is_usage() && error.to_string().starts_with("`dtype` q8_0: a Hugging Face folder"),
        "{error}"
    );
}

#[test]
fn inspection_reports_checkpoints_presets_and_differences() {
    let tiny = fixture_path("tiny-checkpoint");
    let inspected = |options: InspectOptions| options.inspect(&Silent).unwrap();
    let options = InspectOptions { model: Some(tiny.clone()), tensors: true, ..inspect_options() };
    let Inspected::One(found) = inspected(options) else { panic!("expected one checkpoint") };
    assert_eq!((found.format, found.naming), ("safetensors", "Hugging Face"));
    assert_eq!(found.stored_parameters, Some(found.parameters.unique));
    assert!(found.tensors.iter().all(|tensor| tensor.statistics.is_some()), "{:?}", found.tensors);
    let preset = Some("distilgpt2".to_owned());
    let options = InspectOptions { preset, ..inspect_options() };
    let Inspected::One(found) = inspected(options) else { panic!("expected one preset") };
    assert_eq!((found.parameters.unique, found.memory_bytes.f16), (81_912_576, 163_825_152));
    let diff = Some(fixture_path("formats/gguf/q8_0.gguf"));
    let model = Some(fixture_path("formats/gguf/f32.gguf"));
    let options = InspectOptions { model, diff, ..inspect_options() };
    let Inspected::Two(Comparison { equal, first_differing, largest, differences }) = inspected(options)
    else {
        panic!("expected a comparison")
    };
    assert!(!equal && largest.is_some_and(|largest| largest > 0.0 && largest < 0.1), "{largest:?}");
    assert_eq!(first_differing.as_ref(), Some(&differences[0].name));
    let compared = |model: &str, diff: &str| {
        let [model, diff] = [model, diff].map(|name| Some(fixture_path("formats").join(name)));
        match inspected(InspectOptions { model, diff, ..inspect_options() }) {
            Inspected::Two(comparison) => comparison,
            Inspected::One(_) => panic!("expected a comparison"),
        }
    };
    assert!(compared("tensorflow", "safetensors-shards").equal, "two formats of one model");
    let other = serde_json::to_value(compared("book", "tensorflow")).unwrap();
    let rows = other["differences"].as_array().unwrap();
    assert!(rows.iter().any(|row| row["difference"] == "only in the second"), "{other}");
}

#[test]
fn damaged_file_fails_verification_but_missing_file_errors() {
    let truncated = CheckpointFolder::tiny().with("model.safetensors", b"\x10\0\0\0\0\0\0\0{");
    let error = options(truncated.path()).verify(&VerifyOptions::default(), &Silent).unwrap_err();
    let message = error.to_string();
    let verdict = Verification::of_damage(error).unwrap();
    assert!(!verdict.sound && verdict.problems == [message], "{verdict:?}");
    let error = options("/nowhere").verify(&VerifyOptions::default(), &Silent).unwrap_err();
    let error = Verification::of_damage(error).unwrap_err();
    assert!(matches!(error, EngineError::Weights(WeightsError::NotFound { .. })), "{error}");
    assert!(VerifyOptions::allows(0.0) && !VerifyOptions::allows(-1.0) && !VerifyOptions::allows(f64::NAN));
}

/// Embedding rows, configuration and tokenizer disagree (ggml-org/ggml#371).
#[test]
fn mismatched_tokens_and_logits_are_problems() {
    let verify = |model: &Path, options: VerifyOptions| self::options(model).verify(&options, &Silent);
    let alone = |folder: &CheckpointFolder| verify(folder.path(), VerifyOptions::default()).unwrap();
    let far = CheckpointFolder::tiny()
        .without("generation_config.json")
        .with_config(json!({"eos_token_id": 50256}));
    assert_eq!(alone(&far).problems, ["eos_token_id 50256 is outside the vocabulary of 300 tokens"]);
    // transformers writes its default ids into configurations of any size. Without a tokenizer, these ids are
    // harmless.
    let bare = alone(&far.without("tokenizer.json").without("vocab.json"));
    assert!(bare.sound && bare.notes.contains(&"no tokenizer found".to_owned()), "{bare:?}");
    let more =
        CheckpointFolder::tiny().without("tokenizer.json").with("added_tokens.json", r#"{"<pad>": 300}"#);
    let problems = alone(&more).problems;
    assert!(problems[0].contains("it has token id 300"), "{problems:?}");

    let file = |name: &str| fixture_path("formats").join(name);
    let against = |other: &str| VerifyOptions { against: Some(file(other)), ..VerifyOptions::default() };
    let (exact, rounded, shards) = (file("llmc/gpt2.bin"), file("llmc/gpt2_bf16.bin"), "safetensors-shards");
    assert!(verify(&exact, against(shards)).unwrap().sound);
    let problems = verify(&rounded, against(shards)).unwrap().problems;
    assert!(problems[0].contains("the logits of the two models differ by"), "{problems:?}");
    assert!(verify(&rounded, VerifyOptions { tolerance: 0.5, ..against(shards) }).unwrap().sound);
    let message = verify(&exact, against("nanogpt")).unwrap_err().to_string();
    assert!(message.contains("the vocabulary sizes differ: this model has 300 tokens, but "), "{message}");
}

/// A NaN logit fails verification, even if all weights are finite and later logits are not NaN.
#[test]
fn non_finite_logits_fail_verification() {
    // A scale of 0 makes the last logit finite again.
    for scale in [1e4, 0.0] {
        let folder = CheckpointFolder::tiny().with_tensors(|tensors| {
            let huge = Tensor::full(3e38_f32, 28, &Device::Cpu).unwrap();
            tensors.insert("transformer.ln_f.bias".into(), huge);
            let wte = tensors["transformer.wte.weight"].clone();
            let last = (wte.narrow(0, 299, 1).unwrap() * scale).unwrap();
            let rows = [wte.narrow(0, 0, 299).unwrap() * 1e4, Ok(last)].map(Result::unwrap);
            tensors.insert("transformer.wte.weight".into(), Tensor::cat(&rows, 0).unwrap());
        });
        let found = options(folder.path()).verify(&VerifyOptions::default(), &Silent).unwrap();
        assert!(!found.sound);
        assert_eq!(found.problems, ["with a cache, the logits differ by NaN (largest logit: inf)"]);
    }
}

#[test]
fn tensor_statistics_skip_non_finite_values() {
    let folder = CheckpointFolder::tiny().with_tensors(|tensors| {
        let values = [vec![f32::NAN, -3.0, 0.0, 5.0], vec![2.0; 24]].concat();
        tensors.insert("transformer.ln_f.bias".into(), Tensor::from_vec(values, 28, &Device::Cpu).unwrap());
    });
    let options = InspectOptions { model: Some(folder.path().into()), tensors: true, ..inspect_options() };
    let Inspected::One(found) = options.inspect(&Silent).unwrap() else { panic!("one checkpoint") };
    let bias = found.tensors.iter().find(|tensor| tensor.name == "transformer.ln_f.bias").unwrap();
    let statistics = bias.statistics.as_ref().unwrap();
    // The finite values are -3, 0, 5 and 24 twos, 27 in total.
    assert_eq!(
        (statistics.min, statistics.max, statistics.nan, statistics.zeros, statistics.infinite),
        (-3.0, 5.0, 1, 1, 0)
    );
    assert!((statistics.mean - 50.0 / 27.0).abs() < 1e-12);
    let variance = (9.0 + 25.0 + 24.0 * 4.0) / 27.0 - (50.0f64 / 27.0).powi(2);
    assert!((statistics.standard_deviation - variance.sqrt()).abs() < 1e-12);
}

/// Uses a Hub that accepts connections but never responds.
#[cfg(feature = "hub")]
#[test]
fn waiting_for_a_silent_hub_can_be_interrupted() {
    use std::time::{Duration, Instant};

    use candle_gpt2_engine::{HubError, HubOptions, Network};

    struct Until(Instant);

    impl Reporter for Until {
        fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
            Silent.start(what, total, unit)
        }

        fn note(&self, _: &str) {}

        fn is_interrupted(&self) -> bool {
            Instant::now() >= self.0
        }
    }

    let hub = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let cache = tempfile::tempdir().unwrap();
    let hub_options = HubOptions {
        network: Network::Allowed,
        endpoint: format!("http://{}", hub.local_addr().unwrap()),
        cache: cache.path().into(),
        ..HubOptions::default()
    };
    let model = ModelOptions { hub: hub_options, ..options("someone/tiny") };
    let until = Instant::now() + Duration::from_millis(100);
    let error = model.open(&Until(until)).unwrap_err();
    assert!(matches!(error, EngineError::Hub(HubError::Stopped { .. })), "{error}");
    assert!(error.is_interrupted() && until.elapsed() < Duration::from_secs(1), "{:?}", until.elapsed());
}

/// Reporter that records notes.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Notes {
    fn text(&self) -> String {
        self.0.lock().unwrap().join("\n")
    }
}

impl Reporter for Notes {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        Silent.start(what, total, unit)
    }

    fn note(&self, note: &str) {
        self.0.lock().unwrap().push(note.to_owned());
    }
}

#[cfg(not(target_os = "wasi"))]
#[test]
fn conversion_reports_dropped_settings() {
    let source = CheckpointFolder::tiny()
        .with("generation_config.json", r#"{"temperature": 0.5, "eos_token_id": [5, 3]}"#);
    let folder = tempfile::tempdir().unwrap();
    let convert = |name: &str| {
        let output = folder.path().join(name);
        let notes = Notes::default();
        let options = ConvertOptions { output, dtype: WrittenDType::F32 };
        let written = ModelOptions { model: source.path().into(), ..ModelOptions::default() }
            .convert(&options, &notes)
            .unwrap();
        assert_eq!(written.notes.join("\n"), notes.text());
        (notes.text(), options.output)
    };
    let (notes, copy) = convert("copy");
    assert_eq!(notes, "");
    let kept = |folder: &Path| std::fs::read(folder.join("generation_config.json")).unwrap();
    assert_eq!(kept(&copy), kept(source.path()));
    let (notes, _) = convert("copy.gguf");
    assert!(notes.contains("temperature") && notes.contains("one end token"), "{notes}");
}

#[test]
fn tokens_outside_the_vocabulary_are_noted_at_open() {
    let notes = Notes::default();
    options(CheckpointFolder::tiny().path()).open(&notes).unwrap();
    assert_eq!(notes.text(), "");
    let text = std::fs::read_to_string(fixture_path("tiny-checkpoint/tokenizer.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    json["added_tokens"]
        .as_array_mut()
        .unwrap()
        .push(json!({"id": 300, "content": "<x>", "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false, "special": false}));
    let larger = CheckpointFolder::tiny().with("tokenizer.json", json.to_string());
    let opened = options(larger.path()).open(&notes).unwrap();
    assert!(
        notes.text().contains("it has token id 300 (`<x>`), but the vocabulary has 300 tokens"),
        "{}",
        notes.text()
    );
    assert!(matches!(
        opened.vocabulary().encode("a <x>"),
        Err(EngineError::ForeignTokenizer { id: 300, .. })
    ));
}

#[test]
fn character_without_a_token_is_noted_with_its_position() {
    let letters = CheckpointFolder::tiny()
        .without("tokenizer.json")
        .with("vocab.json", r#"{"a": 0, "b": 1, "Ġ": 2}"#)
        .with("merges.txt", "#version: 0.2\n");
    let opened = options(letters.path()).open(&Silent).unwrap();
    assert_eq!(opened.vocabulary().lost_note("ab ba"), None);
    let note = opened.vocabulary().lost_note("ab\u{20}1").unwrap();
    assert!(note.contains("no token for '1' (line 1, column 4)"), "{note}");
}
