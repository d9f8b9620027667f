//! The threads that compute: started once, woken for each region of parallel work.
//!
//! Each thread has a share of neighbouring indices, which it takes one by one: neighbours mostly read neighbouring memory,
//! and one long walk through it is faster than many short ones. Who is done with its own share takes from the others'. The
//! caller works too, and at the end waits only for threads that took part: one that the system has not let run yet is told
//! that it comes too late. So a region on a busy machine costs no more than the caller's own time, where a barrier (candle's
//! pool) waits for every thread each time, a thousand times a second.
//! A second region at the same time, or one inside another, runs on its caller alone; nothing can deadlock.

#![expect(unsafe_code, reason = "threads that live on borrow the work of a region that does not")]

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{Builder, available_parallelism, yield_now};
use std::time::{Duration, Instant};

/// How long an idle thread looks for work before it sleeps: longer than the time between two regions.
const TIME_BEFORE_SLEEP: Duration = Duration::from_micros(100);
/// How often it looks before it asks for the time.
const SPINS_BETWEEN_TIMES: usize = 64;
/// How often the caller looks whether the others are done before it gives its processor away.
const SPINS_BEFORE_YIELD: usize = 200;

static THREADS: OnceLock<usize> = OnceLock::new();

/// Sets how many threads compute, the calling one among them. Without it they are as many as the process may use, the limits
/// of its container included.
///
/// Returns whether the number could be set: it is fixed when the first computation starts.
///
/// ```
/// assert!(gpt2_arithmetic::set_thread_count(2));
/// assert_eq!(gpt2_arithmetic::thread_count(), 2);
/// ```
pub fn set_thread_count(threads: usize) -> bool {
    THREADS.set(threads.max(1)).is_ok()
}

/// How many threads compute. An example is at [`set_thread_count`].
pub fn thread_count() -> usize {
    *THREADS.get_or_init(|| available_parallelism().map_or(1, usize::from))
}

/// Calls `work` once with each index below `count`, on all threads.
pub(crate) fn for_each_index(count: usize, work: impl Fn(usize) + Sync) {
    static POOL: OnceLock<&'static Pool> = OnceLock::new();
    if count < 2 || thread_count() == 1 {
        (0..count).for_each(work);
        return;
    }
    POOL.get_or_init(|| Pool::start(thread_count() - 1)).run(count, &work);
}

struct Pool {
    slot: Mutex<Slot>,
    /// How many indices of each thread's share are taken, the caller's first.
    shares: Box<[Share]>,
    /// Signalled when a task is published.
    published: Condvar,
    /// Number of tasks published so far. Idle threads look at it all the time, so it has a cache line of its own.
    generation: Share,
    /// Threads that take part in the task and may still use it.
    active: AtomicUsize,
}

#[derive(Default)]
struct Slot {
    /// The task that threads may join.
    task: Option<Task>,
    /// Threads that wait for `published`.
    sleeping: usize,
}

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
    /// A pool that lives as long as the program, with as many threads besides the caller's.
    fn start(threads: usize) -> &'static Self {
        let pool: &'static Self = Box::leak(Box::new(Self {
            slot: Mutex::default(),
            shares: (0..=threads).map(|_| Share::default()).collect(),
            published: Condvar::new(),
            generation: Share::default(),
            active: AtomicUsize::new(0),
        }));
        for index in 1..=threads {
            // Where the system has no more threads to give, the others do the work.
            let _ = Builder::new().name(format!("gpt2-{index}")).spawn(move || pool.serve(index));
        }
        pool
    }

    /// The indices below `count` that belong to a share.
    fn indices_of(&self, share: usize, count: usize) -> Range<usize> {
        count * share / self.shares.len()..count * (share + 1) / self.shares.len()
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

    fn run(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        // SAFETY: only the lifetime changes. Threads get the task from the slot alone, which `Region` empties, and it waits for
        // those that got it, before this function returns or unwinds.
        let borrowed = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync)>(work)
        };
        let mut slot = self.lock();
        // A region that is closed already may still have threads that take from the shares.
        if slot.task.is_some() || self.active.load(Ordering::Acquire) > 0 {
            drop(slot);
            (0..count).for_each(work);
            return;
        }
        let panic = Panic::default();
        let task = Task { work: borrowed, count, panic: &raw const panic };
        self.shares.iter().for_each(|share| share.0.store(0, Ordering::Relaxed));
        slot.task = Some(task);
        self.generation.0.fetch_add(1, Ordering::Release);
        // As many as there is work for, beside the caller.
        for _ in 0..slot.sleeping.min(count.saturating_sub(1)) {
            self.published.notify_one();
        }
        drop(slot);
        let region = Region(self);
        // SAFETY: this function has not returned.
        unsafe { self.work(task, 0) };
        drop(region);
        if let Some(panic) = panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
    }

    /// What a thread does all its life; it begins with its own share.
    fn serve(&self, share: usize) {
        let mut seen = 0;
        loop {
            self.wait_for_task_after(seen);
            seen = self.generation.0.load(Ordering::Acquire);
            let slot = self.lock();
            let Some(task) = slot.task else { continue };
            // Counted under the lock, so the caller cannot miss it when it has emptied the slot.
            self.active.fetch_add(1, Ordering::Relaxed);
            drop(slot);
            // SAFETY: the caller waits until this thread is no longer counted as active.
            let result = catch_unwind(AssertUnwindSafe(|| unsafe { self.work(task, share) }));
            if let Err(panic) = result {
                // SAFETY: as above.
                let first = unsafe { &*task.panic };
                first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
            }
            self.active.fetch_sub(1, Ordering::Release);
        }
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
        let mut slot = self.lock();
        slot.sleeping += 1;
        while self.generation.0.load(Ordering::Acquire) == seen {
            slot = self.published.wait(slot).unwrap_or_else(PoisonError::into_inner);
        }
        slot.sleeping -= 1;
    }

    fn lock(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A published task; dropping it, in a panic too, closes it to further threads and waits for those that joined.
struct Region<'a>(&'a Pool);

impl Drop for Region<'_> {
    fn drop(&mut self) {
        self.0.lock().task = None;
        let mut spins = 0;
        while self.0.active.load(Ordering::Acquire) > 0 {
            spins += 1;
            if spins < SPINS_BEFORE_YIELD { std::hint::spin_loop() } else { yield_now() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn regions_may_meet_and_nest() {
        let pool = Pool::start(3);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..50).for_each(|_| assert_eq!(calls(pool, 20), vec![1; 20])));
            }
        });
        pool.run(8, &|_| assert_eq!(calls(pool, 5), vec![1; 5]));
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

    #[test]
    #[cfg_attr(panic = "abort", ignore = "a panic ends the program")]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = Pool::start(2);
        for _ in 0..10 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(50, &|index| assert_ne!(index, 25, "told to panic"));
            }));
            assert!(result.is_err());
            assert_eq!(calls(pool, 30), vec![1; 30]);
        }
    }
}
