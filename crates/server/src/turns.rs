//! Work with a limited concurrency and a bounded queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use candle_gpt2_api::ApiError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::busy::queue_timeout;

/// A queue of work, of which a fixed number runs at a time.
#[derive(Debug)]
pub(crate) struct Turns {
    turn: Arc<Semaphore>,
    /// Number of places in use, at most `most`.
    taken: AtomicUsize,
    most: usize,
    /// Maximum time in the queue.
    longest: Duration,
}

/// Places of work that waits or is done; free when dropped.
pub(crate) struct Places<'a> {
    taken: &'a AtomicUsize,
    count: usize,
}

impl Drop for Places<'_> {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.count, Ordering::AcqRel);
    }
}

/// The right to work; it goes to the next when it is dropped.
pub(crate) type Turn = OwnedSemaphorePermit;

impl Turns {
    /// A queue with `most` places, in which work waits at most `longest`; `at_once` pieces of work run at a time.
    pub(crate) fn new(at_once: usize, most: usize, longest: Duration) -> Self {
        Self { turn: Arc::new(Semaphore::new(at_once)), taken: AtomicUsize::new(0), most, longest }
    }

    /// Takes `count` places; `None` if fewer are free.
    pub(crate) fn places(&self, count: usize) -> Option<Places<'_>> {
        let taken = |taken: usize| taken.checked_add(count).filter(|taken| *taken <= self.most);
        self.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, taken).ok()?;
        Some(Places { taken: &self.taken, count })
    }

    /// Waits for a turn, which the work keeps until its end, even if its client has gone.
    pub(crate) async fn turn(&self) -> Result<Turn, ApiError> {
        match timeout(self.longest, Arc::clone(&self.turn).acquire_owned()).await {
            Ok(turn) => turn.map_err(ApiError::failed),
            Err(_) => Err(queue_timeout(None)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_bounded_and_turns_come_one_by_one() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let turns = Turns::new(1, 3, Duration::from_millis(20));
        let two = turns.places(2).unwrap();
        assert!(turns.places(2).is_none());
        let _one = turns.places(1).unwrap();
        drop(two);
        assert!(turns.places(2).is_some());
        let turn = runtime.block_on(turns.turn()).unwrap();
        let error = runtime.block_on(turns.turn()).unwrap_err();
        assert_eq!((error.status(), error.code()), (503, Some("queue_timeout")));
        assert_eq!(error.retry_after(), Some(Duration::from_secs(1)));
        drop(turn);
        assert!(runtime.block_on(turns.turn()).is_ok());
    }
}
