//! Python classifiers that label texts or their tokens, or rank several choices.
//!
//! Result dicts have the keys of `gpt2 classify --json`.

use std::path::PathBuf;
use std::sync::Arc;

use candle_gpt2_engine::{CLASSIFIED_AT_ONCE, Classification, Question, Vocabulary, device_name};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple, PyType};
use serde::Serialize;

use crate::errors::{Failure, Result, type_error, value_error};
use crate::generate::{check_batch_size, collect_with_notes};
use crate::model::{Adapters, HubAccess, HubToken, OpenArguments};
use crate::process::{computing_on, start, thread_count};
use crate::reporting::reporting;
use crate::values::{Text, Texts, number, report_to_dict, to_python};

/// GPT-2 classifier: labels texts or their tokens, or ranks several choices.
///
/// Threads may share a Classifier. A pickle stores its name and options, and another process reopens the
/// model from them.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct Classifier {
    loaded: Arc<candle_gpt2_engine::Classifier>,
    opened: OpenArguments,
}

/// Result for one text.
#[derive(Serialize)]
struct Report<'a> {
    prompt_ids: &'a Question,
    #[serde(flatten)]
    classification: &'a Classification,
}

/// Choices: one list for all prompts, or one list per prompt.
#[derive(FromPyObject)]
enum Choices {
    #[pyo3(annotation = "list of str")]
    Shared(Vec<String>),
    #[pyo3(annotation = "list of lists of str")]
    PerText(Vec<Vec<String>>),
}

/// Builds the [`Question`] for one text.
fn question(
    text: Text,
    choices: Option<&[String]>,
    vocabulary: &Vocabulary,
    keep_last: Option<usize>,
) -> Result<Question> {
    Ok(match (text, choices) {
        (Text::Words(text), None) => Question::of_text(vocabulary, &text, keep_last)?,
        (Text::Ids(ids), None) => Question::of_ids(vocabulary, ids, keep_last)?,
        (Text::Words(prompt), Some(choices)) => {
            Question::of_choices(vocabulary, &prompt, choices, keep_last)?
        }
        (Text::Ids(_), Some(_)) => {
            return Err(type_error(
                "choices: the prompt must be a string; to use token ids, omit choices and pass a list with the ids of \
                 each choice as `text`",
            ));
        }
    })
}

/// Builds the [`Question`] for each text, and returns whether the input was a list.
fn questions(
    py: Python<'_>,
    texts: &Bound<'_, PyAny>,
    choices: Option<Choices>,
    vocabulary: &Vocabulary,
    keep_last: Option<usize>,
) -> Result<(bool, Vec<Question>)> {
    let (is_list, texts) = Texts::read(texts)?.into_list();
    let texts = collect_with_notes(py, texts, "text")?;
    let has_ids = texts.iter().all(|text| matches!(text, Text::Ids(_)));
    if choices.is_none() && is_list && has_ids && !vocabulary.config().head.has_labels() {
        // A list of token ID sequences contains the choices for a single question.
        let ids = texts.into_iter().map(|text| text.encoded(vocabulary)).collect::<Result<_>>()?;
        return Ok((false, vec![Question::of_choice_ids(vocabulary, ids, keep_last)?]));
    }
    let choices_per_text: Vec<Option<&[String]>> = match &choices {
        None => vec![None; texts.len()],
        Some(Choices::Shared(choices)) => vec![Some(choices); texts.len()],
        Some(Choices::PerText(choices)) if choices.len() == texts.len() => {
            choices.iter().map(|choices| Some(choices.as_slice())).collect()
        }
        Some(Choices::PerText(choices)) => {
            let (found, expected) = (choices.len(), texts.len());
            return Err(value_error(format!(
                "choices: expected one list for each of the {expected} texts, found {found} lists"
            )));
        }
    };
    let question = |(index, (text, choices))| {
        let made = question(text, choices, vocabulary, keep_last);
        made.map_err(|error| if is_list { error.with_note(py, &format!("text {index}")) } else { error })
    };
    let questions = texts.into_iter().zip(choices_per_text).enumerate().map(question);
    Ok((is_list, questions.collect::<Result<_>>()?))
}

#[pymethods]
impl Classifier {
    /// Opens a classifier from a checkpoint folder, a weights file or the Hugging Face Hub.
    ///
    /// The model is a GPT2ForSequenceClassification, a GPT2ForTokenClassification or a GPT2DoubleHeadsModel.
    /// The options are those of Model.from_pretrained. name_or_path may be None if an adapter names its base
    /// model.
    #[classmethod]
    #[pyo3(signature = (
        name_or_path, dtype = None, device = None, tokenizer = None, revision = None, offline = false,
        cache_dir = None, token = None, local_files_only = false, adapter = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python keyword arguments")]
    fn from_pretrained(
        cls: &Bound<'_, PyType>,
        name_or_path: Option<PathBuf>,
        dtype: Option<&Bound<'_, PyAny>>,
        device: Option<String>,
        tokenizer: Option<PathBuf>,
        revision: Option<String>,
        offline: bool,
        cache_dir: Option<PathBuf>,
        token: Option<HubToken>,
        local_files_only: bool,
        adapter: Option<Adapters>,
    ) -> Result<Self> {
        start()?;
        let hub = HubAccess::new(offline || local_files_only, cache_dir, token)?;
        let opened =
            OpenArguments::classifier(name_or_path, dtype, device, tokenizer, (revision, hub), adapter)?;
        let opened = reporting(cls.py(), |listener| opened.with_base_model(listener))?;
        let options = opened.options()?;
        let loaded =
            reporting(cls.py(), |listener| options.open_classifier(listener)?.load_classifier(listener))?;
        Ok(Self { loaded: Arc::new(loaded), opened })
    }

    /// Classifies a text or token IDs and returns a dict; for a list, returns a list of dicts.
    ///
    /// A dict has prompt_ids and `labels`, a list of dicts with label, score (as in transformers' pipeline)
    /// and logit, best first. A token classifier returns `tokens` instead: dicts with id, text, start and end
    /// (in characters) and labels.
    ///
    /// A model with double heads ranks `choices`, which are continuations of the prompt. It returns
    /// `choices`: dicts with index, text, score and logit, best first. For a list of prompts, `choices` may
    /// be one list for each prompt.
    ///
    /// batch_size: number of texts in a batch. keep_last: keep the last N tokens of a text longer than the
    /// context; by default such a text raises a ValueError.
    #[pyo3(signature = (text, choices = None, *, batch_size = CLASSIFIED_AT_ONCE, keep_last = None))]
    fn classify<'py>(
        &self,
        py: Python<'py>,
        text: &Bound<'py, PyAny>,
        choices: Option<Choices>,
        #[pyo3(from_py_with = number)] batch_size: usize,
        #[pyo3(from_py_with = number)] keep_last: Option<usize>,
    ) -> Result<Bound<'py, PyAny>> {
        start()?;
        check_batch_size(batch_size)?;
        let (is_list, questions) = questions(py, text, choices, self.loaded.vocabulary(), keep_last)?;
        let classified = computing_on(py, self.loaded.device(), || {
            let batches = questions.chunks(batch_size).map(|batch| self.loaded.classify(batch));
            Ok::<_, Failure>(batches.collect::<std::result::Result<Vec<_>, _>>()?.concat())
        })?;
        let reports = questions.iter().zip(&classified);
        let reports = reports
            .map(|(prompt_ids, classification)| report_to_dict(py, &Report { prompt_ids, classification }))
            .collect::<Result<Vec<_>>>()?;
        match (is_list, reports.first()) {
            (false, Some(report)) => Ok(report.clone().into_any()),
            _ => Ok(PyList::new(py, reports).map_err(Failure::from)?.into_any()),
        }
    }

    fn __repr__(&self) -> String {
        let loaded = &self.loaded;
        let labels = match loaded.config().num_labels() {
            0 => String::new(),
            count => format!(", {count} labels"),
        };
        format!(
            "Classifier({:?}, {}{labels}, {} parameters, {} weights in {:.1} MB on {}, {} threads)",
            self.opened.name(),
            loaded.config().head.class_name(),
            loaded.parameter_count(),
            loaded.weight_type(),
            loaded.weight_bytes() as f64 / 1e6,
            device_name(loaded.device()),
            thread_count()
        )
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let arguments = slf.get().opened.classifier_arguments(slf.py())?;
        Ok((slf.get_type().getattr("from_pretrained")?, arguments))
    }

    /// Name or path that the model was opened with.
    #[getter]
    fn name(&self) -> String {
        self.opened.name()
    }

    /// Data type of the weights.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.loaded.weight_type()
    }

    /// Device that the model runs on.
    #[getter]
    fn device(&self) -> String {
        device_name(self.loaded.device())
    }

    /// Label names by index, empty for a model that ranks choices.
    #[getter]
    fn labels(&self) -> Vec<String> {
        self.loaded.config().id2label.clone()
    }

    /// Configuration as a dict with the keys of config.json.
    #[getter]
    fn config<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        to_python(py, &self.loaded.config().to_json())
    }

    /// Encodes a text into token IDs.
    fn encode(&self, py: Python<'_>, text: &str) -> Result<Vec<u32>> {
        Ok(py.detach(|| self.loaded.vocabulary().encode(text))?)
    }

    /// Decodes token IDs into text.
    #[pyo3(signature = (ids, skip_special_tokens = true))]
    fn decode(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, skip_special_tokens: bool) -> Result<String> {
        let ids = Text::read(ids)?;
        py.detach(|| ids.decoded(self.loaded.vocabulary(), skip_special_tokens))
    }
}
