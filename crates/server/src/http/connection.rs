//! Serves a connection until it is closed.

use std::future::poll_fn;
use std::io::IoSlice;
use std::pin::{Pin, pin};
use std::sync::{Arc, Once};
use std::task::Poll;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use candle_gpt2_api::ApiError;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use tokio::time::timeout;

use super::peer::Peer;
use super::receive::too_large;
use super::slots::{ConnectionSlot, State};
use super::timed_stream::{TimedOut, TimedStream};
use super::{Connection, Phase, Shared, reply, routes};
use crate::log::log_failure;

/// Maximum size of a request head and of the read buffer, in bytes.
const MAX_HEAD: usize = 64 << 10;
/// Maximum number of header lines.
const MAX_HEADERS: usize = 100;
/// Maximum number of bytes read from a client after its request has been rejected.
const MAX_LINGER: usize = 64 << 20;

/// Serves a connection until it is closed.
pub(crate) async fn serve(shared: Arc<Shared>, peer: Peer, slot: ConnectionSlot) {
    let peer = Arc::new(peer);
    let activity = Arc::clone(&slot.activity);
    let connection = Arc::new(Connection {
        peer: Arc::clone(&peer),
        activity: Arc::clone(&activity),
        is_surplus: slot.is_surplus,
    });
    let mut bytes = TimedStream::new(Arc::clone(&peer), Arc::clone(&activity), shared.options.timeouts);
    let ended = run(&shared, connection, &mut bytes).await;
    let max_body = shared.options.max_body;
    let refusal = ended.err().and_then(|failure| refusal(&failure, &bytes, max_body));
    let is_at_end = bytes.is_at_end() || bytes.timed_out() == Some(TimedOut::Write);
    let linger = shared.options.timeouts.linger;
    if let Some(error) = refusal {
        // Errors are ignored, because the client may not read the response.
        _ = timeout(linger, send(&peer, &error)).await;
        shared.metrics.count_request("none", error.status(), Duration::ZERO);
    }
    peer.end();
    if !is_at_end && !shared.is_ending() {
        activity.enter(State::Lingering);
        tokio::select! {
            biased;
            () = activity.evicted() => (),
            // If the socket closed while the client was sending, the client's system could discard the
            // response.
            _ = timeout(linger, read_on(&peer)) => (),
        }
    }
}

/// Reason why a connection ended early.
#[derive(Debug)]
enum Failure {
    Http(hyper::Error),
    /// The system clock is out of range; see [`is_http_date`].
    Clock,
}

async fn run(
    shared: &Arc<Shared>,
    connection: Arc<Connection>,
    bytes: &mut TimedStream,
) -> Result<(), Failure> {
    let service = service_fn(|request| routes::answer(Arc::clone(shared), Arc::clone(&connection), request));
    let mut builder = http1::Builder::new();
    // `TimedStream` enforces the head timeout, and the routes detect a client that has closed its side.
    builder.header_read_timeout(None).half_close(true);
    builder.max_buf_size(MAX_HEAD).max_header_size(MAX_HEAD).max_headers(MAX_HEADERS);
    let mut connection = pin!(builder.serve_connection(bytes, service));
    tokio::select! {
        ended = run_while_dated(&mut connection, SystemTime::now) => return ended,
        () = shared.reached(Phase::Ending) => connection.as_mut().graceful_shutdown(),
    }
    run_while_dated(&mut connection, SystemTime::now).await
}

/// Runs a connection while the system time is a valid HTTP date.
///
/// hyper formats the date on every poll, with or without the `Date` header, and panics on failure.
async fn run_while_dated(
    connection: &mut Pin<&mut impl Future<Output = hyper::Result<()>>>,
    now: fn() -> SystemTime,
) -> Result<(), Failure> {
    poll_fn(|cx| match is_http_date(now()) {
        true => connection.as_mut().poll(cx).map_err(Failure::Http),
        false => Poll::Ready(Err(Failure::Clock)),
    })
    .await
}

/// Whether HTTP can express the time; HTTP dates are limited to the years 1970 to 9999.
fn is_http_date(time: SystemTime) -> bool {
    const YEAR_10000: u64 = 253_402_300_800;
    time.duration_since(UNIX_EPOCH).is_ok_and(|since| since.as_secs() < YEAR_10000)
}

/// Error for every request until the clock is set.
fn clock_refusal() -> ApiError {
    static LOGGED: Once = Once::new();
    let message =
        "the server's clock is not in the years 1970 to 9999, the range that HTTP can express; set the clock";
    LOGGED.call_once(|| log_failure("a connection", message));
    ApiError::busy(503, message, "clock_out_of_range", Duration::from_secs(1))
}

/// Response to a head that is incomplete or that hyper cannot parse.
fn refusal(failure: &Failure, bytes: &TimedStream, max_body: usize) -> Option<ApiError> {
    if !bytes.is_between_requests() {
        return None;
    }
    let error = match failure {
        Failure::Http(error) => error,
        Failure::Clock => return Some(clock_refusal()),
    };
    match bytes.timed_out() {
        Some(TimedOut::Head) => {
            return Some(
                ApiError::new(408, "timed out waiting for the request head").with_code("request_timeout"),
            );
        }
        Some(TimedOut::Idle | TimedOut::Write) => return None,
        None => {}
    }
    if error.is_parse() && bytes.announces_too_much() {
        return Some(too_large(max_body));
    }
    if error.is_parse_too_large() {
        let message =
            format!("the request head is larger than {MAX_HEAD} bytes or has more than {MAX_HEADERS} lines");
        return Some(ApiError::new(431, message).with_code("head_too_large"));
    }
    if error.is_parse() {
        let message = "not a valid HTTP/1.1 request; the server accepts only unencrypted HTTP/1.1; for TLS or HTTP/2, put a proxy in front of it";
        return Some(ApiError::invalid(message).with_code("bad_request"));
    }
    if error.is_incomplete_message() {
        return Some(ApiError::invalid("the request head is incomplete").with_code("bad_request"));
    }
    None
}

async fn send(peer: &Peer, error: &ApiError) -> std::io::Result<()> {
    let (head, _) = reply::refusal(error).into_parts();
    let (body, status) = (error.to_json(), head.status);
    let reason = status.canonical_reason().unwrap_or_default();
    let mut message = format!(
        "HTTP/1.1 {} {reason}\r\nserver: gpt2\r\nx-content-type-options: nosniff\r\n",
        status.as_u16()
    );
    for (name, value) in &head.headers {
        message.push_str(&format!("{name}: {}\r\n", value.to_str().unwrap_or_default()));
    }
    message.push_str(&format!("content-length: {}\r\nconnection: close\r\n\r\n{body}", body.len()));
    let mut rest = message.as_bytes();
    while !rest.is_empty() {
        let count = poll_fn(|cx| peer.poll_write(cx, &[IoSlice::new(rest)])).await?;
        rest = rest.get(count..).unwrap_or_default();
    }
    Ok(())
}

async fn read_on(peer: &Peer) {
    let mut buffer = [0; 16 << 10];
    let mut total = 0;
    while total < MAX_LINGER {
        match poll_fn(|cx| peer.poll_read(cx, &mut buffer)).await {
            Ok(count) if count > 0 => total += count,
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hyper_is_not_polled_outside_the_http_date_range() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let run = |now: fn() -> SystemTime| {
            // Imitates hyper's connection, which panics if polled when the time is out of range.
            let mut connection = pin!(async move {
                assert!(is_http_date(now()), "polled");
                Ok(())
            });
            runtime.block_on(run_while_dated(&mut connection, now))
        };
        let second = Duration::from_secs(1);
        assert!(matches!(run(|| UNIX_EPOCH - Duration::from_secs(1)), Err(Failure::Clock)));
        assert!(matches!(run(|| UNIX_EPOCH + Duration::from_secs(253_402_300_800)), Err(Failure::Clock)));
        assert!(run(|| UNIX_EPOCH).is_ok() && run(SystemTime::now).is_ok());
        assert!(is_http_date(UNIX_EPOCH + Duration::from_secs(253_402_300_800) - second));
        assert_eq!(clock_refusal().status(), 503);
    }
}
