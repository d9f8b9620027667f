//! Errors for a server at capacity, each with a retry delay.

use std::time::Duration;

use candle_gpt2_api::ApiError;

/// Retry delay if no better estimate is known.
const SOON: Duration = Duration::from_secs(1);

/// Error for a full queue.
pub(crate) fn queue_full(retry_after: Option<Duration>) -> ApiError {
    let message = "the queue is full; retry after the delay in the Retry-After header";
    ApiError::busy(429, message, "server_overloaded", retry_after.unwrap_or(SOON))
}

/// Error for a request that timed out in the queue.
pub(crate) fn queue_timeout(retry_after: Option<Duration>) -> ApiError {
    let message = "the request timed out in the queue; retry after the delay in the Retry-After header";
    ApiError::busy(503, message, "queue_timeout", retry_after.unwrap_or(SOON))
}

/// Error for a full analysis queue.
pub(crate) fn looks_full() -> ApiError {
    let message = "the analysis queue is full; retry after the delay in the Retry-After header";
    ApiError::busy(503, message, "server_overloaded", SOON)
}

/// Error when all connections are in use.
pub(crate) fn connections_full() -> ApiError {
    let message =
        "all connections to this server are in use; retry after the delay in the Retry-After header";
    ApiError::busy(503, message, "server_overloaded", SOON)
}

/// Error when no memory is free for a request body.
pub(crate) fn bodies_full() -> ApiError {
    let message = "not enough free memory for this request body; retry after the delay in the Retry-After header, and send the body without pauses";
    ApiError::busy(503, message, "server_overloaded", SOON)
}

/// Error when no memory is free for the requested activations.
pub(crate) fn activations_full() -> ApiError {
    let message = "not enough free memory for the activations requested; retry after the delay in the Retry-After header";
    ApiError::busy(503, message, "server_overloaded", SOON)
}

/// Error for a request that arrives during shutdown.
pub(crate) fn draining() -> ApiError {
    ApiError::busy(503, "the server is shutting down", "server_draining", SOON)
}
