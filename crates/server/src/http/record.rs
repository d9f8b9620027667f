//! Record of a request for `/metrics` and the log; never contains the request's text.
//!
//! tower-http's trace layer does not notice a response that is dropped while it is being sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::time::Instant;

use candle_gpt2_api::ApiError;
use candle_gpt2_generation::Event;
use tokio::sync::watch;

use crate::metrics::Metrics;

/// Record of a request from its head to the end of the response. Dropping it counts the request.
pub(crate) struct Record {
    metrics: Arc<Metrics>,
    is_logged: bool,
    id: Arc<str>,
    method: &'static str,
    route: &'static str,
    begun: Instant,
    stats: Arc<RequestStats>,
}

/// Statistics collected while a request is served.
#[derive(Debug)]
pub(crate) struct RequestStats {
    code: AtomicU16,
    prompt_tokens: AtomicUsize,
    new_tokens: AtomicUsize,
}

impl RequestStats {
    /// Sets the status code under which the request is counted.
    pub(crate) fn set_code(&self, code: u16) {
        self.code.store(code, Ordering::Relaxed);
    }

    pub(crate) fn add_prompt_tokens(&self, tokens: usize) {
        self.prompt_tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    pub(crate) fn count(&self, event: &Event) {
        if matches!(event, Event::Token { .. }) {
            self.new_tokens.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Status code for a request whose client disconnected before the response was complete.
pub(crate) const CLIENT_GONE: u16 = 499;

/// Error for a client that closed its sending side.
///
/// Most such clients have disconnected. A client that closed only one direction receives this error.
pub(crate) fn gone() -> ApiError {
    let message = "the client closed its side of the connection, which cancels the request; keep the connection open until the response \
                   has arrived";
    ApiError::new(CLIENT_GONE, message).with_code("client_closed_request")
}

impl Record {
    /// Creates a record; `is_logged` determines whether the request is logged.
    pub(crate) fn new(
        metrics: &Arc<Metrics>,
        is_logged: bool,
        id: Arc<str>,
        method: &'static str,
        route: &'static str,
    ) -> Self {
        let stats = RequestStats {
            // Stays in effect if the response is dropped before it begins.
            code: AtomicU16::new(CLIENT_GONE),
            prompt_tokens: AtomicUsize::new(0),
            new_tokens: AtomicUsize::new(0),
        };
        let metrics = Arc::clone(metrics);
        Self { metrics, is_logged, id, method, route, begun: Instant::now(), stats: Arc::new(stats) }
    }

    pub(crate) fn id(&self) -> &Arc<str> {
        &self.id
    }

    pub(crate) fn stats(&self) -> &Arc<RequestStats> {
        &self.stats
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let time = self.begun.elapsed();
        let code = self.stats.code.load(Ordering::Relaxed);
        self.metrics.count_request(self.route, code, time);
        if self.is_logged {
            tracing::info!(
                request_id = %self.id,
                method = %self.method,
                path = %self.route,
                status = code,
                prompt_tokens = self.stats.prompt_tokens.load(Ordering::Relaxed),
                new_tokens = self.stats.new_tokens.load(Ordering::Relaxed),
                seconds = time.as_secs_f64(),
            );
        }
    }
}

/// RAII guard for a request whose response is not complete yet.
pub(crate) struct Accepted(watch::Sender<usize>);

impl Accepted {
    pub(crate) fn new(calls: &watch::Sender<usize>) -> Self {
        calls.send_modify(|calls| *calls += 1);
        Self(calls.clone())
    }
}

impl Drop for Accepted {
    fn drop(&mut self) {
        self.0.send_modify(|calls| *calls -= 1);
    }
}
