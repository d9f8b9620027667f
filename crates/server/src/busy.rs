//! The answers of a server that has no room for a request, always with the time after which to try again.

use std::time::Duration;

use candle_gpt2_api::ApiError;

/// When to try again, if nothing better is known.
const SOON: Duration = Duration::from_secs(1);

/// As many wait as may.
pub(crate) fn queue_full(retry_after: Option<Duration>) -> ApiError {
    let message = "the queue is full; retry after the time in the Retry-After header";
    ApiError::busy(429, message, "server_overloaded", retry_after.unwrap_or(SOON))
}

/// It has waited as long as may be.
pub(crate) fn queue_timeout(retry_after: Option<Duration>) -> ApiError {
    let message = "the request waited too long in the queue; retry after the time in the Retry-After header";
    ApiError::busy(503, message, "queue_timeout", retry_after.unwrap_or(SOON))
}

/// As many analyses wait as may.
pub(crate) fn looks_full() -> ApiError {
    let message = "the queue of analyses is full; retry after the time in the Retry-After header";
    ApiError::busy(503, message, "server_overloaded", SOON)
}

/// All connections are taken.
pub(crate) fn connections_full() -> ApiError {
    let message = "all connections of this server are in use; retry after the time in the Retry-After header";
    ApiError::busy(503, message, "server_overloaded", SOON)
}

/// There is no memory for the body.
pub(crate) fn bodies_full() -> ApiError {
    let message = "there is no memory for this request body; retry after the time in the Retry-After header, and send it without pauses";
    ApiError::busy(503, message, "server_overloaded", SOON)
}

/// There is no memory for the activations that are asked for.
pub(crate) fn activations_full() -> ApiError {
    let message = "there is no memory for the activations of this request; retry after the time in the Retry-After header";
    ApiError::busy(503, message, "server_overloaded", SOON)
}

/// The server is about to end.
pub(crate) fn draining() -> ApiError {
    ApiError::busy(503, "the server is shutting down", "server_draining", SOON)
}
