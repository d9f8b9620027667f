//! Completions: from a body to a call of the engine, and from what the engine tells to an answer, whole or in pieces.

use std::sync::Arc;
use std::time::Duration;

use candle_gpt2_api::{Answer, ApiError, Call, Endpoint, Work};
use candle_gpt2_generation::{Event, Request};
use hyper::Response;
use hyper::body::Bytes;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::activations::Held;
use super::body::{Content, Stream};
use super::peer::Peer;
use super::receive::Received;
use super::record::{Accepted, CLIENT_GONE, Numbers, gone};
use super::reply;
use super::{Caller, Phase, Shared};
use crate::backend::Backend;
use crate::engine::{Ticket, Update};
use crate::fault::{blocking, caught};

/// Entries of a response that the async thread writes itself, which takes less than a millisecond.
const SHORT_ANSWER: usize = 4 << 10;

/// Whether a response may be so long that it is written on a request thread.
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

/// Whether an event of a long response may add more to it than a token: the echoed prompt, or activations.
fn is_costly(event: &Event) -> bool {
    match event {
        Event::Token { stop_reason, .. } => stop_reason.is_some(),
        _ => true,
    }
}

/// The type of safetensors files.
pub(crate) const FILE: &str = "application/octet-stream";

/// A line that clients skip.
const PING: Bytes = Bytes::from_static(b":\n\n");

/// Serves a request for a completion, or for activations: those come as a file if that is wanted.
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
    // An engine that drains accepts no further call.
    let (running, is_streamed) = caller.until(Phase::Draining, begun).await?;
    let peer = Arc::clone(&caller.peer);
    if is_streamed { running.in_pieces(shared, peer).await } else { running.whole(&peer).await }
}

/// Submits a request to the engine. Returns the call, and whether its response is a stream.
fn begin(work: Work, wants_file: bool, caller: &Caller) -> Result<(Running, bool), ApiError> {
    let shared = &caller.shared;
    let Work::Texts(Call { mut requests, answer, stream, activation_bytes }) = work else {
        return Err(ApiError::failed("a path of texts that asks for something else"));
    };
    caller.log_warnings(answer.warnings());
    limit_time(&mut requests, shared.options.max_time);
    caller.numbers.add_prompt_tokens(requests.iter().map(|request| request.prompt.len()).sum());
    let is_long = is_long(&requests);
    let Backend::Texts(engine) = &shared.backend else {
        return Err(ApiError::failed("texts, of a classifier"));
    };
    let held = shared.activations.hold(activation_bytes);
    let held = held.inspect_err(|_| shared.metrics.reject("activations_full"))?;
    let ticket = engine.submit(&caller.id, requests)?;
    let numbers = Arc::clone(&caller.numbers);
    let id = Arc::clone(&caller.id);
    let _accepted = Accepted::new(&shared.calls);
    let running = Running { id, answer: Some(answer), ticket, numbers, is_long, wants_file, held, _accepted };
    Ok((running, stream))
}

fn limit_time(requests: &mut [Request], most: Option<Duration>) {
    let Some(most) = most.map(|most| most.as_secs_f64()) else { return };
    for request in requests {
        let config = Arc::make_mut(&mut request.config);
        config.max_time = Some(config.max_time.map_or(most, |asked| asked.min(most)));
    }
}

/// A call that the engine has accepted. Dropping it cancels the call.
struct Running {
    /// That of the request.
    id: Arc<str>,
    /// `None` while a request thread has it.
    answer: Option<Answer>,
    ticket: Ticket,
    numbers: Arc<Numbers>,
    /// Whether the response may be long.
    is_long: bool,
    /// Whether it is a safetensors file.
    wants_file: bool,
    /// The memory of its activations.
    held: Option<Held>,
    _accepted: Accepted,
}

impl Running {
    fn answer(&mut self) -> Result<&mut Answer, ApiError> {
        self.answer.as_mut().ok_or_else(lost)
    }

    /// The chunks that an update adds to the response; `None` once all texts have ended. Must not be dropped before its end.
    async fn take(&mut self, update: Option<Update>) -> Result<Option<Vec<String>>, ApiError> {
        match update {
            None => Ok(None),
            Some(Update::Event { prompt, event }) => {
                self.numbers.count(&event);
                if !(self.is_long && is_costly(&event)) {
                    return self.answer()?.take(prompt, event).map(Some);
                }
                let mut answer = self.answer.take().ok_or_else(lost)?;
                let taken = blocking(&self.id, move || {
                    let chunks = answer.take(prompt, event);
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
                if self.take(update).await?.is_none() {
                    return Ok::<(), ApiError>(());
                }
            }
        };
        tokio::select! {
            biased;
            made = made => made?,
            () = peer.closed() => return Err(gone()),
        }
        let Self { id, answer, is_long, wants_file, held, .. } = self;
        let answer = answer.ok_or_else(lost)?;
        let write = move || {
            let body = match wants_file {
                true => answer.into_safetensors()?,
                false => answer.into_response().into_bytes(),
            };
            let body = match held {
                Some(held) => held.until_sent(body),
                None => body.into(),
            };
            Ok(if wants_file { reply::text(FILE, body) } else { reply::json(body) })
        };
        if is_long { blocking(&id, write).await } else { write() }
    }

    /// Waits a while for the first update, so that a call that fails immediately gets a status of its own.
    async fn in_pieces(mut self, shared: &Shared, peer: Arc<Peer>) -> Result<Response<Content>, ApiError> {
        let timeouts = shared.options.timeouts;
        let first = async {
            match timeout(timeouts.head, self.ticket.next()).await {
                Ok(update) => self.take(update).await.map(First::Happened),
                Err(_) => Ok(First::Waits),
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

    async fn send(mut self, first: First, out: mpsc::Sender<Bytes>, peer: Arc<Peer>, ping: Duration) {
        // A stream that is given up before its end keeps this code.
        self.numbers.set_code(CLIENT_GONE);
        let id = Arc::clone(&self.id);
        let told = tokio::select! {
            biased;
            told = caught(&id, self.tell(first, &out, ping)) => told,
            () = peer.closed() => Err(gone()),
        };
        // The head has gone out as a success; the log tells what became of it.
        let (code, last) = match told {
            Ok(()) => (200, self.answer.as_mut().map(Answer::last_chunks).unwrap_or_default()),
            Err(error) => (error.status(), vec![error.to_json()]),
        };
        let last = last.iter().map(|chunk| event(chunk)).collect::<String>() + "data: [DONE]\n\n";
        self.numbers.set_code(code);
        // An error says that the reader is gone.
        _ = out.send(last.into()).await;
    }

    async fn tell(
        &mut self,
        first: First,
        out: &mpsc::Sender<Bytes>,
        ping: Duration,
    ) -> Result<(), ApiError> {
        let mut next = match first {
            First::Happened(pieces) => pieces,
            First::Waits => {
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
                    Ok(update) => break self.take(update).await?,
                    Err(_) => _ = out.send(PING).await,
                }
            };
        }
        Ok(())
    }
}

/// What has happened before the head of a stream is sent.
enum First {
    Happened(Option<Vec<String>>),
    /// Nothing, for a long time.
    Waits,
}

/// The request thread that had the response panicked, which is in the log.
fn lost() -> ApiError {
    ApiError::internal()
}

fn event(json: &str) -> String {
    format!("data: {json}\n\n")
}
