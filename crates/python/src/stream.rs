//! Streamed generation: iterators over the pieces of a completion.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::result;

use candle_gpt2_engine::{CallEvent, CompletionDriver, EngineError, LoadedModel};
use candle_gpt2_generation::{Event, GenerationError, Request, SearchMode, StopReason};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::errors::{Failure, Result, type_error, value_error};
use crate::generate::{check_batch_size, clock, collect_with_notes};
use crate::model::Model;
use crate::options::ParsedOptions;
use crate::process::{computing, computing_partly, start};
use crate::raised::{Exclusive, Raised};
use crate::signals::is_raised;
use crate::values::{self, number};

/// A piece of a completion, or the error that ended it.
type Piece = result::Result<String, Failure>;

/// Generation in progress.
struct Stream {
    loaded: LoadedModel,
    raised: Raised,
    state: Exclusive<State>,
}

struct State {
    /// Driver for the completions; `None` once the last completion has ended.
    driver: Option<CompletionDriver<()>>,
    /// Events from the last step that have not been processed yet.
    events: VecDeque<CallEvent>,
    /// Device failure during the last step.
    failure: Option<GenerationError>,
    /// Errors for failed prompts, and pieces that were ready when an exception occurred.
    pieces: VecDeque<(usize, Piece)>,
    /// Prompt index of each request.
    prompt_indices: Vec<usize>,
    /// Whether a failed prompt's error is returned as its result.
    returns_exceptions: bool,
    ids: Vec<Vec<u32>>,
    stop_reasons: Vec<Option<StopReason>>,
}

impl Stream {
    fn new(
        py: Python<'_>,
        loaded: LoadedModel,
        parsed: &ParsedOptions,
        prompts: Vec<Result<Vec<u32>>>,
        batch_size: usize,
        returns_exceptions: bool,
        raised: Raised,
    ) -> Result<Self> {
        if parsed.config.num_return_sequences != 1 {
            return Err(value_error(
                "num_return_sequences: only one completion per prompt can be streamed; repeat the prompt with \
                 different seeds",
            ));
        }
        if parsed.config.search_mode() != SearchMode::TokenByToken {
            return Err(value_error("beam and contrastive search cannot be streamed; call generate instead"));
        }
        let count = prompts.len();
        let (mut requests, mut prompt_indices, mut pieces) = (Vec::new(), Vec::new(), VecDeque::new());
        for (index, prompt) in prompts.into_iter().enumerate() {
            match prompt {
                Ok(prompt) => {
                    let processors = parsed.processors.clone();
                    requests.push(Request { processors, ..Request::new(prompt, parsed.config_for(index)) });
                    prompt_indices.push(index);
                }
                Err(error) => pieces.push_back((index, Err(error))),
            }
        }
        let driver = computing(py, &loaded, || {
            let mut driver =
                CompletionDriver::new(loaded.scheduler_for(&requests, batch_size, Some(clock()))?);
            driver.begin(requests, ());
            while let Some((_, request, result)) = driver.feed(usize::MAX) {
                match result {
                    Err(error) if returns_exceptions => {
                        pieces.push_back((prompt_indices[request], Err(error.into())));
                    }
                    result => result?,
                }
            }
            Ok::<_, EngineError>(driver)
        })?;
        let state = State {
            driver: Some(driver),
            events: VecDeque::new(),
            failure: None,
            pieces,
            prompt_indices,
            returns_exceptions,
            ids: vec![Vec::new(); count],
            stop_reasons: vec![None; count],
        };
        Ok(Self { loaded, raised, state: Exclusive::new("the stream", state) })
    }

    /// Returns the next piece with the index of its prompt, or `None` after the last piece.
    fn next(&self, py: Python<'_>) -> Result<Option<(usize, Piece)>> {
        start()?;
        let (next, signal) = computing_partly(py, self.loaded.device(), || {
            self.raised.computing(|| {
                self.state.run_for(&self.raised, |state| {
                    let next = state.next();
                    // An error or the end of the pieces ends generation.
                    if !matches!(next, Ok(Some(_))) && !is_raised() {
                        state.driver = None;
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
            while let Some(event) = self.events.pop_front() {
                if let Some(piece) = self.handle_event(event)? {
                    return Ok(Some(piece));
                }
            }
            if let Some(error) = self.failure.take() {
                return Err(error.into());
            }
            let Some(driver) = self.driver.as_mut().filter(|driver| !driver.is_idle()) else {
                return Ok(None);
            };
            let (events, failure) = driver.step(&|| ControlFlow::Continue(()));
            (self.events, self.failure) = (events.into(), failure);
            if is_raised() {
                // The thread that waits for the piece raises the exception.
                return Ok(None);
            }
        }
    }

    /// Processes an event and returns its piece, if any.
    fn handle_event(&mut self, CallEvent { prompt, event, .. }: CallEvent) -> Result<Option<(usize, Piece)>> {
        let prompt = self.prompt_indices[prompt];
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

    /// Ends all completions but keeps the pieces that are ready.
    fn interrupt(&mut self) {
        if self.driver.take().is_none() {
            return;
        }
        while let Some(event) = self.events.pop_front() {
            let piece = self.handle_event(event);
            self.pieces.extend(piece.ok().flatten());
        }
        for reason in &mut self.stop_reasons {
            reason.get_or_insert(StopReason::Interrupted);
        }
    }
}

const NO_PICKLE: &str = "a stream cannot be pickled; pickle the model, the prompt and the options, and start a \
                         new stream in the other process";

/// Iterator over the pieces of a completion.
///
/// A piece never ends inside a character and never contains part of a stop string.
#[pyclass(frozen, module = "candle_gpt2")]
pub(crate) struct TextStream(Stream);

#[pymethods]
impl TextStream {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> Result<Option<String>> {
        self.0.next(py)?.map(|(_, piece)| piece).transpose()
    }

    /// Token IDs generated so far.
    #[getter]
    fn ids(&self, py: Python<'_>) -> Result<Vec<u32>> {
        self.0.state.with(py, |state| state.ids.first().cloned().unwrap_or_default())
    }

    /// Reason why the completion ended, or None while it continues.
    #[getter]
    fn stop_reason(&self, py: Python<'_>) -> Result<Option<&'static str>> {
        self.0.state.with(py, |state| state.stop_reasons.first().copied().flatten().map(StopReason::name))
    }

    fn __reduce__(&self) -> Result<()> {
        Err(type_error(NO_PICKLE))
    }
}

/// Iterator over the pieces of many completions, as pairs (prompt index, piece).
///
/// With return_exceptions, a prompt that fails yields its exception as a piece.
#[pyclass(frozen, generic, module = "candle_gpt2")]
pub(crate) struct BatchStream(Stream);

#[pymethods]
impl BatchStream {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> Result<Option<(usize, Bound<'py, PyAny>)>> {
        let Some((prompt, piece)) = self.0.next(py)? else { return Ok(None) };
        let piece =
            piece.map_or_else(|error| error.into_item(py), |text| Ok(PyString::new(py, &text).into_any()));
        Ok(Some((prompt, piece?)))
    }

    /// Token IDs of each completion so far.
    #[getter]
    fn ids(&self, py: Python<'_>) -> Result<Vec<Vec<u32>>> {
        self.0.state.with(py, |state| state.ids.clone())
    }

    /// Reason why each completion ended.
    ///
    /// None for a completion that continues, or whose prompt failed.
    #[getter]
    fn stop_reasons(&self, py: Python<'_>) -> Result<Vec<Option<&'static str>>> {
        let name = |reason: &Option<StopReason>| reason.map(StopReason::name);
        self.0.state.with(py, |state| state.stop_reasons.iter().map(name).collect())
    }

    fn __reduce__(&self) -> Result<()> {
        Err(type_error(NO_PICKLE))
    }
}

#[pymethods]
impl Model {
    /// Continues a prompt and returns an iterator over pieces of the completion.
    ///
    /// The options are those of generate.
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
        let parsed = ParsedOptions::read(py, &self.loaded, || self.compiler(), options, &["hooks"], &raised)?;
        parsed.check_seeds(1)?;
        self.loaded.vocabulary().required_tokenizer()?;
        let prompt = values::Text::read(prompt)?;
        let prompt = py.detach(|| self.prompt(prompt, &parsed))?;
        Stream::new(py, self.hooked(hooks, &raised)?, &parsed, vec![Ok(prompt)], 1, false, raised)
            .map(TextStream)
    }

    /// Continues all prompts in a list and returns an iterator over pairs (prompt index, piece).
    ///
    /// The options are those of generate. With return_exceptions, a prompt that fails yields its exception as
    /// the last piece, and the other prompts continue.
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
        let parsed = ParsedOptions::read(py, &self.loaded, || self.compiler(), options, &others, &raised)?;
        self.loaded.vocabulary().required_tokenizer()?;
        let (_, prompts) = values::Texts::read(prompts)?.into_list();
        parsed.check_seeds(prompts.len())?;
        let mut prompts = self.prompts(py, prompts, &parsed)?;
        if !return_exceptions {
            prompts = collect_with_notes(py, prompts, "prompt")?.into_iter().map(Ok).collect();
        }
        let hooked = self.hooked(hooks, &raised)?;
        Stream::new(py, hooked, &parsed, prompts, batch_size, return_exceptions, raised).map(BatchStream)
    }
}
