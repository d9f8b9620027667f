//! Completions in OpenAI's words: a request and an answer are those of the server, `gpt2 serve`.

use candle_gpt2_api::{ApiOptions, Call, CompletionRequest, Limits, ServedModel};
use candle_gpt2_engine::LoadedModel;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde_json::{Map, Value};

use crate::errors::{Failure, Result, failed, wrong_value};
use crate::generate::clock;
use crate::model::Model;
use crate::options::unknown_keyword;
use crate::process::{computing, start};
use crate::signals::is_raised;
use crate::values::{json_of, python_of};

/// Texts that are made at once, as the program has it.
const BATCH_SIZE: usize = 8;

/// What requests are checked against: nothing that is there to keep a server from harm.
pub(crate) fn served(loaded: &LoadedModel, name: &str) -> Result<ServedModel> {
    let limits = Limits {
        max_prompts: usize::MAX,
        max_n: usize::MAX,
        max_logprobs: usize::MAX,
        max_total_tokens: usize::MAX,
        ends_at_context: false,
    };
    Ok(ServedModel::new(loaded, ApiOptions { name: name.to_owned(), limits, ..ApiOptions::default() })?)
}

/// The answer to a request for completions of a prompt.
pub(crate) fn complete<'py>(
    py: Python<'py>,
    loaded: &LoadedModel,
    served: &ServedModel,
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
    let request = CompletionRequest::parse(Value::Object(body).to_string().as_bytes())?;
    let answer = computing(py, loaded, || {
        let Call { requests, mut answer, stream } = Call::of_completion(request, served, None)?;
        if stream {
            return Err(wrong_value("stream: an answer comes as a whole here; iterate over model.stream(…)"));
        }
        for event in loaded.batch(requests, BATCH_SIZE, Some(clock()))? {
            let event = event?;
            answer.take(event.request().place(), event)?;
            if is_raised() {
                return Err(failed("interrupted"));
            }
        }
        Ok::<_, Failure>(answer.into_response())
    })?;
    let answer: Value = serde_json::from_str(&answer).map_err(|error| failed(error.to_string()))?;
    Ok(python_of(py, &answer)?)
}

impl Model {
    fn served(&self) -> Result<&ServedModel> {
        match self.served.get() {
            Some(served) => Ok(served),
            None => {
                let served = served(&self.loaded, &self.opened.name())?;
                Ok(self.served.get_or_init(|| served))
            }
        }
    }
}

#[pymethods]
impl Model {
    /// Continues a prompt as OpenAI's completions do: options in their words (max_tokens, temperature, n, logprobs, stop, seed, …),
    /// and the answer a dict in their shape.
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
