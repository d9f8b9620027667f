//! How probable a text is, or continuations of a prompt: dicts with the names of `gpt2 score --json`.

use gpt2_engine::LoadedModel;
use gpt2_generation::{Continuation, Score};
use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::Result;
use crate::process::computing;

/// The score of a text.
pub(crate) fn score<'py>(
    py: Python<'py>,
    loaded: &LoadedModel,
    ids: Vec<u32>,
    stride: Option<usize>,
    top: usize,
) -> Result<Bound<'py, PyDict>> {
    let stride = stride.unwrap_or_else(|| loaded.config().n_positions.div_ceil(2));
    let scored =
        computing(py, loaded, || gpt2_generation::score(loaded.model(), &ids, stride, top, &|_| {}))?;
    py.check_signals()?;
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

/// The scores of continuations of a prompt. A token may reach from the prompt into a continuation, so both are encoded together,
/// and what follows the tokens that all of them and the prompt begin with is the continuation's.
pub(crate) fn score_continuations<'py>(
    py: Python<'py>,
    loaded: &LoadedModel,
    prompt: &str,
    continuations: Vec<String>,
) -> Result<Vec<Bound<'py, PyDict>>> {
    let vocabulary = loaded.vocabulary();
    let mut prompt_ids = vocabulary.encode(prompt)?;
    let mut wholes = Vec::with_capacity(continuations.len());
    for continuation in &continuations {
        wholes.push(vocabulary.encode(&format!("{prompt}{continuation}"))?);
    }
    let shared = |ids: &Vec<u32>| ids.iter().zip(&prompt_ids).take_while(|(a, b)| a == b).count();
    prompt_ids.truncate(wholes.iter().map(shared).min().unwrap_or(0));
    let own: Vec<Vec<u32>> = wholes.into_iter().map(|mut ids| ids.split_off(prompt_ids.len())).collect();
    let prompt_ids = vocabulary.start_if_empty(prompt_ids);
    let scored = computing(py, loaded, || {
        gpt2_generation::score_continuations(loaded.model(), &prompt_ids, &own, &|| {})
    })?;
    py.check_signals()?;
    let of_one = |((text, ids), scored): ((String, Vec<u32>), Continuation)| {
        let dict = PyDict::new(py);
        dict.set_item("ids", ids)?;
        dict.set_item("sum", scored.sum())?;
        // The space between the prompt and it is scored and not counted.
        let counted = text.strip_prefix(' ').unwrap_or(&text);
        let per = |count: usize| scored.sum() / count.max(1) as f64;
        dict.set_item("mean", scored.mean())?;
        dict.set_item("per_token", scored.mean())?;
        dict.set_item("per_character", per(counted.chars().count()))?;
        dict.set_item("per_byte", per(counted.len()))?;
        dict.set_item("is_greedy", scored.is_greedy)?;
        dict.set_item("logprobs", PyArray1::from_vec(py, scored.logprobs))?;
        dict.set_item("text", text)?;
        Ok(dict)
    };
    continuations.into_iter().zip(own).zip(scored).map(of_one).collect()
}
