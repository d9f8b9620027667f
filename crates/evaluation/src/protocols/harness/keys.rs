//! The keys of a task file: which are read, which mean nothing here, and which cannot be followed.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value as Json};
use serde_yaml_ng::{Mapping, Value};

use crate::EvaluationError;

/// Most bytes of a task file.
const MAX_BYTES: u64 = 1 << 20;
/// Most files that include each other.
const MAX_INCLUDES: usize = 16;

/// A task file, with those that it includes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Keys {
    pub(super) task: Option<String>,
    pub(super) output_type: Option<String>,
    pub(super) dataset_path: Option<String>,
    #[serde(default)]
    pub(super) dataset_kwargs: DatasetKeys,
    pub(super) training_split: Option<String>,
    pub(super) validation_split: Option<String>,
    pub(super) test_split: Option<String>,
    pub(super) fewshot_split: Option<String>,
    pub(super) doc_to_text: Option<FormKey>,
    pub(super) doc_to_target: Option<FormKey>,
    pub(super) doc_to_choice: Option<FormKey>,
    pub(super) description: Option<String>,
    pub(super) target_delimiter: Option<String>,
    pub(super) fewshot_delimiter: Option<String>,
    #[serde(default)]
    pub(super) fewshot_config: FewShotKeys,
    pub(super) num_fewshot: Option<usize>,
    pub(super) metric_list: Option<Vec<MetricKeys>>,
}

/// Keys that change no figure here.
const WITHOUT_EFFECT: &str = "task_alias tag dataset_name should_decontaminate doc_to_decontamination_query generation_kwargs metadata";

/// Keys of the harness that this program cannot follow, and why.
const REFUSED: [(&str, &str); 12] = [
    ("group", "it names a group of tasks; give the file of each task"),
    ("task_list", "it names several tasks; give the file of each task"),
    ("process_docs", "it is a function of Python; write the entries as they are to be read"),
    ("process_results", "it is a function of Python"),
    ("custom_dataset", "it is a function of Python"),
    ("filter_list", "filters are for written answers, which are not evaluated here"),
    ("repeats", "repeats are for written answers, which are not evaluated here"),
    ("use_prompt", "prompts of promptsource are not read; write doc_to_text and doc_to_target"),
    ("gen_prefix", "answers do not begin with a text of their own here"),
    ("doc_to_image", "this model reads texts alone"),
    ("doc_to_audio", "this model reads texts alone"),
    ("unsafe_code", "no code of a task is run"),
];

/// A `doc_to_…`.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum FormKey {
    Index(usize),
    Text(String),
    List(Vec<String>),
    /// Of which the values count, in their order.
    Named(Mapping),
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DatasetKeys {
    pub(super) data_files: Option<DataFiles>,
    #[serde(rename = "trust_remote_code")]
    _trust_remote_code: Option<bool>,
}

/// Files of data: of one split, or of several.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum DataFiles {
    Train(SplitFiles),
    Splits(std::collections::BTreeMap<String, SplitFiles>),
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum SplitFiles {
    One(PathBuf),
    Several(Vec<PathBuf>),
}

impl DataFiles {
    /// The files of a split; those without one are `train`.
    pub(super) fn of_split(&self, split: &str) -> Option<Vec<PathBuf>> {
        let files = match self {
            Self::Train(files) => Some(files).filter(|_| split == "train"),
            Self::Splits(splits) => splits.get(split),
        };
        files.map(|files| match files {
            SplitFiles::One(file) => vec![file.clone()],
            SplitFiles::Several(files) => files.clone(),
        })
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FewShotKeys {
    pub(super) sampler: Option<String>,
    pub(super) split: Option<String>,
    pub(super) samples: Option<Vec<Map<String, Json>>>,
    pub(super) fewshot_indices: Option<Vec<usize>>,
    pub(super) doc_to_text: Option<FormKey>,
    pub(super) doc_to_target: Option<FormKey>,
    pub(super) doc_to_choice: Option<FormKey>,
    pub(super) target_delimiter: Option<String>,
    pub(super) fewshot_delimiter: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MetricKeys {
    pub(super) metric: String,
    pub(super) aggregation: Option<String>,
    #[serde(rename = "higher_is_better")]
    _higher_is_better: Option<bool>,
}

/// What is wrong with a task file.
pub(super) fn wrong(path: &Path, what: impl Into<String>) -> EvaluationError {
    EvaluationError::Unusable { file: path.display().to_string(), what: what.into() }
}

impl Keys {
    /// Reads a task file.
    pub(super) fn read(path: &Path) -> Result<Self, EvaluationError> {
        let mapping = mapping_of(path, &mut Vec::new())?;
        for (key, why) in REFUSED {
            // Without effect: what switches it off.
            let is_set = |value: &Value| !matches!(value, Value::Null | Value::Bool(false));
            let is_once = |value: &Value| key == "repeats" && value.as_u64() == Some(1);
            if mapping.get(key).is_some_and(|value| is_set(value) && !is_once(value)) {
                return Err(wrong(path, format!("`{key}` is not supported: {why}")));
            }
        }
        let passed_over = |key: &Value| {
            let mut names = REFUSED.iter().map(|(name, _)| *name).chain(WITHOUT_EFFECT.split(' '));
            names.any(|name| key.as_str() == Some(name))
        };
        let read = mapping.into_iter().filter(|(key, value)| !value.is_null() && !passed_over(key));
        serde_yaml_ng::from_value(Value::Mapping(read.collect()))
            .map_err(|error| wrong(path, error.to_string()))
    }
}

/// The keys of a file over those of the files that it includes.
fn mapping_of(path: &Path, including: &mut Vec<PathBuf>) -> Result<Mapping, EvaluationError> {
    let failed = |cause| EvaluationError::File { path: path.to_owned(), cause };
    let place = fs::canonicalize(path).map_err(failed)?;
    if including.contains(&place) {
        return Err(wrong(path, "`include`: the file includes itself"));
    }
    if including.len() == MAX_INCLUDES {
        return Err(wrong(path, format!("`include`: expected at most {MAX_INCLUDES} files in one another")));
    }
    if fs::metadata(path).map_err(failed)?.len() > MAX_BYTES {
        return Err(wrong(path, format!("expected a task file of at most {MAX_BYTES} bytes")));
    }
    including.push(place);
    let text = fs::read_to_string(path).map_err(failed)?;
    let value: Value = serde_yaml_ng::from_str(&text).map_err(|error| wrong(path, error.to_string()))?;
    if let Some(tag) = tag_in(&value) {
        return Err(wrong(
            path,
            format!("`{tag}` is not supported: no code of a task is run; write a template or a list"),
        ));
    }
    let Value::Mapping(mut mapping) = value else {
        return Err(wrong(path, "expected a task file, which has keys and values"));
    };
    let mut merged = Mapping::new();
    let included = mapping.remove("include");
    let names = match included {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Sequence(names)) => names,
        Some(name) => vec![name],
    };
    for name in names {
        let Some(name) = name.as_str() else {
            return Err(wrong(path, "`include`: expected the name of a file, or a list of names"));
        };
        let beside = path.parent().unwrap_or(Path::new("")).join(name);
        let mut of_file = mapping_of(&beside, including)?;
        of_file.remove("task_list");
        merged.extend(of_file);
    }
    including.pop();
    merged.extend(mapping);
    Ok(merged)
}

/// A tag, such as `!function`, anywhere in a value.
fn tag_in(value: &Value) -> Option<String> {
    match value {
        Value::Tagged(tagged) => Some(tagged.tag.to_string()),
        Value::Sequence(values) => values.iter().find_map(tag_in),
        Value::Mapping(mapping) => {
            mapping.iter().find_map(|(key, value)| tag_in(key).or_else(|| tag_in(value)))
        }
        _ => None,
    }
}
