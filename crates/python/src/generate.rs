//! Generation of complete results for one or more prompts, identical to the program's output.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use candle_gpt2_engine::{Completion, EngineError, Job, LoadedModel, Silent};
use candle_gpt2_generation::{Clock, GenerationError, LogitsProcessor};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use crate::errors::{Failure, Result, gpt2_error, value_error};
use crate::model::Model;
use crate::options::{ParsedOptions, samples};
use crate::process::{computing_partly, interruptible, start};
use crate::raised::Raised;
use crate::signals::is_raised;
use crate::values::{self, Texts, number};

/// Result for a prompt, or `None` if its generation has not started.
pub(crate) type Outcome = Option<Result<Vec<Completion>>>;

/// Generates the completions of all prompts, in order.
///
/// If an exception ends generation early, it is returned along with the results so far.
pub(crate) fn generate(
    py: Python<'_>,
    loaded: &LoadedModel,
    parsed: &ParsedOptions,
    prompts: Vec<Result<Vec<u32>>>,
    batch_size: usize,
    raised: &Raised,
) -> Result<(Vec<Outcome>, Option<PyErr>)> {
    let mut outcomes: Vec<Outcome> = Vec::with_capacity(prompts.len());
    let (mut positions, mut ids) = (Vec::new(), VecDeque::new());
    for (position, prompt) in prompts.into_iter().enumerate() {
        outcomes.push(match prompt {
            Ok(prompt) => {
                positions.push(position);
                ids.push_back(prompt);
                None
            }
            Err(error) => Some(Err(error)),
        });
    }
    let seeds =
        parsed.seeds.as_ref().map(|seeds| positions.iter().map(|position| seeds[*position]).collect());
    let mut generated = Vec::new();
    generated.resize_with(positions.len(), || None);
    let mut job = PromptJob { prompts: ids, seeds, outcomes: generated, processors: &parsed.processors };
    let (done, signal) = computing_partly(py, loaded.device(), || {
        raised.computing(|| loaded.generate(&mut job, batch_size, &parsed.config, &Silent))
    })?;
    let raised = match (done, raised.take().or(signal)) {
        (Err(_), Some(raised)) => return Err(raised.into()),
        (done, raised) => done.map(|()| raised)?,
    };
    for (position, texts) in positions.into_iter().zip(job.outcomes) {
        outcomes[position] = texts;
    }
    Ok((outcomes, raised))
}

/// Creates a clock that starts now.
pub(crate) fn clock() -> Clock {
    let start = Instant::now();
    Arc::new(move || start.elapsed())
}

/// Generation job for a list of prompts.
struct PromptJob<'a> {
    prompts: VecDeque<Vec<u32>>,
    /// One seed per prompt, if each prompt has its own.
    seeds: Option<Vec<u64>>,
    outcomes: Vec<Outcome>,
    processors: &'a [LogitsProcessor],
}

impl Job for PromptJob<'_> {
    type Error = EngineError;

    fn next_prompt(&mut self) -> std::result::Result<Option<Vec<u32>>, EngineError> {
        Ok(self.prompts.pop_front())
    }

    fn seed(&self, prompt: usize) -> Option<u64> {
        self.seeds.as_ref()?.get(prompt).copied()
    }

    fn on_texts(
        &mut self,
        prompt: usize,
        texts: std::result::Result<Vec<Completion>, GenerationError>,
    ) -> std::result::Result<(), EngineError> {
        if let Some(outcome) = self.outcomes.get_mut(prompt) {
            *outcome = Some(texts.map_err(Failure::from));
        }
        Ok(())
    }

    fn is_interrupted(&self) -> bool {
        is_raised()
    }

    fn clock(&self) -> Option<Clock> {
        Some(clock())
    }

    fn processors(&self) -> Vec<LogitsProcessor> {
        self.processors.to_vec()
    }
}

/// Form of the results that are returned to Python.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    /// Whether the prompts were passed as a list.
    pub(crate) is_list: bool,
    /// Whether each prompt has several completions.
    pub(crate) has_several: bool,
    /// Whether results contain more than the text.
    pub(crate) has_details: bool,
    /// Whether a failed prompt's error is returned as its result.
    pub(crate) returns_exceptions: bool,
}

/// Converts the outcomes to Python objects.
pub(crate) fn outcomes_to_python<'py>(
    py: Python<'py>,
    outcomes: Vec<Outcome>,
    interrupted: Option<PyErr>,
    shape: Shape,
) -> Result<Bound<'py, PyAny>> {
    let mut list = Vec::with_capacity(outcomes.len());
    for (index, outcome) in outcomes.into_iter().enumerate() {
        list.push(match outcome {
            None => py.None().into_bound(py),
            Some(Ok(texts)) => prompt_to_python(py, texts, shape)?,
            // An interruption takes precedence over a prompt's error.
            Some(Err(error)) if shape.returns_exceptions || interrupted.is_some() => {
                error.into_exception(py).into_bound(py)
            }
            Some(Err(error)) if shape.is_list => return Err(error.with_note(py, &format!("prompt {index}"))),
            Some(Err(error)) => return Err(error),
        });
    }
    let value = match (shape.is_list, list.len()) {
        (false, 1) => list.swap_remove(0),
        _ => PyList::new(py, list)?.into_any(),
    };
    match interrupted {
        None => Ok(value),
        // Keep the results so far.
        Some(error) => {
            // Exceptions that accept no attributes are raised without `partial`.
            let _ = error.value(py).setattr("partial", value);
            Err(error.into())
        }
    }
}

fn prompt_to_python(py: Python<'_>, texts: Vec<Completion>, shape: Shape) -> Result<Bound<'_, PyAny>> {
    let to_value = |text: Completion| -> Result<Bound<'_, PyAny>> {
        if shape.has_details {
            return values::report_to_dict(py, &text);
        }
        // Without a tokenizer, return the token IDs.
        Ok(match text.text {
            Some(text) => PyString::new(py, &text).into_any(),
            None => text.ids.into_pyobject(py)?.into_any(),
        })
    };
    let mut values: Vec<_> = texts.into_iter().map(to_value).collect::<Result<_>>()?;
    Ok(match (shape.has_several, values.len()) {
        (false, 1) => values.swap_remove(0),
        _ => PyList::new(py, values)?.into_any(),
    })
}

/// Keywords of `generate` that are not generation options.
const OTHER_KEYWORDS: [&str; 4] = ["batch_size", "details", "return_exceptions", "hooks"];

#[pymethods]
impl Model {
    /// Continues a prompt and returns the completion without the prompt.
    ///
    /// Unlike HookedTransformer, this method prepends no BOS token by default.
    ///
    /// prompt: a text, token IDs, or a list of these. The options are those of transformers (max_new_tokens,
    /// do_sample, temperature, top_k, num_beams, …) and seed, stop, bad_words, logit_bias, keep_last,
    /// keep_head, slide, json_schema, json_object, regex, grammar and logits_processor; see
    /// help(candle_gpt2). prepend_bos: prepend a BOS token to texts. batch_size: number of sequences in a
    /// batch. details: return dicts with ids, text, stop_reason and score instead of texts.
    /// return_exceptions: return an exception as the result of a prompt that fails. hooks: see
    /// run_with_cache.
    #[pyo3(signature = (prompt, *, batch_size = 8, details = false, return_exceptions = false, hooks = None, **options))]
    #[expect(clippy::too_many_arguments, reason = "Python keyword arguments")]
    fn generate<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        #[pyo3(from_py_with = number)] batch_size: usize,
        details: bool,
        return_exceptions: bool,
        hooks: Option<&Bound<'py, PyAny>>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> Result<Bound<'py, PyAny>> {
        start()?;
        check_batch_size(batch_size)?;
        let raised = Raised::default();
        let parsed =
            ParsedOptions::read(py, &self.loaded, || self.compiler(), options, &OTHER_KEYWORDS, &raised)?;
        let (is_list, prompts) = Texts::read(prompt)?.into_list();
        parsed.check_seeds(prompts.len())?;
        let prompts = self.prompts(py, prompts, &parsed)?;
        let prompts = match return_exceptions {
            true => prompts,
            false if is_list => collect_with_notes(py, prompts, "prompt")?.into_iter().map(Ok).collect(),
            false => prompts.into_iter().map(|prompt| prompt.map(Ok)).collect::<Result<_>>()?,
        };
        let loaded = self.hooked(hooks, &raised)?;
        let (outcomes, interrupted) = generate(py, &loaded, &parsed, prompts, batch_size, &raised)?;
        let shape = Shape {
            is_list,
            has_several: parsed.config.num_return_sequences > 1,
            has_details: details,
            returns_exceptions: return_exceptions,
        };
        outcomes_to_python(py, outcomes, interrupted, shape)
    }

    /// Whether `generate` samples with these keywords, so that the seed matters.
    #[pyo3(signature = (**options))]
    fn _samples(&self, options: Option<&Bound<'_, PyDict>>) -> Result<bool> {
        samples(&self.loaded, options, &OTHER_KEYWORDS)
    }
}

impl Model {
    /// Encodes a prompt into the tokens that the model receives.
    pub(crate) fn prompt(&self, prompt: values::Text, parsed: &ParsedOptions) -> Result<Vec<u32>> {
        let vocabulary = self.loaded.vocabulary();
        Ok(vocabulary.prompt(prompt.encoded_after(parsed.bos, vocabulary)?, &parsed.config)?)
    }

    /// Encodes many prompts with the GIL released.
    pub(crate) fn prompts(
        &self,
        py: Python<'_>,
        prompts: Vec<Result<values::Text>>,
        parsed: &ParsedOptions,
    ) -> Result<Vec<Result<Vec<u32>>>> {
        let prompt = |prompt: Result<values::Text>| match is_raised() {
            // The thread that waits for the prompts raises the exception.
            true => Err(gpt2_error("interrupted")),
            false => Ok(prompt.and_then(|prompt| self.prompt(prompt, parsed))),
        };
        interruptible(py, || prompts.into_iter().map(prompt).collect::<Result<_>>())
    }
}

/// Collects all members of a list.
///
/// The first error gets a note with its index.
pub(crate) fn collect_with_notes<T>(py: Python<'_>, members: Vec<Result<T>>, what: &str) -> Result<Vec<T>> {
    let member = |(index, member): (usize, Result<T>)| {
        member.map_err(|error| error.with_note(py, &format!("{what} {index}")))
    };
    members.into_iter().enumerate().map(member).collect()
}

pub(crate) fn check_batch_size(batch_size: usize) -> Result<()> {
    match batch_size {
        0 => Err(value_error("batch_size: expected at least 1, found 0")),
        _ => Ok(()),
    }
}
