//! What does the work of a server: the engine, whose thread has a language model, or a classifier.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use candle_gpt2_api::{Analysis, ApiError};
use candle_gpt2_engine::Classifier;

use crate::busy::draining;
use crate::engine::Engine;
use crate::fault::blocking;
use crate::turns::Turns;

/// What answers to requests for texts or for labels.
pub(crate) enum Backend {
    Texts(Engine),
    Labels(Labels),
}

/// A classifier. Texts of all requests come in batches, one batch at a time, so that a long request lets others through between two of
/// its own.
pub(crate) struct Labels {
    classifier: Arc<Classifier>,
    /// One batch is computed at a time: it has all cores. The places are those of texts.
    pub(crate) turns: Turns,
    /// Texts of a batch.
    at_once: usize,
    is_stopped: AtomicBool,
}

impl Labels {
    pub(crate) fn new(classifier: Classifier, at_once: usize, queue: usize, longest: Duration) -> Self {
        Self {
            classifier: Arc::new(classifier),
            // As with texts that are made: what is computed does not wait.
            turns: Turns::new(1, queue.saturating_add(at_once), longest),
            at_once,
            is_stopped: AtomicBool::new(false),
        }
    }

    /// Computes the next piece of an analysis, when its turn has come.
    pub(crate) async fn compute(&self, id: &Arc<str>, analysis: Analysis) -> Result<Analysis, ApiError> {
        let turn = self.turns.turn().await?;
        if self.is_stopped.load(Ordering::Acquire) {
            return Err(draining());
        }
        let (classifier, at_once) = (Arc::clone(&self.classifier), self.at_once);
        blocking(id, move || {
            // Kept until the batch ends, even if its client has gone.
            let _turn = turn;
            analysis.classify(&classifier, at_once)
        })
        .await
    }
}

impl Backend {
    /// Refuses new and waiting requests; those that have begun continue.
    pub(crate) fn drain(&self) {
        match self {
            Self::Texts(engine) => engine.drain(),
            // A request has begun when it is there, and no further one is let in.
            Self::Labels(_) => {}
        }
    }

    /// Ends everything.
    pub(crate) fn stop(&self) {
        match self {
            Self::Texts(engine) => engine.stop(),
            // No further batch begins.
            Self::Labels(labels) => labels.is_stopped.store(true, Ordering::Release),
        }
    }

    /// Returns when nothing is left to do after [`Backend::drain`], but for calls that are being answered.
    pub(crate) async fn drained(&self) {
        if let Self::Texts(engine) = self {
            engine.drained().await;
        }
    }

    /// Returns when no work is done any more, and says why.
    pub(crate) async fn died(&self) -> String {
        match self {
            Self::Texts(engine) => engine.died().await,
            Self::Labels(_) => std::future::pending().await,
        }
    }
}
