//! Shared code of all launches: compiled kernels, element types, tensor memory and parameters.

#![expect(unsafe_code, reason = "structs are passed to kernels by their memory layout")]

use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaView, CudaViewMut, DeviceRepr, LaunchArgs, PushKernelArg,
};
use candle_core::cuda_backend::{CudaDType, CudaDevice, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{DType, Layout, Result, Shape, Storage, StorageRef, Tensor};
use half::{bf16, f16};

/// The compiled kernels.
pub(super) const KERNELS: &str = include_str!(concat!(env!("OUT_DIR"), "/kernels.ptx"));
/// Module name under which candle caches the kernels on the device.
pub(super) const MODULE: &str = "gpt2";

/// Element type of the kernels.
pub(super) trait Element: CudaDType + DeviceRepr {
    /// Name of this type in kernel names.
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

/// Calls a generic function with the element type for a dtype.
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

/// Whether the kernels support these tensors.
///
/// All tensors must be on one GPU opened by [`open`](super::open), have one supported dtype, be non-empty,
/// and need no gradient.
///
/// The kernels depend on one stream that runs everything in order. A GPU that candle opens itself has
/// one stream per thread.
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

/// Borrowed memory of a tensor.
pub(super) struct TensorMemory<'a> {
    storage: StorageRef<'a>,
    layout: &'a Layout,
}

impl<'a> TensorMemory<'a> {
    pub(super) fn new(x: &'a Tensor) -> Self {
        let (storage, layout) = x.storage_and_layout();
        Self { storage, layout }
    }

    /// Elements, starting at the tensor's first element.
    pub(super) fn values<T: CudaDType>(&self) -> Result<CudaView<'_, T>> {
        let Storage::Cuda(storage) = &*self.storage else {
            candle_core::bail!("expected a tensor on an NVIDIA GPU, found one on another device");
        };
        Ok(storage.as_cuda_slice::<T>()?.slice(self.layout.start_offset()..))
    }
}

/// Converts a size to the kernels' `u32`.
pub(super) fn counted(size: usize) -> Result<u32> {
    u32::try_from(size).map_err(candle_core::Error::wrap)
}

pub(super) fn tensor<T: Element>(values: CudaSlice<T>, device: &CudaDevice, shape: &Shape) -> Tensor {
    let storage = CudaStorage::wrap_cuda_slice(values, device.clone());
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}

/// Device memory that a kernel reads.
pub(super) type Read<'a, T> = CudaView<'a, T>;

/// Device memory that a kernel writes.
pub(super) type Written<'a, T> = CudaViewMut<'a, T>;

/// Device memory that a kernel writes even though the tensor has other owners.
pub(super) struct Shared<'a, T>(pub(super) CudaView<'a, T>);

/// Strides of a `(B, H, T, D)` tensor with contiguous rows; the kernels declare the same struct.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Strides {
    pub(super) batch: usize,
    pub(super) head: usize,
    pub(super) token: usize,
}

// SAFETY: the struct consists of three integers in C layout.
unsafe impl DeviceRepr for Strides {}

/// Null pointer that a kernel receives for an absent optional parameter.
const NULL: u64 = 0;

/// Parameter of a kernel launch.
pub(super) trait Parameter {
    fn push_to<'a>(&'a mut self, launch: &mut LaunchArgs<'a>);
}

impl<T> Parameter for Read<'_, T> {
    fn push_to<'a>(&'a mut self, launch: &mut LaunchArgs<'a>) {
        launch.arg(&*self);
    }
}

impl<T> Parameter for Option<Read<'_, T>> {
    fn push_to<'a>(&'a mut self, launch: &mut LaunchArgs<'a>) {
        match self {
            Some(values) => launch.arg(&*values),
            None => launch.arg(&NULL),
        };
    }
}

impl<T> Parameter for Written<'_, T> {
    fn push_to<'a>(&'a mut self, launch: &mut LaunchArgs<'a>) {
        launch.arg(self);
    }
}

impl<T> Parameter for Option<Written<'_, T>> {
    fn push_to<'a>(&'a mut self, launch: &mut LaunchArgs<'a>) {
        match self {
            Some(values) => launch.arg(values),
            None => launch.arg(&NULL),
        };
    }
}

impl<T> Parameter for Shared<'_, T> {
    fn push_to<'a>(&'a mut self, launch: &mut LaunchArgs<'a>) {
        launch.arg(&self.0);
    }
}

macro_rules! plain_parameters {
    ($($type:ty),*) => {
        $(impl Parameter for $type {
            fn push_to<'a>(&'a mut self, launch: &mut LaunchArgs<'a>) {
                launch.arg(&*self);
            }
        })*
    };
}
plain_parameters!(u32, usize, f32, Strides);
