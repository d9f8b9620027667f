//! Concurrency limit with a bounded queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use candle_gpt2_api::ApiError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::busy::queue_timeout;

/// Work queue with a fixed concurrency.
#[derive(Debug)]
pub(crate) struct ConcurrencyLimit {
    permits: Arc<Semaphore>,
    /// Number of slots in use, at most `max_slots`.
    taken: AtomicUsize,
    max_slots: usize,
    /// Maximum time in the queue.
    max_wait: Duration,
}

/// Slots held by waiting or running work, released on drop.
pub(crate) struct QueueSlots<'a> {
    taken: &'a AtomicUsize,
    count: usize,
}

impl Drop for QueueSlots<'_> {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.count, Ordering::AcqRel);
    }
}

/// Permit to run; on drop, the next waiting caller receives it.
pub(crate) type Permit = OwnedSemaphorePermit;

impl ConcurrencyLimit {
    /// Creates a queue with `max_slots` slots that runs `at_once` callers concurrently.
    pub(crate) fn new(at_once: usize, max_slots: usize, max_wait: Duration) -> Self {
        let permits = Arc::new(Semaphore::new(at_once));
        Self { permits, taken: AtomicUsize::new(0), max_slots, max_wait }
    }

    /// Reserves `count` slots; returns `None` if fewer are free.
    pub(crate) fn reserve(&self, count: usize) -> Option<QueueSlots<'_>> {
        let taken = |taken: usize| taken.checked_add(count).filter(|taken| *taken <= self.max_slots);
        self.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, taken).ok()?;
        Some(QueueSlots { taken: &self.taken, count })
    }

    /// Waits for a permit; hold it until the work ends, even if the client disconnects.
    pub(crate) async fn acquire(&self) -> Result<Permit, ApiError> {
        match timeout(self.max_wait, Arc::clone(&self.permits).acquire_owned()).await {
            Ok(permit) => permit.map_err(ApiError::failed),
            Err(_) => Err(queue_timeout(None)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reservations_are_bounded_and_permits_are_exclusive() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let limit = ConcurrencyLimit::new(1, 3, Duration::from_millis(20));
        let two = limit.reserve(2).unwrap();
        assert!(limit.reserve(2).is_none());
        let _one = limit.reserve(1).unwrap();
        drop(two);
        assert!(limit.reserve(2).is_some());
        let permit = runtime.block_on(limit.acquire()).unwrap();
        let error = runtime.block_on(limit.acquire()).unwrap_err();
        assert_eq!((error.status(), error.code()), (503, Some("queue_timeout")));
        assert_eq!(error.retry_after(), Some(Duration::from_secs(1)));
        drop(permit);
        assert!(runtime.block_on(limit.acquire()).is_ok());
    }
}
