//! Requests that fail through no fault of theirs: a panic ends one with an error that says nothing of the inside, and the log has the
//! reason; what comes while the server ends is told so.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use gpt2_api::ApiError;

use crate::log::log;

/// What the future returns; a panic within it is an error.
pub(crate) async fn caught<T>(future: impl Future<Output = Result<T, ApiError>>) -> Result<T, ApiError> {
    let mut future = pin!(future);
    poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(poll) => poll,
        Err(panic) => Poll::Ready(Err(fault(panic.as_ref()))),
    })
    .await
}

/// Runs what takes long on a thread of its own.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(match error.try_into_panic() {
            Ok(panic) => fault(panic.as_ref()),
            Err(_) => ApiError::internal(),
        }),
    }
}

fn fault(panic: &(dyn Any + Send)) -> ApiError {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    let message = message.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
    log(&format!("internal error, please report it: {message}"));
    ApiError::internal()
}

/// The answer to what comes while the server ends.
pub(crate) fn draining() -> ApiError {
    let error = ApiError::new(503, "the server is about to end").with_code("server_draining");
    error.with_retry_after(Duration::from_secs(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_that_says_nothing_of_the_inside() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let broken = || -> Result<(), ApiError> { panic!("secret {}", 5) };
        let of_future = runtime.block_on(caught(async { broken() }));
        let of_thread = runtime.block_on(blocking(broken));
        for error in [of_future, of_thread] {
            assert_eq!(error, Err(ApiError::internal()));
        }
        assert_eq!(runtime.block_on(caught(async { Ok(1) })), Ok(1));
        assert_eq!(runtime.block_on(blocking(|| Ok(2))), Ok(2));
    }
}
