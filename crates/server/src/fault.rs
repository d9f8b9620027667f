//! Internal failures: the cause is logged on one line, and clients see no details.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use candle_gpt2_api::ApiError;
use candle_gpt2_engine::process::panic_message;
use tokio::task::spawn_blocking;

use crate::log::log_failure;

/// Awaits a request's future and turns a panic into an error.
pub(crate) async fn caught<T>(
    id: &str,
    future: impl Future<Output = Result<T, ApiError>>,
) -> Result<T, ApiError> {
    let mut future = pin!(future);
    poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(poll) => poll.map_err(|error| logged(id, error)),
        Err(panic) => Poll::Ready(Err(logged(id, ApiError::failed(internal(panic.as_ref()))))),
    })
    .await
}

/// Runs `work` for the request `id` on a request thread.
///
/// Failures are logged on that thread, because the client may have disconnected.
pub(crate) async fn blocking<T: Send + 'static>(
    id: &Arc<str>,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let own = Arc::clone(id);
    let work = move || {
        let worked = catch_unwind(AssertUnwindSafe(work));
        let worked = worked.unwrap_or_else(|panic| Err(ApiError::failed(internal(panic.as_ref()))));
        worked.map_err(|error| logged(&own, error))
    };
    spawn_blocking(work).await.unwrap_or_else(|error| Err(logged(id, ApiError::failed(error))))
}

/// Logs the cause of an error and removes it from the error.
pub(crate) fn logged(id: &str, mut error: ApiError) -> ApiError {
    if let Some(cause) = error.take_cause() {
        log_failure(id, cause);
    }
    error
}

/// Log message for a panic.
pub(crate) fn internal(panic: &(dyn Any + Send)) -> String {
    format!("internal error, please report it: {}", panic_message(panic))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::tests::lines_with;

    #[test]
    fn panics_become_internal_errors_and_one_log_line() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let panics = || -> Result<(), ApiError> { panic!("secret {}", 5) };
        let fails = || -> Result<(), ApiError> { Err(ApiError::failed("secret cause")) };
        let id = |name: &str| Arc::<str>::from(name);
        for error in [
            runtime.block_on(caught("req-fault-1", async { panics() })),
            runtime.block_on(blocking(&id("req-fault-2"), panics)),
            runtime.block_on(caught("req-fault-3", async { fails() })),
            runtime.block_on(caught("req-fault-4", blocking(&id("req-fault-4"), fails))),
        ] {
            assert_eq!(error, Err(ApiError::internal()));
        }
        let panicked = "failed: internal error, please report it: secret 5";
        for (id, cause) in [
            ("req-fault-1", panicked),
            ("req-fault-2", panicked),
            ("req-fault-3", "failed: secret cause"),
            ("req-fault-4", "failed: secret cause"),
        ] {
            let lines = lines_with(id);
            assert_eq!(lines.len(), 1, "{lines:?}");
            assert!(lines[0].starts_with(&format!("{id} {cause}")), "{lines:?}");
        }
        assert_eq!(runtime.block_on(caught("", async { Ok(1) })), Ok(1));
        assert_eq!(runtime.block_on(blocking(&id(""), || Ok(2))), Ok(2));
    }
}
