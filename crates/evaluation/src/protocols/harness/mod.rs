//! Tasks from lm-evaluation-harness, read from their YAML files.
//!
//! Supports multiple-choice tasks, log-likelihoods of a continuation, and log-likelihoods of whole texts.
//!
//! A task file is untrusted. None of its code runs, its templates are limited, and unsupported keys are
//! errors.
//!
//! # Source
//! lm-evaluation-harness 0.4.13: `config/task.py`, `tasks/_yaml_loader.py`, `api/task.py`
//! (`ConfigurableTask`).

mod keys;
mod template;

use std::path::{Path, PathBuf};

use candle_gpt2_confined::{Style, Templates, WorkerProgram};

use self::keys::{FewShotKeys, FormKey, Keys, task_file_error};
use self::template::{Entry, Form, FormValue};
use super::few_shot::{Examples, Pool, Sampler};
use super::lm_eval::{self, Pair};
use super::shared::{PreparedItem, prepare_records};
use super::{lambada, wikitext};
use crate::{Data, EvaluationError, ItemResult, Metric, Prepared, Record, Setting, Totals};

/// Kind of task, which determines what is scored for each entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    MultipleChoice,
    LogLikelihood,
    Rolling,
}

/// Name of a metric, and the harness's name for its aggregation.
type MetricOf = (&'static str, &'static str);

/// Task kinds, with their names and metrics.
const KINDS: [(&str, Kind, &[MetricOf]); 3] = [
    (
        "multiple_choice",
        Kind::MultipleChoice,
        &[("acc", "mean"), ("acc_norm", "mean"), ("acc_bytes", "mean")],
    ),
    ("loglikelihood", Kind::LogLikelihood, &[("perplexity", "perplexity"), ("acc", "mean")]),
    (
        "loglikelihood_rolling",
        Kind::Rolling,
        &[
            ("word_perplexity", "weighted_perplexity"),
            ("byte_perplexity", "weighted_perplexity"),
            ("bits_per_byte", "bits_per_byte"),
        ],
    ),
];

/// A task from a YAML file.
#[derive(Debug)]
pub(crate) struct HarnessTask {
    path: PathBuf,
    name: String,
    kind: Kind,
    metrics: Vec<&'static str>,
    description: Option<Form>,
    question: Forms,
    example: Forms,
    num_fewshot: Option<usize>,
    sampler: Sampler,
    excludes: bool,
    /// Examples from the task file itself.
    samples: Option<Vec<Record>>,
    /// Indices of the entries in the split that may be sampled as examples.
    indices: Option<Vec<usize>>,
    /// Files for the evaluated split; `few_shot_data` holds the files for the split with the examples.
    data: Option<Vec<PathBuf>>,
    few_shot_data: Option<Vec<PathBuf>>,
    /// Whether each line in the files is an entry.
    has_lines: bool,
    templates: Templates,
}

/// Values of the `doc_to_…` keys, and the delimiters between the parts of an entry.
#[derive(Debug, Clone)]
struct Forms {
    text: Form,
    target: Form,
    choice: Option<Form>,
    /// Delimiter between a question and its answer.
    target_delimiter: String,
    /// Delimiter after an example.
    few_shot_delimiter: String,
}

impl HarnessTask {
    /// Whether a protocol's name is a path to a task file.
    pub(crate) fn is_file(name: &str) -> bool {
        let extension = Path::new(name).extension();
        extension.is_some_and(|end| end.eq_ignore_ascii_case("yaml") || end.eq_ignore_ascii_case("yml"))
    }

    /// Reads a task file. Child processes of `worker` render its templates.
    pub(crate) fn read(path: &Path, worker: Option<&WorkerProgram>) -> Result<Self, EvaluationError> {
        let keys = Keys::read(path)?;
        let wrong = |what: String| task_file_error(path, what);
        let output_type = keys.output_type.as_deref().unwrap_or("generate_until");
        let known = KINDS.iter().find(|(name, ..)| *name == output_type);
        let Some((_, kind, of_kind)) = known.copied() else {
            let names = KINDS.map(|(name, ..)| name).join(", ");
            return Err(wrong(format!("`output_type`: expected one of {names}, found {output_type}")));
        };
        let metrics = match &keys.metric_list {
            None => of_kind.iter().map(|(name, _)| *name).filter(|name| *name != "acc_bytes").collect(),
            Some(list) => {
                let mut metrics = Vec::new();
                for wanted in list {
                    let known = of_kind.iter().find(|(name, aggregation)| {
                        *name == wanted.metric
                            && wanted.aggregation.as_deref().is_none_or(|given| given == *aggregation)
                    });
                    let Some((name, _)) = known else {
                        let names = of_kind.iter().map(|(name, by)| format!("{name} by {by}"));
                        let names = names.collect::<Vec<_>>().join(", ");
                        let by = wanted.aggregation.as_ref().map_or(String::new(), |by| format!(" by {by}"));
                        let found = &wanted.metric;
                        return Err(wrong(format!(
                            "`metric_list`: expected metrics for {output_type} ({names}), found {found}{by}"
                        )));
                    };
                    metrics.push(*name);
                }
                metrics
            }
        };
        let sampler = match keys.fewshot_config.sampler.as_deref() {
            None | Some("default") => Sampler::Random,
            Some("first_n") => Sampler::FirstN,
            Some(other) => {
                return Err(wrong(format!(
                    "`fewshot_config.sampler`: expected default or first_n, found {other}"
                )));
            }
        };
        let form = |name: &str, key: Option<&FormKey>| match key {
            Some(key) => {
                form_of(key).ok_or_else(|| wrong(format!("`{name}`: expected a list of strings"))).map(Some)
            }
            None => Ok(None),
        };
        let required = |name: &str, key: Option<&FormKey>| {
            form(name, key)?.ok_or_else(|| wrong(format!("`{name}` is missing")))
        };
        let text = match kind {
            // The harness ignores `doc_to_text` in these tasks.
            Kind::Rolling => Form::Text(String::new()),
            _ => required("doc_to_text", keys.doc_to_text.as_ref())?,
        };
        let question = Forms {
            text,
            target: required("doc_to_target", keys.doc_to_target.as_ref())?,
            choice: form("doc_to_choice", keys.doc_to_choice.as_ref())?,
            target_delimiter: keys.target_delimiter.clone().unwrap_or_else(|| " ".into()),
            few_shot_delimiter: keys.fewshot_delimiter.clone().unwrap_or_else(|| "\n\n".into()),
        };
        if kind == Kind::MultipleChoice && question.choice.is_none() {
            return Err(wrong("`doc_to_choice` is missing".into()));
        }
        let FewShotKeys { doc_to_text, doc_to_target, doc_to_choice, .. } = &keys.fewshot_config;
        let own = |name: &str, key: &Option<FormKey>| form(&format!("fewshot_config.{name}"), key.as_ref());
        let example = Forms {
            text: own("doc_to_text", doc_to_text)?.unwrap_or_else(|| question.text.clone()),
            target: own("doc_to_target", doc_to_target)?.unwrap_or_else(|| question.target.clone()),
            choice: own("doc_to_choice", doc_to_choice)?.or_else(|| question.choice.clone()),
            target_delimiter: given_or(&keys.fewshot_config.target_delimiter, &question.target_delimiter),
            few_shot_delimiter: given_or(
                &keys.fewshot_config.fewshot_delimiter,
                &question.few_shot_delimiter,
            ),
        };
        let splits = Splits::of(path, &keys)?;
        let samples = keys.fewshot_config.samples.as_ref().map(|samples| {
            samples.iter().map(|fields| Record::new(path.to_owned(), 1, fields.clone())).collect()
        });
        Ok(Self {
            name: keys.task.clone().unwrap_or_else(|| {
                path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
            }),
            kind,
            metrics,
            description: keys.description.filter(|text| !text.is_empty()).map(Form::Text),
            question,
            example,
            num_fewshot: keys.num_fewshot,
            sampler,
            excludes: splits.excludes,
            samples: samples.filter(|_| !splits.has_few_shot_split),
            indices: keys.fewshot_config.fewshot_indices,
            data: splits.data,
            few_shot_data: splits.few_shot_data,
            has_lines: keys.dataset_path.as_deref() == Some("text"),
            templates: Templates::new(Style::Task, &[], worker).map_err(|error| wrong(error.to_string()))?,
            path: path.to_owned(),
        })
    }

    /// Returns the name of the task.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of examples before each question, with a note if the file overrides `wanted`.
    pub(crate) fn shots(&self, wanted: Option<usize>) -> (usize, Option<String>) {
        match (self.num_fewshot, wanted) {
            (Some(0), Some(1..)) => {
                (0, Some("the task file sets `num_fewshot` to 0, which overrides the option".into()))
            }
            (own, wanted) => (wanted.or(own).unwrap_or(0), None),
        }
    }

    /// Whether few-shot examples can precede the items.
    pub(crate) fn takes_examples(&self) -> bool {
        self.kind != Kind::Rolling
    }

    /// Returns the files for the evaluated split.
    pub(crate) fn data_files(&self) -> Result<&[PathBuf], EvaluationError> {
        self.data.as_deref().ok_or_else(|| {
            task_file_error(
                &self.path,
                "`dataset_kwargs.data_files` does not name the data; specify it with `data`",
            )
        })
    }

    /// Returns the files for the split with the examples, if the task file names them.
    pub(crate) fn few_shot_files(&self) -> Option<&[PathBuf]> {
        self.few_shot_data.as_deref()
    }

    /// Builds items from the data.
    pub(crate) fn prepare(&self, data: &Data, setting: &Setting<'_>) -> Result<Prepared, EvaluationError> {
        let records = |data: &Data| -> Result<Vec<Record>, EvaluationError> {
            match self.has_lines {
                true => data.lines(),
                false => Ok(data.records().collect::<Result<_, _>>()?),
            }
        };
        let mut examples = None;
        if let Some(shots) = &setting.shots {
            let all = match (&self.samples, shots.data) {
                (Some(samples), None) => samples.clone(),
                (_, given) => records(given.unwrap_or(data))?,
            };
            let chosen = match &self.indices {
                None => all,
                Some(indices) => {
                    let at = |index: &usize| all.get(*index).cloned();
                    indices.iter().map(at).collect::<Option<_>>().ok_or_else(|| {
                        let what =
                            format!("`fewshot_config.fewshot_indices`: expected indices below {}", all.len());
                        task_file_error(&self.path, what)
                    })?
                }
            };
            let pool = Pool { records: chosen, sampler: self.sampler, excludes: self.excludes };
            examples = Some(Examples::new(pool, shots));
        }
        let mut make = |index: usize, record: &Record| -> Result<PreparedItem, EvaluationError> {
            if self.kind == Kind::Rolling {
                let entry = self.entry(record);
                let text = entry.text("doc_to_target", &self.question.target)?;
                return wikitext::rolling(setting, index, record, (&text, &text), "doc_to_target");
            }
            let mut before = match &self.description {
                Some(description) => self.entry(record).text("description", description)?,
                None => String::new(),
            };
            if let Some(examples) = &mut examples {
                before.push_str(&examples.before(record, |example| self.example(example))?);
            }
            self.item(setting, index, record, &before)
        };
        match self.has_lines {
            true => prepare_records(data, setting, records(data)?.into_iter().map(Ok), &mut make),
            false => prepare_records(data, setting, data.records(), &mut make),
        }
    }

    /// Computes metrics from the results.
    pub(crate) fn measure(&self, totals: &Totals, results: &[ItemResult]) -> Vec<Metric> {
        let all = match self.kind {
            Kind::MultipleChoice => {
                let by_bytes = lm_eval::share_of("acc_bytes", results, |predicted| predicted.per_byte);
                lm_eval::measure(totals, results).into_iter().chain(by_bytes).collect()
            }
            Kind::LogLikelihood => lambada::measure_words(results),
            Kind::Rolling => wikitext::measure_pages(totals, results),
        };
        let place = |metric: &Metric| self.metrics.iter().position(|name| *name == metric.name);
        let mut wanted: Vec<Metric> = all.into_iter().filter(|metric| place(metric).is_some()).collect();
        wanted.sort_by_key(place);
        wanted
    }

    fn entry<'a>(&'a self, record: &'a Record) -> Entry<'a> {
        Entry { templates: &self.templates, record, has_choices: self.question.choice.is_some() }
    }

    /// Renders an example that precedes a question.
    fn example(&self, record: &Record) -> Result<String, EvaluationError> {
        let entry = self.entry(record);
        let Forms { text, target, choice, target_delimiter, few_shot_delimiter } = &self.example;
        let choices = choice.as_ref().map(|form| entry.list("doc_to_choice", form)).transpose()?;
        let choice_at = |key: &str, index: usize| {
            let choices = choices.as_deref().unwrap_or_default();
            choices.get(index).cloned().ok_or_else(|| {
                let count = choices.len();
                entry.error(key, &format!("expected the index of one of {count} choices, found {index}"))
            })
        };
        let question = match entry.value("doc_to_text", text)? {
            FormValue::Text(text) => text,
            FormValue::Index(index) => choice_at("doc_to_text", index)?,
            FormValue::List(_) => {
                return Err(entry.error("doc_to_text", "expected a string, found a list").into());
            }
        };
        let answer = match entry.value("doc_to_target", target)? {
            FormValue::Text(text) => text,
            FormValue::Index(index) => choice_at("doc_to_target", index)?,
            FormValue::List(texts) => texts.into_iter().next().unwrap_or_default(),
        };
        match answer.is_empty() {
            true => Ok(question),
            false => Ok(format!("{question}{target_delimiter}{answer}{few_shot_delimiter}")),
        }
    }

    /// Builds the item for an entry; `before` is the text in front of the question.
    fn item(
        &self,
        setting: &Setting<'_>,
        index: usize,
        record: &Record,
        before: &str,
    ) -> Result<PreparedItem, EvaluationError> {
        let entry = self.entry(record);
        let Forms { text, target, choice, target_delimiter, .. } = &self.question;
        let text = entry.value("doc_to_text", text)?;
        let pair =
            |context, continuation, measured| Pair { field: "doc_to_text", context, continuation, measured };
        let Some(choice) = choice.as_ref().filter(|_| self.kind == Kind::MultipleChoice) else {
            let FormValue::Text(text) = text else {
                return Err(entry.error("doc_to_text", "expected a string, found another type").into());
            };
            let target = entry.text("doc_to_target", target)?;
            let context = format!("{before}{text}");
            return lm_eval::item(
                setting.vocabulary,
                index,
                record,
                &[pair(&context, &target, &target)],
                Some(0),
            );
        };
        let choices = entry.list("doc_to_choice", choice)?;
        if choices.len() < 2 {
            let what = format!("expected at least two choices, found {}", choices.len());
            return Err(entry.error("doc_to_choice", &what).into());
        }
        let place = |key: &str, given: FormValue| match given {
            FormValue::Index(index) if index < choices.len() => Ok(index),
            FormValue::Text(text) if choices.contains(&text) => {
                Ok(choices.iter().position(|choice| *choice == text).unwrap_or_default())
            }
            other => {
                let count = choices.len();
                Err(entry.error(
                    key,
                    &format!("expected one of the {count} choices or its index, found {other:?}"),
                ))
            }
        };
        // Either `doc_to_text` is a text that each choice follows, or it is an index and `doc_to_target` is a
        // text that follows each choice.
        let (pairs, gold) = match text {
            FormValue::Text(text) => {
                let gold = place("doc_to_target", entry.value("doc_to_target", target)?)?;
                let pairs = choices
                    .iter()
                    .map(|choice| (format!("{before}{text}"), format!("{target_delimiter}{choice}"), choice));
                (pairs.collect::<Vec<_>>(), gold)
            }
            given => {
                let gold = place("doc_to_text", given)?;
                let target = entry.text("doc_to_target", target)?;
                let pairs = choices.iter().map(|choice| {
                    (format!("{before}{choice}"), format!("{target_delimiter}{target}"), choice)
                });
                (pairs.collect(), gold)
            }
        };
        let pairs: Vec<_> =
            pairs.iter().map(|(context, continuation, choice)| pair(context, continuation, choice)).collect();
        lm_eval::item(setting.vocabulary, index, record, &pairs, Some(gold))
    }
}

fn given_or(given: &Option<String>, usual: &str) -> String {
    given.clone().unwrap_or_else(|| usual.to_owned())
}

fn form_of(key: &FormKey) -> Option<Form> {
    Some(match key {
        FormKey::Index(index) => Form::Index(*index),
        FormKey::Text(text) => Form::Text(text.clone()),
        FormKey::List(texts) => Form::List(texts.clone()),
        FormKey::Named(named) => {
            Form::List(named.values().map(|value| value.as_str().map(str::to_owned)).collect::<Option<_>>()?)
        }
    })
}

/// Data files to evaluate, and data files with few-shot examples.
struct Splits {
    data: Option<Vec<PathBuf>>,
    few_shot_data: Option<Vec<PathBuf>>,
    /// Whether the task file names the split that contains the examples.
    has_few_shot_split: bool,
    /// Whether a question cannot be its own example.
    excludes: bool,
}

impl Splits {
    fn of(path: &Path, keys: &Keys) -> Result<Self, EvaluationError> {
        let evaluated = keys.test_split.as_deref().or(keys.validation_split.as_deref());
        let given = keys.fewshot_config.split.as_deref().or(keys.fewshot_split.as_deref());
        // Like the harness, compare the split names as set in the file; two unset names are equal.
        let excludes = given == keys.test_split.as_deref();
        let has_few_shot_split = given.is_some();
        let few_shot =
            given.or(keys.training_split.as_deref()).or(keys.validation_split.as_deref()).or(evaluated);
        let Some(files) = &keys.dataset_kwargs.data_files else {
            return Ok(Self { data: None, few_shot_data: None, has_few_shot_split, excludes });
        };
        let kind = keys.dataset_path.as_deref().unwrap_or_default();
        if !["json", "csv", "parquet", "text"].contains(&kind) {
            let what = format!(
                "`dataset_path`: expected json, csv, parquet or text (with files in `data_files`), found {kind:?}"
            );
            return Err(task_file_error(path, what));
        }
        let Some(evaluated) = evaluated else {
            return Err(task_file_error(
                path,
                "`test_split` or `validation_split` is missing; set one of them to select the data to evaluate",
            ));
        };
        let of_split = |split: &str| -> Result<Vec<PathBuf>, EvaluationError> {
            let files = files.of_split(split).ok_or_else(|| {
                let what = format!("`dataset_kwargs.data_files` lists no files for the split `{split}`; files listed without a split belong to `train`");
                task_file_error(path, what)
            })?;
            // A path is relative to the working directory, as in the harness, or to the task file's folder if
            // the file does not exist there.
            let beside = path.parent().unwrap_or(Path::new(""));
            Ok(files.into_iter().map(|file| if file.exists() { file } else { beside.join(file) }).collect())
        };
        let few_shot_data = few_shot.map(of_split).transpose()?;
        Ok(Self { data: Some(of_split(evaluated)?), few_shot_data, has_few_shot_split, excludes })
    }
}
