//! Completions in OpenAI's words: a request and an answer are those of the server, `gpt2 serve`.

use std::sync::Arc;

use candle_gpt2_api::{ApiOptions, CompletionRequest, Endpoint, Limits, ServedModel, Session, Work};
use candle_gpt2_engine::LoadedModel;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::{Map, Value};

use crate::errors::{Result, failed, wrong_value};
use crate::generate::clock;
use crate::keywords::unknown_keyword;
use crate::model::Model;
use crate::process::{computing, start};
use crate::signals::is_raised;
use crate::values::{json_of, python_of};

/// Texts that are made at once, as the program has it.
const BATCH_SIZE: usize = 8;

/// The answer to a request for completions of a prompt.
pub(crate) fn complete<'py>(
    py: Python<'py>,
    loaded: &LoadedModel,
    served: &Arc<ServedModel>,
    prompt: &Bound<'py, PyAny>,
    options: Option<&Bound<'py, PyDict>>,
) -> Result<Bound<'py, PyAny>> {
    let mut body = Map::from_iter([("prompt".to_owned(), json_of(prompt)?)]);
    for (key, value) in options.into_iter().flatten() {
        let key: String = key.extract()?;
        if !CompletionRequest::fields().any(|field| field == key) {
            return Err(unknown_keyword(&key, CompletionRequest::fields()));
        }
        body.insert(key, json_of(&value)?);
    }
    let body = Value::Object(body).to_string();
    let answer = computing(py, loaded, || {
        let work = served.read(Endpoint::Completions, body.as_bytes(), None)?;
        let Work::Texts(call) = &work else {
            return Err(failed("a completion that asks for something else"));
        };
        if call.stream {
            return Err(wrong_value("stream: an answer comes as a whole here; iterate over model.stream(…)"));
        }
        let scheduler = loaded.scheduler_for(&call.requests, BATCH_SIZE, Some(clock()))?;
        let mut session = Session::new(loaded.clone(), Arc::clone(served), scheduler);
        let reply = session.answer(work, || !is_raised())?;
        reply.map(|reply| reply.json).ok_or_else(|| failed("interrupted"))
    })?;
    let answer: Value = serde_json::from_str(&answer).map_err(|error| failed(error.to_string()))?;
    Ok(python_of(py, &answer)?)
}

impl Model {
    /// What requests are checked against: nothing that is there to keep a server from harm.
    fn served(&self) -> Result<&Arc<ServedModel>> {
        if let Some(served) = self.served.get() {
            return Ok(served);
        }
        let options = ApiOptions {
            name: self.opened.name(),
            limits: Limits::NONE,
            activations: true,
            ..ApiOptions::default()
        };
        let served = Arc::new(ServedModel::new(&self.loaded, options)?);
        Ok(self.served.get_or_init(|| served))
    }
}

#[pymethods]
impl Model {
    /// Continues a prompt as OpenAI's completions do: options in their words (max_tokens, temperature, n, logprobs, stop, seed, …),
    /// and the answer a dict in their shape. `activations` and `steering` are those of the server too: what is inside the model at hook
    /// points, in each choice, and changes to it; of a dictionary's feature give `site` and `vector`.
    #[pyo3(signature = (prompt, **options))]
    fn complete<'py>(
        &self,
        py: Python<'py>,
        prompt: &Bound<'py, PyAny>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> Result<Bound<'py, PyAny>> {
        start()?;
        complete(py, &self.loaded, self.served()?, prompt, options)
    }
}
