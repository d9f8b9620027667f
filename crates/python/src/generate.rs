//! Whole texts: of one prompt or many, each as the program would write it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use gpt2_engine::{EngineError, Job, LoadedModel, Silent, Text};
use gpt2_generation::{Clock, Event, GenerationError, LogitsProcessor, Request, SearchMode, StopReason};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString};

use crate::batch::{Batch, Step};
use crate::errors::{Failure, Result};
use crate::options::Asked;
use crate::process::computing;
use crate::signals::Signals;
use crate::values::python_of;

/// What became of a prompt; `None` where it was not begun.
pub(crate) type Outcome = Option<Result<Vec<Text>>>;

/// The texts of every prompt, in their order; with the exception that ended them early, if one did.
pub(crate) fn generate(
    py: Python<'_>,
    loaded: &LoadedModel,
    asked: &Asked,
    prompts: Vec<Result<Vec<u32>>>,
    batch_size: usize,
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
    let signals = Signals::new();
    let has_own_seeds = asked.seeds.is_some() && asked.config.search_mode() == SearchMode::TokenByToken;
    let made = computing(py, loaded, || match has_own_seeds {
        true => with_own_seeds(loaded, asked, &places, ids, batch_size, &signals),
        false => {
            let mut made = Vec::new();
            made.resize_with(places.len(), || None);
            let (processors, start) = (&asked.processors, Instant::now());
            let mut job = Listed { prompts: ids, made, processors, signals: &signals, start };
            loaded.generate(&mut job, batch_size, &asked.config, &Silent)?;
            Ok(job.made)
        }
    })?;
    for (place, texts) in places.into_iter().zip(made) {
        outcomes[place] = texts;
    }
    Ok((outcomes, signals.take()))
}

/// A list of prompts.
struct Listed<'a> {
    prompts: VecDeque<Vec<u32>>,
    made: Vec<Outcome>,
    processors: &'a [LogitsProcessor],
    signals: &'a Signals,
    start: Instant,
}

impl Job for Listed<'_> {
    type Error = EngineError;

    fn next_prompt(&mut self) -> std::result::Result<Option<Vec<u32>>, EngineError> {
        Ok(self.prompts.pop_front())
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
        self.signals.is_raised()
    }

    fn clock(&self) -> Option<Clock> {
        let start = self.start;
        Some(Arc::new(move || start.elapsed()))
    }

    fn processors(&self) -> Vec<LogitsProcessor> {
        self.processors.to_vec()
    }
}

/// The same where every prompt has a seed of its own.
fn with_own_seeds(
    loaded: &LoadedModel,
    asked: &Asked,
    places: &[usize],
    prompts: VecDeque<Vec<u32>>,
    batch_size: usize,
    signals: &Signals,
) -> Result<Vec<Outcome>> {
    let has_text = loaded.vocabulary().tokenizer().is_some();
    let is_drafted = loaded.assistant().is_some() || asked.config.prompt_lookup_num_tokens.is_some();
    let empty = Text {
        ids: Vec::new(),
        text: has_text.then(String::new),
        stop_reason: StopReason::MaxNewTokens,
        score: None,
        drafts: is_drafted.then(Default::default),
    };
    let texts = vec![empty; asked.config.num_return_sequences];
    let mut made: Vec<Outcome> = Vec::new();
    made.resize_with(prompts.len(), || Some(Ok(texts.clone())));
    let requests = prompts.into_iter().zip(places).map(|(prompt, place)| Request {
        processors: asked.processors.clone(),
        ..Request::new(prompt, asked.config_of(*place))
    });
    let mut batch = Batch::new(loaded, requests.collect(), batch_size)?;
    loop {
        match batch.step()? {
            Step::End => return Ok(made),
            Step::Nothing => {}
            Step::Event(place, Event::Token { sequence, id, text: piece, stop_reason, drafts, .. }) => {
                if let Some(Ok(texts)) = &mut made[place] {
                    let text = &mut texts[sequence];
                    text.ids.push(id);
                    text.drafts = text.drafts.map(|_| drafts);
                    if let Some(text) = &mut text.text {
                        text.push_str(&piece);
                    }
                    text.stop_reason = stop_reason.unwrap_or(StopReason::Interrupted);
                }
            }
            Step::Event(place, Event::Failed { error, .. }) => made[place] = Some(Err(error.into())),
            Step::Event(..) => {}
        }
        if signals.is_raised() {
            return Ok(made);
        }
    }
}

/// How texts are handed to Python.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    /// Whether the prompts were a list.
    pub(crate) is_list: bool,
    /// Whether several texts are made of each.
    pub(crate) has_several: bool,
    /// Whether more than the text is told.
    pub(crate) has_details: bool,
    /// Whether what went wrong with a prompt stands in its place.
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
            Some(Err(error)) if shape.returns_exceptions => error.into_exception(py).into_bound(py),
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
            error.value(py).setattr("partial", told)?;
            Err(error.into())
        }
    }
}

fn told_of_prompt(py: Python<'_>, texts: Vec<Text>, shape: Shape) -> Result<Bound<'_, PyAny>> {
    let told = |text: Text| -> Result<Bound<'_, PyAny>> {
        if shape.has_details {
            let json =
                serde_json::to_value(&text).map_err(|error| crate::errors::failed(error.to_string()))?;
            return Ok(python_of(py, &json)?);
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
