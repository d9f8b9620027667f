//! A classifier that Python holds: labels of texts or of their tokens, or which of several texts is right, as dicts with the names of
//! `gpt2 classify --json`.

use std::path::PathBuf;
use std::sync::Arc;

use candle_gpt2_engine::{CLASSIFIED_AT_ONCE, Classification, Question, Vocabulary, device_name};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple, PyType};
use serde::Serialize;

use crate::errors::{Failure, Result, wrong_type, wrong_value};
use crate::generate::{all_of, check_batch_size};
use crate::model::{Adapters, HubAccess, HubToken, Opened};
use crate::process::{computing_on, start, thread_count};
use crate::reporting::reporting;
use crate::values::{Text, Texts, dict_of, number, python_of};

/// A GPT-2 in memory that labels texts or their tokens, or chooses among several texts. Threads may share it; a pickle holds its name,
/// by which another process opens it again.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct Classifier {
    loaded: Arc<candle_gpt2_engine::Classifier>,
    opened: Opened,
}

/// The result for a text.
#[derive(Serialize)]
struct Report<'a> {
    prompt_ids: &'a Question,
    #[serde(flatten)]
    classification: &'a Classification,
}

/// Choices, of one prompt or of each.
#[derive(FromPyObject)]
enum Choices {
    #[pyo3(annotation = "list of str")]
    OfOne(Vec<String>),
    #[pyo3(annotation = "list of lists of str")]
    OfEach(Vec<Vec<String>>),
}

/// The question that a text is.
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
            return Err(wrong_type("choices follow a text (str); give the tokens of each choice as a list"));
        }
    })
}

/// The questions that texts are, and whether they are a list of them.
fn questions(
    py: Python<'_>,
    texts: &Bound<'_, PyAny>,
    choices: Option<Choices>,
    vocabulary: &Vocabulary,
    keep_last: Option<usize>,
) -> Result<(bool, Vec<Question>)> {
    let (is_list, texts) = Texts::read(texts)?.into_list();
    let texts = all_of(py, texts, "text")?;
    let has_ids = texts.iter().all(|text| matches!(text, Text::Ids(_)));
    if choices.is_none() && is_list && has_ids && !vocabulary.config().head.has_labels() {
        // The tokens of each choice of one question.
        let ids = texts.into_iter().map(|text| text.encoded(vocabulary)).collect::<Result<_>>()?;
        return Ok((false, vec![Question::of_choice_ids(vocabulary, ids, keep_last)?]));
    }
    let of_each: Vec<Option<&[String]>> = match &choices {
        None => vec![None; texts.len()],
        Some(Choices::OfOne(choices)) => vec![Some(choices); texts.len()],
        Some(Choices::OfEach(choices)) if choices.len() == texts.len() => {
            choices.iter().map(|choices| Some(choices.as_slice())).collect()
        }
        Some(Choices::OfEach(choices)) => {
            let (found, expected) = (choices.len(), texts.len());
            return Err(wrong_value(format!(
                "choices: expected one list for each of {expected} texts, found {found}"
            )));
        }
    };
    let question = |(index, (text, choices))| {
        let made = question(text, choices, vocabulary, keep_last);
        made.map_err(|error| if is_list { error.with_note(py, &format!("text {index}")) } else { error })
    };
    let questions = texts.into_iter().zip(of_each).enumerate().map(question);
    Ok((is_list, questions.collect::<Result<_>>()?))
}

#[pymethods]
impl Classifier {
    /// Opens a classifier: a checkpoint folder or weights file of a GPT2ForSequenceClassification, a GPT2ForTokenClassification or a
    /// GPT2DoubleHeadsModel, or such a model on the Hugging Face Hub. The options are those of Model.from_pretrained. name_or_path may
    /// be None if an adapter names its base model.
    #[classmethod]
    #[pyo3(signature = (
        name_or_path, dtype = None, device = None, tokenizer = None, revision = None, offline = false,
        cache_dir = None, token = None, local_files_only = false, adapter = None
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
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
        let opened = Opened::classifier(name_or_path, dtype, device, tokenizer, (revision, hub), adapter)?;
        let opened = reporting(cls.py(), |listener| opened.with_base_model(listener))?;
        let options = opened.options()?;
        let loaded =
            reporting(cls.py(), |listener| options.open_classifier(listener)?.load_classifier(listener))?;
        Ok(Self { loaded: Arc::new(loaded), opened })
    }

    /// The model's labels: for a text (or token ids) a dict with prompt_ids and `labels`, a list of dicts with label, score (as
    /// transformers' pipeline has them) and logit, the best first; a model that labels tokens gives `tokens` in their place, dicts with
    /// id, text, start and end (in characters) and labels. For a list of texts, a list.
    ///
    /// A model with double heads takes `choices`, possible texts after the prompt, and gives `choices`: dicts with index, text, score
    /// and logit, the best first. For a list of prompts they may be a list for each.
    ///
    /// batch_size: texts that are computed at once. keep_last: keep the last N tokens of a text longer than the context; without it such
    /// a text is a ValueError.
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
            .map(|(prompt_ids, classification)| dict_of(py, &Report { prompt_ids, classification }))
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

    /// The name that it was opened by.
    #[getter]
    fn name(&self) -> String {
        self.opened.name()
    }

    /// The precision of the weights.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.loaded.weight_type()
    }

    /// The device that it runs on.
    #[getter]
    fn device(&self) -> String {
        device_name(self.loaded.device())
    }

    /// The names of the labels by their numbers; empty if it chooses among texts.
    #[getter]
    fn labels(&self) -> Vec<String> {
        self.loaded.config().id2label.clone()
    }

    /// The configuration, with the keys of a config.json.
    #[getter]
    fn config<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        python_of(py, &self.loaded.config().to_json())
    }

    /// The tokens of a text.
    fn encode(&self, py: Python<'_>, text: &str) -> Result<Vec<u32>> {
        Ok(py.detach(|| self.loaded.vocabulary().encode(text))?)
    }

    /// The text of tokens.
    #[pyo3(signature = (ids, skip_special_tokens = true))]
    fn decode(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, skip_special_tokens: bool) -> Result<String> {
        let ids = Text::read(ids)?;
        py.detach(|| ids.decoded(self.loaded.vocabulary(), skip_special_tokens))
    }
}
