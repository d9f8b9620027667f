//! Classifying: texts of all requests in batches, one batch at a time, so that a long request lets others through between two of its
//! own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use candle_gpt2_api::{ApiError, ClassifyCall, Reply, ServedModel};
use candle_gpt2_engine::{Classification, Classifier, Question};

use crate::busy::{draining, queue_full};
use crate::fault::blocking;
use crate::http::receive::Received;
use crate::metrics::Metrics;
use crate::turns::Turns;

/// The classifier of a server, and who waits for it.
pub(crate) struct Classifying {
    classifier: Arc<Classifier>,
    metrics: Arc<Metrics>,
    /// One batch is computed at a time: it has all cores. The places are those of texts.
    turns: Turns,
    /// Texts of a batch.
    at_once: usize,
    is_stopped: AtomicBool,
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
            // As with texts that are made: what is computed does not wait.
            turns: Turns::new(queue.saturating_add(at_once), longest),
            at_once,
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
        received: Received,
        served: &Arc<ServedModel>,
        id: &Arc<str>,
        count: impl FnOnce(usize),
    ) -> Result<Reply, ApiError> {
        let served = Arc::clone(served);
        let ClassifyCall { questions, answer } =
            blocking(id, move || ClassifyCall::read(received.bytes(), &served)).await?;
        count(answer.prompt_tokens());
        let _places = self.turns.places(questions.len()).ok_or_else(|| {
            self.metrics.reject("queue_full");
            queue_full(None)
        })?;
        let mut classified = Vec::with_capacity(questions.len());
        for batch in questions.chunks(self.at_once.max(1)) {
            classified.extend(self.batch(batch.to_vec(), id).await?);
        }
        self.metrics.prompt_tokens.inc_by(answer.prompt_tokens() as u64);
        blocking(id, move || Ok(answer.into_response(&classified))).await
    }

    /// What the classifier says to some questions, when their turn has come.
    async fn batch(&self, questions: Vec<Question>, id: &Arc<str>) -> Result<Vec<Classification>, ApiError> {
        let turn = self.turns.turn().await?;
        if self.is_stopped.load(Ordering::Acquire) {
            return Err(draining());
        }
        let classifier = Arc::clone(&self.classifier);
        blocking(id, move || {
            // Held to the end of the batch, also where nobody waits for it any more.
            let _turn = turn;
            classifier.classify(&questions).map_err(ApiError::failed)
        })
        .await
    }
}
