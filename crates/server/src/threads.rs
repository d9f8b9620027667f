//! Request threads. Parsing, tokenizing, chat templates, grammars and writing long responses run here, never on the async thread.

use std::sync::Arc;
use std::time::Duration;

use candle_gpt2_api::{ApiError, Endpoint, ServedModel, Work};

use crate::fault::blocking;
use crate::metrics::Metrics;
use crate::turns::Turns;

/// Threads next to the async thread and the engine's.
pub(crate) const THREADS: usize = 16;
/// Long work at a time. The remaining threads serve short requests.
const LONG_AT_ONCE: usize = 10;

/// Reads requests on request threads, within limits.
#[derive(Debug)]
pub(crate) struct RequestThreads {
    served: Arc<ServedModel>,
    metrics: Arc<Metrics>,
    /// Long work holds a turn. Connections and their bodies are limited, so the queue needs no limit of its own.
    long: Turns,
}

impl RequestThreads {
    /// Threads that read requests to `served`. Long work waits at most `longest` for its turn.
    pub(crate) fn new(served: Arc<ServedModel>, metrics: Arc<Metrics>, longest: Duration) -> Self {
        Self { served, metrics, long: Turns::new(LONG_AT_ONCE, usize::MAX, longest) }
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
        let turn = self.long.turn().await.inspect_err(|_| self.metrics.reject("queue_timeout"))?;
        let served = Arc::clone(&self.served);
        blocking(id, move || {
            // Held until the work ends, even if its client has left.
            let _turn = turn;
            let work = served.read(endpoint, body.as_ref(), reuse)?;
            drop(body);
            then(work)
        })
        .await
    }
}
