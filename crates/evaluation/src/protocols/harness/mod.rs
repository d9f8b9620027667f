//! Tasks of lm-evaluation-harness from their YAML files: questions with choices, log-likelihoods of a text behind another, and
//! those of whole texts.
//!
//! A task file is untrusted: no code of it runs, its templates are bounded, and a key that cannot be followed is an error.
//!
//! # Source
//! lm-evaluation-harness 0.4.13: `config/task.py`, `tasks/_yaml_loader.py`, `api/task.py` (`ConfigurableTask`).

mod keys;
mod template;

use std::path::{Path, PathBuf};

use candle_gpt2_confined::{Style, Templates, WorkerProgram};

use self::keys::{FewShotKeys, FormKey, Keys, wrong};
use self::template::{Entry, Form, FormValue};
use super::few_shot::{Examples, Pool, Sampler};
use super::lm_eval::{self, Pair};
use super::shared::{Made, prepare_records};
use super::{lambada, wikitext};
use crate::{Data, EvaluationError, ItemResult, Metric, Prepared, Record, Setting, Totals};

/// What is asked about an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    MultipleChoice,
    LogLikelihood,
    Rolling,
}

/// A metric, and how the harness sums it up.
type MetricOf = (&'static str, &'static str);

/// Each kind with its name and its metrics.
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

/// A task of a file.
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
    /// Examples that the file contains.
    samples: Option<Vec<Record>>,
    /// Which examples of the split may be drawn.
    indices: Option<Vec<usize>>,
    /// Files of the evaluated split and of that of the examples.
    data: Option<Vec<PathBuf>>,
    few_shot_data: Option<Vec<PathBuf>>,
    /// Whether files are texts, of which each line is an entry.
    has_lines: bool,
    templates: Templates,
}

/// How the parts of an entry are made, and what separates them.
#[derive(Debug, Clone)]
struct Forms {
    text: Form,
    target: Form,
    choice: Option<Form>,
    /// Between a question and its answer.
    target_delimiter: String,
    /// Behind an example.
    few_shot_delimiter: String,
}

impl HarnessTask {
    /// Whether a protocol's name is that of a task file.
    pub(crate) fn is_file(name: &str) -> bool {
        let extension = Path::new(name).extension();
        extension.is_some_and(|end| end.eq_ignore_ascii_case("yaml") || end.eq_ignore_ascii_case("yml"))
    }

    /// Reads a task file, whose templates child processes of `worker` render.
    pub(crate) fn read(path: &Path, worker: Option<&WorkerProgram>) -> Result<Self, EvaluationError> {
        let keys = Keys::read(path)?;
        let wrong = |what: String| wrong(path, what);
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
                            "`metric_list`: expected of {output_type} some of {names}, found {found}{by}"
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
                form_of(key).ok_or_else(|| wrong(format!("`{name}`: expected texts in its list"))).map(Some)
            }
            None => Ok(None),
        };
        let required = |name: &str, key: Option<&FormKey>| {
            form(name, key)?.ok_or_else(|| wrong(format!("`{name}` is missing")))
        };
        let text = match kind {
            // Its value is not read.
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

    /// What the task is called.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The number of examples before a question, of a run that asks for `wanted`; with a note if the file has the last word.
    pub(crate) fn shots(&self, wanted: Option<usize>) -> (usize, Option<String>) {
        match (self.num_fewshot, wanted) {
            (Some(0), Some(1..)) => {
                (0, Some("its file sets `num_fewshot` to 0, which overrides the option".into()))
            }
            (own, wanted) => (wanted.or(own).unwrap_or(0), None),
        }
    }

    /// Whether its items may follow examples.
    pub(crate) fn takes_examples(&self) -> bool {
        self.kind != Kind::Rolling
    }

    /// The files of the evaluated split.
    pub(crate) fn data_files(&self) -> Result<&[PathBuf], EvaluationError> {
        self.data.as_deref().ok_or_else(|| {
            wrong(&self.path, "its data are not named by `dataset_kwargs.data_files`; give them with `data`")
        })
    }

    /// The files that examples are drawn from, if they are not those of the evaluated split.
    pub(crate) fn few_shot_files(&self) -> Option<&[PathBuf]> {
        self.few_shot_data.as_deref()
    }

    /// Makes items of the data.
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
                            format!("`fewshot_config.fewshot_indices`: expected numbers below {}", all.len());
                        wrong(&self.path, what)
                    })?
                }
            };
            let pool = Pool { records: chosen, sampler: self.sampler, excludes: self.excludes };
            examples = Some(Examples::new(pool, shots));
        }
        let mut make = |index: usize, record: &Record| -> Result<Made, EvaluationError> {
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

    /// Makes metrics of what the model said.
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

    /// An example as it precedes a question.
    fn example(&self, record: &Record) -> Result<String, EvaluationError> {
        let entry = self.entry(record);
        let Forms { text, target, choice, target_delimiter, few_shot_delimiter } = &self.example;
        let choices = choice.as_ref().map(|form| entry.list("doc_to_choice", form)).transpose()?;
        let choice_at = |key: &str, index: usize| {
            let choices = choices.as_deref().unwrap_or_default();
            choices.get(index).cloned().ok_or_else(|| {
                let count = choices.len();
                entry.error(key, &format!("expected the place of one of {count} choices, found {index}"))
            })
        };
        let question = match entry.value("doc_to_text", text)? {
            FormValue::Text(text) => text,
            FormValue::Index(index) => choice_at("doc_to_text", index)?,
            FormValue::List(_) => {
                return Err(entry.error("doc_to_text", "expected a text, found a list").into());
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

    /// The item of an entry, after the given text.
    fn item(
        &self,
        setting: &Setting<'_>,
        index: usize,
        record: &Record,
        before: &str,
    ) -> Result<Made, EvaluationError> {
        let entry = self.entry(record);
        let Forms { text, target, choice, target_delimiter, .. } = &self.question;
        let text = entry.value("doc_to_text", text)?;
        let pair =
            |context, continuation, measured| Pair { field: "doc_to_text", context, continuation, measured };
        let Some(choice) = choice.as_ref().filter(|_| self.kind == Kind::MultipleChoice) else {
            let FormValue::Text(text) = text else {
                return Err(entry.error("doc_to_text", "expected a text, found something else").into());
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
                    &format!("expected one of the {count} choices or its place, found {other:?}"),
                ))
            }
        };
        // Either the choices follow one text, or one text follows the choices.
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

/// Which files are evaluated, and which examples come from.
struct Splits {
    data: Option<Vec<PathBuf>>,
    few_shot_data: Option<Vec<PathBuf>>,
    /// Whether the file names the split of the examples.
    has_few_shot_split: bool,
    /// Whether the question itself is no example.
    excludes: bool,
}

impl Splits {
    fn of(path: &Path, keys: &Keys) -> Result<Self, EvaluationError> {
        let evaluated = keys.test_split.as_deref().or(keys.validation_split.as_deref());
        let given = keys.fewshot_config.split.as_deref().or(keys.fewshot_split.as_deref());
        // The harness compares the names that the file gives, also where it gives none.
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
                "`dataset_path`: expected json, csv, parquet or text, whose files `data_files` names, found {kind:?}"
            );
            return Err(wrong(path, what));
        }
        let Some(evaluated) = evaluated else {
            return Err(wrong(
                path,
                "`test_split` or `validation_split` is missing: it says what is evaluated",
            ));
        };
        let of_split = |split: &str| -> Result<Vec<PathBuf>, EvaluationError> {
            let files = files.of_split(split).ok_or_else(|| {
                let what = format!("`dataset_kwargs.data_files` names no files of the split `{split}`; files without a split are `train`");
                wrong(path, what)
            })?;
            // As the harness reads them, from where it runs; else beside the task file.
            let beside = path.parent().unwrap_or(Path::new(""));
            Ok(files.into_iter().map(|file| if file.exists() { file } else { beside.join(file) }).collect())
        };
        let few_shot_data = few_shot.map(of_split).transpose()?;
        Ok(Self { data: Some(of_split(evaluated)?), few_shot_data, has_few_shot_split, excludes })
    }
}
