//! What every launch needs: the compiled kernels, their element types, the memory of tensors, and how parameters are handed over.

#![expect(unsafe_code, reason = "a structure is handed to kernels as it lies in memory")]

use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaView, CudaViewMut, DeviceRepr, LaunchArgs, PushKernelArg,
};
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{DType, Layout, Result, Shape, Storage, StorageRef, Tensor};
use half::{bf16, f16};

/// The compiled kernels.
pub(super) const KERNELS: &str = include_str!(concat!(env!("OUT_DIR"), "/kernels.ptx"));
/// Under this name candle keeps them on the device.
pub(super) const MODULE: &str = "gpt2";

/// The element types of the kernels.
pub(super) trait Element: CudaDType + DeviceRepr {
    /// How the kernels name it.
    const NAME: &str;
}

impl Element for f32 {
    const NAME: &str = "f32";
}

impl Element for f16 {
    const NAME: &str = "f16";
}

impl Element for bf16 {
    const NAME: &str = "bf16";
}

/// Calls a function that is generic over the element type.
macro_rules! by_type {
    ($dtype:expr, $function:ident ( $($argument:expr),* $(,)? )) => {
        match $dtype {
            DType::F16 => $function::<f16>($($argument),*),
            DType::BF16 => $function::<bf16>($($argument),*),
            _ => $function::<f32>($($argument),*),
        }
    };
}
pub(super) use by_type;

/// Whether all tensors are on one GPU that [`open`](super::open) has opened, of one type that the kernels have, not empty, and
/// want no gradient.
///
/// The kernels depend on one stream that runs everything in order. candle's own way to open a GPU gives each thread a stream.
pub(super) fn applies(tensors: &[&Tensor]) -> bool {
    let has_one_stream = |x: &Tensor| x.device().as_cuda_device().is_ok_and(|gpu| !gpu.is_event_tracking());
    let alike = |x: &&Tensor| {
        has_one_stream(x)
            && x.device().same_device(tensors[0].device())
            && x.dtype() == tensors[0].dtype()
            && matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16)
            && !x.track_op()
            && x.elem_count() > 0
    };
    tensors.iter().all(alike)
}

/// A tensor's memory, held while it is read.
pub(super) struct Held<'a> {
    storage: StorageRef<'a>,
    layout: &'a Layout,
}

impl<'a> Held<'a> {
    pub(super) fn new(x: &'a Tensor) -> Self {
        let (storage, layout) = x.storage_and_layout();
        Self { storage, layout }
    }

    /// The elements from the tensor's first one on.
    pub(super) fn values<T: CudaDType>(&self) -> Result<CudaView<'_, T>> {
        let Storage::Cuda(storage) = &*self.storage else {
            candle_core::bail!("expected a tensor on a GPU");
        };
        Ok(storage.as_cuda_slice::<T>()?.slice(self.layout.start_offset()..))
    }
}

/// A size as the kernels count.
pub(super) fn counted(size: usize) -> Result<u32> {
    u32::try_from(size).map_err(candle_core::Error::wrap)
}

pub(super) fn tensor<T: Element>(values: CudaSlice<T>, device: &CudaDevice, shape: &Shape) -> Tensor {
    let storage = CudaStorage::wrap_cuda_slice(values, device.clone());
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}

/// Memory from some element on, which a kernel reads.
pub(super) type Read<'a, T> = CudaView<'a, T>;

/// Memory that a kernel writes.
pub(super) type Written<'a, T> = CudaViewMut<'a, T>;

/// Memory of a tensor, which others hold as well, and a kernel writes.
pub(super) struct Shared<'a, T>(pub(super) CudaView<'a, T>);

/// Where the rows of a `(B, H, T, D)` tensor are; the kernels have the same structure.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Strides {
    pub(super) batch: usize,
    pub(super) head: usize,
    pub(super) token: usize,
}

// SAFETY: three integers in the layout of C.
unsafe impl DeviceRepr for Strides {}

/// What a kernel gets in place of memory that is not there.
const NULL: u64 = 0;

/// What a launch hands to a kernel.
pub(super) trait Parameter {
    fn hand<'a>(&'a mut self, launch: &mut LaunchArgs<'a>);
}

impl<T> Parameter for Read<'_, T> {
    fn hand<'a>(&'a mut self, launch: &mut LaunchArgs<'a>) {
        launch.arg(&*self);
    }
}

impl<T> Parameter for Option<Read<'_, T>> {
    fn hand<'a>(&'a mut self, launch: &mut LaunchArgs<'a>) {
        match self {
            Some(values) => launch.arg(&*values),
            None => launch.arg(&NULL),
        };
    }
}

impl<T> Parameter for Written<'_, T> {
    fn hand<'a>(&'a mut self, launch: &mut LaunchArgs<'a>) {
        launch.arg(self);
    }
}

impl<T> Parameter for Option<Written<'_, T>> {
    fn hand<'a>(&'a mut self, launch: &mut LaunchArgs<'a>) {
        match self {
            Some(values) => launch.arg(values),
            None => launch.arg(&NULL),
        };
    }
}

impl<T> Parameter for Shared<'_, T> {
    fn hand<'a>(&'a mut self, launch: &mut LaunchArgs<'a>) {
        launch.arg(&self.0);
    }
}

macro_rules! handed_as_they_are {
    ($($type:ty),*) => {
        $(impl Parameter for $type {
            fn hand<'a>(&'a mut self, launch: &mut LaunchArgs<'a>) {
                launch.arg(&*self);
            }
        })*
    };
}
handed_as_they_are!(u32, usize, f32, Strides);
