//! The record of a request: numbers for `/metrics`, and a line of the log. Never a text. tower-http's layer for traces does not see
//! an answer that is given up while it is sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::time::Instant;

use candle_gpt2_api::ApiError;
use candle_gpt2_generation::Event;
use tokio::sync::watch;

use crate::metrics::Metrics;

/// A request from its head to the end of its answer. Dropping it counts the request.
pub(crate) struct Record {
    metrics: Arc<Metrics>,
    is_logged: bool,
    id: Arc<str>,
    method: &'static str,
    route: &'static str,
    begun: Instant,
    numbers: Arc<Numbers>,
}

/// What is found out while a request is served.
#[derive(Debug)]
pub(crate) struct Numbers {
    code: AtomicU16,
    prompt_tokens: AtomicUsize,
    new_tokens: AtomicUsize,
}

impl Numbers {
    /// Sets the code that the request is counted under.
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

/// The code of a request whose client was gone before its end.
pub(crate) const CLIENT_GONE: u16 = 499;

/// Refuses a client that closed its sending side. Most have left; one that only sends nothing more reads this.
pub(crate) fn gone() -> ApiError {
    let message = "the connection's sending side was closed before the answer, which cancels the request; keep it open until the \
                   answer has come";
    ApiError::new(CLIENT_GONE, message).with_code("client_closed_request")
}

impl Record {
    /// `is_logged`: whether it gets a line of the log.
    pub(crate) fn new(
        metrics: &Arc<Metrics>,
        is_logged: bool,
        id: Arc<str>,
        method: &'static str,
        route: &'static str,
    ) -> Self {
        let numbers = Numbers {
            // Until it has another one: an answer that is given up before it begins has none.
            code: AtomicU16::new(CLIENT_GONE),
            prompt_tokens: AtomicUsize::new(0),
            new_tokens: AtomicUsize::new(0),
        };
        let metrics = Arc::clone(metrics);
        Self { metrics, is_logged, id, method, route, begun: Instant::now(), numbers: Arc::new(numbers) }
    }

    pub(crate) fn id(&self) -> &Arc<str> {
        &self.id
    }

    pub(crate) fn numbers(&self) -> &Arc<Numbers> {
        &self.numbers
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let time = self.begun.elapsed();
        let code = self.numbers.code.load(Ordering::Relaxed);
        self.metrics.count_request(self.route, code, time);
        if self.is_logged {
            tracing::info!(
                request_id = %self.id,
                method = %self.method,
                path = %self.route,
                status = code,
                prompt_tokens = self.numbers.prompt_tokens.load(Ordering::Relaxed),
                new_tokens = self.numbers.new_tokens.load(Ordering::Relaxed),
                seconds = time.as_secs_f64(),
            );
        }
    }
}

/// A call that the engine has accepted, and whose answer is not complete.
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
