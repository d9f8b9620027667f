//! Whole texts: of one prompt or many, each as the program would write it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use candle_gpt2_engine::{EngineError, Job, LoadedModel, Silent, Text};
use candle_gpt2_generation::{Clock, GenerationError, LogitsProcessor};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use crate::errors::{Failure, Result, failed, wrong_value};
use crate::model::Model;
use crate::options::{Asked, samples};
use crate::process::{computing_partly, interruptible, start};
use crate::raised::Raised;
use crate::signals::is_raised;
use crate::values::{self, Texts, number};

/// What became of a prompt; `None` if it was not begun.
pub(crate) type Outcome = Option<Result<Vec<Text>>>;

/// The texts of every prompt, in their order; with the exception that ended them early, if one did.
pub(crate) fn generate(
    py: Python<'_>,
    loaded: &LoadedModel,
    asked: &Asked,
    prompts: Vec<Result<Vec<u32>>>,
    batch_size: usize,
    raised: &Raised,
) -> Result<(Vec<Outcome>, Option<PyErr>)> {
    let mut outcomes: Vec<Outcome> = Vec::with_capacity(prompts.len());
    let (mut places, mut ids) = (Vec::new(), VecDeque::new());
    for (place, prompt) in prompts.into_iter().enumerate() {
        outcomes.push(match prompt {
            Ok(prompt) => {
                places.push(place);
                ids.push_back(prompt);
                None
            }
            Err(error) => Some(Err(error)),
        });
    }
    let seeds = asked.seeds.as_ref().map(|seeds| places.iter().map(|place| seeds[*place]).collect());
    let mut made = Vec::new();
    made.resize_with(places.len(), || None);
    let mut job = Listed { prompts: ids, seeds, made, processors: &asked.processors };
    let (done, signal) = computing_partly(py, loaded.device(), || {
        raised.computing(|| loaded.generate(&mut job, batch_size, &asked.config, &Silent))
    })?;
    let raised = match (done, raised.take().or(signal)) {
        (Err(_), Some(raised)) => return Err(raised.into()),
        (done, raised) => done.map(|()| raised)?,
    };
    for (place, texts) in places.into_iter().zip(job.made) {
        outcomes[place] = texts;
    }
    Ok((outcomes, raised))
}

/// A clock that starts now.
pub(crate) fn clock() -> Clock {
    let start = Instant::now();
    Arc::new(move || start.elapsed())
}

/// A list of prompts.
struct Listed<'a> {
    prompts: VecDeque<Vec<u32>>,
    /// Those of the prompts, if each has its own.
    seeds: Option<Vec<u64>>,
    made: Vec<Outcome>,
    processors: &'a [LogitsProcessor],
}

impl Job for Listed<'_> {
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
        texts: std::result::Result<Vec<Text>, GenerationError>,
    ) -> std::result::Result<(), EngineError> {
        if let Some(made) = self.made.get_mut(prompt) {
            *made = Some(texts.map_err(Failure::from));
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

/// How texts are handed to Python.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    /// Whether the prompts were a list.
    pub(crate) is_list: bool,
    /// Whether several texts are made of each.
    pub(crate) has_several: bool,
    /// Whether more than the text is returned.
    pub(crate) has_details: bool,
    /// Whether the error of a prompt is returned in its place.
    pub(crate) returns_exceptions: bool,
}

/// The texts as Python gets them.
pub(crate) fn told<'py>(
    py: Python<'py>,
    outcomes: Vec<Outcome>,
    interrupted: Option<PyErr>,
    shape: Shape,
) -> Result<Bound<'py, PyAny>> {
    let mut list = Vec::with_capacity(outcomes.len());
    for (index, outcome) in outcomes.into_iter().enumerate() {
        list.push(match outcome {
            None => py.None().into_bound(py),
            Some(Ok(texts)) => told_of_prompt(py, texts, shape)?,
            // That the texts were ended is told before what is wrong with a prompt.
            Some(Err(error)) if shape.returns_exceptions || interrupted.is_some() => {
                error.into_exception(py).into_bound(py)
            }
            Some(Err(error)) if shape.is_list => return Err(error.with_note(py, &format!("prompt {index}"))),
            Some(Err(error)) => return Err(error),
        });
    }
    let told = match (shape.is_list, list.len()) {
        (false, 1) => list.swap_remove(0),
        _ => PyList::new(py, list)?.into_any(),
    };
    match interrupted {
        None => Ok(told),
        // What was made until then is not lost.
        Some(error) => {
            // An exception that takes no attributes is told without.
            let _ = error.value(py).setattr("partial", told);
            Err(error.into())
        }
    }
}

fn told_of_prompt(py: Python<'_>, texts: Vec<Text>, shape: Shape) -> Result<Bound<'_, PyAny>> {
    let told = |text: Text| -> Result<Bound<'_, PyAny>> {
        if shape.has_details {
            return values::dict_of(py, &text);
        }
        // Without a tokenizer the ids are the text.
        Ok(match text.text {
            Some(text) => PyString::new(py, &text).into_any(),
            None => text.ids.into_pyobject(py)?.into_any(),
        })
    };
    let mut told: Vec<_> = texts.into_iter().map(told).collect::<Result<_>>()?;
    Ok(match (shape.has_several, told.len()) {
        (false, 1) => told.swap_remove(0),
        _ => PyList::new(py, told)?.into_any(),
    })
}

/// Keywords of `generate` that are no options of texts.
const OTHERS: [&str; 4] = ["batch_size", "details", "return_exceptions", "hooks"];

#[pymethods]
impl Model {
    /// Continues a prompt and returns the continuation without it; no BOS token by default, unlike a HookedTransformer.
    ///
    /// prompt: a text, token ids, or a list of these. Options are transformers' (max_new_tokens, do_sample, temperature, top_k, num_beams,
    /// …) with seed, stop, bad_words, logit_bias, keep_last, keep_head, slide, json_schema, json_object, regex, grammar and
    /// logits_processor; see help(candle_gpt2). prepend_bos: put a BOS token in front of texts. batch_size: sequences that are generated at once. details: dicts with ids, text, stop_reason and score in place of texts.
    /// return_exceptions: return the exception of a prompt in its place. hooks: see run_with_cache.
    #[pyo3(signature = (prompt, *, batch_size = 8, details = false, return_exceptions = false, hooks = None, **options))]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
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
        let asked = Asked::read(py, &self.loaded, || self.compiler(), options, &OTHERS, &raised)?;
        let (is_list, prompts) = Texts::read(prompt)?.into_list();
        asked.check_seeds(prompts.len())?;
        let prompts = self.prompts(py, prompts, &asked)?;
        let prompts = match return_exceptions {
            true => prompts,
            false if is_list => all_of(py, prompts, "prompt")?.into_iter().map(Ok).collect(),
            false => prompts.into_iter().map(|prompt| prompt.map(Ok)).collect::<Result<_>>()?,
        };
        let loaded = self.hooked(hooks, &raised)?;
        let (outcomes, interrupted) = generate(py, &loaded, &asked, prompts, batch_size, &raised)?;
        let shape = Shape {
            is_list,
            has_several: asked.config.num_return_sequences > 1,
            has_details: details,
            returns_exceptions: return_exceptions,
        };
        told(py, outcomes, interrupted, shape)
    }

    /// Whether `generate` samples with these keywords, so that a seed changes its texts.
    #[pyo3(signature = (**options))]
    fn _samples(&self, options: Option<&Bound<'_, PyDict>>) -> Result<bool> {
        samples(&self.loaded, options, &OTHERS)
    }
}

impl Model {
    /// The tokens of a prompt as the model gets them.
    pub(crate) fn prompt(&self, prompt: values::Text, asked: &Asked) -> Result<Vec<u32>> {
        let vocabulary = self.loaded.vocabulary();
        let bos = asked.bos.filter(|_| matches!(prompt, values::Text::Words(_)));
        let ids = bos.into_iter().chain(prompt.encoded(vocabulary)?).collect();
        Ok(vocabulary.prompt(ids, &asked.config)?)
    }

    /// Those of many prompts, made without the interpreter's lock.
    pub(crate) fn prompts(
        &self,
        py: Python<'_>,
        prompts: Vec<Result<values::Text>>,
        asked: &Asked,
    ) -> Result<Vec<Result<Vec<u32>>>> {
        let prompt = |prompt: Result<values::Text>| match is_raised() {
            // The waiting thread raises the exception.
            true => Err(failed("interrupted")),
            false => Ok(prompt.and_then(|prompt| self.prompt(prompt, asked))),
        };
        interruptible(py, || prompts.into_iter().map(prompt).collect::<Result<_>>())
    }
}

/// All members of a list, or what is wrong with the first that is none.
pub(crate) fn all_of<T>(py: Python<'_>, members: Vec<Result<T>>, what: &str) -> Result<Vec<T>> {
    let member = |(index, member): (usize, Result<T>)| {
        member.map_err(|error| error.with_note(py, &format!("{what} {index}")))
    };
    members.into_iter().enumerate().map(member).collect()
}

pub(crate) fn check_batch_size(batch_size: usize) -> Result<()> {
    match batch_size {
        0 => Err(wrong_value("batch_size: expected at least 1, found 0")),
        _ => Ok(()),
    }
}
