//! OpenAI-style completions, in the request and response formats of `gpt2 serve`.

use std::sync::Arc;

use candle_gpt2_api::{ApiOptions, CompletionRequest, Endpoint, Limits, ServedModel, Session, Work};
use candle_gpt2_engine::LoadedModel;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::{Map, Value};

use crate::errors::{Result, gpt2_error, value_error};
use crate::generate::clock;
use crate::keywords::unknown_keyword;
use crate::model::Model;
use crate::process::{computing, start};
use crate::signals::is_raised;
use crate::values::{to_json, to_python};

/// Number of sequences per batch, as in the `gpt2` program.
const BATCH_SIZE: usize = 8;

/// Runs a completion request for a prompt and returns the response.
pub(crate) fn complete<'py>(
    py: Python<'py>,
    loaded: &LoadedModel,
    served: &Arc<ServedModel>,
    prompt: &Bound<'py, PyAny>,
    options: Option<&Bound<'py, PyDict>>,
) -> Result<Bound<'py, PyAny>> {
    let mut body = Map::from_iter([("prompt".to_owned(), to_json(prompt)?)]);
    for (key, value) in options.into_iter().flatten() {
        let key: String = key.extract()?;
        if !CompletionRequest::fields().any(|field| field == key) {
            return Err(unknown_keyword(&key, CompletionRequest::fields()));
        }
        body.insert(key, to_json(&value)?);
    }
    let body = Value::Object(body).to_string();
    let answer = computing(py, loaded, || {
        let work = served.read(Endpoint::Completions, body.as_bytes(), None)?;
        let Work::Texts(call) = &work else {
            return Err(gpt2_error("unexpected request type"));
        };
        if call.stream {
            return Err(value_error(
                "stream: `complete` returns the whole completion; iterate over model.stream(…) instead",
            ));
        }
        let scheduler = loaded.scheduler_for(&call.requests, BATCH_SIZE, Some(clock()))?;
        let mut session = Session::new(loaded.clone(), Arc::clone(served), scheduler);
        let reply = session.answer(work, || !is_raised())?;
        reply.map(|reply| reply.json).ok_or_else(|| gpt2_error("interrupted"))
    })?;
    let answer: Value = serde_json::from_str(&answer).map_err(|error| gpt2_error(error.to_string()))?;
    Ok(to_python(py, &answer)?)
}

impl Model {
    /// Returns the served model that validates requests, created on first use.
    ///
    /// It sets no request limits, because they exist only to protect servers.
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
    /// Completes a prompt and returns a dict in the format of OpenAI's completions API.
    ///
    /// Options have OpenAI's names (max_tokens, temperature, n, logprobs, stop, seed, …). As in `gpt2 serve`,
    /// `activations` adds activations at hook points to each choice, and `steering` edits them. To steer with
    /// a dictionary's feature, pass its `site` and `vector`.
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
