//! Thread-local state of a computation.
//!
//! Callers set three values for the code that they call, instead of passing them as arguments:
//!
//! - `TAPE` decides what operations record for the backward pass; see [`Tape`]. The default is off.
//!   [`gradients`](crate::gradients) and [`recomputed`](crate::recomputed) record; [`without_gradients`]
//!   pauses. Every operation with a backward pass reads it, as do the layers that pick a kernel by it
//!   ([`runs_as_in_training`](crate::runs_as_in_training)).
//! - `IS_COMPOSED` disables the CPU kernels. The default is false. [`composed`] sets it, in tests. Every
//!   choice of a kernel reads it through [`has_cpu_kernels`].
//! - `INTERRUPT` is a function that decides whether to stop. The default is none. [`interruptible`] sets it,
//!   and a CUDA recording sets one that never stops. Products, operations and the blocks of a model read it
//!   through [`check_interrupted`] and [`is_interrupted`].
//!
//! Each value applies to one call. The previous value is restored when the call ends, even by an error or a
//! panic, so calls nest. Other threads do not inherit the values. The threads of the pool compute on slices
//! and read none of them. Code that starts a thread for operations must set the values again in that thread.
//!
//! The pool in `candle-gpt2-arithmetic` has two thread-local flags of its own: whether a thread is inside a
//! parallel region, and whether its regions are too small to wake sleeping threads.
//!
//! The threads that use a GPU ([`using`](crate::using)) are not thread-local state, because other threads
//! wait for them. `device_use` tracks them for the whole process by thread ID.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::thread::LocalKey;

use candle_core::{DType, Result, Tensor, TensorId};

use crate::error::KernelError;

thread_local! {
    static TAPE: RefCell<Tape> = const { RefCell::new(Tape::Off) };
    static IS_COMPOSED: RefCell<bool> = const { RefCell::new(false) };
    static INTERRUPT: RefCell<Option<Interrupt>> = const { RefCell::new(None) };
}

/// Runs `compute` with a thread-local value, then restores the previous one, even after a panic.
fn with_value<T, R>(place: &'static LocalKey<RefCell<T>>, value: T, compute: impl FnOnce() -> R) -> R {
    struct Restore<T: 'static>(&'static LocalKey<RefCell<T>>, Option<T>);
    impl<T> Drop for Restore<T> {
        fn drop(&mut self) {
            // Dropping the value may run arbitrary code, so it must not happen while the cell is borrowed.
            drop(self.1.take().map(|before| self.0.replace(before)));
        }
    }
    let _restore = Restore(place, Some(place.replace(value)));
    compute()
}

/// Recording mode of this thread's operations.
pub(crate) enum Tape {
    /// Only candle's graph is built.
    Off,
    /// Every step is recorded.
    Recording(Recording),
    /// No step is recorded; results are constants.
    Paused,
}

/// Steps recorded during a forward pass, and the gradient sums accumulated so far.
#[derive(Default)]
pub(crate) struct Recording {
    pub(crate) steps: Vec<Step>,
    pub(crate) sums: Sums,
}

/// A recorded operation with its inputs.
pub(crate) struct Step {
    pub(crate) output: TensorId,
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) operation: Arc<dyn Operation>,
}

/// Backward pass of an operation.
pub(crate) trait Operation: Send + Sync + 'static {
    /// Name for error messages.
    fn name(&self) -> &'static str;

    /// Adds a gradient to `sums` for each input that needs one.
    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()>;
}

/// Gradient sums by tensor.
#[derive(Default)]
pub(crate) struct Sums(pub(crate) HashMap<TensorId, Sum>);

/// Gradient accumulated so far for one tensor.
pub(crate) enum Sum {
    /// Uninitialized memory that the first gradient is written to.
    Memory(Tensor),
    /// A tensor owned only by the sum.
    Owned(Tensor),
    /// A tensor that may also be the gradient of other tensors.
    Shared(Tensor),
}

/// Whether this thread computes within [`gradients`](crate::gradients) or [`without_gradients`].
pub(crate) fn has_tape() -> bool {
    TAPE.with_borrow(|tape| !matches!(tape, Tape::Off))
}

/// Whether this thread computes within [`without_gradients`], so that its results are constants.
pub fn is_without_gradients() -> bool {
    TAPE.with_borrow(|tape| matches!(tape, Tape::Paused))
}

/// Whether this thread records steps.
pub(crate) fn is_recording() -> bool {
    TAPE.with_borrow(|tape| matches!(tape, Tape::Recording(_)))
}

/// Calls `change` with this thread's recording, or returns `None` if the thread is not recording.
pub(crate) fn with_recording<R>(change: impl FnOnce(&mut Recording) -> R) -> Option<R> {
    TAPE.with_borrow_mut(|tape| match tape {
        Tape::Recording(recording) => Some(change(recording)),
        Tape::Off | Tape::Paused => None,
    })
}

/// Runs `compute` with `tape` and returns the steps recorded on it.
pub(crate) fn with_tape<R>(tape: Tape, compute: impl FnOnce() -> Result<R>) -> Result<(R, Recording)> {
    with_value(&TAPE, tape, || {
        let result = compute()?;
        match TAPE.replace(Tape::Off) {
            Tape::Recording(recording) => Ok((result, recording)),
            Tape::Off | Tape::Paused => Ok((result, Recording::default())),
        }
    })
}

/// Runs `compute` without gradients and returns its result as a constant.
///
/// The operations of this crate save nothing for a backward pass. candle's own operations still do, but their
/// graph is freed with the result's.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use candle_gpt2_kernels::without_gradients;
///
/// let x = Var::ones(3, DType::F32, &Device::Cpu)?;
/// let sum = without_gradients(|| x.sqr()?.sum_all())?;
/// assert_eq!(sum.to_scalar::<f32>()?, 3.);
/// assert!(!sum.track_op() && sum.backward()?.get(&x).is_none());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If the computation fails.
pub fn without_gradients(compute: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
    Ok(with_tape(Tape::Paused, compute)?.0.detach())
}

/// Runs `compute` without the CPU kernels.
///
/// On this thread, every operation runs as a composition of candle operations. Apple GPUs always use these
/// compositions, and NVIDIA GPUs use them for operations without a CUDA kernel. Tests use this function to
/// check the compositions without a GPU.
///
/// `compute` must compute its gradients with [`gradients`](crate::gradients), if it needs any.
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
    with_value(&IS_COMPOSED, true, compute)
}

/// Whether the CPU kernels with a backward pass support `x`.
///
/// The kernels support f32 and f64 on the CPU, outside [`composed`], which has an example.
pub fn has_cpu_kernels(x: &Tensor) -> bool {
    x.device().is_cpu()
        && matches!(x.dtype(), DType::F32 | DType::F64)
        && !IS_COMPOSED.with_borrow(|is_composed| *is_composed)
}

/// Callback for [`interruptible`] that returns whether the computation should stop.
pub type Interrupt = Arc<dyn Fn() -> bool + Send + Sync>;

/// Runs `compute`, which fails with [`KernelError::Interrupted`] once `interrupt` returns true.
///
/// This thread calls `interrupt` in each CPU product, each differentiable operation and each block of a
/// model, so it should be cheap. Once it returns true, it should keep returning true.
/// ```
/// use std::sync::Arc;
///
/// use candle_core::{Device, Tensor};
/// use candle_gpt2_kernels::{Linear, interruptible};
///
/// let one = Tensor::new(&[[1f32]], &Device::Cpu)?;
/// let layer = Linear::new(one.clone(), None)?;
/// assert!(interruptible(Arc::new(|| false), || layer.forward(&one)).is_ok());
/// assert!(interruptible(Arc::new(|| true), || layer.forward(&one)).is_err());
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn interruptible<T>(interrupt: Interrupt, compute: impl FnOnce() -> T) -> T {
    with_value(&INTERRUPT, Some(interrupt), compute)
}

/// Whether this thread's computation can be interrupted.
pub(crate) fn is_interruptible() -> bool {
    INTERRUPT.with_borrow(Option::is_some)
}

/// Whether this thread's computation should stop; see [`interruptible`].
pub fn is_interrupted() -> bool {
    // The function may itself run a computation and set another interrupt.
    let interrupt = INTERRUPT.with_borrow(Option::clone);
    interrupt.is_some_and(|is_raised| is_raised())
}

/// Returns an error if this thread's computation should stop; see [`interruptible`].
///
/// # Errors
/// [`KernelError::Interrupted`] if it should stop.
pub fn check_interrupted() -> Result<()> {
    if is_interrupted() { Err(KernelError::Interrupted.into()) } else { Ok(()) }
}
