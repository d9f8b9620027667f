//! The memory of the bodies that are received. It is taken as bytes come, and if there is none left, the slowest body gives up its
//! own, so that clients that send a part and then drip keep no other client out.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use candle_gpt2_api::ApiError;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::seats::Activity;
use crate::busy::bodies_full;

/// A body up to this size takes none of the memory: connections are limited already.
const SMALL: usize = 64 << 10;
/// Bodies of the largest size that there is memory for,
const LARGEST_AT_ONCE: usize = 4;
/// and the least that there is memory for.
const LEAST: usize = 16 << 20;
/// Bytes that a body brings,
const PROGRESS: usize = 16 << 10;
/// and how long it may take for as many before others may take its memory.
const GRACE: Duration = Duration::from_secs(1);
/// How often it is looked whether one has come slowly for so long.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// How long a body waits for memory.
const LONGEST: Duration = Duration::from_secs(20);

/// The memory of a server's bodies.
#[derive(Debug)]
pub(crate) struct Rooms {
    /// Bytes that all may take but one: the oldest takes what it needs, so that one always comes to its end.
    most: usize,
    taken: Mutex<Taken>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Taken {
    next: u64,
    total: usize,
    /// Largest total since the last call of [`Rooms::take_peak`].
    peak: usize,
    bodies: BTreeMap<u64, Body>,
}

#[derive(Debug)]
struct Body {
    bytes: usize,
    /// Those since its last progress.
    recent: usize,
    activity: Arc<Activity>,
    pace: Pace,
}

/// How a body comes.
#[derive(Debug)]
enum Pace {
    /// Its last progress was then, or the server has had memory for it again since then.
    Since(Instant),
    /// It waits for memory.
    Waits,
    /// It is there.
    Whole,
    /// It has to give up its memory.
    Evicted,
}

/// A body's memory; free when dropped.
#[derive(Debug)]
pub(crate) struct Room {
    rooms: Arc<Rooms>,
    number: u64,
}

impl Drop for Room {
    fn drop(&mut self) {
        let mut taken = self.rooms.taken();
        taken.total -= taken.bodies.remove(&self.number).map_or(0, |body| body.bytes);
        drop(taken);
        self.rooms.freed.notify_waiters();
    }
}

impl Rooms {
    /// The memory for bodies of up to `max_body` bytes.
    pub(crate) fn new(max_body: usize) -> Self {
        let all = max_body.saturating_mul(LARGEST_AT_ONCE).max(LEAST);
        Self { most: all.saturating_sub(max_body), taken: Mutex::default(), freed: Notify::new() }
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        // The numbers are whole at any moment.
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Largest memory of all bodies since the last call.
    pub(crate) fn take_peak(&self) -> usize {
        std::mem::take(&mut self.taken().peak)
    }

    /// The memory of a body that begins to come over the connection of this activity.
    pub(crate) fn begin(self: &Arc<Self>, activity: &Arc<Activity>) -> Room {
        let mut taken = self.taken();
        let number = taken.next;
        taken.next += 1;
        let body =
            Body { bytes: 0, recent: 0, activity: Arc::clone(activity), pace: Pace::Since(Instant::now()) };
        taken.bodies.insert(number, body);
        Room { rooms: Arc::clone(self), number }
    }
}

impl Room {
    /// Takes memory for a body that has `bytes` in all.
    ///
    /// # Errors
    /// When others need it all.
    pub(crate) async fn hold(&self, bytes: usize) -> Result<(), ApiError> {
        if bytes <= SMALL {
            return Ok(());
        }
        let begun = Instant::now();
        while !self.rooms.taken().hold(self.number, bytes, self.rooms.most) {
            if begun.elapsed() > LONGEST || self.rooms.taken().is_evicted(self.number) {
                return Err(bodies_full());
            }
            // What is freed between the look and the wait is seen at the next look.
            _ = timeout(LOOK_AGAIN, self.rooms.freed.notified()).await;
        }
        Ok(())
    }

    /// The whole body has come.
    pub(crate) fn is_whole(&self) {
        if let Some(body) = self.rooms.taken().bodies.get_mut(&self.number) {
            body.pace = Pace::Whole;
        }
    }
}

impl Taken {
    /// Whether the body has memory for so many bytes; if not, a slower one has to give up its own.
    fn hold(&mut self, number: u64, bytes: usize, most: usize) -> bool {
        let large = |(number, body): (&u64, &Body)| (body.bytes > 0).then_some(*number);
        let oldest = self.bodies.iter().find_map(large).unwrap_or(number);
        let Some(body) = self.bodies.get_mut(&number) else { return false };
        let more = bytes.saturating_sub(body.bytes);
        let has_room = self.total.saturating_add(more) <= most || oldest == number;
        match (&body.pace, has_room) {
            // Its client could not send meanwhile.
            (Pace::Waits, true) => body.pace = Pace::Since(Instant::now()),
            (Pace::Since(_), false) => body.pace = Pace::Waits,
            _ => {}
        }
        if has_room {
            (body.bytes, self.total) = (bytes, self.total + more);
            self.peak = self.peak.max(self.total);
            body.recent += more;
            if body.recent >= PROGRESS && matches!(body.pace, Pace::Since(_)) {
                (body.recent, body.pace) = (0, Pace::Since(Instant::now()));
            }
        } else {
            self.evict_slowest();
        }
        has_room
    }

    fn is_evicted(&self, number: u64) -> bool {
        self.bodies.get(&number).is_some_and(|body| matches!(body.pace, Pace::Evicted))
    }

    /// Tells the body that has come slowest to give up its memory, unless one does so already.
    fn evict_slowest(&mut self) {
        if self.bodies.values().any(|body| matches!(body.pace, Pace::Evicted)) {
            return;
        }
        let last = |body: &Body| match body.pace {
            Pace::Since(since) if body.bytes > 0 && since.elapsed() > GRACE => Some(since),
            _ => None,
        };
        let slow = self.bodies.values_mut().filter_map(|body| Some((last(body)?, body)));
        if let Some((_, body)) = slow.min_by_key(|(since, _)| *since) {
            body.pace = Pace::Evicted;
            body.activity.evict();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: usize = 1 << 20;

    fn begin(rooms: &Arc<Rooms>) -> Room {
        rooms.begin(&Arc::default())
    }

    fn holds(room: &Room, bytes: usize) -> bool {
        room.rooms.taken().hold(room.number, bytes, room.rooms.most)
    }

    fn is_evicted(room: &Room) -> bool {
        room.rooms.taken().is_evicted(room.number)
    }

    /// Sends since so long.
    fn age(room: &Room, time: Duration) {
        if let Pace::Since(since) = &mut room.rooms.taken().bodies.get_mut(&room.number).unwrap().pace {
            *since -= time;
        }
    }

    #[test]
    fn the_memory_is_bounded_and_the_oldest_comes_to_its_end() {
        let rooms = Arc::new(Rooms::new(8 * LARGE));
        assert_eq!(rooms.most, 24 * LARGE);
        let bodies: Vec<Room> = (0..30).map(|_| begin(&rooms)).collect();
        let count = bodies.iter().filter(|body| holds(body, LARGE)).count();
        assert_eq!(count, 24);
        // No other takes more, and none that has just begun gives up its own.
        assert!(!holds(&bodies[1], 2 * LARGE) && !bodies.iter().any(is_evicted));
        assert!(holds(&bodies[0], 8 * LARGE));
        assert!(rooms.taken().total <= 32 * LARGE);
        drop(bodies);
        assert_eq!(rooms.taken().total, 0);
        // One that began before all others, and has held nothing yet, is not the oldest of those that do.
        let bodies: Vec<Room> = (0..30).map(|_| begin(&rooms)).collect();
        let most = bodies.iter().rev().filter(|body| holds(body, 8 * LARGE)).count();
        assert!(most == 3 && rooms.taken().total <= 32 * LARGE, "{most}");
        drop(bodies);
        assert_eq!(rooms.taken().total, 0);
    }

    #[test]
    fn the_slowest_gives_up_its_memory_to_one_that_waits() {
        let rooms = Arc::new(Rooms::new(LARGE));
        let [fast, slow, slower, whole] = [(); 4].map(|()| begin(&rooms));
        for body in [&fast, &slow, &slower, &whole] {
            assert!(holds(body, 15 * LARGE / 4));
        }
        whole.is_whole();
        age(&slow, 2 * GRACE);
        age(&slower, 3 * GRACE);
        let waits = begin(&rooms);
        assert!(!holds(&waits, LARGE));
        assert!(is_evicted(&slower) && !is_evicted(&slow));
        // One at a time.
        assert!(!holds(&waits, LARGE) && !is_evicted(&slow));
        drop(slower);
        assert!(holds(&waits, LARGE));
        let more = begin(&rooms);
        assert!(holds(&more, 2 * LARGE) && !holds(&more, 4 * LARGE) && is_evicted(&slow));
        assert!(!is_evicted(&fast) && !is_evicted(&whole) && !is_evicted(&waits));
    }

    #[test]
    fn a_body_that_waits_for_memory_is_not_slow() {
        let rooms = Arc::new(Rooms::new(LARGE));
        let [first, second] = [(); 2].map(|()| begin(&rooms));
        assert!(holds(&first, 15 * LARGE) && !holds(&second, LARGE));
        assert!(matches!(rooms.taken().bodies[&second.number].pace, Pace::Waits));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        assert_eq!(runtime.block_on(second.hold(SMALL)), Ok(()), "small ones take none");
    }
}
