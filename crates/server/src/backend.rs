//! Server backend: the engine thread with a language model, or a classifier.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use candle_gpt2_api::{Analysis, ApiError};
use candle_gpt2_engine::Classifier;

use crate::busy::draining;
use crate::concurrency::ConcurrencyLimit;
use crate::engine::Engine;
use crate::fault::blocking;

/// Model that computes the server's responses.
pub(crate) enum Backend {
    Texts(Engine),
    Labels(Labels),
}

/// Classifier that labels texts in batches, one batch at a time.
///
/// A long request lets other requests run between its batches.
pub(crate) struct Labels {
    classifier: Arc<Classifier>,
    /// Limits execution to one batch at a time, which uses all cores. Each text occupies one slot.
    pub(crate) limit: ConcurrencyLimit,
    /// Maximum number of texts in a batch.
    at_once: usize,
    is_stopped: AtomicBool,
}

impl Labels {
    pub(crate) fn new(classifier: Classifier, at_once: usize, queue: usize, max_wait: Duration) -> Self {
        Self {
            classifier: Arc::new(classifier),
            // Like running completions in the engine, texts being classified do not count as waiting.
            limit: ConcurrencyLimit::new(1, queue.saturating_add(at_once), max_wait),
            at_once,
            is_stopped: AtomicBool::new(false),
        }
    }

    /// Waits for a permit and computes the next piece of an analysis.
    pub(crate) async fn compute(&self, id: &Arc<str>, analysis: Analysis) -> Result<Analysis, ApiError> {
        let permit = self.limit.acquire().await?;
        if self.is_stopped.load(Ordering::Acquire) {
            return Err(draining());
        }
        let (classifier, at_once) = (Arc::clone(&self.classifier), self.at_once);
        blocking(id, move || {
            // Held until the batch ends, even if the client has disconnected.
            let _permit = permit;
            analysis.classify(&classifier, at_once)
        })
        .await
    }
}

impl Backend {
    /// Rejects new and waiting requests; started ones continue.
    pub(crate) fn drain(&self) {
        match self {
            Self::Texts(engine) => engine.drain(),
            // Each received request has already started, and the routes admit no further request.
            Self::Labels(_) => {}
        }
    }

    /// Stops all work.
    pub(crate) fn stop(&self) {
        match self {
            Self::Texts(engine) => engine.stop(),
            // Prevents further batches.
            Self::Labels(labels) => labels.is_stopped.store(true, Ordering::Release),
        }
    }

    /// Returns once only responses remain to be sent after [`Backend::drain`].
    pub(crate) async fn drained(&self) {
        if let Self::Texts(engine) = self {
            engine.drained().await;
        }
    }

    /// Waits until the backend dies, and returns the reason.
    pub(crate) async fn died(&self) -> String {
        match self {
            Self::Texts(engine) => engine.died().await,
            Self::Labels(_) => std::future::pending().await,
        }
    }
}
