//! The threads that compute: started once, woken for each region of parallel work.
//!
//! Each thread has a share of neighbouring indices, which it takes one by one: neighbours mostly read neighbouring memory,
//! and one long walk through it is faster than many short ones. Who is done with its own share takes from the others'. The
//! caller works too, and at the end waits only for threads that took part: one that the system has not let run yet is told
//! that it comes too late. So a region on a busy machine costs no more than the caller's own time, where a barrier (candle's
//! pool) waits for every thread each time, a thousand times a second. A thread joins by adding itself to a number: with a lock,
//! sixteen would queue up for it in every region. Idle threads fall asleep, and only a region with much to do wakes them.
//! Regions of several callers run at the same time: each has its own shares, and a thread that finds nothing more to do in one looks
//! into the others. A region inside another one runs on its caller alone, so that nothing waits in a circle.
//!
//! A forked process has none of its parent's threads, and its copy of a lock may be held by one of them for good. So it leaves the
//! pool that it inherits untouched and starts its own; what decides this are atomics, which no thread can leave half done.

#![expect(unsafe_code, reason = "threads that live on borrow the work of a region that does not")]

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, LocalKey, available_parallelism, panicking, yield_now};
use std::time::{Duration, Instant};

/// How long an idle thread looks for work before it sleeps: longer than the time between two regions.
const TIME_BEFORE_SLEEP: Duration = Duration::from_micros(100);
/// How often it looks before it asks for the time.
const SPINS_BETWEEN_TIMES: usize = 64;
/// How often the caller looks whether the others are done before it gives its processor away.
const SPINS_BEFORE_YIELD: usize = 200;

/// Bytes that a region reads, or products that it adds up, from which on sleeping threads are woken for it: less is done before they
/// are there, since a system call and the way back to a processor take some ten microseconds.
const WORTH_WAKING: [usize; 2] = [512 << 10, 1 << 20];

/// Regions that threads can work at at the same time. Those of further callers run on their caller alone.
const PLACES: usize = 8;

thread_local! {
    /// Whether this thread is inside of a region.
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
    /// Whether what this thread computes now is over before a sleeping thread would be awake.
    static IS_SHORT: Cell<bool> = const { Cell::new(false) };
}

/// Regions of this process so far.
static REGIONS: AtomicUsize = AtomicUsize::new(0);
/// How many threads compute; 0 until it is fixed.
static THREADS: AtomicUsize = AtomicUsize::new(0);
/// The pool of this process or of the one that it was forked from; null before the first region.
static POOL: AtomicPtr<Pool> = AtomicPtr::new(null_mut());
/// Forks between the process that started the first pool and this one.
static FORKS: AtomicUsize = AtomicUsize::new(0);

/// Sets the number of threads that compute, the calling one included. By default it is the number that the process may use,
/// within the limits of its container.
///
/// Returns whether the number could be set: it is fixed when the first computation starts.
///
/// ```
/// assert!(candle_gpt2_arithmetic::set_thread_count(2));
/// assert_eq!(candle_gpt2_arithmetic::thread_count(), 2);
/// ```
pub fn set_thread_count(threads: usize) -> bool {
    THREADS.compare_exchange(0, threads.max(1), Ordering::AcqRel, Ordering::Acquire).is_ok()
}

/// How many threads compute. An example is at [`set_thread_count`].
pub fn thread_count() -> usize {
    match THREADS.load(Ordering::Acquire) {
        0 => {
            set_thread_count(available_parallelism().map_or(1, usize::from));
            THREADS.load(Ordering::Acquire)
        }
        threads => threads,
    }
}

/// How many regions of parallel work this process has run: each costs the time in which threads meet.
///
/// ```
/// use candle_gpt2_arithmetic::{map_items, region_count};
///
/// let before = region_count();
/// map_items([2, 3, 5], |number| number * number);
/// assert!(region_count() > before, "and those of other threads");
/// ```
pub fn region_count() -> usize {
    REGIONS.load(Ordering::Relaxed)
}

/// Calls `work` once with each index below `count`, on all threads.
pub(crate) fn for_each_index(count: usize, work: impl Fn(usize) + Sync) {
    if count < 2 || IS_INSIDE.get() {
        (0..count).for_each(work);
        return;
    }
    REGIONS.fetch_add(1, Ordering::Relaxed);
    if thread_count() == 1 {
        (0..count).for_each(work);
        return;
    }
    Pool::of_this_process(&POOL, thread_count() - 1).run(count, &work);
}

/// What `work` returns, which reads so many bytes and adds up so many products: if these are few, its regions are for threads that are
/// awake. So a model of some megabytes runs on one thread, and a large one's small products are shared.
pub(crate) fn of_size<R>(bytes: usize, products: usize, work: impl FnOnce() -> R) -> R {
    let is_short = bytes < WORTH_WAKING[0] && products < WORTH_WAKING[1];
    let _short = Within::enter(&IS_SHORT, is_short);
    work()
}

/// Makes forks of this process known to [`FORKS`] in them.
fn notice_forks() {
    #[cfg(all(unix, not(miri)))]
    {
        extern "C" fn notice() {
            FORKS.fetch_add(1, Ordering::AcqRel);
        }
        // SAFETY: the function only adds to an atomic, which may be done at any time. Where there is no memory to keep it, forks stay
        // unnoticed, and everything else works.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(notice)) };
    }
}

struct Pool {
    places: [Place; PLACES],
    /// Number of tasks published so far. Idle threads look at it all the time, so it has a cache line of its own.
    generation: Share,
    /// Threads that wait for `published`: who counts itself looks at the generation then, and who publishes looks here after it has
    /// changed that, so one of them sees the other.
    sleeping: AtomicUsize,
    /// Held between counting oneself and waiting, and to signal.
    falling_asleep: Mutex<()>,
    /// Signalled when a task is published.
    published: Condvar,
    /// The value of [`FORKS`] in the process that has the threads.
    forks: usize,
}

/// What the threads of one task share.
#[repr(align(64))]
struct Place {
    /// How many indices of each thread's share are taken, the caller's first.
    shares: Box<[Share]>,
    /// Indices of the task that is published here; 0 when there is none.
    count: AtomicUsize,
    /// What is published here, while [`OPEN`] is set.
    task: UnsafeCell<Option<Task>>,
    /// [`CLAIMED`] and [`OPEN`], and the number of threads that may use the task, or are about to see that they come too late.
    state: AtomicUsize,
}

/// A caller has the place.
const CLAIMED: usize = 1 << (usize::BITS - 1);
/// Threads may join the task.
const OPEN: usize = CLAIMED >> 1;
/// The rest of a state: the number of threads.
const JOINED: usize = OPEN - 1;

// SAFETY: the caller that has claimed a place writes its task before it opens it, and while it is open all only read it.
unsafe impl Sync for Place {}

/// A number on a cache line of its own, such as how many indices of a share are taken.
#[derive(Default)]
#[repr(align(64))]
struct Share(AtomicUsize);

/// What a thread panicked with.
type Panic = Mutex<Option<Box<dyn Any + Send>>>;

/// The work of a region, and what the first thread that panicked at it panicked with, both borrowed from its caller.
#[derive(Clone, Copy)]
struct Task {
    work: *const (dyn Fn(usize) + Sync),
    count: usize,
    panic: *const Panic,
}

// SAFETY: the pointers are to values that may be shared between threads, and only shared references are made of them.
unsafe impl Send for Task {}

impl Pool {
    /// The pool at `place`, or a new one with so many threads besides the caller's if there is none or it is another process's.
    fn of_this_process(place: &AtomicPtr<Self>, threads: usize) -> &'static Self {
        let found = place.load(Ordering::Acquire);
        // SAFETY: it is null or points to a pool, and those live as long as the program.
        if let Some(pool) = unsafe { found.as_ref() }
            && pool.is_of_this_process()
        {
            return pool;
        }
        // Before the number is read that tells forks apart.
        notice_forks();
        let new = Box::into_raw(Box::new(Self::new(threads)));
        match place.compare_exchange(found, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                // SAFETY: it points to the pool that was just made, which is never freed.
                let pool: &'static Self = unsafe { &*new };
                pool.start_threads();
                pool
            }
            Err(faster) => {
                // SAFETY: no other thread has seen this one.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: it points to the pool of another thread of this process, which is never freed.
                unsafe { &*faster }
            }
        }
    }

    fn new(threads: usize) -> Self {
        Self {
            places: std::array::from_fn(|_| Place::new(threads)),
            generation: Share::default(),
            sleeping: AtomicUsize::new(0),
            falling_asleep: Mutex::default(),
            published: Condvar::new(),
            forks: FORKS.load(Ordering::Acquire),
        }
    }

    fn start_threads(&'static self) {
        for index in 1..self.places[0].shares.len() {
            // Where the system has no more threads to give, the others do the work.
            let _ = Builder::new().name(format!("gpt2-{index}")).spawn(move || self.serve(index));
        }
    }

    /// Whether its threads are there: this process started it.
    fn is_of_this_process(&self) -> bool {
        self.forks == FORKS.load(Ordering::Acquire)
    }

    fn run(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        let Some(place) = self.places.iter().find(|place| place.claim()) else {
            let _inside = Within::enter(&IS_INSIDE, true);
            (0..count).for_each(work);
            return;
        };
        // SAFETY: only the lifetime changes. Threads get the task from the place alone, which `Region` closes, and it waits for
        // those that got it, before this function returns or unwinds.
        let borrowed = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(work)
        };
        let panic = Panic::default();
        let task = Task { work: borrowed, count, panic: &raw const panic };
        place.open(task);
        let region = Region { pool: self, place };
        self.wake(if IS_SHORT.get() { 0 } else { count.saturating_sub(1) });
        let inside = Within::enter(&IS_INSIDE, true);
        // SAFETY: this function has not returned.
        unsafe { place.work(task, 0) };
        drop(inside);
        drop(region);
        if let Some(panic) = panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
    }

    /// Lets idle threads look for work, and wakes no more of those that sleep than there is work for.
    fn wake(&self, most: usize) {
        self.generation.0.fetch_add(1, Ordering::SeqCst);
        if most == 0 || self.sleeping.load(Ordering::SeqCst) == 0 {
            return;
        }
        let _falling_asleep = self.lock();
        for _ in 0..self.sleeping.load(Ordering::Relaxed).min(most) {
            self.published.notify_one();
        }
    }

    /// What a thread does all its life; it begins with its own share.
    fn serve(&self, share: usize) {
        let _inside = Within::enter(&IS_INSIDE, true);
        let mut seen = 0;
        loop {
            self.wait_for_task_after(seen);
            seen = self.generation.0.load(Ordering::Acquire);
            // Whatever is published after this has another generation.
            while let Some((place, task)) = self.joined() {
                // SAFETY: the caller waits until this thread is no longer counted as active.
                let result = catch_unwind(AssertUnwindSafe(|| unsafe { place.work(task, share) }));
                if let Err(panic) = result {
                    // SAFETY: as above.
                    let first = unsafe { &*task.panic };
                    first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
                }
                place.state.fetch_sub(1, Ordering::Release);
                if !self.is_of_this_process() {
                    // The work forked, and this is the only thread of the new process: no more work will ever come.
                    return;
                }
            }
        }
    }

    /// A task with work left, as one of whose threads this one is counted; `None` if there is none.
    fn joined(&self) -> Option<(&Place, Task)> {
        let joined = |place: &'_ Place| place.has_work().then(|| place.join()).flatten();
        self.places.iter().find_map(|place| Some((place, joined(place)?)))
    }

    fn wait_for_task_after(&self, seen: usize) {
        let start = Instant::now();
        while start.elapsed() < TIME_BEFORE_SLEEP {
            for _ in 0..SPINS_BETWEEN_TIMES {
                if self.generation.0.load(Ordering::Acquire) != seen {
                    return;
                }
                std::hint::spin_loop();
            }
        }
        let mut falling_asleep = self.lock();
        self.sleeping.fetch_add(1, Ordering::SeqCst);
        while self.generation.0.load(Ordering::SeqCst) == seen {
            falling_asleep = self.published.wait(falling_asleep).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleeping.fetch_sub(1, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.falling_asleep.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    fn new(threads: usize) -> Self {
        Self {
            shares: (0..=threads).map(|_| Share::default()).collect(),
            count: AtomicUsize::new(0),
            task: UnsafeCell::new(None),
            state: AtomicUsize::new(0),
        }
    }

    /// Whether the place was free and is the caller's now. A thread that comes too late for the last task may still be leaving.
    fn claim(&self) -> bool {
        self.state.compare_exchange(0, CLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Lets threads join a task at this place, which is claimed.
    fn open(&self, task: Task) {
        self.shares.iter().for_each(|share| share.0.store(0, Ordering::Relaxed));
        self.count.store(task.count, Ordering::Relaxed);
        // SAFETY: the place is the caller's and closed, so no other thread reads or writes the task.
        unsafe { *self.task.get() = Some(task) };
        self.state.fetch_add(OPEN, Ordering::Release);
    }

    /// The task, if it is open and has fewer threads than indices: the caller then waits until this thread is no longer counted.
    fn join(&self) -> Option<Task> {
        // Looking first leaves the number to those who change it.
        let state = self.state.load(Ordering::Relaxed);
        if state & OPEN == 0 || (state & JOINED) + 1 >= self.count.load(Ordering::Relaxed) {
            return None;
        }
        if self.state.fetch_add(1, Ordering::Acquire) & OPEN == 0 {
            self.state.fetch_sub(1, Ordering::Release);
            return None;
        }
        // SAFETY: it was written before the place was opened, and is not written again before all that joined have left.
        unsafe { *self.task.get() }
    }

    /// The indices below `count` that belong to a share.
    fn indices_of(&self, share: usize, count: usize) -> Range<usize> {
        count * share / self.shares.len()..count * (share + 1) / self.shares.len()
    }

    /// Whether there seem to be indices that no thread has taken.
    fn has_work(&self) -> bool {
        let count = self.count.load(Ordering::Acquire);
        let is_left =
            |share: usize| self.shares[share].0.load(Ordering::Relaxed) < self.indices_of(share, count).len();
        count > 0 && (0..self.shares.len()).any(is_left)
    }

    /// Works until no index of the published task is left, with those of the `first` share to begin with.
    ///
    /// # Safety
    /// The region that published the task has not returned.
    unsafe fn work(&self, task: Task, first: usize) {
        // SAFETY: the caller's region has not returned, so what it borrowed is still there.
        let work = unsafe { &*task.work };
        for share in (first..self.shares.len()).chain(0..first) {
            let indices = self.indices_of(share, task.count);
            let taken = &self.shares[share].0;
            // Looking first leaves the shares that are used up to those who still write to theirs.
            while taken.load(Ordering::Relaxed) < indices.len() {
                if let Some(index) = indices.clone().nth(taken.fetch_add(1, Ordering::Relaxed)) {
                    work(index);
                }
            }
        }
    }
}

/// What a thread is within, as long as this is there.
struct Within(&'static LocalKey<Cell<bool>>, bool);

impl Within {
    fn enter(place: &'static LocalKey<Cell<bool>>, is_within: bool) -> Self {
        Self(place, place.replace(is_within))
    }
}

impl Drop for Within {
    fn drop(&mut self) {
        self.0.set(self.1);
    }
}

/// A published task; dropping it, in a panic too, closes it to further threads and waits for those that joined.
struct Region<'a> {
    pool: &'a Pool,
    place: &'a Place,
}

impl Drop for Region<'_> {
    fn drop(&mut self) {
        let Self { pool, place } = *self;
        if !pool.is_of_this_process() {
            // The work forked: what other threads had begun will never be done here.
            assert!(panicking(), "a process was forked inside of a computation, which cannot end in it");
            return;
        }
        place.count.store(0, Ordering::Relaxed);
        place.state.fetch_sub(OPEN, Ordering::Relaxed);
        let mut spins = 0;
        while place.state.load(Ordering::Acquire) & JOINED > 0 {
            spins += 1;
            if spins < SPINS_BEFORE_YIELD { std::hint::spin_loop() } else { yield_now() }
        }
        place.state.fetch_sub(CLAIMED, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// How long a thread that was woken may take to arrive.
    const PATIENCE: Duration = Duration::from_secs(60);

    impl Pool {
        fn start(threads: usize) -> &'static Self {
            Self::of_this_process(Box::leak(Box::default()), threads)
        }
    }

    /// Calls of each index in one region.
    fn calls(pool: &Pool, count: usize) -> Vec<usize> {
        let calls: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
        pool.run(count, &|index| {
            calls[index].fetch_add(1, Ordering::Relaxed);
        });
        calls.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn each_index_comes_once_in_region_after_region() {
        for threads in [0, 1, 5] {
            let pool = Pool::start(threads);
            for region in 0..200 {
                assert_eq!(calls(pool, region % 37), vec![1; region % 37]);
            }
        }
    }

    #[test]
    #[cfg_attr(target_family = "wasm", ignore = "starts threads")]
    fn only_regions_with_much_to_do_wake_threads() {
        let pool = Pool::start(2);
        for (bytes, products, expected) in [(1000, 1000, 1), (1 << 20, 0, 2), (0, 1 << 20, 2)] {
            while pool.sleeping.load(Ordering::SeqCst) < 2 {
                yield_now();
            }
            let threads = Mutex::new(HashSet::new());
            let start = Instant::now();
            let all_are_there = || threads.lock().unwrap().len() == expected || start.elapsed() > PATIENCE;
            of_size(bytes, products, || {
                pool.run(2, &|_| {
                    threads.lock().unwrap().insert(std::thread::current().id());
                    while !all_are_there() {
                        yield_now();
                    }
                });
            });
            assert_eq!(threads.into_inner().unwrap().len(), expected, "{bytes} bytes, {products} products");
        }
    }

    #[test]
    #[cfg_attr(target_family = "wasm", ignore = "starts threads")]
    fn regions_may_meet_and_nest() {
        let pool = Pool::start(3);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..50).for_each(|_| assert_eq!(calls(pool, 20), vec![1; 20])));
            }
        });
        pool.run(8, &|_| assert_eq!(calls(pool, 5), vec![1; 5]));
    }

    /// Two indices of a region wait for each other, and for one of the other region: no caller could end its own alone.
    #[test]
    #[cfg_attr(target_family = "wasm", ignore = "starts threads")]
    fn two_callers_have_the_pool_at_the_same_time() {
        const INDICES: usize = 3; // One more than the pool has threads, so that a caller always finds one of its own.
        let pool = Pool::start(2);
        for _ in 0..50 {
            let arrived = [AtomicUsize::new(0), AtomicUsize::new(0)];
            std::thread::scope(|scope| {
                for (own, other) in [(&arrived[0], &arrived[1]), (&arrived[1], &arrived[0])] {
                    scope.spawn(move || {
                        pool.run(INDICES, &|_| {
                            own.fetch_add(1, Ordering::AcqRel);
                            while own.load(Ordering::Acquire) < 2 || other.load(Ordering::Acquire) < 1 {
                                yield_now();
                            }
                        });
                    });
                }
            });
        }
    }

    /// More threads than any machine of the tests has cores, and more callers than regions at a time.
    #[test]
    #[cfg_attr(any(miri, target_family = "wasm"), ignore = "starts many threads")]
    fn many_threads_and_callers_come_to_an_end() {
        for threads in [1, 2, 4, 8, 16, 64] {
            let pool = Pool::start(threads - 1);
            std::thread::scope(|scope| {
                for _ in 0..PLACES + 2 {
                    scope.spawn(|| (0..20).for_each(|_| assert_eq!(calls(pool, 150), vec![1; 150])));
                }
            });
        }
    }

    /// Shares are taken, not dealt: two of three threads are held up in their first index until all others are done, which the third
    /// has to do alone.
    #[test]
    #[cfg_attr(target_family = "wasm", ignore = "starts threads")]
    fn a_thread_that_is_not_held_up_does_what_is_left_of_all_shares() {
        const INDICES: usize = 90;
        let pool = Pool::start(2);
        for _ in 0..20 {
            let (begun, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
            pool.run(INDICES, &|_| {
                if begun.fetch_add(1, Ordering::AcqRel) < 2 {
                    while done.load(Ordering::Acquire) < INDICES - 2 {
                        yield_now();
                    }
                } else {
                    done.fetch_add(1, Ordering::AcqRel);
                }
            });
            assert_eq!(done.into_inner(), INDICES - 2);
        }
    }

    /// Other work on each core, more threads than cores, and two callers.
    #[test]
    #[cfg_attr(any(miri, target_family = "wasm"), ignore = "keeps all cores busy")]
    fn other_work_on_the_cores_changes_nothing() {
        let pool = Pool::start(2 * available_parallelism().map_or(1, usize::from));
        let is_over = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..available_parallelism().map_or(1, usize::from) {
                scope.spawn(|| {
                    while is_over.load(Ordering::Acquire) < 2 {
                        std::hint::spin_loop();
                    }
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    (0..50).for_each(|_| assert_eq!(calls(pool, 100), vec![1; 100]));
                    is_over.fetch_add(1, Ordering::AcqRel);
                });
            }
        });
    }

    /// Threads of a region that is about to end must not meet the next one's indices.
    #[test]
    #[cfg_attr(target_family = "wasm", ignore = "starts threads")]
    fn regions_of_several_callers_follow_each_other() {
        let pool = Pool::start(2);
        std::thread::scope(|scope| {
            for caller in 0..3 {
                scope.spawn(move || {
                    for region in 0..2_000 {
                        let done: [AtomicUsize; 6] = Default::default();
                        let count = 2 + (region + caller) % 5;
                        pool.run(count, &|index| {
                            yield_now();
                            done[index].fetch_add(1, Ordering::Relaxed);
                        });
                        let done = done.map(AtomicUsize::into_inner);
                        assert!(
                            done.iter().enumerate().all(|(index, done)| *done == usize::from(index < count))
                        );
                    }
                });
            }
        });
    }

    #[test]
    fn sleeping_threads_wake_up() {
        let pool = Pool::start(2);
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(calls(pool, 100), vec![1; 100]);
        }
    }

    /// Held while a thread panics: reporting it takes locks, which a fork by another test would copy.
    static PANICS: Mutex<()> = Mutex::new(());

    #[test]
    #[cfg_attr(panic = "abort", ignore = "a panic ends the program")]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let _alone = PANICS.lock().unwrap();
        let pool = Pool::start(2);
        for _ in 0..10 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(50, &|index| assert_ne!(index, 25, "told to panic"));
            }));
            assert!(result.is_err());
            assert_eq!(calls(pool, 30), vec![1; 30]);
        }
    }

    /// What a fork of this process makes of `work`, which gets ten seconds: the child's exit code, or the signal that ended it.
    #[cfg(all(unix, not(miri)))]
    fn in_a_fork(work: impl FnOnce() -> bool) -> Result<i32, i32> {
        // SAFETY: the child computes, and ends without running what belongs to the test's program.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "no fork");
        if child == 0 {
            // SAFETY: as above. An alarm ends a child that hangs.
            unsafe {
                libc::alarm(10);
                let is_right = catch_unwind(AssertUnwindSafe(work));
                libc::_exit(is_right.map_or(2, |is_right| i32::from(!is_right)));
            }
        }
        let mut status = 0;
        // SAFETY: the status is an integer of this function.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        if libc::WIFEXITED(status) { Ok(libc::WEXITSTATUS(status)) } else { Err(libc::WTERMSIG(status)) }
    }

    #[test]
    #[cfg(all(unix, not(miri)))]
    fn a_forked_process_computes_with_threads_of_its_own() {
        let place: &'static AtomicPtr<Pool> = Box::leak(Box::default());
        let pool = || Pool::of_this_process(place, 2);
        assert_eq!(calls(pool(), 50), vec![1; 50]);
        let parents: *const Pool = pool();
        let in_child = || {
            let is_own = !std::ptr::eq(parents, pool());
            // Two indices that wait for each other: no single thread could end them.
            let arrived = AtomicUsize::new(0);
            pool().run(2, &|_| {
                arrived.fetch_add(1, Ordering::AcqRel);
                while arrived.load(Ordering::Acquire) < 2 {
                    yield_now();
                }
            });
            is_own
                && calls(pool(), 50) == vec![1; 50]
                && in_a_fork(|| calls(pool(), 50) == vec![1; 50]) == Ok(0)
        };
        assert_eq!(in_a_fork(in_child), Ok(0), "the child, and its own child");
        assert!(std::ptr::eq(parents, pool()), "the parent keeps its pool");
        assert_eq!(calls(pool(), 50), vec![1; 50]);
    }

    #[test]
    #[cfg(all(unix, not(miri)))]
    fn a_fork_while_another_thread_is_inside_a_region_computes() {
        let place: &'static AtomicPtr<Pool> = Box::leak(Box::default());
        let pool = || Pool::of_this_process(place, 2);
        let (entered, is_over) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let in_child = || calls(pool(), 50) == vec![1; 50];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                pool().run(3, &|_| {
                    entered.fetch_add(1, Ordering::AcqRel);
                    while is_over.load(Ordering::Acquire) == 0 {
                        yield_now();
                    }
                });
            });
            while entered.load(Ordering::Acquire) < 1 {
                yield_now();
            }
            let forked = in_a_fork(in_child);
            is_over.store(1, Ordering::Release);
            assert_eq!(forked, Ok(0));
        });
        let held = pool().lock();
        let forked = in_a_fork(in_child);
        drop(held);
        assert_eq!(forked, Ok(0), "with the lock held");
    }

    #[test]
    #[cfg(all(unix, not(miri), not(panic = "abort")))]
    fn a_region_that_forks_ends_with_a_panic_in_the_child() {
        let _alone = PANICS.lock().unwrap();
        let pool = Pool::start(2);
        let forked = std::sync::OnceLock::new();
        let parent = std::process::id();
        // Only the caller's index forks; the child continues the region, and must not wait for threads that it does not have.
        let caller = std::thread::current().id();
        let region = catch_unwind(AssertUnwindSafe(|| {
            pool.run(40, &|_| {
                if std::thread::current().id() == caller && forked.get().is_none() {
                    // SAFETY: as in `in_a_fork`, whose `_exit` comes below.
                    let child = unsafe { libc::fork() };
                    if child == 0 {
                        // SAFETY: an alarm ends a child that hangs.
                        unsafe { libc::alarm(10) };
                    }
                    let _ = forked.set(child);
                }
                std::thread::sleep(Duration::from_millis(1));
            });
        }));
        if std::process::id() != parent {
            // SAFETY: the child ends without running what belongs to the test's program.
            unsafe { libc::_exit(i32::from(region.is_ok())) };
        }
        assert!(region.is_ok(), "the parent's region is whole");
        let (mut status, child) = (0, *forked.get().unwrap());
        // SAFETY: the status is an integer of this function.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status}");
    }
}
