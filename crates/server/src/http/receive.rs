//! Receives request bodies, with limits on size, time and content type.
//!
//! tower-http's size and timeout layers do not respond with JSON. They also ignore the memory that other
//! bodies use and the connection slots.

use std::error::Error;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

use candle_gpt2_api::ApiError;
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue};
use tokio::time::timeout;

use super::Shared;
use super::body_memory::BodyReservation;
use super::slots::{Activity, State};
use crate::busy::bodies_full;

/// Received body and the memory reserved for it, both released after the body is parsed.
pub(crate) struct Received {
    bytes: Vec<u8>,
    _reservation: BodyReservation,
}

impl AsRef<[u8]> for Received {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Receives a JSON body.
pub(crate) async fn read(
    headers: &HeaderMap,
    body: &mut Incoming,
    shared: &Shared,
    activity: &Arc<Activity>,
) -> Result<Received, ApiError> {
    check_kind(headers)?;
    let limit = shared.options.timeouts.body;
    activity.enter(State::Receiving);
    let received = timeout(limit, collect(body, shared, activity)).await;
    activity.enter(State::Answering);
    match received {
        Ok(received) => received,
        Err(_) => {
            let message = format!("timed out after {} s waiting for the request body", limit.as_secs_f64());
            Err(ApiError::new(408, message).with_code("request_timeout"))
        }
    }
}

/// Rejects content types other than JSON, so that browsers must send a preflight for other origins.
fn check_kind(headers: &HeaderMap) -> Result<(), ApiError> {
    let values: Vec<_> = headers.get_all(CONTENT_TYPE).iter().collect();
    let is_json = match values.as_slice() {
        [value] => value.to_str().is_ok_and(|value| {
            let essence = value.split(';').next().unwrap_or_default();
            essence.trim().eq_ignore_ascii_case("application/json")
        }),
        _ => false,
    };
    if !is_json {
        return Err(ApiError::new(
            415,
            "unsupported content type; send JSON with the header `Content-Type: application/json`",
        ));
    }
    let is_plain = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"identity");
    if !headers.get_all(CONTENT_ENCODING).iter().all(is_plain) {
        return Err(ApiError::new(415, "unsupported Content-Encoding; send the body uncompressed"));
    }
    Ok(())
}

async fn collect(
    body: &mut Incoming,
    shared: &Shared,
    activity: &Arc<Activity>,
) -> Result<Received, ApiError> {
    let most = shared.options.max_body;
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if announced > most {
        return Err(too_large(most));
    }
    let reservation = shared.body_memory.begin(activity);
    let mut bytes = Vec::new();
    while let Some(frame) = next_frame(body, activity).await? {
        // Trailers are ignored.
        let Ok(data) = frame.map_err(|error| broken(&error))?.into_data() else { continue };
        if bytes.len() + data.len() > most {
            return Err(too_large(most));
        }
        reservation.reserve(bytes.len() + data.len()).await?;
        bytes.extend_from_slice(&data);
    }
    reservation.mark_complete();
    Ok(Received { bytes, _reservation: reservation })
}

/// Error for a body of more than `most` bytes.
pub(super) fn too_large(most: usize) -> ApiError {
    let message = format!("the body exceeds the server's limit of {most} bytes (`--max-body`)");
    ApiError::new(413, message).with_code("body_too_large")
}

/// Receives the next frame of a body; fails if the connection is evicted.
async fn next_frame(
    body: &mut Incoming,
    activity: &Activity,
) -> Result<Option<hyper::Result<Frame<Bytes>>>, ApiError> {
    poll_fn(|cx| match Pin::new(&mut *body).poll_frame(cx) {
        Poll::Ready(frame) => Poll::Ready(Ok(frame)),
        Poll::Pending => activity.poll_evicted(cx).map(|()| Err(bodies_full())),
    })
    .await
}

fn broken(error: &hyper::Error) -> ApiError {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    let is_cut = cause.is_some_and(|cause| cause.kind() == io::ErrorKind::UnexpectedEof);
    ApiError::invalid(match is_cut || error.is_incomplete_message() {
        true => "the body ended early",
        false => "invalid chunked encoding of the body",
    })
}
