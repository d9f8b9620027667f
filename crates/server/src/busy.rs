//! Errors of a server at capacity, each with a retry delay.

use std::time::Duration;

use candle_gpt2_api::ApiError;

/// Default retry delay.
const SOON: Duration = Duration::from_secs(1);

/// The queue is full.
pub(crate) fn queue_full(retry_after: Option<Duration>) -> ApiError {
    let message = "the queue is full; retry after the time in the Retry-After header";
    ApiError::busy(429, message, "server_overloaded", retry_after.unwrap_or(SOON))
}

/// Timed out in the queue.
pub(crate) fn queue_timeout(retry_after: Option<Duration>) -> ApiError {
    let message = "the request timed out in the queue; retry after the time in the Retry-After header";
    ApiError::busy(503, message, "queue_timeout", retry_after.unwrap_or(SOON))
}

/// The queue of analyses is full.
pub(crate) fn looks_full() -> ApiError {
    let message = "the queue of analyses is full; retry after the time in the Retry-After header";
    ApiError::busy(503, message, "server_overloaded", SOON)
}

/// All connections are in use.
pub(crate) fn connections_full() -> ApiError {
    let message = "all connections of this server are in use; retry after the time in the Retry-After header";
    ApiError::busy(503, message, "server_overloaded", SOON)
}

/// No memory is free for the body.
pub(crate) fn bodies_full() -> ApiError {
    let message = "not enough free memory for this request body; retry after the time in the Retry-After header, and send it without pauses";
    ApiError::busy(503, message, "server_overloaded", SOON)
}

/// No memory is free for the requested activations.
pub(crate) fn activations_full() -> ApiError {
    let message = "not enough free memory for the activations of this request; retry after the time in the Retry-After header";
    ApiError::busy(503, message, "server_overloaded", SOON)
}

/// The server is shutting down.
pub(crate) fn draining() -> ApiError {
    ApiError::busy(503, "the server is shutting down", "server_draining", SOON)
}
