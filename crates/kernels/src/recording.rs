//! GPU work that can be replayed in one call.
//!
//! The implementation is in `cuda`; builds without the feature `cuda` have none.

#![expect(unsafe_code, reason = "a recording uses memory that it does not own")]

use candle_core::{Device, Result};

use crate::cuda;

/// Recorded GPU work that can be replayed: the same kernels, arguments and memory.
///
/// Before recording, run the work once with [`prepared`]. `candle_gpt2::Gpt2LMHeadModel::with_recorded_steps`
/// uses recordings.
#[derive(Debug)]
pub struct Recording(cuda::Graph);

impl Recording {
    /// Records the work that `work` submits to the device, without running it.
    ///
    /// Returns `None` without calling `work` if another thread [uses](crate::using) the device, because its
    /// work would be recorded too. `work` cannot be interrupted.
    ///
    /// The recording owns the memory that `work` allocates. Work on the host is not recorded. `work` may
    /// upload shapes and strides that [`prepared`] has seen. candle's kernels read them from device memory,
    /// and candle never frees them.
    ///
    /// candle does not detect every other upload. Inside [`prepared`] and a recording, it caches each upload
    /// of at most 4 KiB by its bytes, separately for each thread. A recorded upload of bytes in this thread's
    /// cache succeeds, and each replay copies the cached bytes. candle frees them when the thread exits.
    ///
    /// # Errors
    /// If `work` fails, the feature `cuda` is off, or [`crate::open_cuda`] has not opened the device. Also if
    /// `work` waits for the device, runs out of memory, uploads more than 4 KiB, or uploads bytes that this
    /// thread has not uploaded inside [`prepared`].
    ///
    /// # Safety
    /// All device memory that `work` uses but does not allocate must be valid whenever the recording is
    /// replayed, and may be freed only in the order of the device's stream. Memory that `work` allocates must
    /// not be used outside `work`. `work` must upload nothing but shapes and strides.
    pub unsafe fn of(device: &Device, work: impl FnOnce() -> Result<()>) -> Result<Option<Self>> {
        // SAFETY: this function has the same contract as `Graph::of`, and the caller upholds it.
        Ok(unsafe { cuda::Graph::of(device, work)? }.map(Self))
    }

    /// Replays the recorded work, in the order of the device's stream.
    ///
    /// # Errors
    /// If the GPU fails.
    pub fn replay(&mut self) -> Result<()> {
        self.0.replay()
    }
}

/// Runs `work` and keeps candle's kernel uploads on the device for a later recording of `work`.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_kernels::prepared;
///
/// let sum = prepared(&Device::Cpu, || Tensor::new(&[1f32, 2., 4.], &Device::Cpu)?.sum_all())?;
/// assert_eq!(sum.to_scalar::<f32>()?, 7.);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If `work` fails.
pub fn prepared<T>(device: &Device, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let _kept_uploads = cuda::kept_uploads(device);
    work()
}
