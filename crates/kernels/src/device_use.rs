//! GPU access control: any number of threads may use a GPU, or one thread records a step.
//!
//! A recording captures all work that any thread submits to the device, without running it. Therefore all GPU
//! work must be wrapped in [`using`], and a recording starts only if no other thread is inside `using`. The
//! recorder never waits for the other threads, because their work may call a user's function that waits for
//! another thread. The other threads wait for the recorder. A recording takes milliseconds and never calls a
//! user's function.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{ThreadId, current};

use candle_core::{Device, DeviceLocation};

/// Threads that use each GPU, by GPU index.
static GPUS: Mutex<BTreeMap<usize, Arc<Users>>> = Mutex::new(BTreeMap::new());

/// Runs `work`, which submits work to a device, after waiting for any other thread's recording.
///
/// Only NVIDIA GPUs support recordings; on other devices this only calls `work`. Calls nest, on this thread
/// and across threads. `candle_gpt2::Gpt2LMHeadModel::with_recorded_steps` makes recordings.
///
/// Forward passes of models call `using` themselves. So do allocations, writes and copies of KV caches.
/// Callers must wrap all other work of other threads on the same device: operations on tensors, reads of
/// results, and drops of tensors, models and caches.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_kernels::using;
///
/// let device = Device::Cpu;
/// let sum = using(&device, || Tensor::new(&[1f32, 2., 4.], &device)?.sum_all())?;
/// assert_eq!(sum.to_scalar::<f32>()?, 7.);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn using<T>(device: &Device, work: impl FnOnce() -> T) -> T {
    let users = users_of(device);
    let _use = users.as_deref().map(Users::begin);
    work()
}

/// Runs `work` while no other thread uses the GPU, or returns `None` if one does.
///
/// Until `work` returns, [`using`] blocks in other threads.
#[cfg(feature = "cuda")]
pub(crate) fn exclusively<T>(device: &Device, work: impl FnOnce() -> T) -> Option<T> {
    match users_of(device) {
        Some(users) => users.exclusively(work),
        None => Some(work()),
    }
}

fn users_of(device: &Device) -> Option<Arc<Users>> {
    let DeviceLocation::Cuda { gpu_id } = device.location() else { return None };
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    Some(Arc::clone(gpus.entry(gpu_id).or_default()))
}

/// Threads that use a GPU.
#[derive(Default)]
struct Users {
    state: Mutex<State>,
    /// Condition variable that is notified when a recording ends.
    recorded: Condvar,
}

#[derive(Default)]
struct State {
    /// Threads with a use in progress; a thread appears once for each nested use.
    users: Vec<ThreadId>,
    recorder: Option<ThreadId>,
}

impl Users {
    /// Waits until no other thread records, then blocks recordings by others until the use is dropped.
    fn begin(&self) -> Use<'_> {
        let this = current().id();
        let mut state = self.lock();
        while state.recorder.is_some_and(|recorder| recorder != this) {
            state = self.recorded.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.users.push(this);
        Use { users: self, thread: this }
    }

    #[cfg(any(feature = "cuda", test))]
    fn exclusively<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        /// RAII guard that wakes the waiting threads, even after a panic.
        struct Recorder<'a>(&'a Users);
        impl Drop for Recorder<'_> {
            fn drop(&mut self) {
                self.0.lock().recorder = None;
                self.0.recorded.notify_all();
            }
        }
        let this = current().id();
        let mut state = self.lock();
        if state.recorder.is_some() || state.users.iter().any(|user| *user != this) {
            return None;
        }
        state.recorder = Some(this);
        drop(state);
        let _recorder = Recorder(self);
        Some(work())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// RAII guard that marks the GPU as used by this thread.
struct Use<'a> {
    users: &'a Users,
    thread: ThreadId,
}

impl Drop for Use<'_> {
    fn drop(&mut self) {
        let mut state = self.users.lock();
        if let Some(place) = state.users.iter().rposition(|user| *user == self.thread) {
            state.users.swap_remove(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::mpsc::{Receiver, channel};
    use std::thread::{scope, spawn};
    use std::time::Duration;

    use super::*;

    /// Timeout after which a thread without progress counts as stuck, even on a busy machine.
    const SOON: Duration = Duration::from_secs(20);
    /// Time after which a thread without progress counts as blocked.
    const A_WHILE: Duration = Duration::from_millis(100);

    /// Begins a use on another thread, which sends a message once the use has begun.
    fn used_elsewhere(users: &Arc<Users>) -> Receiver<()> {
        let (users, (sender, started)) = (Arc::clone(users), channel());
        spawn(move || {
            let _use = users.begin();
            let _ = sender.send(());
        });
        started
    }

    /// A hook may compute on its own thread, or wait for another thread that computes.
    ///
    /// Either of these would deadlock with a plain lock.
    #[test]
    fn nested_use_does_not_deadlock() {
        let users = Arc::new(Users::default());
        let (done, finished) = channel();
        let in_thread = Arc::clone(&users);
        spawn(move || {
            let _hooked = in_thread.begin();
            let _same_thread = in_thread.begin();
            let other_thread = used_elsewhere(&in_thread).recv_timeout(SOON).is_ok();
            let _ = done.send((other_thread, in_thread.lock().users.len()));
        });
        let (other_thread, users) = finished.recv_timeout(SOON).expect("no thread waits for itself");
        assert!(other_thread && users >= 2);
    }

    #[test]
    fn recording_requires_exclusive_use() {
        let users = Arc::new(Users::default());
        assert_eq!(users.exclusively(|| 7), Some(7));
        let own = users.begin();
        assert_eq!(users.exclusively(|| 7), Some(7), "the thread itself may record");
        assert_eq!(users.exclusively(|| users.exclusively(|| 7)), Some(None), "one at a time");
        scope(|scope| {
            assert_eq!(
                scope.spawn(|| users.exclusively(|| 7)).join().unwrap(),
                None,
                "another thread uses it"
            );
        });
        drop(own);
        scope(|scope| assert_eq!(scope.spawn(|| users.exclusively(|| 7)).join().unwrap(), Some(7)));
    }

    #[test]
    fn recording_blocks_only_other_threads() {
        let users = Arc::new(Users::default());
        let waiting = users.exclusively(|| {
            let _of_the_recording = users.begin();
            let other = used_elsewhere(&users);
            assert!(other.recv_timeout(A_WHILE).is_err(), "the other thread waits for the recording");
            other
        });
        waiting.unwrap().recv_timeout(SOON).expect("it continues after the recording");
        assert!(users.lock().recorder.is_none());
    }

    #[test]
    fn panic_ends_use_and_recording() {
        let users = Arc::new(Users::default());
        for _ in 0..2 {
            let in_use = catch_unwind(AssertUnwindSafe(|| {
                let _use = users.begin();
                panic!("in a use");
            }));
            let in_recording =
                catch_unwind(AssertUnwindSafe(|| users.exclusively(|| panic!("in a recording"))));
            assert!(in_use.is_err() && in_recording.is_err());
        }
        used_elsewhere(&users).recv_timeout(SOON).unwrap();
        let state = users.lock();
        assert!(state.recorder.is_none());
    }

    #[test]
    fn cpu_needs_no_lock() {
        assert!(users_of(&Device::Cpu).is_none());
        assert_eq!(using(&Device::Cpu, || 7), 7);
    }
}
