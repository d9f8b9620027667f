//! Request threads. Parsing, tokenizing, chat templates, grammars and writing long responses run here, never on the async thread.

use std::sync::Arc;
use std::time::Duration;

use candle_gpt2_api::{ApiError, Endpoint, GRAMMARS_BUSY, ServedModel, Work};
use tokio::time::{sleep, timeout};

use crate::busy::{queue_full, queue_timeout};
use crate::fault::blocking;
use crate::metrics::Metrics;
use crate::turns::Turns;

/// Threads next to the async thread and the engine's.
pub(crate) const THREADS: usize = 16;
/// Long work at a time. The remaining threads serve short requests.
const LONG_AT_ONCE: usize = 10;
/// Time after which the first grammar in the queue tries again.
const GRAMMAR_RETRY: Duration = Duration::from_millis(20);

/// Reads requests on request threads, within limits.
#[derive(Debug)]
pub(crate) struct RequestThreads {
    served: Arc<ServedModel>,
    metrics: Arc<Metrics>,
    /// Long work holds a turn. Connections and their bodies are limited, so the queue needs no limit of its own.
    long: Turns,
    /// Requests whose grammars find no free worker.
    grammars: Turns,
    /// Maximum time in a queue.
    longest: Duration,
}

impl RequestThreads {
    /// Threads that read requests to `served`. Long work waits at most `longest` for its turn, and so do `queue` grammars for a
    /// worker.
    pub(crate) fn new(
        served: Arc<ServedModel>,
        metrics: Arc<Metrics>,
        queue: usize,
        longest: Duration,
    ) -> Self {
        let [long, grammars] = [(LONG_AT_ONCE, usize::MAX), (1, queue)]
            .map(|(at_once, most)| Turns::new(at_once, most, longest));
        Self { served, metrics, long, grammars, longest }
    }

    /// Reads the request with this id and this body, and runs `then` on the same thread, which saves a change of threads. Only a few
    /// requests that take long are read at a time; the others wait.
    ///
    /// # Errors
    /// When the body is wrong, the request waits too long, or `then` fails.
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
        let _place = self.grammars.places(1).ok_or_else(|| {
            self.metrics.reject("queue_full");
            queue_full(None)
        })?;
        let queued = async {
            // The first in the queue tries until a worker is free.
            let _turn = self.grammars.turn().await?;
            loop {
                match self.read_long(id, endpoint, body, reuse, then).await? {
                    Ok(done) => return Ok(done),
                    Err(unread) => (body, then) = unread,
                }
                sleep(GRAMMAR_RETRY).await;
            }
        };
        timeout(self.longest, queued).await.unwrap_or_else(|_| {
            self.metrics.reject("queue_timeout");
            Err(queue_timeout(None))
        })
    }

    /// Reads a request in its turn. Returns the body and `then` if its grammar finds no free worker.
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
        let turn = self.long.turn().await.inspect_err(|_| self.metrics.reject("queue_timeout"))?;
        let served = Arc::clone(&self.served);
        blocking(id, move || {
            // Held until the work ends, even if its client has left.
            let _turn = turn;
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
