//! Opens GPUs; errors name the missing driver, feature or device.

#[cfg(any(feature = "cuda", test))]
use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use candle_core::Device;
use thiserror::Error;

/// Reason why a GPU cannot be used, returned by [`open_cuda`] and [`open_metal`].
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The program was built without the feature.
    #[error("this program was built without {name}; build it with --features {feature}")]
    NotBuilt {
        /// Name of the requested platform.
        name: &'static str,
        /// Feature that provides the platform.
        feature: &'static str,
    },
    /// The driver is missing, or it finds no GPU.
    #[error(
        "no NVIDIA driver with a GPU was found ({found}); use the CPU, or check the output of nvidia-smi"
    )]
    NoDriver {
        /// Result reported by the driver library.
        found: String,
    },
    /// The GPU index is out of range.
    #[error(
        "GPU index {index} is out of range; GPUs are counted from 0, and the driver reports {count} in total"
    )]
    NoSuchGpu {
        /// Requested index.
        index: usize,
        /// Number of GPUs.
        count: usize,
    },
    /// The GPU exists but does not work with this program.
    #[error("GPU {index} cannot be used")]
    Unusable {
        /// Index of the GPU.
        index: usize,
        /// Error reported by the libraries.
        source: candle_core::Error,
    },
}

/// Cache of values that are opened once per index.
#[cfg(any(feature = "cuda", test))]
struct OpenedOnce<T>(Mutex<BTreeMap<usize, T>>);

#[cfg(any(feature = "cuda", test))]
impl<T: Clone> OpenedOnce<T> {
    const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// Returns the cached value for `index`, or opens it; errors are not cached.
    fn get<E>(&self, index: usize, open: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let mut opened = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(opened) = opened.get(&index) {
            return Ok(opened.clone());
        }
        let new = open()?;
        opened.insert(index, new.clone());
        Ok(new)
    }
}

/// Opens NVIDIA GPU `index` once; later calls return the same device.
///
/// The device's stream and its 32 MiB workspace for products remain allocated until the program exits.
///
/// All work on the device runs in order on this one stream, and the kernels rely on that order. Devices from
/// `Device::new_cuda` have one stream per thread, so the kernels do not run on them. The kernels recognize a
/// device with one stream by its disabled event tracking. A program that calls `disable_event_tracking` on
/// another device must use it with a single stream.
///
/// ```
/// match candle_gpt2_kernels::open_cuda(0) {
///     Ok(device) => assert!(device.is_cuda()),
///     Err(reason) => println!("on the CPU, then: {reason}"),
/// }
/// ```
///
/// # Errors
/// If the feature `cuda` is off, the driver is missing, the index is out of range, or the GPU does not
/// respond.
pub fn open_cuda(index: usize) -> Result<Device, DeviceError> {
    open_nvidia(index)
}

#[cfg(not(feature = "cuda"))]
fn open_nvidia(_: usize) -> Result<Device, DeviceError> {
    Err(DeviceError::NotBuilt { name: "CUDA", feature: "cuda" })
}

#[cfg(feature = "cuda")]
fn open_nvidia(index: usize) -> Result<Device, DeviceError> {
    use candle_core::cuda_backend::cudarc::driver::CudaContext;

    static GPUS: OpenedOnce<Device> = OpenedOnce::new();
    let count = CudaContext::device_count();
    let count = count.map_err(|error| DeviceError::NoDriver { found: format!("{:?}", error.0) })?;
    let count = usize::try_from(count).unwrap_or_default();
    if count == 0 {
        return Err(DeviceError::NoDriver { found: "the driver reports no GPU".into() });
    }
    if index >= count {
        return Err(DeviceError::NoSuchGpu { index, count });
    }
    let opened = GPUS.get(index, || crate::cuda::open(index));
    opened.map_err(|source| DeviceError::Unusable { index, source })
}

/// Opens Apple GPU `index` through Metal; the counterpart of [`open_cuda`].
///
/// # Errors
/// If the feature `metal` is off or the index is out of range.
pub fn open_metal(index: usize) -> Result<Device, DeviceError> {
    if !candle_core::utils::metal_is_available() {
        return Err(DeviceError::NotBuilt { name: "Metal", feature: "metal" });
    }
    Device::new_metal(index).map_err(|source| DeviceError::Unusable { index, source })
}

/// Sets whether products of f32 matrices on NVIDIA GPUs round their inputs to TF32.
///
/// TF32 has 10 bits after the binary point. Products of up to four rows may remain exact, because one of this
/// crate's kernels computes them. A [`Recording`](crate::Recording) keeps the setting it was made with.
/// ```
/// candle_gpt2_kernels::use_tf32(true); // faster on GPUs that support TF32, no effect elsewhere
/// candle_gpt2_kernels::use_tf32(false); // the default
/// ```
pub fn use_tf32(is_on: bool) {
    candle_core::cuda::set_gemm_reduced_precision_f32(is_on);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_is_cached_and_errors_are_not() {
        let devices = OpenedOnce::<&str>::new();
        let mut times = 0;
        assert_eq!(devices.get(1, || Err("busy")), Err("busy"));
        for _ in 0..3 {
            let first = devices.get(1, || {
                times += 1;
                Ok::<_, &str>("first")
            });
            assert_eq!((first, devices.get(0, || Ok::<_, &str>("zeroth"))), (Ok("first"), Ok("zeroth")));
        }
        assert_eq!(times, 1);
    }
}
