//! CUDA graphs: recorded GPU work that can be launched again in one call.

#![expect(unsafe_code, reason = "a recording uses memory that it does not own")]

use std::mem::ManuallyDrop;
use std::sync::Arc;

use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaStream, DriverError};
use candle_core::cuda_backend::{CudaDevice, WrapErr};

use crate::device_use::exclusively;
use crate::per_thread::interruptible;

/// CUDA graph of a [`Recording`](crate::Recording).
pub(crate) struct Graph(CudaGraph);

// SAFETY: the driver allows any thread to use the graph, but only one at a time, and only `&mut self` reaches
// the graph.
unsafe impl Send for Graph {}
// SAFETY: same as for `Send`.
unsafe impl Sync for Graph {}

impl Graph {
    /// Records work; see [`Recording::of`](crate::Recording::of).
    ///
    /// # Safety
    /// Same as [`Recording::of`](crate::Recording::of).
    pub(crate) unsafe fn of(
        device: &Device,
        work: impl FnOnce() -> candle_core::Result<()>,
    ) -> candle_core::Result<Option<Self>> {
        // A user's interrupt function might compute on this device, so interrupts are disabled.
        let work = || interruptible(Arc::new(|| false), work);
        exclusively(device, || Self::captured(device.as_cuda_device()?, work)).transpose()
    }

    fn captured(
        device: &CudaDevice,
        work: impl FnOnce() -> candle_core::Result<()>,
    ) -> candle_core::Result<Self> {
        if device.is_event_tracking() {
            candle_core::bail!(
                "the device may use several streams, but only one is recorded; open it with `open_cuda`"
            );
        }
        let stream = device.cuda_stream();
        let kept_uploads = device.enable_cuda_graph_htod_cache();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).w()?;
        let capture = Capture(&stream);
        let worked = work();
        drop(kept_uploads);
        // Takes pending errors that no call has returned yet; otherwise `end_capture` would return them.
        let noticed = stream.context().check_err();
        let recorded = capture.end();
        worked?;
        noticed.w()?;
        let graph = recorded.w()?;
        let graph =
            graph.ok_or_else(|| candle_core::Error::Msg("the recording contains no GPU work".into()))?;
        Ok(Self(graph))
    }

    /// Replays the work; see [`Recording::replay`](crate::Recording::replay).
    pub(crate) fn replay(&mut self) -> candle_core::Result<()> {
        self.0.launch().w()
    }
}

/// RAII guard for a capturing stream; dropping it ends the capture, even after a panic.
struct Capture<'a>(&'a Arc<CudaStream>);

impl Capture<'_> {
    fn end(self) -> Result<Option<CudaGraph>, DriverError> {
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        ManuallyDrop::new(self).0.end_capture(flags)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        // A panic discards the recording. A pending error must not keep the capture from ending.
        let _ = self.0.context().check_err();
        let _ = Capture(self.0).end();
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph").finish_non_exhaustive()
    }
}

/// RAII guard that keeps candle's kernel uploads on the device.
pub(crate) fn kept_uploads(device: &Device) -> Option<impl Sized> {
    device.as_cuda_device().ok().map(|device| device.enable_cuda_graph_htod_cache())
}
