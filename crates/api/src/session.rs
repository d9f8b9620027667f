//! A model that answers paths with bodies in steps: for front ends of one thread, such as a page and a call of Python's. A server reads
//! the same [`Work`] and does it between many callers.

use std::mem;
use std::ops::ControlFlow;
use std::sync::Arc;

use candle_gpt2_engine::{CallId, Happened, LoadedModel, Texts};
use candle_gpt2_generation::Scheduler;
use candle_gpt2_look::Reading;

use crate::{Answer, ApiError, Call, Reply, ServedModel, Work};

/// A model, what is served of it, and the texts that are made.
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
/// let body = br#"{"prompt": "ROMEO:", "max_tokens": 5, "temperature": 0}"#;
/// let reply = session.answer(served.read(Endpoint::Completions, body, None)?, || true)?;
/// assert!(reply.is_some_and(|reply| reply.json.contains(r#""completion_tokens":5"#)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Session {
    model: LoadedModel,
    served: Arc<ServedModel>,
    texts: Texts<Making>,
    /// What was read for `/look/next`, of which the next one may be a continuation.
    reading: Reading,
}

/// An answer in the making.
struct Making {
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
        Self { model, served, texts: Texts::new(scheduler), reading: Reading::default() }
    }

    /// What requests are checked against.
    pub fn served(&self) -> &Arc<ServedModel> {
        &self.served
    }

    /// The whole answer; `None` if `goes_on`, which is asked after each step, ends it before.
    ///
    /// # Errors
    /// When the work cannot go on, or is for a classifier.
    pub fn answer(
        &mut self,
        work: Work,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<Option<Reply>, ApiError> {
        match work {
            Work::Reply(reply) => Ok(Some(reply)),
            Work::Labels(_) => Err(self.served.has_no_labels()),
            Work::Analysis(mut analysis) => loop {
                match analysis.step(&self.model, &self.served, &mut self.reading)? {
                    ControlFlow::Break(reply) => return Ok(Some(reply)),
                    ControlFlow::Continue(rest) if goes_on() => analysis = rest,
                    ControlFlow::Continue(_) => return Ok(None),
                }
            },
            Work::Texts(call) => {
                let id = self.begin(call);
                while self.step(id)?.is_some() {
                    if !goes_on() {
                        self.end(id);
                        return Ok(None);
                    }
                }
                let making = self.texts.end(id);
                Ok(making.map(|making| making.answer.into_reply()))
            }
        }
    }

    /// Begins texts that come piece by piece.
    pub fn begin(&mut self, Call { requests, answer, .. }: Call) -> CallId {
        let is_whole = requests.is_empty();
        self.texts.begin(requests, Making { answer, chunks: Vec::new(), is_whole, failure: None })
    }

    /// One step of all texts: the chunks of this call's stream, which may be none; `None` when they have ended.
    ///
    /// # Errors
    /// When the call cannot go on, which ends it.
    pub fn step(&mut self, id: CallId) -> Result<Option<Vec<String>>, ApiError> {
        let is_over = |making: &Making| making.is_whole || making.failure.is_some();
        if self.texts.owner(id).is_some_and(|making| !is_over(making)) {
            self.step_all();
        }
        let Some(making) = self.texts.owner(id) else { return Ok(None) };
        let chunks = mem::take(&mut making.chunks);
        match making.failure.take() {
            Some(error) => {
                self.texts.end(id);
                Err(error)
            }
            None => Ok(Some(chunks).filter(|chunks| !making.is_whole || !chunks.is_empty())),
        }
    }

    /// A step of all texts, each of which keeps what it brought.
    fn step_all(&mut self) {
        while let Some((call, _, taken)) = self.texts.feed(usize::MAX) {
            let making = self.texts.owner(call);
            making
                .zip(taken.err())
                .into_iter()
                .for_each(|(making, error)| making.failure = Some((&error).into()));
        }
        let (happened, failure) = self.texts.step(&|| ControlFlow::Continue(()));
        for Happened { call, prompt, event, is_last } in happened {
            let Some(making) = self.texts.owner(call) else { continue };
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
            let calls: Vec<CallId> = self.texts.owners().map(|(call, _)| call).collect();
            for call in calls {
                let making = self.texts.owner(call).filter(|making| !making.is_whole);
                making.into_iter().for_each(|making| making.failure = Some(ApiError::failed(&error)));
            }
        }
    }

    /// Whether a call has begun and not ended.
    pub fn has(&self, id: CallId) -> bool {
        self.texts.owners().any(|(call, _)| call == id)
    }

    /// Ends a call, of which nothing more is made.
    pub fn end(&mut self, id: CallId) {
        self.texts.end(id);
    }
}
