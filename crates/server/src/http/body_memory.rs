//! Memory budget for request bodies.
//!
//! Memory is reserved as bytes arrive. If none is left, the slowest body is evicted. Clients that send part
//! of a body and then drip bytes therefore cannot lock out others.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use candle_gpt2_api::ApiError;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::slots::Activity;
use crate::busy::bodies_full;

/// Size up to which bodies bypass the budget; the connection limit bounds their total.
const SMALL: usize = 64 << 10;
/// Number of maximum-size bodies that fit into the budget.
const LARGEST_AT_ONCE: usize = 4;
/// Minimum budget in bytes.
const MIN_BUDGET: usize = 16 << 20;
/// Number of received bytes that counts as progress.
const PROGRESS: usize = 16 << 10;
/// Time without progress after which a body may be evicted.
const GRACE: Duration = Duration::from_secs(1);
/// Polling interval while a body waits for memory.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum time that a body waits for memory.
const MAX_WAIT: Duration = Duration::from_secs(20);

/// Memory budget for a server's request bodies.
#[derive(Debug)]
pub(crate) struct BodyMemory {
    /// Memory limit for all bodies except the oldest.
    ///
    /// The oldest body gets the memory it needs, so one upload always completes.
    most: usize,
    taken: Mutex<Taken>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Taken {
    next: u64,
    total: usize,
    /// Largest total since the last call to [`BodyMemory::take_peak`].
    peak: usize,
    bodies: BTreeMap<u64, Body>,
}

#[derive(Debug)]
struct Body {
    bytes: usize,
    /// Bytes received since the last recorded progress.
    recent: usize,
    activity: Arc<Activity>,
    state: ReceiveState,
}

/// Receive state of a body.
#[derive(Debug)]
enum ReceiveState {
    /// Receiving; the instant is the last progress or the end of the last wait for memory.
    Since(Instant),
    /// Waiting for memory.
    Waiting,
    /// Completely received.
    Complete,
    /// Evicted; must release its memory.
    Evicted,
}

/// Memory reserved for a body, released on drop.
#[derive(Debug)]
pub(crate) struct BodyReservation {
    memory: Arc<BodyMemory>,
    number: u64,
}

impl Drop for BodyReservation {
    fn drop(&mut self) {
        let mut taken = self.memory.taken();
        taken.total -= taken.bodies.remove(&self.number).map_or(0, |body| body.bytes);
        drop(taken);
        self.memory.freed.notify_waiters();
    }
}

impl BodyMemory {
    /// Creates a budget for bodies of up to `max_body` bytes each.
    pub(crate) fn new(max_body: usize) -> Self {
        let all = max_body.saturating_mul(LARGEST_AT_ONCE).max(MIN_BUDGET);
        Self { most: all.saturating_sub(max_body), taken: Mutex::default(), freed: Notify::new() }
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        // The counters are consistent whenever the lock is released, so poisoning is harmless.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the peak memory of all bodies since the last call.
    pub(crate) fn take_peak(&self) -> usize {
        std::mem::take(&mut self.taken().peak)
    }

    /// Registers a body whose first bytes are about to arrive on the connection with this `activity`.
    pub(crate) fn begin(self: &Arc<Self>, activity: &Arc<Activity>) -> BodyReservation {
        let mut taken = self.taken();
        let number = taken.next;
        taken.next += 1;
        let body = Body {
            bytes: 0,
            recent: 0,
            activity: Arc::clone(activity),
            state: ReceiveState::Since(Instant::now()),
        };
        taken.bodies.insert(number, body);
        BodyReservation { memory: Arc::clone(self), number }
    }
}

impl BodyReservation {
    /// Reserves memory until the body has `bytes` bytes in total.
    ///
    /// # Errors
    /// If other bodies occupy the memory for too long, or this body is evicted.
    pub(crate) async fn reserve(&self, bytes: usize) -> Result<(), ApiError> {
        if bytes <= SMALL {
            return Ok(());
        }
        let begun = Instant::now();
        while !self.memory.taken().reserve(self.number, bytes, self.memory.most) {
            if begun.elapsed() > MAX_WAIT || self.memory.taken().is_evicted(self.number) {
                return Err(bodies_full());
            }
            // If memory is freed between the check and this wait, the check after the timeout notices it.
            _ = timeout(POLL_INTERVAL, self.memory.freed.notified()).await;
        }
        Ok(())
    }

    /// Marks the body as completely received.
    pub(crate) fn mark_complete(&self) {
        if let Some(body) = self.memory.taken().bodies.get_mut(&self.number) {
            body.state = ReceiveState::Complete;
        }
    }
}

impl Taken {
    /// Extends a body's memory to `bytes` bytes, or evicts the slowest body.
    ///
    /// Returns whether the memory was reserved.
    fn reserve(&mut self, number: u64, bytes: usize, most: usize) -> bool {
        let large = |(number, body): (&u64, &Body)| (body.bytes > 0).then_some(*number);
        let oldest = self.bodies.iter().find_map(large).unwrap_or(number);
        let Some(body) = self.bodies.get_mut(&number) else { return false };
        let more = bytes.saturating_sub(body.bytes);
        let has_memory = self.total.saturating_add(more) <= most || oldest == number;
        match (&body.state, has_memory) {
            // The client could not send while its body waited for memory.
            (ReceiveState::Waiting, true) => body.state = ReceiveState::Since(Instant::now()),
            (ReceiveState::Since(_), false) => body.state = ReceiveState::Waiting,
            _ => {}
        }
        if has_memory {
            (body.bytes, self.total) = (bytes, self.total + more);
            self.peak = self.peak.max(self.total);
            body.recent += more;
            if body.recent >= PROGRESS && matches!(body.state, ReceiveState::Since(_)) {
                (body.recent, body.state) = (0, ReceiveState::Since(Instant::now()));
            }
        } else {
            self.evict_slowest();
        }
        has_memory
    }

    fn is_evicted(&self, number: u64) -> bool {
        self.bodies.get(&number).is_some_and(|body| matches!(body.state, ReceiveState::Evicted))
    }

    /// Evicts the slowest body, unless an eviction is already in progress.
    fn evict_slowest(&mut self) {
        if self.bodies.values().any(|body| matches!(body.state, ReceiveState::Evicted)) {
            return;
        }
        let last = |body: &Body| match body.state {
            ReceiveState::Since(since) if body.bytes > 0 && since.elapsed() > GRACE => Some(since),
            _ => None,
        };
        let slow = self.bodies.values_mut().filter_map(|body| Some((last(body)?, body)));
        if let Some((_, body)) = slow.min_by_key(|(since, _)| *since) {
            body.state = ReceiveState::Evicted;
            body.activity.evict();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: usize = 1 << 20;

    fn begin(memory: &Arc<BodyMemory>) -> BodyReservation {
        memory.begin(&Arc::default())
    }

    fn try_reserve(reservation: &BodyReservation, bytes: usize) -> bool {
        reservation.memory.taken().reserve(reservation.number, bytes, reservation.memory.most)
    }

    fn is_evicted(reservation: &BodyReservation) -> bool {
        reservation.memory.taken().is_evicted(reservation.number)
    }

    /// Moves a body's last progress further into the past.
    fn age(reservation: &BodyReservation, time: Duration) {
        if let ReceiveState::Since(since) =
            &mut reservation.memory.taken().bodies.get_mut(&reservation.number).unwrap().state
        {
            *since -= time;
        }
    }

    #[test]
    fn memory_is_bounded_and_the_oldest_body_completes() {
        let memory = Arc::new(BodyMemory::new(8 * LARGE));
        assert_eq!(memory.most, 24 * LARGE);
        let bodies: Vec<BodyReservation> = (0..30).map(|_| begin(&memory)).collect();
        let count = bodies.iter().filter(|body| try_reserve(body, LARGE)).count();
        assert_eq!(count, 24);
        // The other bodies get no more memory, and none is evicted so soon after its start.
        assert!(!try_reserve(&bodies[1], 2 * LARGE) && !bodies.iter().any(is_evicted));
        assert!(try_reserve(&bodies[0], 8 * LARGE));
        assert!(memory.taken().total <= 32 * LARGE);
        drop(bodies);
        assert_eq!(memory.taken().total, 0);
        // A body that registered first but holds no memory does not count as the oldest.
        let bodies: Vec<BodyReservation> = (0..30).map(|_| begin(&memory)).collect();
        let count = bodies.iter().rev().filter(|body| try_reserve(body, 8 * LARGE)).count();
        assert!(count == 3 && memory.taken().total <= 32 * LARGE, "{count}");
        drop(bodies);
        assert_eq!(memory.taken().total, 0);
    }

    #[test]
    fn slowest_body_yields_its_memory_to_a_waiting_one() {
        let memory = Arc::new(BodyMemory::new(LARGE));
        let [fast, slow, slower, whole] = [(); 4].map(|()| begin(&memory));
        for body in [&fast, &slow, &slower, &whole] {
            assert!(try_reserve(body, 15 * LARGE / 4));
        }
        whole.mark_complete();
        age(&slow, 2 * GRACE);
        age(&slower, 3 * GRACE);
        let waiting = begin(&memory);
        assert!(!try_reserve(&waiting, LARGE));
        assert!(is_evicted(&slower) && !is_evicted(&slow));
        // Bodies are evicted one at a time.
        assert!(!try_reserve(&waiting, LARGE) && !is_evicted(&slow));
        drop(slower);
        assert!(try_reserve(&waiting, LARGE));
        let more = begin(&memory);
        assert!(try_reserve(&more, 2 * LARGE) && !try_reserve(&more, 4 * LARGE) && is_evicted(&slow));
        assert!(!is_evicted(&fast) && !is_evicted(&whole) && !is_evicted(&waiting));
    }

    #[test]
    fn body_waiting_for_memory_is_not_slow() {
        let memory = Arc::new(BodyMemory::new(LARGE));
        let [first, second] = [(); 2].map(|()| begin(&memory));
        assert!(try_reserve(&first, 15 * LARGE) && !try_reserve(&second, LARGE));
        assert!(matches!(memory.taken().bodies[&second.number].state, ReceiveState::Waiting));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        assert_eq!(runtime.block_on(second.reserve(SMALL)), Ok(()), "small bodies bypass the budget");
    }
}
