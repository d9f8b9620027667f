//! Opening GPUs, with errors that say what is missing.

#[cfg(any(feature = "cuda", test))]
use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use candle_core::Device;
use thiserror::Error;

/// Why a GPU cannot be used. [`open_cuda`] returns it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The feature is off.
    #[error("this program was built without {name}; build it with --features {feature}")]
    NotBuilt {
        /// What was asked for.
        name: &'static str,
        /// The feature that has it.
        feature: &'static str,
    },
    /// There is no driver, or it finds no GPU.
    #[error("no NVIDIA driver with a GPU was found ({found}); use the CPU, or look at what nvidia-smi says")]
    NoDriver {
        /// What the driver's library said.
        found: String,
    },
    /// There are GPUs, and none with this number.
    #[error("there is no GPU {index}: the driver has {count}, counted from 0")]
    NoSuchGpu {
        /// The number asked for.
        index: usize,
        /// GPUs that there are.
        count: usize,
    },
    /// The GPU is there and does not work with this program.
    #[error("GPU {index} cannot be used")]
    Unusable {
        /// The GPU's number.
        index: usize,
        /// What the libraries said.
        source: candle_core::Error,
    },
}

/// What is opened once by number and then kept for later calls.
#[cfg(any(feature = "cuda", test))]
struct OpenedOnce<T>(Mutex<BTreeMap<usize, T>>);

#[cfg(any(feature = "cuda", test))]
impl<T: Clone> OpenedOnce<T> {
    const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// What is open under a number, or what `open` gives, unless that is an error.
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

/// Opens GPU `index` of the NVIDIA driver, once: later calls return the same device, whose stream and whose 32 MiB of workspace for
/// products stay as long as the program runs.
///
/// ```
/// match candle_gpt2_kernels::open_cuda(0) {
///     Ok(device) => assert!(device.is_cuda()),
///     Err(reason) => println!("on the CPU, then: {reason}"),
/// }
/// ```
///
/// # Errors
/// When the feature `cuda` is off, there is no driver, no such GPU, or the GPU does not answer.
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
        return Err(DeviceError::NoDriver { found: "it counts none".into() });
    }
    if index >= count {
        return Err(DeviceError::NoSuchGpu { index, count });
    }
    let opened = GPUS.get(index, || crate::cuda::open(index));
    opened.map_err(|source| DeviceError::Unusable { index, source })
}

/// Opens GPU `index` of Apple's Metal. As [`open_cuda`] of the other kind of GPU.
///
/// # Errors
/// When the feature `metal` is off, or there is no such GPU.
pub fn open_metal(index: usize) -> Result<Device, DeviceError> {
    if !candle_core::utils::metal_is_available() {
        return Err(DeviceError::NotBuilt { name: "Metal", feature: "metal" });
    }
    Device::new_metal(index).map_err(|source| DeviceError::Unusable { index, source })
}

/// Whether products of f32 matrices on NVIDIA GPUs round their inputs to TF32, with 10 bits after the binary point; those of up to four
/// rows may stay exact, because a kernel of this project computes them. A [`Recording`](crate::Recording) keeps what held when it was
/// made.
///
/// ```
/// candle_gpt2_kernels::use_tf32(true); // faster on GPUs that have it; elsewhere nothing changes
/// candle_gpt2_kernels::use_tf32(false); // as a program starts
/// ```
pub fn use_tf32(is_on: bool) {
    candle_core::cuda::set_gemm_reduced_precision_f32(is_on);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_opened_once_and_an_error_is_not_kept() {
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
