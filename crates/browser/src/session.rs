//! A loaded model with everything that a page asks of it, by the paths and bodies of the server.

use std::cell::RefCell;
use std::rc::Rc;

use candle_core::DType;
use candle_gpt2::LogitsFor;
use candle_gpt2_api::{
    Answer, ApiError, ApiOptions, AttentionRequest, Call, CompletionRequest, HeadRequest, LensRequest,
    Limits, NextRequest, Reply, ServedModel, SetupError, detokenize, models, tokenize,
};
use candle_gpt2_engine::{EngineError, LoadedModel, Silent};
use candle_gpt2_generation::{Request, RequestId, Scheduler, SchedulerOptions};
use candle_gpt2_interpret::{Chain, Run};
use candle_gpt2_look::{Attention, Heads, Lens, Look, Reading, Subject, Text as Words};
use candle_gpt2_pictures::data;

/// Tokens of a prompt that are computed in a step: a page hears of a stop between two steps.
const CHUNK_TOKENS: usize = 64;
/// All texts are one user's, and go on from what was computed for another.
const REUSE: u64 = 0;

/// A model in memory that is asked by paths and bodies.
pub struct Session {
    loaded: LoadedModel,
    served: ServedModel,
    texts: Rc<RefCell<Texts>>,
    /// What was read for `look/next`.
    reading: RefCell<Reading>,
}

/// What makes the texts that are streamed, one after the other.
struct Texts {
    scheduler: Scheduler,
    /// Which text it is, counted from 1.
    number: u64,
    /// Its requests, one for each prompt.
    requests: Vec<RequestId>,
}

/// A text in the making.
pub struct Writing {
    texts: Rc<RefCell<Texts>>,
    number: u64,
    /// `None` when everything was told.
    answer: Option<Answer>,
}

impl Session {
    /// A model under its name; `now` tells the seconds since 1970.
    ///
    /// # Errors
    /// When the checkpoint's `generation_config.json` cannot be used, or there is no memory for keys and values.
    pub fn new(loaded: LoadedModel, name: &str, now: fn() -> u64) -> Result<Self, SetupError> {
        // Nothing that is there to keep a server from harm.
        let limits = Limits {
            max_prompts: usize::MAX,
            max_n: usize::MAX,
            max_logprobs: usize::MAX,
            max_total_tokens: usize::MAX,
            ends_at_context: true,
        };
        let options = ApiOptions {
            name: name.to_owned(),
            limits,
            created: now(),
            parallel: 1,
            now,
            ..ApiOptions::default()
        };
        let served = ServedModel::of_completions(&loaded, options)?;
        let kv_tokens = loaded.config().n_positions;
        let scheduler = SchedulerOptions { max_texts: 1, kv_tokens, chunk_tokens: CHUNK_TOKENS };
        let scheduler = loaded.scheduler(scheduler).map_err(EngineError::from)?;
        let texts = Rc::new(RefCell::new(Texts { scheduler, number: 0, requests: Vec::new() }));
        Ok(Self { loaded, served, texts, reading: RefCell::default() })
    }

    /// The model.
    pub fn loaded(&self) -> &LoadedModel {
        &self.loaded
    }

    /// The name that it was given.
    pub fn name(&self) -> &str {
        self.served.name()
    }

    /// The answer to a request: JSON.
    ///
    /// # Errors
    /// 404 for a path that is none of these; otherwise as the server answers.
    pub fn ask(&self, path: &str, body: &[u8]) -> Result<String, ApiError> {
        match path {
            "v1/models" => Ok(models(&self.served)),
            "v1/completions" => self.complete(body),
            "tokenize" => tokenize(body, &self.served).map(|reply| reply.json),
            "detokenize" => detokenize(body, &self.served).map(|reply| reply.json),
            "look/attention" => self.attention(body),
            "look/lens" => self.lens(body),
            "look/head" => self.head(body),
            "look/next" => self.next(body),
            _ => Err(no_such_path(path)),
        }
    }

    /// Begins a text that comes piece by piece: `v1/completions` with `stream`. One text is made at a time: this ends the one
    /// before.
    ///
    /// # Errors
    /// As [`Session::ask`].
    pub fn start(&self, path: &str, body: &[u8]) -> Result<Writing, ApiError> {
        if path != "v1/completions" {
            return Err(no_such_path(path));
        }
        let call = self.call(body)?;
        if !call.stream {
            let message = "stream: expected true; an answer as a whole is asked for, not started";
            return Err(ApiError::invalid(message).with_param("stream"));
        }
        let number = self.texts.borrow_mut().begin(call.requests)?;
        Ok(Writing { texts: Rc::clone(&self.texts), number, answer: Some(call.answer) })
    }

    /// The text of tokens, with the names of special ones.
    ///
    /// # Errors
    /// When one is outside the vocabulary.
    pub fn decode(&self, ids: &[u32]) -> Result<String, ApiError> {
        ids.iter().try_for_each(|id| self.check_token(*id))?;
        let bytes: Vec<u8> = ids.iter().flat_map(|id| self.loaded.vocabulary().token_bytes(*id)).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The logits after each token, `(T, V)`, those of a token one after the other.
    ///
    /// # Errors
    /// When there are no tokens or more than the context holds, or one is outside the vocabulary.
    pub fn logits(&self, ids: &[u32]) -> Result<Vec<f32>, ApiError> {
        let run = Run::new(self.loaded.model(), ids).map_err(|error| ApiError::invalid(error.to_string()))?;
        let logits = run.logits(LogitsFor::EveryToken, &mut Chain(Vec::new()));
        let numbers = logits.and_then(|logits| logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1());
        numbers.map_err(failed)
    }

    fn check_token(&self, id: u32) -> Result<(), ApiError> {
        let config = self.loaded.config();
        if config.has_token(id) {
            return Ok(());
        }
        Err(ApiError::invalid(format!("token {id} is outside the vocabulary of {}", config.vocab_size)))
    }

    fn attention(&self, body: &[u8]) -> Result<String, ApiError> {
        let AttentionRequest { ids, heads, warnings } = AttentionRequest::read(body, &self.served)?;
        let look = Attention { text: Words::Ids(ids), layers: None, heads: Some(Heads(heads)) };
        Ok(Reply::new(self.found(&look)?, warnings).json)
    }

    fn lens(&self, body: &[u8]) -> Result<String, ApiError> {
        let LensRequest { ids, show, warnings } = LensRequest::read(body, &self.served)?;
        let look = Lens { show, top: 1, ..Lens::new(Words::Ids(ids)) };
        Ok(Reply::new(self.found(&look)?, warnings).json)
    }

    fn found(&self, look: &impl Look) -> Result<String, ApiError> {
        let reader = self.served.reader();
        let found = look.at(&Subject::new(&self.loaded, self.name().to_owned(), &reader), &Silent);
        Ok(data(&found.map_err(failed)?.report))
    }

    fn head(&self, body: &[u8]) -> Result<String, ApiError> {
        let HeadRequest { head, warnings } = HeadRequest::read(body, &self.served)?;
        let reader = self.served.reader();
        let steps = head.look(&Subject::new(&self.loaded, self.name().to_owned(), &reader));
        let steps = serde_json::to_string(&steps.map_err(failed)?).map_err(failed)?;
        Ok(Reply::new(steps, warnings).json)
    }

    fn next(&self, body: &[u8]) -> Result<String, ApiError> {
        let request = NextRequest::read(body, &self.served)?;
        let mut reading = self.reading.borrow_mut();
        let logits = reading.logits(self.loaded.model(), &request.text, request.ids.len() - 1);
        let found = request.answer(&logits.map_err(failed)?, &self.served)?;
        let found = serde_json::to_string(&found).map_err(failed)?;
        Ok(Reply::new(found, request.warnings).json)
    }

    fn call(&self, body: &[u8]) -> Result<Call, ApiError> {
        Call::of_completion(CompletionRequest::parse(body)?, &self.served, Some(REUSE))
    }

    fn complete(&self, body: &[u8]) -> Result<String, ApiError> {
        let Call { requests, mut answer, stream } = self.call(body)?;
        if stream {
            let message = "stream: a text that comes piece by piece is started, not asked for";
            return Err(ApiError::invalid(message).with_param("stream"));
        }
        for event in self.loaded.batch(requests, 1, None).map_err(failed)? {
            let event = event.map_err(failed)?;
            answer.take(event.request().place(), event)?;
        }
        Ok(answer.into_response())
    }
}

impl Texts {
    /// Begins a text in the place of the one before, and gives its number.
    fn begin(&mut self, requests: Vec<Request>) -> Result<u64, ApiError> {
        self.end();
        for request in requests {
            match self.scheduler.submit(request) {
                Ok(id) => self.requests.push(id),
                Err(error) => {
                    self.end();
                    return Err((&error).into());
                }
            }
        }
        Ok(self.number)
    }

    /// Ends the text, of which nothing more is made.
    fn end(&mut self) {
        for request in self.requests.drain(..) {
            self.scheduler.cancel(request);
        }
        self.number += 1;
    }
}

impl Writing {
    /// One step: the JSON chunks that it brought, which may be none; `None` when the text has ended.
    ///
    /// # Errors
    /// When another text was begun, or the text cannot go on. It has then ended.
    pub fn step(&mut self) -> Result<Option<Vec<String>>, ApiError> {
        let Some(mut answer) = self.answer.take() else { return Ok(None) };
        let mut texts = self.texts.borrow_mut();
        if texts.number != self.number {
            return Err(ApiError::new(409, "another text was begun, which ended this one"));
        }
        if texts.scheduler.is_idle() {
            let last = answer.last_chunks();
            return Ok((!last.is_empty()).then_some(last));
        }
        let mut chunks = Vec::new();
        for event in texts.scheduler.step().into_result().map_err(failed)? {
            if let Some(prompt) = texts.requests.iter().position(|id| *id == event.request()) {
                chunks.extend(answer.take(prompt, event)?);
            }
        }
        self.answer = Some(answer);
        Ok(Some(chunks))
    }
}

/// What is not read to its end is not made either.
impl Drop for Writing {
    fn drop(&mut self) {
        let mut texts = self.texts.borrow_mut();
        if texts.number == self.number {
            texts.end();
        }
    }
}

fn no_such_path(path: &str) -> ApiError {
    ApiError::new(404, format!("there is nothing at this path: {path}"))
}

/// Whoever asks here owns the model, and may know what went wrong inside.
fn failed(error: impl std::fmt::Display) -> ApiError {
    ApiError::new(500, error.to_string())
}
