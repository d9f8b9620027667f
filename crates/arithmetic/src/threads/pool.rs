//! Thread pool: threads start once and help with each parallel region.
//!
//! Each thread owns a share of consecutive indices and takes them one by one, because neighboring indices
//! mostly read neighboring memory. A thread that finishes its share takes indices from the other shares. The
//! caller works too. At the end of a region, it waits only for threads that joined. A thread that the system
//! has not scheduled yet finds the region closed. A barrier, as in candle's pool, would wait for every thread
//! each time. Threads enter a region with an atomic add, because sixteen threads would queue for a lock.
//!
//! Regions of several callers run concurrently. Each has its own shares, and a thread that
//! runs out of work in one region looks for work in the others. A nested region runs on its
//! caller's thread alone, so waits cannot form a cycle.
//!
//! # Waiting
//! Threads stay awake between the regions of a job, because waking up is slow on a busy core. A woken thread
//! must wait there until another process's time slice ends, even if that process has the lowest priority.
//! That takes milliseconds, longer than most regions. A waiting thread therefore spins first. If the wait
//! outlasts the usual gap, the awaited thread was probably preempted and may need this very core, so the
//! waiting thread yields between checks. A worker waits no longer than it has worked, then sleeps
//! ([`WaitBudget`]), so idle threads cost nothing. Only large regions wake sleeping threads.
//!
//! # Forks
//! A forked process has none of its parent's threads, and its copy of a lock may stay locked forever. The
//! process therefore leaves the inherited pool untouched and starts its own. Atomics select the pool, because
//! a fork cannot leave them half written.

#![expect(unsafe_code, reason = "long-lived threads borrow the work of a short-lived region")]

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, LocalKey, available_parallelism, panicking, yield_now};
use std::time::{Duration, Instant};

/// Time that a waiting thread spins before it yields: longer than most gaps between regions.
///
/// A longer time costs speed when processes of equal priority compete for the cores. A shorter time costs
/// speed when processes of lower priority compete for them.
const SPIN_TIME: Duration = Duration::from_micros(200);
/// Spin time if threads outnumber cores; the awaited thread may then need this core.
const CROWDED_SPIN_TIME: Duration = Duration::from_micros(20);
/// Minimum wait of an idle thread before it sleeps: longer than the usual gap between two regions.
const SHORTEST_WAIT: Duration = Duration::from_micros(100);
/// Maximum time that an idle thread waits before it sleeps: longer than a scheduler time slice.
///
/// A caller may be preempted for one time slice between regions.
const LONGEST_WAIT: Duration = Duration::from_millis(10);
/// Number of checks that a spinning thread makes between clock reads.
const CHECKS_PER_TIME: usize = 64;

/// Minimum bytes read, or minimum multiply-adds, for a region to wake sleeping threads.
///
/// Smaller regions end before the threads arrive, since a system call and
/// scheduling take tens of microseconds.
const WORTH_WAKING: [usize; 2] = [512 << 10, 1 << 20];

/// Maximum number of regions that run concurrently on the pool; further callers run theirs alone.
const SLOTS: usize = 8;

/// Environment variables for the thread count, shared with candle; the first valid one is used.
const VARIABLES: [&str; 2] = ["CANDLE_NUM_THREADS", "RAYON_NUM_THREADS"];

thread_local! {
    /// Whether this thread is inside a region.
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
    /// Whether this thread's regions are too small to wake sleeping threads.
    static IS_SHORT: Cell<bool> = const { Cell::new(false) };
}

/// Number of regions that this process has run.
static REGIONS: AtomicUsize = AtomicUsize::new(0);
/// Number of threads; 0 until it is fixed.
static THREADS: AtomicUsize = AtomicUsize::new(0);
/// Pool of this process, or of its parent after a fork; null before the first region.
static POOL: AtomicPtr<Pool> = AtomicPtr::new(null_mut());
/// Number of forks between the process that started the first pool and this process.
static FORKS: AtomicUsize = AtomicUsize::new(0);

/// Sets the number of threads, including the calling one.
///
/// The default is the value of the environment variable `CANDLE_NUM_THREADS`, or else of
/// `RAYON_NUM_THREADS`. If neither is set, it is the number of cores that the process may use, within its
/// container's limits. Returns whether the number could be set; the first computation or call of
/// [`thread_count`] fixes it. Operations of candle itself follow only the variables.
///
/// ```
/// assert!(candle_gpt2_arithmetic::set_thread_count(2));
/// assert_eq!(candle_gpt2_arithmetic::thread_count(), 2);
/// ```
pub fn set_thread_count(threads: usize) -> bool {
    THREADS.compare_exchange(0, threads.max(1), Ordering::AcqRel, Ordering::Acquire).is_ok()
}

/// Returns the number of threads; [`set_thread_count`] has an example.
pub fn thread_count() -> usize {
    match THREADS.load(Ordering::Acquire) {
        0 => {
            let variable = |name: &str| std::env::var(name).ok();
            set_thread_count(requested_count(variable).unwrap_or_else(core_count));
            THREADS.load(Ordering::Acquire)
        }
        threads => threads,
    }
}

/// Number of threads that the environment requests, ignoring zero and invalid values.
fn requested_count(variable: impl Fn(&str) -> Option<String>) -> Option<usize> {
    VARIABLES.iter().filter_map(|name| variable(name)?.trim().parse().ok()).find(|count| *count > 0)
}

/// Number of cores that this process may use.
fn core_count() -> usize {
    available_parallelism().map_or(1, usize::from)
}

/// Returns the number of parallel regions that this process has run.
///
/// Each region costs synchronization time.
///
/// ```
/// use candle_gpt2_arithmetic::{map_items, region_count};
///
/// let before = region_count();
/// map_items([2, 3, 5], |number| number * number);
/// assert!(region_count() > before, "other threads' regions count too");
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

/// Runs `work`; small jobs (by bytes read and multiply-adds) do not wake sleeping threads.
///
/// A model of a few megabytes therefore runs on one thread. In a large model, threads that are
/// awake still share small products.
pub(crate) fn with_job_size<R>(bytes: usize, products: usize, work: impl FnOnce() -> R) -> R {
    let is_short = bytes < WORTH_WAKING[0] && products < WORTH_WAKING[1];
    let _short = Flag::set(&IS_SHORT, is_short);
    work()
}

/// Registers a handler that counts forks in [`FORKS`].
fn notice_forks() {
    #[cfg(all(unix, not(miri)))]
    {
        extern "C" fn notice() {
            FORKS.fetch_add(1, Ordering::AcqRel);
        }
        // SAFETY: the handler only adds to an atomic, which is allowed at any time. If registering fails for
        // lack of memory, forks go unnoticed and everything else works.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(notice)) };
    }
}

/// Waits until `is_ready` returns true, or returns false after `limit`.
///
/// Spins for `spin_time`, then yields the core between checks.
fn wait_until(is_ready: impl Fn() -> bool, spin_time: Duration, limit: Duration) -> bool {
    let mut start = None;
    loop {
        for _ in 0..CHECKS_PER_TIME {
            if is_ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        let waited = start.get_or_insert_with(Instant::now).elapsed();
        if waited >= limit {
            return false;
        }
        if waited >= spin_time {
            yield_now();
        }
    }
}

/// Time that a thread may wait before it sleeps: as long as it has worked, up to [`LONGEST_WAIT`].
///
/// A job's threads spend no more time waiting than working, and stop waiting soon after the job ends.
#[derive(Default)]
struct WaitBudget(Duration);

impl WaitBudget {
    fn earn(&mut self, worked: Duration) {
        self.0 = self.0.saturating_add(worked).min(LONGEST_WAIT);
    }

    fn spend(&mut self, waited: Duration) {
        self.0 = self.0.saturating_sub(waited);
    }

    /// Maximum time that the thread waits before it sleeps.
    fn limit(&self) -> Duration {
        self.0.max(SHORTEST_WAIT)
    }
}

struct Pool {
    slots: [Slot; SLOTS],
    /// Number of tasks published so far; it has its own cache line because idle threads poll it.
    generation: Padded,
    /// Time that a waiting thread spins before it yields.
    spin_time: Duration,
    /// Number of threads waiting for `published`.
    ///
    /// A thread first adds itself and then checks the generation. A publisher first changes the generation
    /// and then checks this number. At least one of them therefore notices the other.
    sleeping: AtomicUsize,
    /// Lock held from incrementing `sleeping` until the thread waits, and while signaling.
    falling_asleep: Mutex<()>,
    /// Condition variable that signals a published task.
    published: Condvar,
    /// Value of [`FORKS`] in the process that owns the threads.
    forks: usize,
}

/// State shared by the threads that work on one task.
#[repr(align(64))]
struct Slot {
    /// Number of indices taken from each thread's share, starting with the caller's.
    shares: Box<[Padded]>,
    /// Number of indices in the published task; 0 if there is none.
    count: AtomicUsize,
    /// Published task while [`OPEN`] is set.
    task: UnsafeCell<Option<Task>>,
    /// [`CLAIMED`], [`OPEN`], and the number of threads that joined or are trying to join.
    state: AtomicUsize,
}

/// Flag for a slot that a caller owns.
const CLAIMED: usize = 1 << (usize::BITS - 1);
/// Flag for a slot whose task other threads may join.
const OPEN: usize = CLAIMED >> 1;
/// Mask of the bits that count threads.
const JOINED: usize = OPEN - 1;

// SAFETY: the caller that claimed a slot writes its task before opening it. While the slot
// is open, threads only read the task.
unsafe impl Sync for Slot {}

/// Counter with its own cache line.
#[derive(Default)]
#[repr(align(64))]
struct Padded(AtomicUsize);

/// Payload of a panic.
type Panic = Mutex<Option<Box<dyn Any + Send>>>;

/// A region's work and storage for its first panic, both borrowed from the caller.
#[derive(Clone, Copy)]
struct Task {
    work: *const (dyn Fn(usize) + Sync),
    count: usize,
    panic: *const Panic,
}

// SAFETY: the pointees are Sync, and threads only create shared references to them.
unsafe impl Send for Task {}

impl Pool {
    /// Returns the pool at `place`, or starts one for this process.
    ///
    /// Starts a pool if there is none or if it belongs to another process. A new pool has
    /// `threads` threads in addition to the caller.
    fn of_this_process(place: &AtomicPtr<Self>, threads: usize) -> &'static Self {
        let found = place.load(Ordering::Acquire);
        // SAFETY: the pointer is null or points to a pool, and pools are never freed once published.
        if let Some(pool) = unsafe { found.as_ref() }
            && pool.is_of_this_process()
        {
            return pool;
        }
        // Must precede `new`, which reads the number of forks.
        notice_forks();
        let new = Box::into_raw(Box::new(Self::new(threads)));
        match place.compare_exchange(found, new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                // SAFETY: the pointer is to the new pool, which is never freed.
                let pool: &'static Self = unsafe { &*new };
                pool.start_threads();
                pool
            }
            Err(faster) => {
                // SAFETY: the new pool was not published.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: another thread of this process published the pool, which is never freed.
                unsafe { &*faster }
            }
        }
    }

    fn new(threads: usize) -> Self {
        Self {
            slots: std::array::from_fn(|_| Slot::new(threads)),
            generation: Padded::default(),
            spin_time: if threads < core_count() { SPIN_TIME } else { CROWDED_SPIN_TIME },
            sleeping: AtomicUsize::new(0),
            falling_asleep: Mutex::default(),
            published: Condvar::new(),
            forks: FORKS.load(Ordering::Acquire),
        }
    }

    fn start_threads(&'static self) {
        for index in 1..self.slots[0].shares.len() {
            // If the system cannot start a thread, the other threads do its work.
            let _ = Builder::new().name(format!("gpt2-{index}")).spawn(move || self.serve(index));
        }
    }

    /// Whether this process started the pool and therefore has its threads.
    fn is_of_this_process(&self) -> bool {
        self.forks == FORKS.load(Ordering::Acquire)
    }

    fn run(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        let Some(slot) = self.slots.iter().find(|slot| slot.claim()) else {
            let _inside = Flag::set(&IS_INSIDE, true);
            (0..count).for_each(work);
            return;
        };
        // SAFETY: only the lifetime changes. Threads read the task from the slot alone. `Region` closes the
        // slot and waits for the threads that joined before this function returns or unwinds.
        let borrowed = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(work)
        };
        let panic = Panic::default();
        let task = Task { work: borrowed, count, panic: &raw const panic };
        slot.open(task);
        let region = Region { pool: self, slot };
        self.wake(if IS_SHORT.get() { 0 } else { count.saturating_sub(1) });
        let inside = Flag::set(&IS_INSIDE, true);
        // SAFETY: this function has not returned.
        unsafe { slot.work(task, 0) };
        drop(inside);
        drop(region);
        if let Some(panic) = panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
    }

    /// Publishes a task to awake threads and wakes at most `most` sleeping ones.
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

    /// Main loop of a thread; it starts each task with its own share.
    fn serve(&self, share: usize) {
        let _inside = Flag::set(&IS_INSIDE, true);
        let mut budget = WaitBudget::default();
        let mut worked_from = Instant::now();
        let mut seen = 0;
        loop {
            let waited_from = Instant::now();
            budget.earn(waited_from - worked_from);
            self.wait_for_task_after(seen, budget.limit());
            worked_from = Instant::now();
            budget.spend(worked_from - waited_from);
            seen = self.generation.0.load(Ordering::Acquire);
            // Any task published from this point on changes the generation again.
            while let Some((slot, task)) = self.join_task() {
                // SAFETY: the caller waits until this thread leaves the task.
                let result = catch_unwind(AssertUnwindSafe(|| unsafe { slot.work(task, share) }));
                if let Err(panic) = result {
                    // SAFETY: as above.
                    let first = unsafe { &*task.panic };
                    first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
                }
                slot.state.fetch_sub(1, Ordering::Release);
                if !self.is_of_this_process() {
                    // The work forked, and this is the only thread of the new
                    // process, so no further task will follow.
                    return;
                }
            }
        }
    }

    /// Joins any task that still has work left.
    fn join_task(&self) -> Option<(&Slot, Task)> {
        let joined = |slot: &'_ Slot| slot.has_work().then(|| slot.join()).flatten();
        self.slots.iter().find_map(|slot| Some((slot, joined(slot)?)))
    }

    /// Waits until the generation differs from `seen`; goes to sleep after `limit`.
    fn wait_for_task_after(&self, seen: usize, limit: Duration) {
        let is_published = || self.generation.0.load(Ordering::Acquire) != seen;
        if wait_until(is_published, self.spin_time, limit) {
            return;
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

impl Slot {
    fn new(threads: usize) -> Self {
        Self {
            shares: (0..=threads).map(|_| Padded::default()).collect(),
            count: AtomicUsize::new(0),
            task: UnsafeCell::new(None),
            state: AtomicUsize::new(0),
        }
    }

    /// Claims the slot if it is free.
    ///
    /// A slot may not be free yet if a thread that joined too late is still leaving it.
    fn claim(&self) -> bool {
        self.state.compare_exchange(0, CLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Opens a task to other threads; the caller must have claimed the slot.
    fn open(&self, task: Task) {
        self.shares.iter().for_each(|share| share.0.store(0, Ordering::Relaxed));
        self.count.store(task.count, Ordering::Relaxed);
        // SAFETY: the caller owns the slot, and it is closed, so no other thread accesses the task.
        unsafe { *self.task.get() = Some(task) };
        self.state.fetch_add(OPEN, Ordering::Release);
    }

    /// Joins the task if it is open and has fewer threads than indices.
    ///
    /// The caller of the region then waits until this thread leaves.
    fn join(&self) -> Option<Task> {
        // Loading first avoids taking the cache line from the threads that change it.
        let state = self.state.load(Ordering::Relaxed);
        if state & OPEN == 0 || (state & JOINED) + 1 >= self.count.load(Ordering::Relaxed) {
            return None;
        }
        if self.state.fetch_add(1, Ordering::Acquire) & OPEN == 0 {
            self.state.fetch_sub(1, Ordering::Release);
            return None;
        }
        // SAFETY: the task was written before the slot was opened, and the next
        // write waits for all joined threads.
        unsafe { *self.task.get() }
    }

    /// Range of the indices below `count` that belong to a share.
    fn indices_of(&self, share: usize, count: usize) -> Range<usize> {
        count * share / self.shares.len()..count * (share + 1) / self.shares.len()
    }

    /// Whether any indices appear to be left.
    fn has_work(&self) -> bool {
        let count = self.count.load(Ordering::Acquire);
        let is_left =
            |share: usize| self.shares[share].0.load(Ordering::Relaxed) < self.indices_of(share, count).len();
        count > 0 && (0..self.shares.len()).any(is_left)
    }

    /// Works until the task has no indices left, starting with share `first`.
    ///
    /// # Safety
    /// The region that published the task has not returned.
    unsafe fn work(&self, task: Task, first: usize) {
        // SAFETY: the caller's region has not returned, so its borrows are alive.
        let work = unsafe { &*task.work };
        for share in (first..self.shares.len()).chain(0..first) {
            let indices = self.indices_of(share, task.count);
            let taken = &self.shares[share].0;
            // Loading first avoids writing to the cache lines of finished shares.
            while taken.load(Ordering::Relaxed) < indices.len() {
                if let Some(index) = indices.clone().nth(taken.fetch_add(1, Ordering::Relaxed)) {
                    work(index);
                }
            }
        }
    }
}

/// RAII guard that sets a thread-local flag and restores it when dropped.
struct Flag(&'static LocalKey<Cell<bool>>, bool);

impl Flag {
    fn set(flag: &'static LocalKey<Cell<bool>>, value: bool) -> Self {
        Self(flag, flag.replace(value))
    }
}

impl Drop for Flag {
    fn drop(&mut self) {
        self.0.set(self.1);
    }
}

/// Published task of a region.
///
/// Dropping it, even during a panic, closes the task to further threads and waits for those that joined.
struct Region<'a> {
    pool: &'a Pool,
    slot: &'a Slot,
}

impl Drop for Region<'_> {
    fn drop(&mut self) {
        let Self { pool, slot } = *self;
        if !pool.is_of_this_process() {
            // The work forked. The indices that other threads had begun will never finish in
            // this process.
            assert!(
                panicking(),
                "the process forked inside a parallel region, which cannot complete in the child"
            );
            return;
        }
        slot.count.store(0, Ordering::Relaxed);
        slot.state.fetch_sub(OPEN, Ordering::Relaxed);
        let have_left = || slot.state.load(Ordering::Acquire) & JOINED == 0;
        wait_until(have_left, pool.spin_time, Duration::MAX);
        slot.state.fetch_sub(CLAIMED, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Time within which a woken thread must arrive.
    const PATIENCE: Duration = Duration::from_secs(60);

    impl Pool {
        fn start(threads: usize) -> &'static Self {
            Self::of_this_process(Box::leak(Box::default()), threads)
        }
    }

    #[test]
    fn environment_requests_a_number_of_threads() {
        let of = |candle: Option<&str>, rayon: Option<&str>| {
            requested_count(|name| {
                let value = if name == "RAYON_NUM_THREADS" { rayon } else { candle };
                value.map(str::to_owned)
            })
        };
        assert_eq!(of(Some("3"), Some("1")), Some(3));
        assert_eq!(of(None, Some("1")), Some(1));
        assert_eq!((of(Some("0"), Some("2")), of(Some("all"), Some("2"))), (Some(2), Some(2)));
        assert_eq!((of(None, None), of(None, Some("-1"))), (None, None));
    }

    #[test]
    fn wait_budget_follows_work_within_bounds() {
        let [short, long] = [SHORTEST_WAIT * 3, LONGEST_WAIT * 3];
        let mut budget = WaitBudget::default();
        assert_eq!(budget.limit(), SHORTEST_WAIT);
        budget.earn(short);
        assert_eq!(budget.limit(), short);
        budget.spend(SHORTEST_WAIT);
        assert_eq!(budget.limit(), short - SHORTEST_WAIT);
        budget.earn(long);
        assert_eq!(budget.limit(), LONGEST_WAIT);
        budget.spend(long);
        assert_eq!(budget.limit(), SHORTEST_WAIT);
    }

    #[test]
    fn wait_ends_when_ready_or_at_its_limit() {
        let checks = AtomicUsize::new(0);
        let is_ready = || checks.fetch_add(1, Ordering::Relaxed) == 3 * CHECKS_PER_TIME;
        assert!(wait_until(is_ready, Duration::ZERO, Duration::MAX), "yields");
        assert!(!wait_until(|| false, Duration::MAX, Duration::ZERO));
        assert!(wait_until(|| true, Duration::ZERO, Duration::ZERO), "ready before the limit");
    }

    /// Checks that idle threads go to sleep after both short and long work.
    #[test]
    #[cfg_attr(target_family = "wasm", ignore = "starts threads")]
    fn idle_threads_sleep() {
        let pool = Pool::start(2);
        for region in [2, 200] {
            assert_eq!(calls(pool, region), vec![1; region]);
            while pool.sleeping.load(Ordering::SeqCst) < 2 {
                yield_now();
            }
        }
    }

    /// Runs one region and returns how many times each index was called.
    fn calls(pool: &Pool, count: usize) -> Vec<usize> {
        let calls: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
        pool.run(count, &|index| {
            calls[index].fetch_add(1, Ordering::Relaxed);
        });
        calls.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn every_region_visits_each_index_once() {
        for threads in [0, 1, 5] {
            let pool = Pool::start(threads);
            for region in 0..200 {
                assert_eq!(calls(pool, region % 37), vec![1; region % 37]);
            }
        }
    }

    #[test]
    #[cfg_attr(target_family = "wasm", ignore = "starts threads")]
    fn only_large_regions_wake_sleeping_threads() {
        let pool = Pool::start(2);
        for (bytes, products, expected) in [(1000, 1000, 1), (1 << 20, 0, 2), (0, 1 << 20, 2)] {
            while pool.sleeping.load(Ordering::SeqCst) < 2 {
                yield_now();
            }
            let threads = Mutex::new(HashSet::new());
            let start = Instant::now();
            let all_arrived = || threads.lock().unwrap().len() == expected || start.elapsed() > PATIENCE;
            with_job_size(bytes, products, || {
                pool.run(2, &|_| {
                    threads.lock().unwrap().insert(std::thread::current().id());
                    while !all_arrived() {
                        yield_now();
                    }
                });
            });
            assert_eq!(threads.into_inner().unwrap().len(), expected, "{bytes} bytes, {products} products");
        }
    }

    #[test]
    #[cfg_attr(target_family = "wasm", ignore = "starts threads")]
    fn regions_run_concurrently_and_nest() {
        let pool = Pool::start(3);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..50).for_each(|_| assert_eq!(calls(pool, 20), vec![1; 20])));
            }
        });
        pool.run(8, &|_| assert_eq!(calls(pool, 5), vec![1; 5]));
    }

    /// Checks that two callers make progress together, although neither could finish alone.
    ///
    /// Two indices of each region wait for each other and for an index of the other region.
    #[test]
    #[cfg_attr(target_family = "wasm", ignore = "starts threads")]
    fn two_callers_share_the_pool() {
        const INDICES: usize = 3; // One more than the pool's threads, so that a caller always keeps one.
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

    /// Runs more threads than cores, and more callers than slots.
    #[test]
    #[cfg_attr(any(miri, target_family = "wasm"), ignore = "starts many threads")]
    fn many_threads_and_callers_finish() {
        for threads in [1, 2, 4, 8, 16, 64] {
            let pool = Pool::start(threads - 1);
            std::thread::scope(|scope| {
                for _ in 0..SLOTS + 2 {
                    scope.spawn(|| (0..20).for_each(|_| assert_eq!(calls(pool, 150), vec![1; 150])));
                }
            });
        }
    }

    /// Checks that a free thread takes indices from all shares.
    ///
    /// Two of three threads block in their first index until all other indices are done.
    #[test]
    #[cfg_attr(target_family = "wasm", ignore = "starts threads")]
    fn free_thread_takes_the_work_of_blocked_threads() {
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

    /// Runs two callers on busy cores with more threads than cores.
    #[test]
    #[cfg_attr(any(miri, target_family = "wasm"), ignore = "keeps all cores busy")]
    fn busy_cores_do_not_change_results() {
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

    /// Checks that a thread that leaves a region late takes no indices from the next region.
    #[test]
    #[cfg_attr(target_family = "wasm", ignore = "starts threads")]
    fn threads_do_not_leak_into_the_next_region() {
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

    /// Lock held while a thread panics.
    ///
    /// Printing a panic message takes locks that a fork in another test would copy.
    static PANICS: Mutex<()> = Mutex::new(());

    #[test]
    #[cfg_attr(panic = "abort", ignore = "a panic ends the program")]
    fn panic_reaches_the_caller_and_the_pool_survives() {
        let _alone = PANICS.lock().unwrap();
        let pool = Pool::start(2);
        for _ in 0..10 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(50, &|index| assert_ne!(index, 25, "expected panic"));
            }));
            assert!(result.is_err());
            assert_eq!(calls(pool, 30), vec![1; 30]);
        }
    }

    /// Runs `work` in a forked process for at most ten seconds.
    ///
    /// Returns the child's exit code, or the signal that ended it.
    #[cfg(all(unix, not(miri)))]
    fn in_a_fork(work: impl FnOnce() -> bool) -> Result<i32, i32> {
        // SAFETY: the child computes and exits without running the test program's handlers.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "fork failed");
        if child == 0 {
            // SAFETY: as above. The alarm ends a child that hangs.
            unsafe {
                libc::alarm(10);
                let passed = catch_unwind(AssertUnwindSafe(work));
                libc::_exit(passed.map_or(2, |passed| i32::from(!passed)));
            }
        }
        let mut status = 0;
        // SAFETY: `status` is a local integer.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        if libc::WIFEXITED(status) { Ok(libc::WEXITSTATUS(status)) } else { Err(libc::WTERMSIG(status)) }
    }

    #[test]
    #[cfg(all(unix, not(miri)))]
    fn forked_process_starts_its_own_threads() {
        let slot: &'static AtomicPtr<Pool> = Box::leak(Box::default());
        let pool = || Pool::of_this_process(slot, 2);
        assert_eq!(calls(pool(), 50), vec![1; 50]);
        let parent_pool: *const Pool = pool();
        let in_child = || {
            let is_own = !std::ptr::eq(parent_pool, pool());
            // Two indices wait for each other, so one thread alone could not finish.
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
        assert!(std::ptr::eq(parent_pool, pool()), "the parent keeps its pool");
        assert_eq!(calls(pool(), 50), vec![1; 50]);
    }

    #[test]
    #[cfg(all(unix, not(miri)))]
    fn fork_during_another_region_computes() {
        let slot: &'static AtomicPtr<Pool> = Box::leak(Box::default());
        let pool = || Pool::of_this_process(slot, 2);
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
        let guard = pool().lock();
        let forked = in_a_fork(in_child);
        drop(guard);
        assert_eq!(forked, Ok(0), "while the lock is held");
    }

    #[test]
    #[cfg(all(unix, not(miri), not(panic = "abort")))]
    fn region_that_forks_panics_in_the_child() {
        let _alone = PANICS.lock().unwrap();
        let pool = Pool::start(2);
        let forked = std::sync::OnceLock::new();
        let parent = std::process::id();
        // Only the caller forks. The child continues the region and must not wait
        // for threads that it does not have.
        let caller = std::thread::current().id();
        let region = catch_unwind(AssertUnwindSafe(|| {
            pool.run(40, &|_| {
                if std::thread::current().id() == caller && forked.get().is_none() {
                    // SAFETY: as in `in_a_fork`; `_exit` follows below.
                    let child = unsafe { libc::fork() };
                    if child == 0 {
                        // SAFETY: the alarm ends a child that hangs.
                        unsafe { libc::alarm(10) };
                    }
                    let _ = forked.set(child);
                }
                std::thread::sleep(Duration::from_millis(1));
            });
        }));
        if std::process::id() != parent {
            // SAFETY: the child exits without running the test program's handlers.
            unsafe { libc::_exit(i32::from(region.is_ok())) };
        }
        assert!(region.is_ok(), "the parent's region is complete");
        let (mut status, child) = (0, *forked.get().unwrap());
        // SAFETY: `status` is a local integer.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status}");
    }
}
