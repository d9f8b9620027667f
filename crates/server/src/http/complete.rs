//! Completions: from a body to a call of the engine, and from what the engine tells to an answer, whole or in pieces.

use std::sync::Arc;
use std::time::Duration;

use candle_gpt2_api::{Answer, ApiError, Call, Endpoint, GRAMMARS_BUSY, Work};
use candle_gpt2_generation::Request;
use hyper::Response;
use hyper::body::Bytes;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::activations::Held;
use super::body::{Content, Stream};
use super::peer::Peer;
use super::receive::Received;
use super::record::{Accepted, CLIENT_GONE, Numbers};
use super::reply;
use super::{Caller, Shared};
use crate::backend::Backend;
use crate::busy::{draining, queue_full, queue_timeout};
use crate::engine::{Ticket, Update};
use crate::fault::{blocking, caught};

/// Tokens whose answer is written at once.
const LONG_ANSWER: usize = 2 << 10;

/// Time after which the first grammar in the queue tries again.
const GRAMMAR_RETRY: Duration = Duration::from_millis(20);

/// Tokens that an answer may have.
fn answer_tokens(requests: &[Request]) -> usize {
    let of_request = |request: &Request| {
        let prompt = if request.prompt_logprobs.is_some() { request.prompt.len() } else { 0 };
        (prompt + request.config.max_new_tokens) * request.config.num_return_sequences
    };
    requests.iter().map(of_request).sum()
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
    let (served, reuse) = (Arc::clone(&shared.served), Some(caller.key));
    let work = match served.read_now(endpoint, received.bytes(), reuse)? {
        Some(work) => work,
        // Tokenising takes up to a second for a large body, and so does reading a grammar; meanwhile others are served.
        None => read_queued(endpoint, received, caller).await?,
    };
    let Work::Texts(Call { mut requests, answer, stream, activation_bytes }) = work else {
        return Err(ApiError::failed("a path of texts that asks for something else"));
    };
    caller.log_warnings(answer.warnings());
    limit_time(&mut requests, shared.options.max_time);
    caller.numbers.add_prompt_tokens(requests.iter().map(|request| request.prompt.len()).sum());
    let is_long =
        answer_tokens(&requests) > LONG_ANSWER || requests.iter().any(|of| !of.observers.is_empty());
    let Backend::Texts(engine) = &shared.backend else {
        return Err(ApiError::failed("texts, of a classifier"));
    };
    let held = shared.activations.hold(activation_bytes);
    let held = held.inspect_err(|_| shared.metrics.reject("activations_full"))?;
    let ticket = engine.submit(&caller.id, requests)?;
    let numbers = Arc::clone(&caller.numbers);
    let id = Arc::clone(&caller.id);
    let wants_file = wants_file && endpoint == Endpoint::Activations;
    let _accepted = Accepted::new(&shared.calls);
    let running = Running { id, answer, ticket, numbers, is_long, wants_file, held, _accepted };
    let peer = Arc::clone(&caller.peer);
    if stream { running.in_pieces(shared, peer).await } else { running.whole(&peer).await }
}

/// Reads a request on a thread of its own. One whose grammar finds no room waits in a queue, as prompts do, and tries again.
async fn read_queued(endpoint: Endpoint, received: Received, caller: &Caller) -> Result<Work, ApiError> {
    let (shared, received) = (&caller.shared, Arc::new(received));
    let read = || {
        let (served, received, reuse) = (Arc::clone(&shared.served), Arc::clone(&received), Some(caller.key));
        blocking(&caller.id, move || served.read(endpoint, received.bytes(), reuse))
    };
    let is_busy =
        |work: &Result<Work, ApiError>| work.as_ref().is_err_and(|error| error.code() == Some(GRAMMARS_BUSY));
    let work = read().await;
    if !is_busy(&work) {
        return work;
    }
    let _place = shared.grammars.places(1).ok_or_else(|| {
        shared.metrics.reject("queue_full");
        queue_full(None)
    })?;
    let queued = async {
        // The first in the queue tries until there is room.
        let _turn = shared.grammars.turn().await?;
        loop {
            let work = read().await;
            if !is_busy(&work) {
                return work;
            }
            sleep(GRAMMAR_RETRY).await;
        }
    };
    let most = shared.options.timeouts.queue;
    let work = tokio::select! {
        work = timeout(most, queued) => work.unwrap_or_else(|_| Err(queue_timeout(None))),
        () = caller.peer.closed() => return Err(gone()),
        () = shared.draining() => return Err(draining()),
    };
    work.inspect_err(|error| {
        if error.code() == Some("queue_timeout") {
            shared.metrics.reject("queue_timeout");
        }
    })
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
    answer: Answer,
    ticket: Ticket,
    numbers: Arc<Numbers>,
    /// Whether writing the answer takes long.
    is_long: bool,
    /// Whether it is a safetensors file.
    wants_file: bool,
    /// The memory of its activations.
    held: Option<Held>,
    _accepted: Accepted,
}

impl Running {
    /// What there is to send next; `None` when all texts have ended.
    async fn next(&mut self) -> Result<Option<Vec<String>>, ApiError> {
        match self.ticket.next().await {
            None => Ok(None),
            Some(Update::Event { prompt, event }) => {
                self.numbers.count(&event);
                Ok(Some(self.answer.take(prompt, event)?))
            }
            Some(Update::Refused { prompt, error }) => Err(self.answer.refused(prompt, &error)),
            Some(Update::Failed(error)) => Err(error),
        }
    }

    async fn whole(mut self, peer: &Peer) -> Result<Response<Content>, ApiError> {
        let made = async {
            while self.next().await?.is_some() {}
            Ok::<(), ApiError>(())
        };
        tokio::select! {
            biased;
            made = made => made?,
            () = peer.closed() => return Err(gone()),
        }
        let Self { id, answer, is_long, wants_file, held, .. } = self;
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

    /// Waits for the first thing that happens, so that what fails at once has a code of its own, though not for long.
    async fn in_pieces(mut self, shared: &Shared, peer: Arc<Peer>) -> Result<Response<Content>, ApiError> {
        let timeouts = shared.options.timeouts;
        let first = tokio::select! {
            biased;
            first = timeout(timeouts.head, self.next()) => first.map_or(Ok(First::Waits), |first| first.map(First::Happened))?,
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
            Ok(()) => (200, self.answer.last_chunks()),
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
                match timeout(ping, self.next()).await {
                    Ok(next) => break next?,
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

fn event(json: &str) -> String {
    format!("data: {json}\n\n")
}

/// A client that has closed its side is taken to be gone: most are. One that only sends nothing more reads this.
pub(crate) fn gone() -> ApiError {
    let message = "the connection's sending side was closed before the answer, which cancels the request; keep it open until the \
                   answer has come";
    ApiError::new(CLIENT_GONE, message).with_code("client_closed_request")
}
