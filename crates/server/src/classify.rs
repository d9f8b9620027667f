//! Classifying: texts of all requests in batches, one batch at a time, so that a long request lets others through between two of its
//! own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use gpt2_api::{ApiError, ClassifyCall, Reply, ServedModel};
use gpt2_engine::{Classification, Classifier, Question};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::fault::{blocking, draining};
use crate::log::log;
use crate::metrics::Metrics;

/// The classifier of a server, and who waits for it.
pub(crate) struct Classifying {
    classifier: Arc<Classifier>,
    metrics: Arc<Metrics>,
    /// One batch is computed at a time: it has all cores.
    turn: Arc<Semaphore>,
    /// Texts that wait or are computed, and how many may.
    texts: AtomicUsize,
    most: usize,
    /// Texts of a batch.
    at_once: usize,
    /// How long a batch may wait.
    longest: Duration,
    is_stopped: AtomicBool,
}

/// The place of a request's texts in the queue; free when dropped.
struct Places<'a> {
    texts: &'a AtomicUsize,
    count: usize,
}

impl Drop for Places<'_> {
    fn drop(&mut self) {
        self.texts.fetch_sub(self.count, Ordering::AcqRel);
    }
}

impl Classifying {
    pub(crate) fn new(
        classifier: Classifier,
        metrics: Arc<Metrics>,
        at_once: usize,
        queue: usize,
        longest: Duration,
    ) -> Self {
        Self {
            classifier: Arc::new(classifier),
            metrics,
            turn: Arc::new(Semaphore::new(1)),
            texts: AtomicUsize::new(0),
            // As with texts that are made: what is computed does not wait.
            most: queue.saturating_add(at_once),
            at_once,
            longest,
            is_stopped: AtomicBool::new(false),
        }
    }

    /// Lets no further batch begin.
    pub(crate) fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
    }

    /// The answer to `POST /v1/classify`; `count` hears of the tokens of its texts.
    pub(crate) async fn answer(
        &self,
        body: Vec<u8>,
        served: &Arc<ServedModel>,
        count: impl FnOnce(usize),
    ) -> Result<Reply, ApiError> {
        let served = Arc::clone(served);
        let ClassifyCall { questions, answer } = blocking(move || ClassifyCall::read(&body, &served)).await?;
        count(answer.prompt_tokens());
        let _places = self.places(questions.len())?;
        let mut classified = Vec::with_capacity(questions.len());
        for batch in questions.chunks(self.at_once.max(1)) {
            classified.extend(self.batch(batch.to_vec()).await?);
        }
        self.metrics.prompt_tokens.inc_by(answer.prompt_tokens() as u64);
        blocking(move || Ok(answer.into_response(&classified))).await
    }

    /// Takes places for so many texts.
    fn places(&self, count: usize) -> Result<Places<'_>, ApiError> {
        let taken = |texts: usize| texts.checked_add(count).filter(|texts| *texts <= self.most);
        match self.texts.fetch_update(Ordering::AcqRel, Ordering::Acquire, taken) {
            Ok(_) => Ok(Places { texts: &self.texts, count }),
            Err(_) => {
                self.metrics.reject("queue_full");
                let message =
                    "as many texts wait as this server keeps waiting; try again after Retry-After seconds";
                let error = ApiError::new(429, message).with_code("server_overloaded");
                Err(error.with_retry_after(Duration::from_secs(1)))
            }
        }
    }

    /// What the classifier says to some questions, when their turn has come.
    async fn batch(&self, questions: Vec<Question>) -> Result<Vec<Classification>, ApiError> {
        let Ok(turn) = timeout(self.longest, Arc::clone(&self.turn).acquire_owned()).await else {
            let message = "the request has waited too long for its turn; try again after Retry-After seconds";
            let error = ApiError::new(503, message).with_code("queue_timeout");
            return Err(error.with_retry_after(Duration::from_secs(1)));
        };
        let turn = turn.map_err(|_| ApiError::internal())?;
        if self.is_stopped.load(Ordering::Acquire) {
            return Err(draining());
        }
        let classifier = Arc::clone(&self.classifier);
        blocking(move || {
            // Held to the end of the batch, also where nobody waits for it any more.
            let _turn = turn;
            classifier.classify(&questions).map_err(|error| {
                log(&format!("a request failed: {error}"));
                ApiError::internal()
            })
        })
        .await
    }
}
