//! Connection slots.
//!
//! If no slot is free, the connection that has waited longest for its client is evicted. Silent clients
//! therefore cannot lock out others. If no connection is idle, a few surplus connections are accepted. They
//! may query the server's health and metrics, and otherwise receive an error with a retry delay.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::timeout;

use crate::options::RESERVE;

/// Time after which a connection that receives a body may be evicted.
const GRACE: Duration = Duration::from_secs(1);
/// Polling interval while no slot is free.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// State of a connection, in eviction order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum State {
    /// Waiting for the client to close the connection after the last response.
    Lingering,
    /// Waiting for a request.
    Waiting,
    /// Receiving the body of a request.
    Receiving,
    /// Computing or sending a response.
    Answering,
    /// Response handed to hyper, but possibly not sent yet.
    Answered,
}

/// State of a connection, shared with the eviction logic.
#[derive(Debug)]
pub(crate) struct Activity(Mutex<ConnectionState>);

#[derive(Debug)]
struct ConnectionState {
    state: State,
    since: Instant,
    is_evicted: bool,
    waker: Option<Waker>,
}

impl Default for Activity {
    fn default() -> Self {
        let connection =
            ConnectionState { state: State::Waiting, since: Instant::now(), is_evicted: false, waker: None };
        Self(Mutex::new(connection))
    }
}

impl Activity {
    fn lock(&self) -> MutexGuard<'_, ConnectionState> {
        // The state is consistent whenever the lock is released, so poisoning is harmless.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn state(&self) -> State {
        self.lock().state
    }

    pub(crate) fn enter(&self, state: State) {
        let mut connection = self.lock();
        (connection.state, connection.since) = (state, Instant::now());
    }

    /// Evicts the connection, which ends as soon as it waits for its client.
    pub(crate) fn evict(&self) {
        let mut connection = self.lock();
        connection.is_evicted = true;
        if let Some(waker) = connection.waker.take() {
            waker.wake();
        }
    }

    /// Returns `Ready` once the connection is evicted. Only one task may poll this.
    pub(crate) fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut connection = self.lock();
        if connection.is_evicted {
            return Poll::Ready(());
        }
        connection.waker = Some(cx.waker().clone());
        Poll::Pending
    }

    pub(crate) async fn evicted(&self) {
        poll_fn(|cx| self.poll_evicted(cx)).await;
    }

    /// Eviction priority; `None` if the connection must not be evicted.
    fn rank(&self) -> Option<(State, Instant)> {
        let connection = self.lock();
        let loses = match connection.state {
            State::Lingering | State::Waiting => true,
            State::Receiving => connection.since.elapsed() > GRACE,
            State::Answering | State::Answered => false,
        };
        loses.then_some((connection.state, connection.since))
    }
}

/// A server's connection slots.
#[derive(Debug)]
pub(crate) struct ConnectionSlots {
    max: usize,
    taken: Mutex<Taken>,
    /// Number of open connections, including evicted ones that have not ended yet.
    open: watch::Sender<usize>,
}

#[derive(Debug, Default)]
struct Taken {
    next: u64,
    activities: BTreeMap<u64, Arc<Activity>>,
}

/// Slot for a connection, released on drop.
#[derive(Debug)]
pub(crate) struct ConnectionSlot {
    slots: Arc<ConnectionSlots>,
    number: u64,
    pub(crate) activity: Arc<Activity>,
    /// Whether the connection exceeds the limit and uses the reserve.
    pub(crate) is_surplus: bool,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.slots.taken().activities.remove(&self.number);
        self.slots.open.send_modify(|open| *open -= 1);
    }
}

impl ConnectionSlots {
    pub(crate) fn new(max: usize) -> Self {
        Self { max, taken: Mutex::default(), open: watch::Sender::new(0) }
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        // The map is consistent whenever the lock is released, so poisoning is harmless.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until another connection may be accepted.
    pub(crate) async fn wait_until_free(&self) {
        let max = self.max.saturating_add(RESERVE);
        let mut open = self.open.subscribe();
        while *open.borrow_and_update() >= max {
            self.evict();
            // No notification arrives when a connection becomes idle, so poll.
            _ = timeout(POLL_INTERVAL, open.changed()).await;
        }
    }

    /// Assigns a slot to a new connection, evicting an idle connection if necessary.
    pub(crate) fn assign(self: &Arc<Self>) -> ConnectionSlot {
        let is_full = || self.taken().activities.len() >= self.max;
        // Evicts several if surplus connections have become idle.
        while is_full() && self.evict() {}
        let is_surplus = is_full();
        let mut taken = self.taken();
        let (number, activity) = (taken.next, Arc::new(Activity::default()));
        taken.next += 1;
        taken.activities.insert(number, Arc::clone(&activity));
        drop(taken);
        self.open.send_modify(|open| *open += 1);
        ConnectionSlot { slots: Arc::clone(self), number, activity, is_surplus }
    }

    /// Evicts the connection that has waited longest for its client; returns false if none is idle.
    pub(crate) fn evict(&self) -> bool {
        let mut taken = self.taken();
        let ranked = taken.activities.iter();
        let ranked = ranked.filter_map(|(number, activity)| Some((activity.rank()?, *number)));
        let evicted = ranked.min().and_then(|(_, number)| taken.activities.remove(&number));
        evicted.inspect(|activity| activity.evict()).is_some()
    }

    /// Waits until all connections have ended.
    pub(crate) async fn wait_until_empty(&self) {
        // Cannot fail because `self` owns the sender.
        _ = self.open.subscribe().wait_for(|open| *open == 0).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_evicted(slot: &ConnectionSlot) -> bool {
        slot.activity.lock().is_evicted
    }

    #[test]
    fn longest_idle_connection_is_evicted() {
        let slots = Arc::new(ConnectionSlots::new(3));
        let [first, second, third] = [(); 3].map(|()| slots.assign());
        // The first connection is served and waits anew, so the second has waited longest.
        first.activity.enter(State::Answering);
        first.activity.enter(State::Waiting);
        third.activity.enter(State::Answering);
        let fourth = slots.assign();
        assert!(!fourth.is_surplus && is_evicted(&second) && !is_evicted(&first));
        fourth.activity.enter(State::Lingering);
        let fifth = slots.assign();
        assert!(!fifth.is_surplus && is_evicted(&fourth) && !is_evicted(&first) && !is_evicted(&third));
    }

    #[test]
    fn busy_connection_is_evicted_only_if_its_body_is_slow() {
        let slots = Arc::new(ConnectionSlots::new(1));
        let first = slots.assign();
        for state in [State::Answering, State::Answered, State::Receiving] {
            first.activity.enter(state);
            let second = slots.assign();
            assert!(second.is_surplus && !is_evicted(&first), "{state:?}");
        }
        first.activity.lock().since -= 2 * GRACE;
        assert!(!slots.assign().is_surplus && is_evicted(&first), "the body is too slow");
    }

    #[test]
    fn accept_waits_while_the_reserve_is_full() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let slots = Arc::new(ConnectionSlots::new(1));
        let take = || {
            let slot = slots.assign();
            slot.activity.enter(State::Answering);
            slot
        };
        let mut taken: Vec<ConnectionSlot> = (0..=RESERVE).map(|_| take()).collect();
        assert!(!taken[0].is_surplus && taken[1..].iter().all(|slot| slot.is_surplus));
        let is_free = || {
            runtime
                .block_on(async { timeout(Duration::from_millis(60), slots.wait_until_free()).await.is_ok() })
        };
        assert!(!is_free());
        taken.pop();
        assert!(is_free());
        drop(taken);
        runtime.block_on(slots.wait_until_empty());
    }
}
