//! Answers requests step by step on one thread, for front ends such as a web page or a Python call.
//!
//! A server runs the same [`Work`] but interleaves the work of many clients.

use std::mem;
use std::ops::ControlFlow;
use std::sync::Arc;

use candle_gpt2_engine::{CLASSIFIED_AT_ONCE, CallEvent, CallId, Classifier, CompletionDriver, LoadedModel};
use candle_gpt2_generation::Scheduler;
use candle_gpt2_look::PrefixCache;

use crate::{Answer, ApiError, Call, Reply, ServedModel, Work};

/// Served language model with its unfinished completions, or a served classifier.
///
/// ```
/// use std::sync::Arc;
///
/// use candle_gpt2_api::{ApiOptions, Endpoint, ServedModel, Session};
/// use candle_gpt2_generation::SchedulerOptions;
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&candle_gpt2_engine::Silent)?.load(&candle_gpt2_engine::Silent)?;
/// let served = Arc::new(ServedModel::new(&model, ApiOptions { name: "built-in".into(), ..ApiOptions::default() })?);
/// let scheduler = model.scheduler(SchedulerOptions { max_texts: 2, kv_tokens: 512, chunk_tokens: 64 })?;
/// let mut session = Session::new(model, Arc::clone(&served), scheduler);
/// let body = br#"{"prompt": "One day", "max_tokens": 5, "temperature": 0}"#;
/// let reply = session.answer(served.read(Endpoint::Completions, body, None)?, || true)?;
/// assert!(reply.is_some_and(|reply| reply.json.contains(r#""completion_tokens":5"#)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Session {
    model: Model,
    served: Arc<ServedModel>,
}

enum Model {
    Texts(Box<TextModel>),
    Labels(Box<Classifier>),
}

/// Language model and the state of its requests.
struct TextModel {
    model: LoadedModel,
    texts: CompletionDriver<PendingCall>,
    /// Text and KV cache from the last `/look/next` request, which the next such request may reuse.
    reading: PrefixCache,
}

/// Partially built answer.
struct PendingCall {
    answer: Answer,
    /// Chunks that [`Session::step`] has not returned yet.
    chunks: Vec<String>,
    /// Whether all completions have finished.
    is_whole: bool,
    failure: Option<ApiError>,
}

impl Session {
    /// Creates a session with no calls in progress. `scheduler` must belong to `model`.
    pub fn new(model: LoadedModel, served: Arc<ServedModel>, scheduler: Scheduler) -> Self {
        let text_model =
            TextModel { model, texts: CompletionDriver::new(scheduler), reading: PrefixCache::default() };
        Self { model: Model::Texts(text_model.into()), served }
    }

    /// Creates a session for a classifier. `served` must describe `classifier`.
    pub fn of_classifier(classifier: Classifier, served: Arc<ServedModel>) -> Self {
        Self { model: Model::Labels(classifier.into()), served }
    }

    /// Served model that validates requests.
    pub fn served(&self) -> &Arc<ServedModel> {
        &self.served
    }

    /// Runs `work` to completion; returns `None` if `keep_going` returns false after a step.
    ///
    /// # Errors
    /// If the work cannot continue.
    pub fn answer(
        &mut self,
        work: Work,
        mut keep_going: impl FnMut() -> bool,
    ) -> Result<Option<Reply>, ApiError> {
        match work {
            Work::Reply(reply) => Ok(Some(reply)),
            Work::Analysis(mut analysis) => loop {
                let stepped = match &mut self.model {
                    Model::Texts(text_model) => {
                        analysis.step(&text_model.model, &self.served, &mut text_model.reading)
                    }
                    Model::Labels(classifier) => {
                        analysis.classify(classifier, CLASSIFIED_AT_ONCE)?.conclude(&self.served)
                    }
                };
                match stepped? {
                    ControlFlow::Break(reply) => return Ok(Some(reply)),
                    ControlFlow::Continue(rest) if keep_going() => analysis = rest,
                    ControlFlow::Continue(_) => return Ok(None),
                }
            },
            Work::Texts(call) => {
                let id = self.begin(call)?;
                while self.step(id)?.is_some() {
                    if !keep_going() {
                        self.end(id);
                        return Ok(None);
                    }
                }
                Ok(self.end(id).map(Answer::into_reply))
            }
        }
    }

    fn texts(&mut self) -> Option<&mut CompletionDriver<PendingCall>> {
        match &mut self.model {
            Model::Texts(text_model) => Some(&mut text_model.texts),
            Model::Labels(_) => None,
        }
    }

    /// Starts completions; [`Session::step`] returns their chunks.
    ///
    /// # Errors
    /// If the model is a classifier.
    pub fn begin(&mut self, Call { requests, answer, .. }: Call) -> Result<CallId, ApiError> {
        let texts = self.texts().ok_or_else(|| ApiError::failed("a classifier cannot generate text"))?;
        let is_whole = requests.is_empty();
        Ok(texts.begin(requests, PendingCall { answer, chunks: Vec::new(), is_whole, failure: None }))
    }

    /// Runs one step of all calls and returns the new chunks of this call's stream, possibly none.
    ///
    /// Returns `None` after the call has finished.
    ///
    /// # Errors
    /// If the call cannot continue; the error ends the call.
    pub fn step(&mut self, id: CallId) -> Result<Option<Vec<String>>, ApiError> {
        let Some(texts) = self.texts() else { return Ok(None) };
        let is_over = |pending: &PendingCall| pending.is_whole || pending.failure.is_some();
        if texts.owner(id).is_some_and(|pending| !is_over(pending)) {
            step_all(texts);
        }
        let Some(pending) = texts.owner(id) else { return Ok(None) };
        let chunks = mem::take(&mut pending.chunks);
        match pending.failure.take() {
            Some(error) => {
                texts.end(id);
                Err(error)
            }
            None => Ok(Some(chunks).filter(|chunks| !pending.is_whole || !chunks.is_empty())),
        }
    }

    /// Whether the call is still in progress.
    pub fn has(&mut self, id: CallId) -> bool {
        self.texts().is_some_and(|texts| texts.owner(id).is_some())
    }

    /// Ends a call and returns its answer, which may be partial.
    pub fn end(&mut self, id: CallId) -> Option<Answer> {
        self.texts()?.end(id).map(|pending| pending.answer)
    }
}

/// Runs one scheduler step and stores each call's new chunks or error.
fn step_all(texts: &mut CompletionDriver<PendingCall>) {
    while let Some((call, prompt, taken)) = texts.feed(usize::MAX) {
        if let (Some(pending), Err(error)) = (texts.owner(call), taken) {
            pending.failure = Some(pending.answer.refused(prompt, &error));
        }
    }
    let (happened, failure) = texts.step(&|| ControlFlow::Continue(()));
    for CallEvent { call, prompt, event, is_last } in happened {
        let Some(pending) = texts.owner(call) else { continue };
        match pending.answer.handle_event(prompt, event) {
            Ok(chunks) => pending.chunks.extend(chunks),
            Err(error) => pending.failure = Some(error),
        }
        if is_last {
            pending.chunks.extend(pending.answer.last_chunks());
            pending.is_whole = true;
        }
    }
    if let Some(error) = failure {
        let calls: Vec<CallId> = texts.owners().map(|(call, _)| call).collect();
        for call in calls {
            let pending = texts.owner(call).filter(|pending| !pending.is_whole);
            pending.into_iter().for_each(|pending| pending.failure = Some(ApiError::failed(&error)));
        }
    }
}
