//! The memory of the activations that requests ask for. A request takes its part before it is queued and has it until its answer is
//! sent, so that many of them hold no more than a few of the largest size.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_gpt2_api::ApiError;
use hyper::body::Bytes;

use crate::busy::activations_full;

/// Requests of the largest size that there is memory for.
const LARGEST_AT_ONCE: usize = 4;

/// The memory of a server's activations.
#[derive(Debug)]
pub(crate) struct Activations {
    most: usize,
    taken: AtomicUsize,
}

/// A request's part of it; free when dropped.
#[derive(Debug)]
pub(crate) struct Held {
    activations: Arc<Activations>,
    bytes: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.activations.taken.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

impl Activations {
    /// The memory for requests of up to `max_bytes` each.
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self { most: max_bytes.saturating_mul(LARGEST_AT_ONCE), taken: AtomicUsize::new(0) }
    }

    /// Takes memory for a request; `None` where it asks for no activations.
    ///
    /// # Errors
    /// When others need it all.
    pub(crate) fn hold(self: &Arc<Self>, bytes: usize) -> Result<Option<Held>, ApiError> {
        if bytes == 0 {
            return Ok(None);
        }
        let more = |taken: usize| taken.checked_add(bytes).filter(|taken| *taken <= self.most);
        let is_held = self.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok();
        is_held.then(|| Some(Held { activations: Arc::clone(self), bytes })).ok_or_else(activations_full)
    }
}

impl Held {
    /// The body of the answer, which holds the memory for as long as it is there.
    pub(crate) fn until_sent(self, body: Vec<u8>) -> Bytes {
        Bytes::from_owner(Body { body, _held: self })
    }
}

struct Body {
    body: Vec<u8>,
    _held: Held,
}

impl AsRef<[u8]> for Body {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_is_bounded_and_free_again_once_an_answer_is_sent() {
        let activations = Arc::new(Activations::new(100));
        assert!(activations.hold(0).unwrap().is_none());
        let mut held: Vec<Held> = (0..4).map(|_| activations.hold(100).unwrap().unwrap()).collect();
        let refused = activations.hold(1).unwrap_err();
        assert_eq!((refused.status(), refused.code()), (503, Some("server_overloaded")));
        assert!(activations.hold(0).unwrap().is_none(), "what records nothing is not refused");
        assert!(activations.hold(usize::MAX).is_err());

        let body = held.pop().unwrap().until_sent(b"numbers".to_vec());
        let (copy, part) = (body.clone(), body.slice(2..4));
        drop((body, copy));
        assert!(activations.hold(1).is_err() && &*part == b"mb", "a part of it is not sent yet");
        drop(part);
        assert!(activations.hold(100).unwrap().is_some());
        drop(held);
        assert_eq!(activations.taken.load(Ordering::Acquire), 0);
    }
}
