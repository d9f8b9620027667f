//! Places of connections. If none is free, the connection that has waited longest for its client loses its own, so that silent
//! clients keep no other out. If none waits, a few more connections are accepted, which can ask whether the server is healthy,
//! and otherwise are told to try again.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::timeout;

use crate::options::RESERVE;

/// How long a body may take before its connection loses its place to another.
const GRACE: Duration = Duration::from_secs(1);
/// How often it is looked whether a place can be had.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// What a connection waits for. Those that come first lose their places first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum State {
    /// Its client's end, after its last answer.
    Lingering,
    /// A request.
    Waiting,
    /// The body of a request.
    Receiving,
    /// Its own answer.
    Answering,
    /// The end of an answer that is handed over and may not be sent yet.
    Answered,
}

/// The state of a connection.
#[derive(Debug)]
pub(crate) struct Activity(Mutex<Standing>);

#[derive(Debug)]
struct Standing {
    state: State,
    since: Instant,
    is_evicted: bool,
    waker: Option<Waker>,
}

impl Default for Activity {
    fn default() -> Self {
        let standing =
            Standing { state: State::Waiting, since: Instant::now(), is_evicted: false, waker: None };
        Self(Mutex::new(standing))
    }
}

impl Activity {
    fn standing(&self) -> MutexGuard<'_, Standing> {
        // It is whole at any moment.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn state(&self) -> State {
        self.standing().state
    }

    pub(crate) fn enter(&self, state: State) {
        let mut standing = self.standing();
        (standing.state, standing.since) = (state, Instant::now());
    }

    /// Takes its place from the connection: it ends while it waits for its client.
    pub(crate) fn evict(&self) {
        let mut standing = self.standing();
        standing.is_evicted = true;
        if let Some(waker) = standing.waker.take() {
            waker.wake();
        }
    }

    /// Ready when the connection has lost its place. One task polls it.
    pub(crate) fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut standing = self.standing();
        if standing.is_evicted {
            return Poll::Ready(());
        }
        standing.waker = Some(cx.waker().clone());
        Poll::Pending
    }

    pub(crate) async fn evicted(&self) {
        poll_fn(|cx| self.poll_evicted(cx)).await;
    }

    /// How readily it loses its place; `None` if it does not.
    fn rank(&self) -> Option<(State, Instant)> {
        let standing = self.standing();
        let loses = match standing.state {
            State::Lingering | State::Waiting => true,
            State::Receiving => standing.since.elapsed() > GRACE,
            State::Answering | State::Answered => false,
        };
        loses.then_some((standing.state, standing.since))
    }
}

/// The places of a server's connections.
#[derive(Debug)]
pub(crate) struct Seats {
    most: usize,
    taken: Mutex<Taken>,
    /// Connections, with those that have lost their place and have not ended yet.
    open: watch::Sender<usize>,
}

#[derive(Debug, Default)]
struct Taken {
    next: u64,
    activities: BTreeMap<u64, Arc<Activity>>,
}

/// A connection's place; free when dropped.
#[derive(Debug)]
pub(crate) struct Seat {
    seats: Arc<Seats>,
    number: u64,
    pub(crate) activity: Arc<Activity>,
    /// Whether it is one of the few that there was no place for.
    pub(crate) is_surplus: bool,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.seats.taken().activities.remove(&self.number);
        self.seats.open.send_modify(|open| *open -= 1);
    }
}

impl Seats {
    pub(crate) fn new(most: usize) -> Self {
        Self { most, taken: Mutex::default(), open: watch::Sender::new(0) }
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        // The map is whole at any moment.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns when a connection may be accepted.
    pub(crate) async fn free(&self) {
        let most = self.most.saturating_add(RESERVE);
        let mut open = self.open.subscribe();
        while *open.borrow_and_update() >= most {
            self.evict();
            // Others come to wait for their clients without a word, so it is looked again.
            _ = timeout(LOOK_AGAIN, open.changed()).await;
        }
    }

    /// A connection's place.
    pub(crate) fn take(self: &Arc<Self>) -> Seat {
        let is_full = || self.taken().activities.len() >= self.most;
        // There may be some beyond the limit that have been served.
        while is_full() && self.evict() {}
        let is_surplus = is_full();
        let mut taken = self.taken();
        let (number, activity) = (taken.next, Arc::new(Activity::default()));
        taken.next += 1;
        taken.activities.insert(number, Arc::clone(&activity));
        drop(taken);
        self.open.send_modify(|open| *open += 1);
        Seat { seats: Arc::clone(self), number, activity, is_surplus }
    }

    /// Takes the place of the connection that has waited longest for its client; `false` if none waits.
    pub(crate) fn evict(&self) -> bool {
        let mut taken = self.taken();
        let ranked = taken.activities.iter();
        let ranked = ranked.filter_map(|(number, activity)| Some((activity.rank()?, *number)));
        let evicted = ranked.min().and_then(|(_, number)| taken.activities.remove(&number));
        evicted.inspect(|activity| activity.evict()).is_some()
    }

    /// Returns when all connections have ended.
    pub(crate) async fn empty(&self) {
        // The sender is here, so this does not fail.
        _ = self.open.subscribe().wait_for(|open| *open == 0).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_evicted(seat: &Seat) -> bool {
        seat.activity.standing().is_evicted
    }

    #[test]
    fn the_connection_that_has_waited_longest_loses_its_place() {
        let seats = Arc::new(Seats::new(3));
        let [first, second, third] = [(); 3].map(|()| seats.take());
        // It has been answered since: the second has waited longer.
        first.activity.enter(State::Answering);
        first.activity.enter(State::Waiting);
        third.activity.enter(State::Answering);
        let fourth = seats.take();
        assert!(!fourth.is_surplus && is_evicted(&second) && !is_evicted(&first));
        fourth.activity.enter(State::Lingering);
        let fifth = seats.take();
        assert!(!fifth.is_surplus && is_evicted(&fourth) && !is_evicted(&first) && !is_evicted(&third));
    }

    #[test]
    fn a_connection_that_works_keeps_its_place() {
        let seats = Arc::new(Seats::new(1));
        let first = seats.take();
        for state in [State::Answering, State::Answered, State::Receiving] {
            first.activity.enter(state);
            let second = seats.take();
            assert!(second.is_surplus && !is_evicted(&first), "{state:?}");
        }
        first.activity.standing().since -= 2 * GRACE;
        assert!(!seats.take().is_surplus && is_evicted(&first), "a body that takes long");
    }

    #[test]
    fn no_client_is_accepted_beyond_the_reserve() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let seats = Arc::new(Seats::new(1));
        let take = || {
            let seat = seats.take();
            seat.activity.enter(State::Answering);
            seat
        };
        let mut taken: Vec<Seat> = (0..=RESERVE).map(|_| take()).collect();
        assert!(!taken[0].is_surplus && taken[1..].iter().all(|seat| seat.is_surplus));
        let is_free =
            || runtime.block_on(async { timeout(Duration::from_millis(60), seats.free()).await.is_ok() });
        assert!(!is_free());
        taken.pop();
        assert!(is_free());
        drop(taken);
        runtime.block_on(seats.empty());
    }
}
