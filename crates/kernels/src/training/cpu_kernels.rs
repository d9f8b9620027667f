//! Whether the CPU's kernels compute, or candle's compositions.

use std::cell::Cell;

use candle_core::{DType, Tensor};

thread_local! {
    static IS_COMPOSED: Cell<bool> = const { Cell::new(false) };
}

/// Computes without the kernels of the CPU, for what goes through [`gradients`](super::gradients) or needs none: on this thread
/// every operation is then the composition that a GPU takes. For tests, on machines without a GPU.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_gpt2_kernels::{composed, has_cpu_kernels};
///
/// let x = Tensor::zeros(3, DType::F32, &Device::Cpu)?;
/// assert!(has_cpu_kernels(&x));
/// assert!(!composed(|| has_cpu_kernels(&x)));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn composed<R>(compute: impl FnOnce() -> R) -> R {
    /// Puts the switch back, in a panic too.
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IS_COMPOSED.set(self.0);
        }
    }
    let _restore = Restore(IS_COMPOSED.replace(true));
    compute()
}

/// Whether the CPU's operations with a backward pass of their own compute with `x`: it is in f32 or f64 on the CPU, and not
/// computed within [`composed`]. An example is at [`composed`].
pub fn has_cpu_kernels(x: &Tensor) -> bool {
    x.device().is_cpu() && matches!(x.dtype(), DType::F32 | DType::F64) && !IS_COMPOSED.get()
}
