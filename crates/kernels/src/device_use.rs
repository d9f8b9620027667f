//! The users of a GPU: any number of threads, or one that records a step.
//!
//! A recording captures whatever any thread gives the device meanwhile, and none of that is run. So all work on a GPU is wrapped in
//! [`using`], and a recording is made only if no other thread is inside it. It never waits for that: work may call a function of its
//! user that waits for another thread's work. The others wait for a recording, which takes milliseconds and calls no user's function.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{ThreadId, current};

use candle_core::{Device, DeviceLocation};

/// Those of each GPU that was used, by its number.
static GPUS: Mutex<BTreeMap<usize, Arc<Users>>> = Mutex::new(BTreeMap::new());

/// Does work that gives an NVIDIA GPU something to do, and waits until no other thread records a step there
/// (`candle_gpt2::Gpt2LMHeadModel::with_recorded_steps`). Work may be within work, on this thread and on others. Elsewhere this changes nothing.
///
/// Models and caches call it themselves. Callers that run operations on tensors of the same device in other threads run them in here.
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

/// Does work while no other thread uses the GPU; `None` if one does. [`using`] then waits in other threads.
#[cfg(feature = "cuda")]
pub(crate) fn alone<T>(device: &Device, work: impl FnOnce() -> T) -> Option<T> {
    match users_of(device) {
        Some(users) => users.alone(work),
        None => Some(work()),
    }
}

fn users_of(device: &Device) -> Option<Arc<Users>> {
    let DeviceLocation::Cuda { gpu_id } = device.location() else { return None };
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    Some(Arc::clone(gpus.entry(gpu_id).or_default()))
}

/// Those who use a GPU.
#[derive(Default)]
struct Users {
    state: Mutex<State>,
    /// Signalled when a recording ends.
    recorded: Condvar,
}

#[derive(Default)]
struct State {
    /// The thread of each use.
    users: Vec<ThreadId>,
    recorder: Option<ThreadId>,
}

impl Users {
    /// Waits until no other thread records, and keeps others from it until the use is dropped.
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
    fn alone<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        /// Lets the others continue, after a panic too.
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

/// A use that has begun; it ends when this is dropped.
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

    /// Long enough for any thread to be run, on a busy machine too.
    const SOON: Duration = Duration::from_secs(20);
    /// What is still waiting after this is said to wait.
    const A_WHILE: Duration = Duration::from_millis(100);

    /// Begins a use on another thread, and tells when it has begun.
    fn used_elsewhere(users: &Arc<Users>) -> Receiver<()> {
        let (users, (begun, told)) = (Arc::clone(users), channel());
        spawn(move || {
            let _use = users.begin();
            let _ = begun.send(());
        });
        told
    }

    /// A hook that computes, on its own thread, and one that waits for a thread which computes: with a plain lock both would wait
    /// for themselves.
    #[test]
    fn work_within_work_waits_for_no_other() {
        let users = Arc::new(Users::default());
        let (done, told) = channel();
        let within = Arc::clone(&users);
        spawn(move || {
            let _hooked = within.begin();
            let _same_thread = within.begin();
            let other_thread = used_elsewhere(&within).recv_timeout(SOON).is_ok();
            let _ = done.send((other_thread, within.lock().users.len()));
        });
        let (other_thread, users) = told.recv_timeout(SOON).expect("no thread waits for itself");
        assert!(other_thread && users >= 2);
    }

    #[test]
    fn a_recording_is_made_while_no_other_thread_uses_the_device() {
        let users = Arc::new(Users::default());
        assert_eq!(users.alone(|| 7), Some(7));
        let own = users.begin();
        assert_eq!(users.alone(|| 7), Some(7), "its own thread does nothing else meanwhile");
        assert_eq!(users.alone(|| users.alone(|| 7)), Some(None), "one at a time");
        scope(|scope| {
            assert_eq!(scope.spawn(|| users.alone(|| 7)).join().unwrap(), None, "another thread uses it");
        });
        drop(own);
        scope(|scope| assert_eq!(scope.spawn(|| users.alone(|| 7)).join().unwrap(), Some(7)));
    }

    #[test]
    fn other_threads_wait_for_a_recording_and_its_own_does_not() {
        let users = Arc::new(Users::default());
        let waiting = users.alone(|| {
            let _of_the_recording = users.begin();
            let other = used_elsewhere(&users);
            assert!(other.recv_timeout(A_WHILE).is_err(), "nothing of it is recorded");
            other
        });
        waiting.unwrap().recv_timeout(SOON).expect("it continues after the recording");
        assert!(users.lock().recorder.is_none());
    }

    #[test]
    fn a_panic_ends_a_use_and_a_recording() {
        let users = Arc::new(Users::default());
        for _ in 0..2 {
            let in_use = catch_unwind(AssertUnwindSafe(|| {
                let _use = users.begin();
                panic!("in a use");
            }));
            let in_recording = catch_unwind(AssertUnwindSafe(|| users.alone(|| panic!("in a recording"))));
            assert!(in_use.is_err() && in_recording.is_err());
        }
        used_elsewhere(&users).recv_timeout(SOON).unwrap();
        let state = users.lock();
        assert!(state.recorder.is_none());
    }

    #[test]
    fn a_cpu_is_used_without_a_lock() {
        assert!(users_of(&Device::Cpu).is_none());
        assert_eq!(using(&Device::Cpu, || 7), 7);
    }
}
