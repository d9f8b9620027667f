//! A model that answers paths with bodies in steps: for front ends of one thread, such as a page and a call of Python's. A server reads
//! the same [`Work`] and does it between many callers.

use std::mem;
use std::ops::ControlFlow;
use std::sync::Arc;

use candle_gpt2_engine::{CLASSIFIED_AT_ONCE, CallId, Classifier, Happened, LoadedModel, Texts};
use candle_gpt2_generation::Scheduler;
use candle_gpt2_look::Reading;

use crate::{Answer, ApiError, Call, Reply, ServedModel, Work};

/// A model, what is served of it, and the texts that are made; or a classifier, of which all work is an analysis.
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
    Texts(Box<Making>),
    Labels(Box<Classifier>),
}

/// A language model, and what is made with it.
struct Making {
    model: LoadedModel,
    texts: Texts<Unfinished>,
    /// What was read for `/look/next`, of which the next one may be a continuation.
    reading: Reading,
}

/// An answer in the making.
struct Unfinished {
    answer: Answer,
    /// What has come of it and was not asked for yet.
    chunks: Vec<String>,
    /// Whether all its texts have ended.
    is_whole: bool,
    failure: Option<ApiError>,
}

impl Session {
    /// Nothing has begun. The scheduler is one of this model.
    pub fn new(model: LoadedModel, served: Arc<ServedModel>, scheduler: Scheduler) -> Self {
        let making = Making { model, texts: Texts::new(scheduler), reading: Reading::default() };
        Self { model: Model::Texts(making.into()), served }
    }

    /// One that labels texts. What is served is of this classifier.
    pub fn of_classifier(classifier: Classifier, served: Arc<ServedModel>) -> Self {
        Self { model: Model::Labels(classifier.into()), served }
    }

    /// What requests are checked against.
    pub fn served(&self) -> &Arc<ServedModel> {
        &self.served
    }

    /// The whole answer; `None` if `goes_on`, which is asked after each step, ends it before.
    ///
    /// # Errors
    /// When the work cannot continue.
    pub fn answer(
        &mut self,
        work: Work,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<Option<Reply>, ApiError> {
        match work {
            Work::Reply(reply) => Ok(Some(reply)),
            Work::Analysis(mut analysis) => loop {
                let stepped = match &mut self.model {
                    Model::Texts(making) => analysis.step(&making.model, &self.served, &mut making.reading),
                    Model::Labels(classifier) => {
                        analysis.classify(classifier, CLASSIFIED_AT_ONCE)?.conclude(&self.served)
                    }
                };
                match stepped? {
                    ControlFlow::Break(reply) => return Ok(Some(reply)),
                    ControlFlow::Continue(rest) if goes_on() => analysis = rest,
                    ControlFlow::Continue(_) => return Ok(None),
                }
            },
            Work::Texts(call) => {
                let id = self.begin(call)?;
                while self.step(id)?.is_some() {
                    if !goes_on() {
                        self.end(id);
                        return Ok(None);
                    }
                }
                Ok(self.end(id).map(Answer::into_reply))
            }
        }
    }

    fn texts(&mut self) -> Option<&mut Texts<Unfinished>> {
        match &mut self.model {
            Model::Texts(making) => Some(&mut making.texts),
            Model::Labels(_) => None,
        }
    }

    /// Begins texts that come piece by piece.
    ///
    /// # Errors
    /// When the model makes none.
    pub fn begin(&mut self, Call { requests, answer, .. }: Call) -> Result<CallId, ApiError> {
        let texts = self.texts().ok_or_else(|| ApiError::failed("texts, asked of a classifier"))?;
        let is_whole = requests.is_empty();
        Ok(texts.begin(requests, Unfinished { answer, chunks: Vec::new(), is_whole, failure: None }))
    }

    /// One step of all texts: the chunks of this call's stream, which may be none; `None` when they have ended.
    ///
    /// # Errors
    /// When the call cannot continue, which ends it.
    pub fn step(&mut self, id: CallId) -> Result<Option<Vec<String>>, ApiError> {
        let Some(texts) = self.texts() else { return Ok(None) };
        let is_over = |making: &Unfinished| making.is_whole || making.failure.is_some();
        if texts.owner(id).is_some_and(|making| !is_over(making)) {
            step_all(texts);
        }
        let Some(making) = texts.owner(id) else { return Ok(None) };
        let chunks = mem::take(&mut making.chunks);
        match making.failure.take() {
            Some(error) => {
                texts.end(id);
                Err(error)
            }
            None => Ok(Some(chunks).filter(|chunks| !making.is_whole || !chunks.is_empty())),
        }
    }

    /// Whether a call has begun and not ended.
    pub fn has(&mut self, id: CallId) -> bool {
        self.texts().is_some_and(|texts| texts.owner(id).is_some())
    }

    /// Ends a call, of which nothing more is made; what there is of its answer.
    pub fn end(&mut self, id: CallId) -> Option<Answer> {
        self.texts()?.end(id).map(|making| making.answer)
    }
}

/// A step of all texts, each of which keeps what it brought.
fn step_all(texts: &mut Texts<Unfinished>) {
    while let Some((call, prompt, taken)) = texts.feed(usize::MAX) {
        if let (Some(making), Err(error)) = (texts.owner(call), taken) {
            making.failure = Some(making.answer.refused(prompt, &error));
        }
    }
    let (happened, failure) = texts.step(&|| ControlFlow::Continue(()));
    for Happened { call, prompt, event, is_last } in happened {
        let Some(making) = texts.owner(call) else { continue };
        match making.answer.take(prompt, event) {
            Ok(chunks) => making.chunks.extend(chunks),
            Err(error) => making.failure = Some(error),
        }
        if is_last {
            making.chunks.extend(making.answer.last_chunks());
            making.is_whole = true;
        }
    }
    if let Some(error) = failure {
        let calls: Vec<CallId> = texts.owners().map(|(call, _)| call).collect();
        for call in calls {
            let making = texts.owner(call).filter(|making| !making.is_whole);
            making.into_iter().for_each(|making| making.failure = Some(ApiError::failed(&error)));
        }
    }
}
