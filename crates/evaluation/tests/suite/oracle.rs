//! Comparison with lm-evaluation-harness, or with a Python script if the harness lacks a protocol.
//!
//! Metrics, decisions and log-probabilities must agree on samples in every format. The scripts
//! `evaluation.py` and `few_shot.py` in `scripts/reference` wrote the samples and the expected results.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_gpt2_engine::{ConvertOptions, DeviceChoice, LoadedModel, ModelOptions, Silent, WeightDType};
use candle_gpt2_evaluation::{
    ChoiceResult, Data, EvaluationOptions, ItemResult, Kl, Metric, ModelFacts, Setting, Shots, named,
};
use candle_gpt2_testing::{checkpoints, fixture_path, json_fixture};
use candle_gpt2_weights::WrittenDType;
use serde::Deserialize;
use serde_json::{Map, Value};

/// Relative tolerance for metrics.
const METRIC_TOLERANCE: f64 = 1e-5;
/// Absolute tolerance for metrics near 0.
///
/// A single divergence or probability change is a difference between numbers with f32 rounding errors of
/// about 1e-7.
const SMALL_METRIC_TOLERANCE: f64 = 1e-6;
/// Absolute tolerance for log-probabilities.
///
/// In f32, logits of up to a hundred have errors of about 1e-6 to 1e-5. A log-probability sums the errors
/// of up to ten tokens.
const LOGPROB_TOLERANCE: f64 = 1e-4;
/// Relative tolerance for log-probabilities of texts with hundreds of tokens.
const LOGPROB_RELATIVE_TOLERANCE: f64 = 2e-6;

fn logprob_tolerance(expected: f64) -> f64 {
    LOGPROB_TOLERANCE.max(LOGPROB_RELATIVE_TOLERANCE * expected.abs())
}

#[derive(Deserialize)]
struct Expected {
    other_config: Map<String, Value>,
    cases: Vec<Case>,
}

/// Expected results for one combination of model, protocol and sample.
#[derive(Deserialize)]
struct Case {
    model: String,
    #[serde(default)]
    protocol: String,
    /// Task file, instead of a protocol and data.
    task: Option<String>,
    #[serde(default)]
    data: String,
    #[serde(default)]
    by: String,
    num_fewshot: Option<usize>,
    context: Option<usize>,
    metrics: BTreeMap<String, f64>,
    #[serde(default)]
    stderr: BTreeMap<String, f64>,
    items: Vec<ExpectedItem>,
}

#[derive(Deserialize)]
struct ExpectedItem {
    #[serde(default)]
    choices: Vec<ExpectedChoice>,
    /// Expected word and generated word.
    words: Option<[String; 2]>,
    /// Whether the best answer by the sum is correct; `acc_norm` uses the sum per character instead.
    acc: Option<bool>,
    acc_norm: Option<bool>,
    /// Best choice by the sum; `per_token` is the best choice by the mean per token.
    sum: Option<usize>,
    per_token: Option<usize>,
}

#[derive(Deserialize)]
struct ExpectedChoice {
    logprob: f64,
    tokens: Option<usize>,
    is_greedy: Option<bool>,
    words: Option<usize>,
    bytes: Option<usize>,
}

fn expected() -> Expected {
    serde_json::from_value(json_fixture("evaluation/expected")).unwrap()
}

fn load(folder: &Path) -> LoadedModel {
    let tokenizer = Some(folder.join("aitextgen.tokenizer.json")).filter(|path| path.exists());
    let options = ModelOptions {
        model: folder.to_owned(),
        tokenizer,
        device: DeviceChoice::Cpu,
        dtype: Some(WeightDType::F32),
        ..ModelOptions::default()
    };
    options.open(&Silent).unwrap().load(&Silent).unwrap()
}

fn built_in() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stories")
}

/// Checks the cases for a model in which the protocol's name starts with `task`.
#[track_caller]
fn check(model: &str, folder: &Path, task: &str) {
    let loaded = load(folder);
    let cases: Vec<Case> = expected().cases.into_iter().filter(|case| case.model == model).collect();
    let cases: Vec<&Case> = cases.iter().filter(|case| case.protocol.starts_with(task)).collect();
    assert!(!cases.is_empty(), "no case of {task} for {model}");
    let wrong: Vec<String> = cases.iter().flat_map(|case| case.differences(&loaded)).collect();
    assert!(wrong.is_empty(), "{} differences:\n{}", wrong.len(), wrong.join("\n"));
}

/// Checks every case of a task for the two models in the repository.
#[track_caller]
fn check_repository_models(task: &str) {
    check("tiny-checkpoint", &fixture_path("tiny-checkpoint"), task);
    check("built-in", &built_in(), task);
}

impl Case {
    fn name(&self) -> String {
        let Self { model, protocol, task, data, by, num_fewshot, .. } = self;
        let name = task.as_deref().unwrap_or(protocol);
        format!("{name} of {model} on {data}, {num_fewshot:?} examples, compared with {by}")
    }

    /// Describes the differences from the expected results.
    fn differences(&self, model: &LoadedModel) -> Vec<String> {
        let data = Data::read(&fixture_path("evaluation").join(&self.data)).unwrap();
        let (protocol, number) = named(&self.protocol).unwrap();
        let setting = Setting {
            vocabulary: model.vocabulary(),
            parameter: number.or(protocol.parameter.and_then(|parameter| parameter.default)).unwrap_or(0),
            context: self.context,
            limit: None,
            // The harness also used these entries as its training split.
            shots: self.num_fewshot.zip(protocol.few_shot).map(|(count, source)| Shots {
                count,
                seed: 1234,
                data: Some(&data),
                source,
            }),
            reporter: &Silent,
        };
        let prepared = (protocol.prepare)(&data, &setting).unwrap();
        assert_eq!(prepared.damaged, None, "{}", self.name());
        let mut kept = Vec::new();
        let results = prepared.evaluate(model, Vec::new(), &Silent, &mut |result| {
            kept.push(result.clone());
            Ok(())
        });
        let results = results.unwrap();
        assert_eq!(results, kept, "{}: the kept results differ from the returned ones", self.name());
        let mut wrong = self.item_differences(&results);
        wrong.extend(self.metric_differences(&(protocol.measure)(&prepared.totals, &results)));
        wrong.into_iter().map(|what| format!("{}: {what}", self.name())).collect()
    }

    fn item_differences(&self, results: &[ItemResult]) -> Vec<String> {
        if self.items.len() != results.len() {
            return vec![format!("expected {} items, found {}", self.items.len(), results.len())];
        }
        let items = self.items.iter().zip(results).enumerate();
        let differ = |(index, (expected, found)): (usize, (&ExpectedItem, &ItemResult))| {
            expected.differences(found).into_iter().map(move |what| format!("item {index}: {what}"))
        };
        items.flat_map(differ).collect()
    }

    /// Compares the metrics, and the standard errors where the oracle reports them.
    fn metric_differences(&self, metrics: &[Metric]) -> Vec<String> {
        let errors = self.stderr.iter().map(|(name, value)| (format!("{name}_stderr"), *value));
        let expected = self.metrics.iter().map(|(name, value)| (name.clone(), *value)).chain(errors);
        let differ = |(name, value): (String, f64)| {
            let metric = |name: &str| metrics.iter().find(|metric| metric.name == name);
            let found = match name.strip_suffix("_stderr") {
                Some(name) => metric(name).and_then(|metric| metric.stderr),
                None => metric(&name).map(|metric| metric.value),
            };
            // The error of a perplexity difference scales with the perplexities.
            let scale =
                if name.contains("difference") { self.metrics["base_perplexity"] } else { value.abs() };
            let tolerance = (METRIC_TOLERANCE * scale).max(SMALL_METRIC_TOLERANCE);
            let is_near = found.is_some_and(|found| (found - value).abs() <= tolerance);
            (!is_near).then(|| format!("{name}: expected {value}, found {found:?}"))
        };
        expected.filter_map(differ).collect()
    }
}

impl ExpectedItem {
    fn differences(&self, found: &ItemResult) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut compare = |what: &str, expected: Option<String>, found: String| {
            let expected = expected.filter(|expected| *expected != found);
            wrong.extend(expected.map(|expected| format!("{what}: expected {expected}, found {found}")));
        };
        let shown = |predicted: Option<usize>| predicted.map(|index| format!("{:?}", Some(index)));
        let predicted = found.predicted;
        let norm = predicted.zip(found.gold).map(|(predicted, gold)| predicted.per_character == gold);
        let sum = predicted.zip(found.gold).map(|(predicted, gold)| predicted.sum == gold);
        let is_correct = match found.choices.as_slice() {
            [only] => Some(only.is_greedy),
            _ => sum.or(found.correct),
        };
        compare("acc", self.acc.map(|acc| format!("{:?}", Some(acc))), format!("{is_correct:?}"));
        compare("acc_norm", self.acc_norm.map(|acc| format!("{:?}", Some(acc))), format!("{norm:?}"));
        compare("sum", shown(self.sum), format!("{:?}", predicted.map(|predicted| predicted.sum)));
        compare(
            "per_token",
            shown(self.per_token),
            format!("{:?}", predicted.map(|predicted| predicted.per_token)),
        );
        compare(
            "words",
            self.words.as_ref().map(|words| format!("{:?}", Some(words))),
            format!("{:?}", found.words),
        );
        if self.choices.len() == found.choices.len() {
            let choices = self.choices.iter().zip(&found.choices).enumerate();
            wrong.extend(choices.flat_map(|(index, (expected, found))| {
                expected.differences(found).into_iter().map(move |what| format!("choice {index}: {what}"))
            }));
        } else {
            wrong.push(format!("expected {} choices, found {}", self.choices.len(), found.choices.len()));
        }
        wrong
    }
}

impl ExpectedChoice {
    fn differences(&self, found: &ChoiceResult) -> Vec<String> {
        let mut wrong = Vec::new();
        let tolerance = logprob_tolerance(self.logprob);
        // NaN fails this check, too.
        if (found.logprob - self.logprob).abs().partial_cmp(&tolerance).is_none_or(|order| order.is_gt()) {
            wrong.push(format!("logprob: expected {}, found {}", self.logprob, found.logprob));
        }
        if self.is_greedy.is_some_and(|is_greedy| is_greedy != found.is_greedy) {
            wrong.push(format!("is_greedy: expected {:?}, found {}", self.is_greedy, found.is_greedy));
        }
        let counts = [
            ("tokens", self.tokens, Some(found.tokens)),
            ("words", self.words, found.words),
            ("bytes", self.bytes, Some(found.bytes)),
        ];
        let differ =
            counts.into_iter().filter(|(_, expected, found)| expected.is_some() && expected != found);
        wrong.extend(
            differ.map(|(what, expected, found)| format!("{what}: expected {expected:?}, found {found:?}")),
        );
        wrong
    }
}

/// Checks few-shot questions and tasks from YAML files.
#[track_caller]
fn check_examples(model: &str, folder: &Path) {
    let options = ModelOptions { model: folder.to_owned(), ..ModelOptions::default() };
    let loaded = load(folder);
    let cases: Vec<Case> = serde_json::from_value(json_fixture("evaluation/few_shot")).unwrap();
    let mut wrong = Vec::new();
    for case in cases.iter().filter(|case| case.model == model) {
        let Some(task) = &case.task else {
            wrong.extend(case.differences(&loaded));
            continue;
        };
        let file = fixture_path("evaluation/tasks").join(task);
        let log = tempfile::tempdir().unwrap();
        let options_of_run = EvaluationOptions {
            num_fewshot: case.num_fewshot,
            items: Some(log.path().join("items.jsonl")),
            ..EvaluationOptions::new([file.display().to_string()])
        };
        let plan = options_of_run.check().unwrap();
        let facts = ModelFacts::of_loaded(&options, &loaded);
        let evaluation = plan.prepare(&facts, None, &Silent).unwrap();
        let report = evaluation.run(&loaded, None, &Silent).next().unwrap().unwrap();
        let metrics = report.metrics.iter().map(|metric| Metric {
            name: metric.name,
            value: metric.value,
            stderr: metric.stderr,
            stderr_kind: metric.stderr_kind,
            count: metric.count,
        });
        let metrics: Vec<Metric> = metrics.collect();
        let names: Vec<&str> = metrics.iter().map(|metric| metric.name).collect();
        assert!(case.metrics.keys().all(|name| names.contains(&name.as_str())), "{}: {names:?}", case.name());
        let items = fs::read_to_string(log.path().join("items.jsonl")).unwrap();
        let logprobs = items.lines().filter_map(|line| {
            let line: Value = serde_json::from_str(line).unwrap();
            let choices =
                line["choices"].as_array()?.iter().map(|choice| choice["logprob"].as_f64().unwrap());
            Some(choices.collect::<Vec<_>>())
        });
        let expected = case
            .items
            .iter()
            .map(|item| item.choices.iter().map(|choice| choice.logprob).collect::<Vec<_>>());
        let (expected, found): (Vec<_>, Vec<_>) = (expected.collect(), logprobs.collect());
        let is_near =
            |(expected, found): (&f64, &f64)| (expected - found).abs() <= logprob_tolerance(*expected);
        let are_near = expected.len() == found.len()
            && expected.iter().zip(&found).all(|(expected, found)| {
                expected.len() == found.len() && expected.iter().zip(found).all(is_near)
            });
        if !are_near {
            wrong.push(format!("{}: expected {expected:?}, found {found:?}", case.name()));
        }
        wrong.extend(
            case.metric_differences(&metrics).into_iter().map(|what| format!("{}: {what}", case.name())),
        );
    }
    assert!(wrong.is_empty(), "{} differences:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn few_shot_and_task_files_match_the_oracle() {
    check_examples("tiny-checkpoint", &fixture_path("tiny-checkpoint"));
    check_examples("built-in", &built_in());
}

#[test]
fn lambada_matches_the_oracles() {
    check_repository_models("lambada:");
}

#[test]
fn wikitext_matches_the_oracles() {
    check_repository_models("wikitext:");
}

#[test]
fn hellaswag_matches_the_oracles() {
    check_repository_models("hellaswag:");
}

#[test]
fn questions_and_texts_match_the_oracle() {
    for task in
        ["arc-easy:", "arc-challenge:", "piqa:", "sciq:", "openbookqa:", "winogrande:", "blimp:", "text:"]
    {
        check_repository_models(task);
    }
}

/// Compares a model with a copy that has the same weights but a different `config.json`.
#[track_caller]
fn check_kl(name: &str, folder: &Path) {
    let Expected { other_config, cases } = expected();
    let changed = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        if entry.path().is_file() {
            fs::copy(entry.path(), changed.path().join(entry.file_name())).unwrap();
        }
    }
    let config: Map<String, Value> =
        serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
    let config: Map<String, Value> = config.into_iter().chain(other_config).collect();
    // The copy may be read-only, like the checkpoint.
    fs::remove_file(changed.path().join("config.json")).unwrap();
    fs::write(changed.path().join("config.json"), Value::Object(config).to_string()).unwrap();
    let (base, model) = (load(folder), load(changed.path()));
    let cases: Vec<Case> =
        cases.into_iter().filter(|case| case.model == name && case.protocol == Kl::NAME).collect();
    assert!(!cases.is_empty(), "no case of kl for {name}");
    for case in cases {
        let data = Data::read(&fixture_path("evaluation").join(&case.data)).unwrap();
        let setting = Setting { context: case.context, ..Setting::new(base.vocabulary(), &Silent) };
        let windows = Kl::prepare(&data, &setting).unwrap();
        let windows = windows.evaluate(&base, &model, Vec::new(), &Silent, &mut |_| Ok(())).unwrap();
        let wrong = case.metric_differences(&Kl::measure(&windows));
        assert!(wrong.is_empty(), "{}:\n{}", case.name(), wrong.join("\n"));
    }
}

#[test]
fn kl_matches_the_oracle() {
    check_kl("tiny-checkpoint", &fixture_path("tiny-checkpoint"));
    // Convert the built-in model to a folder, because `config.json` does not affect a GGUF file.
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("stories");
    let options = ConvertOptions { output: output.clone(), dtype: WrittenDType::F32 };
    ModelOptions::default().convert(&options, &Silent).unwrap();
    check_kl("built-in", &output);
}

#[test]
fn trained_checkpoint_matches_the_oracles() {
    let Some(folder) = checkpoints() else { return };
    let folder = folder.join("tarotble");
    for task in
        "lambada: wikitext: hellaswag: arc- piqa: sciq: openbookqa: winogrande: blimp: text:".split(' ')
    {
        check("tarotble", &folder, task);
    }
    check_kl("tarotble", &folder);
}
