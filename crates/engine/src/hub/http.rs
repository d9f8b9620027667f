//! HTTP requests to the Hub.
//!
//! Each request runs on its own thread, so that a timeout or an interruption ends the wait immediately. Only
//! the calling thread writes files.

use std::io::Read;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use secrecy::{ExposeSecret, SecretString};
use ureq::http::header::{AUTHORIZATION, HeaderMap, RANGE};
use ureq::http::{Uri, response};
use ureq::typestate::WithoutBody;
use ureq::{Agent, RequestBuilder};

use crate::Reporter;

/// Interval between checks for an interruption.
pub(super) const INTERVAL: Duration = Duration::from_millis(20);
/// Maximum size of each piece of a body, in bytes.
const PIECE_BYTES: usize = 64 * 1024;
const QUEUED_PIECES: usize = 8;

/// Reason why a request or the rest of its body failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// [`Reporter::is_interrupted`] ended the wait.
    Stopped,
    /// No data arrived for this long.
    Silent(Duration),
    /// The connection failed or was lost.
    Broken(String),
    /// The response is not valid HTTP.
    Invalid(String),
}

/// Response whose body has not been read.
pub(super) struct Response<'a> {
    pub(super) status: u16,
    pub(super) headers: HeaderMap,
    pub(super) body: Box<dyn Iterator<Item = Result<Vec<u8>, Failure>> + 'a>,
}

/// Transport for requests: the network, or canned responses in tests.
pub(super) trait Web {
    /// Sends a GET request for `uri` from byte `start`, without following redirects.
    fn get(&self, uri: &Uri, start: u64, token: Option<&SecretString>) -> Result<Response<'_>, Failure>;
}

/// Network transport; dropping it closes all connections and thereby ends the request threads.
pub(super) struct Network<'a> {
    agent: Agent,
    timeout: Duration,
    reporter: &'a dyn Reporter,
}

impl<'a> Network<'a> {
    /// Creates a client that fails if no data arrives for `timeout`.
    pub(super) fn new(timeout: Duration, reporter: &'a dyn Reporter) -> Self {
        let config = Agent::config_builder()
            .user_agent(concat!("candle-gpt2/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity")
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            // Ends the thread of a request whose caller has stopped waiting.
            .timeout_connect(Some(2 * timeout))
            .build();
        Self { agent: config.into(), timeout, reporter }
    }
}

impl Drop for Network<'_> {
    fn drop(&mut self) {
        self.agent.clone().shutdown();
    }
}

impl Web for Network<'_> {
    fn get(&self, uri: &Uri, start: u64, token: Option<&SecretString>) -> Result<Response<'_>, Failure> {
        let mut request = self.agent.get(uri);
        if start > 0 {
            request = request.header(RANGE, format!("bytes={start}-"));
        }
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, format!("Bearer {}", token.expose_secret()));
        }
        let (events, received) = sync_channel(QUEUED_PIECES);
        let exchange = move || {
            let done = exchange(request, &events);
            // The receiver may have been dropped.
            let _ = events.send(Event::End(done));
        };
        let thread = thread::Builder::new().name("hub".into()).spawn(exchange);
        thread.map_err(|error| Failure::Broken(error.to_string()))?;
        let body = Body { received, network: self };
        match body.event()? {
            Event::Head(head) => {
                Ok(Response { status: head.status.as_u16(), headers: head.headers, body: Box::new(body) })
            }
            Event::End(Err(error)) => Err(error.into()),
            Event::Piece(_) | Event::End(Ok(())) => Err(Failure::Broken("no response".into())),
        }
    }
}

/// Event that the thread of a request sends.
enum Event {
    Head(Box<response::Parts>),
    Piece(Vec<u8>),
    End(Result<(), ureq::Error>),
}

/// Sends a request and forwards its response until the receiver is dropped.
fn exchange(request: RequestBuilder<WithoutBody>, events: &SyncSender<Event>) -> Result<(), ureq::Error> {
    let (head, body) = request.call()?.into_parts();
    let mut is_received = events.send(Event::Head(Box::new(head))).is_ok();
    let mut body = body.into_reader();
    while is_received {
        let mut piece = vec![0; PIECE_BYTES];
        let length = body.read(&mut piece)?;
        if length == 0 {
            break;
        }
        piece.truncate(length);
        is_received = events.send(Event::Piece(piece)).is_ok();
    }
    Ok(())
}

/// Iterator over the pieces of a response body as they arrive.
struct Body<'a> {
    received: Receiver<Event>,
    network: &'a Network<'a>,
}

impl Body<'_> {
    fn event(&self) -> Result<Event, Failure> {
        let begin = Instant::now();
        loop {
            if self.network.reporter.is_interrupted() {
                return Err(Failure::Stopped);
            }
            match self.received.recv_timeout(INTERVAL) {
                Ok(event) => return Ok(event),
                Err(RecvTimeoutError::Timeout) if begin.elapsed() < self.network.timeout => {}
                Err(RecvTimeoutError::Timeout) => return Err(Failure::Silent(self.network.timeout)),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::Broken("the HTTP client stopped".into()));
                }
            }
        }
    }
}

impl Iterator for Body<'_> {
    type Item = Result<Vec<u8>, Failure>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.event() {
            Ok(Event::Piece(piece)) => Some(Ok(piece)),
            Ok(Event::End(Ok(())) | Event::Head(_)) => None,
            Ok(Event::End(Err(error))) => Some(Err(error.into())),
            Err(failure) => Some(Err(failure)),
        }
    }
}

impl From<ureq::Error> for Failure {
    fn from(error: ureq::Error) -> Self {
        use ureq::Error::{ConnectionFailed, HostNotFound, Io};
        match error {
            Io(_) | HostNotFound | ConnectionFailed | ureq::Error::Timeout(_) => {
                Self::Broken(error.to_string())
            }
            error => Self::Invalid(error.to_string()),
        }
    }
}
