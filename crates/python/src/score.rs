//! Log-probabilities of texts and of continuations of a prompt.
//!
//! Result dicts have the keys of `gpt2 score --json`.

use candle_gpt2_engine::{Choices, LoadedModel, ScoredChoice, Silent};
use candle_gpt2_generation::{Score, default_stride};
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::errors::{Failure, Result};
use crate::generate::collect_with_notes;
use crate::model::Model;
use crate::process::{computing, start};
use crate::values::{Text, Texts, number};

/// Scores a text.
fn score_text<'py>(
    py: Python<'py>,
    loaded: &LoadedModel,
    text: Text,
    bos: Option<u32>,
    stride: Option<usize>,
    top: usize,
) -> Result<Bound<'py, PyDict>> {
    let stride = stride.unwrap_or(default_stride(loaded.config()));
    let (ids, scored) = computing(py, loaded, || {
        let ids = text.encoded_after(bos, loaded.vocabulary())?;
        let scored = candle_gpt2_generation::score(loaded.model(), &ids, stride, top, &|_| {})?;
        Ok::<_, Failure>((ids, scored))
    })?;
    let perplexity = scored.perplexity();
    let Score { logprobs, alternatives, loss } = scored;
    let numbers: Vec<f64> = logprobs.iter().map(|logprob| logprob.unwrap_or(f64::NAN)).collect();
    let dict = PyDict::new(py);
    dict.set_item("ids", ids)?;
    dict.set_item("sum", logprobs.iter().flatten().sum::<f64>())?;
    dict.set_item("logprobs", numbers.into_pyarray(py))?;
    dict.set_item("loss", loss)?;
    dict.set_item("perplexity", perplexity)?;
    if top > 0 {
        dict.set_item("alternatives", alternatives)?;
    }
    Ok(dict)
}

/// Scores continuations of a prompt.
fn score_continuations<'py>(
    py: Python<'py>,
    loaded: &LoadedModel,
    prompt: &str,
    continuations: &[String],
) -> Result<Vec<Bound<'py, PyDict>>> {
    let scored = computing(py, loaded, || {
        Choices::new(loaded.vocabulary(), prompt, continuations)?.score(loaded, &Silent)
    })?;
    let choice_dict = |choice: ScoredChoice| -> Result<_> {
        let dict = PyDict::new(py);
        dict.set_item("ids", choice.ids)?;
        dict.set_item("sum", choice.sum)?;
        dict.set_item("mean", choice.mean)?;
        dict.set_item("per_token", choice.per_token)?;
        dict.set_item("per_character", choice.per_character)?;
        dict.set_item("per_byte", choice.per_byte)?;
        dict.set_item("is_greedy", choice.is_greedy)?;
        dict.set_item("logprobs", PyArray1::from_vec(py, choice.logprobs))?;
        dict.set_item("text", choice.text)?;
        Ok(dict)
    };
    scored.choices.into_iter().map(choice_dict).collect()
}

#[pymethods]
impl Model {
    /// Computes the log-probability of a text.
    ///
    /// Returns a dict with ids, logprobs (NaN for the first token), sum, loss and perplexity; for a list of
    /// texts, a list of dicts. Unlike HookedTransformer, this method prepends no BOS token by default.
    ///
    /// stride: distance between windows of texts longer than the context, by default half the context. top:
    /// also return this many most probable alternatives of each token. prepend_bos: prepend a BOS token to
    /// texts, so that their first token is scored too. return_exceptions: return an exception as the result of
    /// a text that fails.
    #[pyo3(signature = (text, stride = None, top = 0, *, prepend_bos = false, return_exceptions = false))]
    fn score<'py>(
        &self,
        py: Python<'py>,
        text: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = number)] stride: Option<usize>,
        #[pyo3(from_py_with = number)] top: usize,
        prepend_bos: bool,
        return_exceptions: bool,
    ) -> Result<Bound<'py, PyAny>> {
        start()?;
        let bos = self.bos(prepend_bos)?;
        let (is_list, texts) = Texts::read(text)?.into_list();
        let texts = match return_exceptions {
            true => texts,
            false => collect_with_notes(py, texts, "text")?.into_iter().map(Ok).collect(),
        };
        let scored = texts.into_iter().enumerate().map(|(index, text)| {
            match text.and_then(|text| score_text(py, &self.loaded, text, bos, stride, top)) {
                Ok(score) => Ok(score.into_any()),
                Err(error) if return_exceptions => error.into_item(py),
                Err(error) if is_list => Err(error.with_note(py, &format!("text {index}"))),
                Err(error) => Err(error),
            }
        });
        let mut scored = scored.collect::<Result<Vec<_>>>()?;
        Ok(match (is_list, scored.len()) {
            (false, 1) => scored.swap_remove(0),
            _ => PyList::new(py, scored)?.into_any(),
        })
    }

    /// Computes the log-probabilities of continuations of a prompt.
    ///
    /// Returns a dict for each continuation: text, ids, logprobs, is_greedy, sum, and the sum normalized
    /// per_token (mean is the same), per_character and per_byte. A leading space does not count as a
    /// character or byte.
    fn score_continuations<'py>(
        &self,
        py: Python<'py>,
        prompt: &str,
        continuations: Vec<String>,
    ) -> Result<Vec<Bound<'py, PyDict>>> {
        start()?;
        score_continuations(py, &self.loaded, prompt, &continuations)
    }
}
