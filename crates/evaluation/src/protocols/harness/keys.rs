//! Supported, ignored and rejected keys in a task file.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_gpt2_engine::{YamlError, check_yaml};
use candle_gpt2_weights::read_bounded_text;
use serde::Deserialize;
use serde_json::{Map, Value as Json};
use serde_yaml_ng::{Mapping, Value};

use crate::EvaluationError;

/// Maximum size of a task file together with its included files.
const MAX_BYTES: u64 = 1 << 20;
/// Maximum number of included files over all `include` lists.
const MAX_INCLUDES: usize = 64;

/// A task file, merged with its included files.
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

/// Keys that do not affect any supported metric.
const WITHOUT_EFFECT: &str = "task_alias tag dataset_name should_decontaminate doc_to_decontamination_query generation_kwargs metadata";

/// Unsupported harness keys, each with the reason.
const REFUSED: [(&str, &str); 12] = [
    ("group", "it names a group of tasks; specify the file of each task"),
    ("task_list", "it names several tasks; specify the file of each task"),
    ("process_docs", "it is a Python function; write the processed entries to a file instead"),
    ("process_results", "it is a Python function"),
    ("custom_dataset", "it is a Python function"),
    ("filter_list", "filters apply to generated answers, which are not supported"),
    ("repeats", "repeats apply to generated answers, which are not supported"),
    ("use_prompt", "promptsource prompts are not supported; write doc_to_text and doc_to_target"),
    ("gen_prefix", "answer prefixes are not supported"),
    ("doc_to_image", "this model reads only text"),
    ("doc_to_audio", "this model reads only text"),
    ("unsafe_code", "task code is never run"),
];

/// Value of a `doc_to_…` key.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum FormKey {
    Index(usize),
    Text(String),
    List(Vec<String>),
    /// Mapping; only its values are used, in order.
    Named(Mapping),
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DatasetKeys {
    pub(super) data_files: Option<DataFiles>,
    #[serde(rename = "trust_remote_code")]
    _trust_remote_code: Option<bool>,
}

/// Data files for one split or for several splits.
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
    /// Returns the files of a split; files without a split belong to `train`.
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

/// Error about a task file.
pub(super) fn task_file_error(path: &Path, what: impl Into<String>) -> EvaluationError {
    EvaluationError::Unusable { file: path.display().to_string(), what: what.into() }
}

impl Keys {
    /// Reads a task file.
    pub(super) fn read(path: &Path) -> Result<Self, EvaluationError> {
        let mapping = TaskReader::default().mapping(path)?;
        for (key, why) in REFUSED {
            // `null` and `false` turn a key off.
            let is_set = |value: &Value| !matches!(value, Value::Null | Value::Bool(false));
            let is_once = |value: &Value| key == "repeats" && value.as_u64() == Some(1);
            if mapping.get(key).is_some_and(|value| is_set(value) && !is_once(value)) {
                return Err(task_file_error(path, format!("`{key}` is not supported: {why}")));
            }
        }
        let passed_over = |key: &Value| {
            let mut names = REFUSED.iter().map(|(name, _)| *name).chain(WITHOUT_EFFECT.split(' '));
            names.any(|name| key.as_str() == Some(name))
        };
        let read = mapping.into_iter().filter(|(key, value)| !value.is_null() && !passed_over(key));
        serde_yaml_ng::from_value(Value::Mapping(read.collect()))
            .map_err(|error| task_file_error(path, error.to_string()))
    }
}

/// Reader for task files and the files they include; reads each file only once.
#[derive(Default)]
struct TaskReader {
    read: HashMap<PathBuf, Mapping>,
    /// Files whose `include` lists are being followed, outermost first.
    including: Vec<PathBuf>,
    /// Number of names in all `include` lists.
    includes: usize,
    bytes: u64,
}

impl TaskReader {
    /// Returns the keys in a file, merged over the keys in its included files.
    fn mapping(&mut self, path: &Path) -> Result<Mapping, EvaluationError> {
        let failed = |cause| EvaluationError::File { path: path.to_owned(), cause };
        let place = fs::canonicalize(path).map_err(failed)?;
        if self.including.contains(&place) {
            return Err(task_file_error(path, "`include`: the file includes itself"));
        }
        if let Some(mapping) = self.read.get(&place) {
            return Ok(mapping.clone());
        }
        let text = read_bounded_text(path, MAX_BYTES - self.bytes).map_err(failed)?;
        self.bytes += text.len() as u64;
        let mut own = parsed(path, &text)?;
        let names = match own.remove("include") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Sequence(names)) => names,
            Some(name) => vec![name],
        };
        self.includes = self.includes.saturating_add(names.len());
        if self.includes > MAX_INCLUDES {
            return Err(task_file_error(
                path,
                format!("`include`: expected at most {MAX_INCLUDES} included files in total"),
            ));
        }
        self.including.push(place.clone());
        let mut merged = Mapping::new();
        for name in names {
            let Some(name) = name.as_str() else {
                return Err(task_file_error(
                    path,
                    "`include`: expected a file name, or a list of file names",
                ));
            };
            let mut included = self.mapping(&path.parent().unwrap_or(Path::new("")).join(name))?;
            included.remove("task_list");
            merged.extend(included);
        }
        self.including.pop();
        merged.extend(own);
        self.read.insert(place, merged.clone());
        Ok(merged)
    }
}

/// Parses the keys in a task file.
fn parsed(path: &Path, text: &str) -> Result<Mapping, EvaluationError> {
    check_yaml(text).map_err(|error| match error {
        YamlError::Tag { tag, .. } => task_file_error(
            path,
            format!("`{tag}` is not supported: task code is never run; write a template or a list"),
        ),
        error => task_file_error(path, error.to_string()),
    })?;
    match serde_yaml_ng::from_str(text) {
        Ok(Value::Mapping(mapping)) => Ok(mapping),
        Ok(_) => Err(task_file_error(path, "expected a YAML mapping of keys to values, found another type")),
        Err(error) => Err(task_file_error(path, error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nesting depth of a value.
    fn depth(value: &Value) -> usize {
        match value {
            Value::Sequence(values) => 1 + values.iter().map(depth).max().unwrap_or(0),
            Value::Mapping(mapping) => {
                1 + mapping.iter().map(|(key, value)| depth(key).max(depth(value))).max().unwrap_or(0)
            }
            Value::Tagged(tagged) => depth(&tagged.value),
            _ => 0,
        }
    }

    /// Compares the nesting check with the YAML parser on random texts.
    ///
    /// Nesting that the check misses would make libyaml slow. A bracket or an indentation can open two
    /// levels, as in `[a: b]`, and each key adds a mapping.
    #[test]
    fn yaml_check_detects_all_nesting() {
        const PIECES: [&str; 42] = [
            "[", "[", "{", "]", "}", ",", ", ", ": ", ":", "- ", "-", "? ", "\n", "\n", "\n ", "\n  ",
            "\n   ", " ", "  ", "'", "'", "\"", "\"", "#", " #", "|\n", "|\n  ", ">-\n ", "|1\n ", "&a ",
            "*a", "a", "b", "a: ", "b: ", "\\", "\t", "---\n", "...\n", "\u{85}", "\r\n", "é",
        ];
        let mut state = 1_u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            usize::try_from(state >> 33).unwrap_or_default() % below
        };
        let mut parsed = 0;
        for _ in 0..300_000 {
            let text: String = (0..1 + random(14)).map(|_| PIECES[random(PIECES.len())]).collect();
            let Ok(value) = serde_yaml_ng::from_str::<Value>(&text) else { continue };
            parsed += 1;
            match check_yaml(&text) {
                Ok(seen) => assert!(depth(&value) <= 2 * seen + 1, "{text:?}: {seen} for {value:?}"),
                Err(error) => panic!("{text:?}: {error}"),
            }
        }
        assert!(parsed > 10_000, "{parsed}");
    }
}
