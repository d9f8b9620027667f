//! Texts as they are made: iterators of pieces.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::result;

use candle_gpt2_engine::{EngineError, Happened, LoadedModel, Texts};
use candle_gpt2_generation::{Event, GenerationError, Request, SearchMode, StopReason};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::errors::{Failure, Result, wrong_type, wrong_value};
use crate::generate::{all_of, check_batch_size, clock};
use crate::model::Model;
use crate::options::Asked;
use crate::process::{computing, computing_partly, start};
use crate::raised::{Lent, Raised};
use crate::signals::is_raised;
use crate::values::{self, number};

/// A piece of a text, or the error that ended the text.
type Piece = result::Result<String, Failure>;

/// Texts in the making.
struct Streamed {
    loaded: LoadedModel,
    raised: Raised,
    state: Lent<State>,
}

struct State {
    /// Until the last text has ended.
    texts: Option<Texts<()>>,
    /// What the last step brought.
    happened: VecDeque<Happened>,
    /// Why the device failed in it.
    failure: Option<GenerationError>,
    /// Errors of prompts, and pieces that were made when an exception came.
    pieces: VecDeque<(usize, Piece)>,
    /// The prompt of each request.
    places: Vec<usize>,
    /// Whether the error of a prompt is returned in its place.
    returns_exceptions: bool,
    ids: Vec<Vec<u32>>,
    stop_reasons: Vec<Option<StopReason>>,
}

impl Streamed {
    fn new(
        py: Python<'_>,
        loaded: LoadedModel,
        asked: &Asked,
        prompts: Vec<Result<Vec<u32>>>,
        batch_size: usize,
        returns_exceptions: bool,
        raised: Raised,
    ) -> Result<Self> {
        if asked.config.num_return_sequences != 1 {
            return Err(wrong_value(
                "num_return_sequences: one text is streamed of each prompt; give the prompt several times, with other seeds",
            ));
        }
        if asked.config.search_mode() != SearchMode::TokenByToken {
            return Err(wrong_value(
                "beam and contrastive search find a text as a whole, which cannot be streamed; call generate",
            ));
        }
        let count = prompts.len();
        let (mut requests, mut places, mut pieces) = (Vec::new(), Vec::new(), VecDeque::new());
        for (place, prompt) in prompts.into_iter().enumerate() {
            match prompt {
                Ok(prompt) => {
                    let processors = asked.processors.clone();
                    requests.push(Request { processors, ..Request::new(prompt, asked.config_of(place)) });
                    places.push(place);
                }
                Err(error) => pieces.push_back((place, Err(error))),
            }
        }
        let texts = computing(py, &loaded, || {
            let mut texts = Texts::new(loaded.scheduler_for(&requests, batch_size, Some(clock()))?);
            texts.begin(requests, ());
            while let Some((_, request, taken)) = texts.feed(usize::MAX) {
                match taken {
                    Err(error) if returns_exceptions => {
                        pieces.push_back((places[request], Err(error.into())));
                    }
                    taken => taken?,
                }
            }
            Ok::<_, EngineError>(texts)
        })?;
        let state = State {
            texts: Some(texts),
            happened: VecDeque::new(),
            failure: None,
            pieces,
            places,
            returns_exceptions,
            ids: vec![Vec::new(); count],
            stop_reasons: vec![None; count],
        };
        Ok(Self { loaded, raised, state: Lent::new("the stream", state) })
    }

    /// The next piece of a text, and of which; `None` after the last.
    fn next(&self, py: Python<'_>) -> Result<Option<(usize, Piece)>> {
        start()?;
        let (next, signal) = computing_partly(py, self.loaded.device(), || {
            self.raised.computing(|| {
                self.state.lent_to(&self.raised, |state| {
                    let next = state.next();
                    // After an error there is no text.
                    if !matches!(next, Ok(Some(_))) && !is_raised() {
                        state.texts = None;
                    }
                    next
                })?
            })
        })?;
        let Some(error) = self.raised.take().or(signal) else { return next };
        self.state.with(py, |state| {
            state.pieces.extend(next.ok().flatten());
            state.interrupt();
        })?;
        Err(error.into())
    }
}

impl State {
    fn next(&mut self) -> Result<Option<(usize, Piece)>> {
        if let Some(piece) = self.pieces.pop_front() {
            return Ok(Some(piece));
        }
        loop {
            while let Some(happened) = self.happened.pop_front() {
                if let Some(piece) = self.take(happened)? {
                    return Ok(Some(piece));
                }
            }
            if let Some(error) = self.failure.take() {
                return Err(error.into());
            }
            let Some(texts) = self.texts.as_mut().filter(|texts| !texts.is_idle()) else { return Ok(None) };
            let (happened, failure) = texts.step(&|| ControlFlow::Continue(()));
            (self.happened, self.failure) = (happened.into(), failure);
            if is_raised() {
                // The waiting thread raises the exception.
                return Ok(None);
            }
        }
    }

    /// The piece that an event brings, if any.
    fn take(&mut self, Happened { prompt, event, .. }: Happened) -> Result<Option<(usize, Piece)>> {
        let prompt = self.places[prompt];
        match event {
            Event::Token { id, text, stop_reason, .. } => {
                self.ids[prompt].push(id);
                self.stop_reasons[prompt] = stop_reason;
                Ok((!text.is_empty()).then_some((prompt, Ok(text))))
            }
            Event::Empty { .. } => {
                self.stop_reasons[prompt] = Some(StopReason::MaxNewTokens);
                Ok(None)
            }
            Event::Failed { error, .. } => {
                let error = Failure::from(error);
                match self.returns_exceptions {
                    true => Ok(Some((prompt, Err(error)))),
                    false if self.ids.len() > 1 => {
                        Err(Python::attach(|py| error.with_note(py, &format!("prompt {prompt}"))))
                    }
                    false => Err(error),
                }
            }
            _ => Ok(None),
        }
    }

    /// Ends all texts. Pieces that were made come still.
    fn interrupt(&mut self) {
        if self.texts.take().is_none() {
            return;
        }
        while let Some(happened) = self.happened.pop_front() {
            let piece = self.take(happened);
            self.pieces.extend(piece.ok().flatten());
        }
        for reason in &mut self.stop_reasons {
            reason.get_or_insert(StopReason::Interrupted);
        }
    }
}

const NO_PICKLE: &str = "a text in the making cannot be pickled; pickle the model, the prompt and the options, and begin anew there";

/// The pieces of a text, an iterator. No piece ends within a character or holds a part of a stop string.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct TextStream(Streamed);

#[pymethods]
impl TextStream {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> Result<Option<String>> {
        self.0.next(py)?.map(|(_, piece)| piece).transpose()
    }

    /// The tokens so far.
    #[getter]
    fn ids(&self, py: Python<'_>) -> Result<Vec<u32>> {
        self.0.state.with(py, |state| state.ids.first().cloned().unwrap_or_default())
    }

    /// Why the text ended, in a word; None while it continues.
    #[getter]
    fn stop_reason(&self, py: Python<'_>) -> Result<Option<&'static str>> {
        self.0.state.with(py, |state| state.stop_reasons.first().copied().flatten().map(StopReason::name))
    }

    fn __reduce__(&self) -> Result<()> {
        Err(wrong_type(NO_PICKLE))
    }
}

/// The pieces of many texts, an iterator of pairs: which prompt, and the piece, or with return_exceptions what is wrong with the prompt.
#[pyclass(frozen, generic, module = "candle_gpt2")]
pub(crate) struct BatchStream(Streamed);

#[pymethods]
impl BatchStream {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> Result<Option<(usize, Bound<'py, PyAny>)>> {
        let Some((prompt, piece)) = self.0.next(py)? else { return Ok(None) };
        let piece =
            piece.map_or_else(|error| error.in_place(py), |text| Ok(PyString::new(py, &text).into_any()));
        Ok(Some((prompt, piece?)))
    }

    /// The tokens of each text so far.
    #[getter]
    fn ids(&self, py: Python<'_>) -> Result<Vec<Vec<u32>>> {
        self.0.state.with(py, |state| state.ids.clone())
    }

    /// Why each text ended, in a word; None while it continues, and if its prompt failed.
    #[getter]
    fn stop_reasons(&self, py: Python<'_>) -> Result<Vec<Option<&'static str>>> {
        let name = |reason: &Option<StopReason>| reason.map(StopReason::name);
        self.0.state.with(py, |state| state.stop_reasons.iter().map(name).collect())
    }

    fn __reduce__(&self) -> Result<()> {
        Err(wrong_type(NO_PICKLE))
    }
}

#[pymethods]
impl Model {
    /// Continues a prompt: an iterator of pieces of the text as they come. Options are those of generate.
    #[pyo3(signature = (prompt, *, hooks = None, **options))]
    fn stream(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        hooks: Option<&Bound<'_, PyAny>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> Result<TextStream> {
        start()?;
        let raised = Raised::default();
        let asked = Asked::read(py, &self.loaded, || self.compiler(), options, &["hooks"], &raised)?;
        asked.check_seeds(1)?;
        self.loaded.vocabulary().required_tokenizer()?;
        let prompt = values::Text::read(prompt)?;
        let prompt = py.detach(|| self.prompt(prompt, &asked))?;
        Streamed::new(py, self.hooked(hooks, &raised)?, &asked, vec![Ok(prompt)], 1, false, raised)
            .map(TextStream)
    }

    /// Continues every prompt of a list: an iterator of pairs, which prompt, from 0, and a piece of its text. Options are those of
    /// generate; with return_exceptions, a prompt that fails gives its exception as a last piece, and the others continue.
    #[pyo3(signature = (prompts, *, batch_size = 8, return_exceptions = false, hooks = None, **options))]
    fn stream_batch(
        &self,
        py: Python<'_>,
        prompts: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number)] batch_size: usize,
        return_exceptions: bool,
        hooks: Option<&Bound<'_, PyAny>>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> Result<BatchStream> {
        start()?;
        check_batch_size(batch_size)?;
        let raised = Raised::default();
        let others = ["batch_size", "return_exceptions", "hooks"];
        let asked = Asked::read(py, &self.loaded, || self.compiler(), options, &others, &raised)?;
        self.loaded.vocabulary().required_tokenizer()?;
        let (_, prompts) = values::Texts::read(prompts)?.into_list();
        asked.check_seeds(prompts.len())?;
        let mut prompts = self.prompts(py, prompts, &asked)?;
        if !return_exceptions {
            prompts = all_of(py, prompts, "prompt")?.into_iter().map(Ok).collect();
        }
        let hooked = self.hooked(hooks, &raised)?;
        Streamed::new(py, hooked, &asked, prompts, batch_size, return_exceptions, raised).map(BatchStream)
    }
}
