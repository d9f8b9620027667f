//! A CUDA graph: recorded work of a GPU, which is launched again in one call.

#![expect(unsafe_code, reason = "a recording uses memory that it does not hold")]

use std::mem::ManuallyDrop;
use std::sync::Arc;

use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaStream, DriverError};
use candle_core::cuda_backend::{CudaDevice, WrapErr};

use crate::device_use::alone;
use crate::per_thread::interruptible;

/// The work of a [`Recording`](crate::Recording).
pub(crate) struct Graph(CudaGraph);

// SAFETY: the driver asks for one thread at a time, not for a certain one, and only `&mut self` reaches the graph.
unsafe impl Send for Graph {}
// SAFETY: as above.
unsafe impl Sync for Graph {}

impl Graph {
    /// As [`Recording::of`](crate::Recording::of).
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn of(
        device: &Device,
        work: impl FnOnce() -> candle_core::Result<()>,
    ) -> candle_core::Result<Option<Self>> {
        // A function that is asked about an interrupt may compute on this device.
        let work = || interruptible(Arc::new(|| false), work);
        alone(device, || Self::captured(device.as_cuda_device()?, work)).transpose()
    }

    fn captured(
        device: &CudaDevice,
        work: impl FnOnce() -> candle_core::Result<()>,
    ) -> candle_core::Result<Self> {
        if device.is_event_tracking() {
            candle_core::bail!("the device may have streams besides its own, which would not be recorded");
        }
        let stream = device.cuda_stream();
        let kept_uploads = device.enable_cuda_graph_htod_cache();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED).w()?;
        let capture = Capture(&stream);
        let worked = work();
        drop(kept_uploads);
        // What went wrong where no error could be returned; taken here, or ending the recording would fail over it.
        let noticed = stream.context().check_err();
        let recorded = capture.end();
        worked?;
        noticed.w()?;
        let graph = recorded.w()?;
        let graph = graph.ok_or_else(|| candle_core::Error::Msg("the GPU recorded nothing".into()))?;
        Ok(Self(graph))
    }

    /// As [`Recording::replay`](crate::Recording::replay).
    pub(crate) fn replay(&mut self) -> candle_core::Result<()> {
        self.0.launch().w()
    }
}

/// A stream that records; it stops when this is dropped, by a panic too.
struct Capture<'a>(&'a Arc<CudaStream>);

impl Capture<'_> {
    fn end(self) -> Result<Option<CudaGraph>, DriverError> {
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        ManuallyDrop::new(self).0.end_capture(flags)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        // A panic continues and drops what was recorded; an error on the way must not keep the stream from ending.
        let _ = self.0.context().check_err();
        let _ = Capture(self.0).end();
    }
}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Graph").finish_non_exhaustive()
    }
}

/// Keeps on the device what candle uploads for its kernels, until this is dropped.
pub(crate) fn kept_uploads(device: &Device) -> Option<impl Sized> {
    device.as_cuda_device().ok().map(|device| device.enable_cuda_graph_htod_cache())
}
