//! Memory budget for requested activations.
//!
//! A request reserves memory before it is queued and holds that memory until its response is sent. All
//! requests together hold at most four times the maximum size of one request.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_gpt2_api::ApiError;
use hyper::body::Bytes;

use crate::busy::activations_full;

/// Number of maximum-size requests that fit into the budget.
const LARGEST_AT_ONCE: usize = 4;

/// Memory budget for a server's activations.
#[derive(Debug)]
pub(crate) struct Activations {
    max_bytes: usize,
    taken: AtomicUsize,
}

/// Memory reserved for a request, released on drop.
#[derive(Debug)]
pub(crate) struct ActivationReservation {
    activations: Arc<Activations>,
    bytes: usize,
}

impl Drop for ActivationReservation {
    fn drop(&mut self) {
        self.activations.taken.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

impl Activations {
    /// Creates a budget for requests of up to `max_bytes` each.
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self { max_bytes: max_bytes.saturating_mul(LARGEST_AT_ONCE), taken: AtomicUsize::new(0) }
    }

    /// Reserves memory for a request; returns `None` if the request records no activations.
    ///
    /// # Errors
    /// If other requests occupy too much of the budget.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: usize) -> Result<Option<ActivationReservation>, ApiError> {
        if bytes == 0 {
            return Ok(None);
        }
        let more = |taken: usize| taken.checked_add(bytes).filter(|taken| *taken <= self.max_bytes);
        let is_reserved = self.taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).is_ok();
        is_reserved
            .then(|| Some(ActivationReservation { activations: Arc::clone(self), bytes }))
            .ok_or_else(activations_full)
    }
}

impl ActivationReservation {
    /// Wraps a response body, which then holds the memory until the body is dropped.
    pub(crate) fn until_sent(self, body: Vec<u8>) -> Bytes {
        Bytes::from_owner(Body { body, _reservation: self })
    }
}

struct Body {
    body: Vec<u8>,
    _reservation: ActivationReservation,
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
    fn memory_is_bounded_and_released_after_sending() {
        let activations = Arc::new(Activations::new(100));
        assert!(activations.reserve(0).unwrap().is_none());
        let mut reservations: Vec<ActivationReservation> =
            (0..4).map(|_| activations.reserve(100).unwrap().unwrap()).collect();
        let refused = activations.reserve(1).unwrap_err();
        assert_eq!((refused.status(), refused.code()), (503, Some("server_overloaded")));
        assert!(activations.reserve(0).unwrap().is_none(), "a request without activations is not rejected");
        assert!(activations.reserve(usize::MAX).is_err());

        let body = reservations.pop().unwrap().until_sent(b"numbers".to_vec());
        let (copy, part) = (body.clone(), body.slice(2..4));
        drop((body, copy));
        assert!(activations.reserve(1).is_err() && &*part == b"mb", "part of the body is not sent yet");
        drop(part);
        assert!(activations.reserve(100).unwrap().is_some());
        drop(reservations);
        assert_eq!(activations.taken.load(Ordering::Acquire), 0);
    }
}
