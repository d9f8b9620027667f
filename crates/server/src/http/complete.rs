//! Completions: converts a body to an engine call, and the call's updates to a response.

use std::sync::Arc;
use std::time::Duration;

use candle_gpt2_api::{Answer, ApiError, Call, Endpoint, Work};
use candle_gpt2_generation::{Event, Request};
use hyper::Response;
use hyper::body::Bytes;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::activations::ActivationReservation;
use super::body::{Content, Stream};
use super::peer::Peer;
use super::receive::Received;
use super::record::{Accepted, CLIENT_GONE, RequestStats, gone};
use super::reply;
use super::{Caller, Phase, Shared};
use crate::backend::Backend;
use crate::engine::{Ticket, Update};
use crate::fault::{blocking, caught};

/// Maximum number of log-probability entries in a response that the async thread writes itself.
///
/// Writing such a response takes less than a millisecond.
const SHORT_ANSWER: usize = 4 << 10;

/// Whether a response may be so long that a request thread must write it.
fn is_long(requests: &[Request]) -> bool {
    let entries = |request: &Request| {
        let tokens = request.prompt.len().saturating_add(request.config.max_new_tokens);
        let alternatives = request.logprobs.max(request.prompt_logprobs).unwrap_or(0);
        tokens
            .saturating_mul(alternatives.saturating_add(1))
            .saturating_mul(request.config.num_return_sequences)
    };
    let total = requests.iter().map(entries).fold(0, usize::saturating_add);
    total > SHORT_ANSWER || requests.iter().any(|request| !request.observers.is_empty())
}

/// Whether an event may add more than one token to a long response, such as an echo or activations.
fn is_costly(event: &Event) -> bool {
    match event {
        Event::Token { stop_reason, .. } => stop_reason.is_some(),
        _ => true,
    }
}

/// Media type of safetensors files.
pub(crate) const FILE: &str = "application/octet-stream";

/// SSE comment line, which clients ignore.
const PING: Bytes = Bytes::from_static(b":\n\n");

/// Serves a request for completions or activations; `wants_file` requests activations as a file.
pub(crate) async fn answer(
    endpoint: Endpoint,
    received: Received,
    wants_file: bool,
    caller: &Caller,
) -> Result<Response<Content>, ApiError> {
    let shared = &caller.shared;
    let wants_file = wants_file && endpoint == Endpoint::Activations;
    let begin = {
        let caller = caller.clone();
        move |work| begin(work, wants_file, &caller)
    };
    let begun = shared.threads.read(&caller.id, endpoint, received, Some(caller.key), begin);
    // A draining engine accepts no further calls.
    let (running, is_streamed) = caller.until(Phase::Draining, begun).await?;
    let peer = Arc::clone(&caller.peer);
    if is_streamed { running.in_pieces(shared, peer).await } else { running.whole(&peer).await }
}

/// Submits a request to the engine; returns the running call and whether its response is streamed.
fn begin(work: Work, wants_file: bool, caller: &Caller) -> Result<(Running, bool), ApiError> {
    let shared = &caller.shared;
    let Work::Texts(Call { mut requests, answer, stream, activation_bytes }) = work else {
        return Err(ApiError::failed("a completion endpoint returned other work"));
    };
    caller.log_warnings(answer.warnings());
    limit_time(&mut requests, shared.options.max_time);
    caller.stats.add_prompt_tokens(requests.iter().map(|request| request.prompt.len()).sum());
    let is_long = is_long(&requests);
    let Backend::Texts(engine) = &shared.backend else {
        return Err(ApiError::failed("a classifier cannot generate text"));
    };
    let reservation = shared.activations.reserve(activation_bytes);
    let reservation = reservation.inspect_err(|_| shared.metrics.reject("activations_full"))?;
    let ticket = engine.submit(&caller.id, requests)?;
    let stats = Arc::clone(&caller.stats);
    let id = Arc::clone(&caller.id);
    let _accepted = Accepted::new(&shared.calls);
    let answer = Some(answer);
    let running = Running { id, answer, ticket, stats, is_long, wants_file, reservation, _accepted };
    Ok((running, stream))
}

fn limit_time(requests: &mut [Request], most: Option<Duration>) {
    let Some(most) = most.map(|most| most.as_secs_f64()) else { return };
    for request in requests {
        let config = Arc::make_mut(&mut request.config);
        config.max_time = Some(config.max_time.map_or(most, |asked| asked.min(most)));
    }
}

/// Call that the engine has accepted; dropping it cancels the call.
struct Running {
    /// Id of the request.
    id: Arc<str>,
    /// Response so far; `None` while a request thread extends it.
    answer: Option<Answer>,
    ticket: Ticket,
    stats: Arc<RequestStats>,
    /// Whether the response may be long.
    is_long: bool,
    /// Whether the response is a safetensors file.
    wants_file: bool,
    /// Memory reserved for the activations.
    reservation: Option<ActivationReservation>,
    _accepted: Accepted,
}

impl Running {
    fn answer(&mut self) -> Result<&mut Answer, ApiError> {
        self.answer.as_mut().ok_or_else(lost)
    }

    /// Returns the chunks that an update adds to the response, or `None` after the last update.
    ///
    /// The future must not be dropped before it completes.
    async fn handle_update(&mut self, update: Option<Update>) -> Result<Option<Vec<String>>, ApiError> {
        match update {
            None => Ok(None),
            Some(Update::Event { prompt, event }) => {
                self.stats.count(&event);
                if !(self.is_long && is_costly(&event)) {
                    return self.answer()?.handle_event(prompt, event).map(Some);
                }
                let mut answer = self.answer.take().ok_or_else(lost)?;
                let taken = blocking(&self.id, move || {
                    let chunks = answer.handle_event(prompt, event);
                    Ok((answer, chunks))
                });
                let (answer, chunks) = taken.await?;
                self.answer = Some(answer);
                chunks.map(Some)
            }
            Some(Update::Refused { prompt, error }) => Err(self.answer()?.refused(prompt, &error)),
            Some(Update::Failed(error)) => Err(error),
        }
    }

    async fn whole(mut self, peer: &Peer) -> Result<Response<Content>, ApiError> {
        let made = async {
            loop {
                let update = self.ticket.next().await;
                if self.handle_update(update).await?.is_none() {
                    return Ok::<(), ApiError>(());
                }
            }
        };
        tokio::select! {
            biased;
            made = made => made?,
            () = peer.closed() => return Err(gone()),
        }
        let Self { id, answer, is_long, wants_file, reservation, .. } = self;
        let answer = answer.ok_or_else(lost)?;
        let write = move || {
            let body = match wants_file {
                true => answer.into_safetensors()?,
                false => answer.into_response().into_bytes(),
            };
            let body = match reservation {
                Some(reservation) => reservation.until_sent(body),
                None => body.into(),
            };
            Ok(if wants_file { reply::text(FILE, body) } else { reply::json(body) })
        };
        if is_long { blocking(&id, write).await } else { write() }
    }

    /// Streams the response.
    ///
    /// Waits for the first update, up to a timeout, so that an early failure gets the right status.
    async fn in_pieces(mut self, shared: &Shared, peer: Arc<Peer>) -> Result<Response<Content>, ApiError> {
        let timeouts = shared.options.timeouts;
        let first = async {
            match timeout(timeouts.head, self.ticket.next()).await {
                Ok(update) => self.handle_update(update).await.map(FirstUpdate::Chunks),
                Err(_) => Ok(FirstUpdate::TimedOut),
            }
        };
        let first = tokio::select! {
            biased;
            first = first => first?,
            () = peer.closed() => return Err(gone()),
        };
        let stream = Stream::new(move |out| self.send(first, out, peer, timeouts.ping));
        let response = Response::builder()
            .header(CONTENT_TYPE, "text/event-stream")
            .header(CACHE_CONTROL, "no-cache")
            .header(HeaderName::from_static("x-accel-buffering"), "no")
            .body(Content::Stream(stream));
        response.map_err(ApiError::failed)
    }

    async fn send(mut self, first: FirstUpdate, out: mpsc::Sender<Bytes>, peer: Arc<Peer>, ping: Duration) {
        // This code stays in effect if the stream is dropped before its end.
        self.stats.set_code(CLIENT_GONE);
        let id = Arc::clone(&self.id);
        let outcome = tokio::select! {
            biased;
            outcome = caught(&id, self.send_chunks(first, &out, ping)) => outcome,
            () = peer.closed() => Err(gone()),
        };
        // The head with a success status has already been sent, but the log reports the actual outcome.
        let (code, last) = match outcome {
            Ok(()) => (200, self.answer.as_mut().map(Answer::last_chunks).unwrap_or_default()),
            Err(error) => (error.status(), vec![error.to_json()]),
        };
        let last = last.iter().map(|chunk| event(chunk)).collect::<String>() + "data: [DONE]\n\n";
        self.stats.set_code(code);
        // Fails if the stream has been dropped.
        _ = out.send(last.into()).await;
    }

    async fn send_chunks(
        &mut self,
        first: FirstUpdate,
        out: &mpsc::Sender<Bytes>,
        ping: Duration,
    ) -> Result<(), ApiError> {
        let mut next = match first {
            FirstUpdate::Chunks(pieces) => pieces,
            FirstUpdate::TimedOut => {
                _ = out.send(PING).await;
                Some(Vec::new())
            }
        };
        while let Some(pieces) = next {
            for piece in pieces {
                _ = out.send(event(&piece).into()).await;
            }
            next = loop {
                match timeout(ping, self.ticket.next()).await {
                    Ok(update) => break self.handle_update(update).await?,
                    Err(_) => _ = out.send(PING).await,
                }
            };
        }
        Ok(())
    }
}

/// Result of waiting for the first update before a stream's head is sent.
enum FirstUpdate {
    Chunks(Option<Vec<String>>),
    /// No update within the timeout.
    TimedOut,
}

/// Error for a response lost in a panic on its request thread; the panic has been logged.
fn lost() -> ApiError {
    ApiError::internal()
}

fn event(json: &str) -> String {
    format!("data: {json}\n\n")
}
