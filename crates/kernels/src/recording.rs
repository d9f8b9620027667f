//! Work that a GPU does again in one call. What it is made of is in `cuda`; in a build without the feature there is none.

#![expect(unsafe_code, reason = "a recording uses memory that it does not hold")]

use candle_core::{Device, Result};

use crate::cuda;

/// Work of a GPU that can be done again: the same kernels with the same arguments on the same memory.
/// `candle_gpt2::Gpt2LMHeadModel::with_recorded_steps` uses it; [`prepared`] comes first.
#[derive(Debug)]
pub struct Recording(cuda::Graph);

impl Recording {
    /// Records what `work` gives the device to do, without doing it; `None`, without calling it, while another thread
    /// [uses](crate::using) the device, whose work would be recorded too. `work` cannot be interrupted.
    ///
    /// What the work allocates itself is the recording's own, and what it does on the host is not recorded. It may upload shapes
    /// and strides that [`prepared`] has seen, which candle's kernels read from memory, and candle keeps for good.
    ///
    /// # Errors
    /// Those of `work`; when the feature `cuda` is off, when [`crate::open_cuda`] has not opened the device, and when the work waits
    /// for it, uploads something else or uses more memory than there is.
    ///
    /// # Safety
    /// All memory of the device that the work uses and does not allocate must be there whenever the recording is replayed, and
    /// is freed in the order of the device's stream only. What the work allocates does not leave it, and it uploads nothing but
    /// shapes and strides.
    pub unsafe fn of(device: &Device, work: impl FnOnce() -> Result<()>) -> Result<Option<Self>> {
        // SAFETY: the caller's promise.
        Ok(unsafe { cuda::Graph::of(device, work)? }.map(Self))
    }

    /// Does the recorded work once more, in the order of the device's stream.
    ///
    /// # Errors
    /// When the GPU fails.
    pub fn replay(&mut self) -> Result<()> {
        self.0.replay()
    }
}

/// Does `work`, and keeps on the device what candle uploads for its kernels, so that the same work can be recorded.
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
/// Those of `work`.
pub fn prepared<T>(device: &Device, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let _kept_uploads = cuda::kept_uploads(device);
    work()
}
