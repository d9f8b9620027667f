//! Request threads, which keep slow work off the async thread.
//!
//! The threads parse, tokenize, render chat templates, compile grammars and write long responses.

use std::sync::Arc;
use std::time::Duration;

use candle_gpt2_api::{ApiError, Endpoint, GRAMMARS_BUSY, ServedModel, Work};
use tokio::time::{sleep, timeout};

use crate::busy::{queue_full, queue_timeout};
use crate::concurrency::ConcurrencyLimit;
use crate::fault::blocking;
use crate::metrics::Metrics;

/// Number of request threads, in addition to the async thread and the engine thread.
pub(crate) const THREADS: usize = 16;
/// Maximum number of concurrent long requests. The remaining threads serve short requests.
const LONG_AT_ONCE: usize = 10;
/// Delay before the first grammar in the queue is retried.
const GRAMMAR_RETRY: Duration = Duration::from_millis(20);

/// Reads requests on request threads, with limits on concurrency.
#[derive(Debug)]
pub(crate) struct RequestThreads {
    served: Arc<ServedModel>,
    metrics: Arc<Metrics>,
    /// Limit for long requests.
    ///
    /// The queue is unbounded, because the number of connections and the memory for bodies are limited.
    long: ConcurrencyLimit,
    /// Queue of requests whose grammars wait for a free worker.
    grammars: ConcurrencyLimit,
    /// Maximum time in a queue.
    max_wait: Duration,
}

impl RequestThreads {
    /// Creates a reader of requests for `served`.
    ///
    /// Long requests wait at most `max_wait` for a permit. Up to `queue` grammars wait at most as long for a
    /// worker.
    pub(crate) fn new(
        served: Arc<ServedModel>,
        metrics: Arc<Metrics>,
        queue: usize,
        max_wait: Duration,
    ) -> Self {
        let [long, grammars] = [(LONG_AT_ONCE, usize::MAX), (1, queue)]
            .map(|(at_once, max_slots)| ConcurrencyLimit::new(at_once, max_slots, max_wait));
        Self { served, metrics, long, grammars, max_wait }
    }

    /// Reads the body of request `id` and runs `then` on the same thread to save a thread switch.
    ///
    /// Only a few long requests are read concurrently; the others wait.
    ///
    /// # Errors
    /// If the body is invalid, the request waits too long, or `then` fails.
    pub(crate) async fn read<T: Send + 'static>(
        &self,
        id: &Arc<str>,
        endpoint: Endpoint,
        mut body: impl AsRef<[u8]> + Send + 'static,
        reuse: Option<u64>,
        mut then: impl FnOnce(Work) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if endpoint.reads_quickly(body.as_ref().len()) {
            let served = Arc::clone(&self.served);
            let read = move || match served.read_quickly(endpoint, body.as_ref(), reuse)? {
                Some(work) => {
                    drop(body);
                    then(work).map(Ok)
                }
                None => Ok(Err((body, then))),
            };
            match blocking(id, read).await? {
                Ok(done) => return Ok(done),
                Err(unread) => (body, then) = unread,
            }
        }
        match self.read_long(id, endpoint, body, reuse, then).await? {
            Ok(done) => return Ok(done),
            Err(unread) => (body, then) = unread,
        }
        let _slot = self.grammars.reserve(1).ok_or_else(|| {
            self.metrics.reject("queue_full");
            queue_full(None)
        })?;
        let queued = async {
            // The first request in the queue retries until a worker is free.
            let _permit = self.grammars.acquire().await?;
            loop {
                match self.read_long(id, endpoint, body, reuse, then).await? {
                    Ok(done) => return Ok(done),
                    Err(unread) => (body, then) = unread,
                }
                sleep(GRAMMAR_RETRY).await;
            }
        };
        timeout(self.max_wait, queued).await.unwrap_or_else(|_| {
            self.metrics.reject("queue_timeout");
            Err(queue_timeout(None))
        })
    }

    /// Reads a long request when a permit is free; returns the body and `then` if no worker is free.
    async fn read_long<B, T, F>(
        &self,
        id: &Arc<str>,
        endpoint: Endpoint,
        body: B,
        reuse: Option<u64>,
        then: F,
    ) -> Result<Result<T, (B, F)>, ApiError>
    where
        B: AsRef<[u8]> + Send + 'static,
        T: Send + 'static,
        F: FnOnce(Work) -> Result<T, ApiError> + Send + 'static,
    {
        let permit = self.long.acquire().await.inspect_err(|_| self.metrics.reject("queue_timeout"))?;
        let served = Arc::clone(&self.served);
        blocking(id, move || {
            // Held until the work ends, even if the client has disconnected.
            let _permit = permit;
            match served.read(endpoint, body.as_ref(), reuse) {
                Err(error) if error.code() == Some(GRAMMARS_BUSY) => Ok(Err((body, then))),
                work => {
                    drop(body);
                    then(work?).map(Ok)
                }
            }
        })
        .await
    }
}
