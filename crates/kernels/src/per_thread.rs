//! Thread-local state of a computation: three values that callers set for the code they call, instead of passing an argument.
//!
//! | value | meaning | set by | read by | default |
//! |---|---|---|---|---|
//! | `TAPE` | what operations record for the backward pass, see [`Tape`] | [`gradients`](crate::gradients) and [`recomputed`](crate::recomputed) record, [`without_gradients`] pauses | every operation with a backward pass, and layers that choose a kernel by it ([`runs_as_in_training`](crate::runs_as_in_training)) | off |
//! | `IS_COMPOSED` | whether the CPU kernels are off | [`composed`], in tests | [`has_cpu_kernels`], which every choice of a kernel calls | on |
//! | `INTERRUPT` | function that decides whether to stop | [`interruptible`]; a CUDA recording sets one that never stops | [`check_interrupted`] and [`is_interrupted`]: products, operations, the blocks of a model | none |
//!
//! Each value applies to one call. When the call ends, also by an error or a panic, the previous value is restored, so calls nest.
//! No value is inherited by another thread. The threads of the pool compute on slices and read none of these values; code that starts
//! a thread for operations sets them there again. The pool in `candle-gpt2-arithmetic` has two thread-local flags of its own:
//! whether a thread is inside a parallel region, and whether its regions are too small to wake sleeping threads.
//!
//! The threads that use a GPU ([`using`](crate::using)) are not thread-local state, because other threads wait for them: `device_use`
//! tracks them for the whole process by thread id.

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

/// Runs `compute` with another thread-local value and restores the previous one, also after a panic.
fn within<T, R>(place: &'static LocalKey<RefCell<T>>, value: T, compute: impl FnOnce() -> R) -> R {
    struct Restore<T: 'static>(&'static LocalKey<RefCell<T>>, Option<T>);
    impl<T> Drop for Restore<T> {
        fn drop(&mut self) {
            // Dropping the value may run any code, so it must not happen while the cell is borrowed.
            drop(self.1.take().map(|before| self.0.replace(before)));
        }
    }
    let _restore = Restore(place, Some(place.replace(value)));
    compute()
}

/// What this thread's operations record for gradients.
pub(crate) enum Tape {
    /// Only candle's graph.
    Off,
    /// Every step since the recording began.
    Recording(Recording),
    /// Nothing; results are constants.
    Paused,
}

/// Steps recorded while a loss is computed, and the gradient sums known so far.
#[derive(Default)]
pub(crate) struct Recording {
    pub(crate) steps: Vec<Step>,
    pub(crate) sums: Sums,
}

/// A computed operation.
pub(crate) struct Step {
    pub(crate) output: TensorId,
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) operation: Arc<dyn Operation>,
}

/// The backward pass of an operation.
pub(crate) trait Operation: Send + Sync + 'static {
    /// Name for messages.
    fn name(&self) -> &'static str;

    /// Adds the gradients of those inputs that need them to the sums.
    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()>;
}

/// Gradient sums by tensor.
#[derive(Default)]
pub(crate) struct Sums(pub(crate) HashMap<TensorId, Sum>);

/// Gradient of one tensor so far.
pub(crate) enum Sum {
    /// Uninitialized memory for the first gradient.
    Memory(Tensor),
    /// A tensor with no other owner.
    Owned(Tensor),
    /// A tensor that may also be the gradient of other tensors.
    Shared(Tensor),
}

/// Whether this thread computes within [`gradients`](crate::gradients) or [`without_gradients`].
pub(crate) fn has_tape() -> bool {
    TAPE.with_borrow(|tape| !matches!(tape, Tape::Off))
}

/// Whether this thread's results are constants.
pub(crate) fn is_paused() -> bool {
    TAPE.with_borrow(|tape| matches!(tape, Tape::Paused))
}

/// Whether this thread records steps.
pub(crate) fn is_recording() -> bool {
    TAPE.with_borrow(|tape| matches!(tape, Tape::Recording(_)))
}

/// Calls `change` with this thread's recording; returns `None` if there is none.
pub(crate) fn with_recording<R>(change: impl FnOnce(&mut Recording) -> R) -> Option<R> {
    TAPE.with_borrow_mut(|tape| match tape {
        Tape::Recording(recording) => Some(change(recording)),
        Tape::Off | Tape::Paused => None,
    })
}

/// Runs `compute` with another tape and returns its recording.
pub(crate) fn with_tape<R>(tape: Tape, compute: impl FnOnce() -> Result<R>) -> Result<(R, Recording)> {
    within(&TAPE, tape, || {
        let result = compute()?;
        match TAPE.replace(Tape::Off) {
            Tape::Recording(recording) => Ok((result, recording)),
            Tape::Off | Tape::Paused => Ok((result, Recording::default())),
        }
    })
}

/// Runs `compute` without recording anything for gradients.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use candle_gpt2_kernels::without_gradients;
///
/// let x = Var::ones(3, DType::F32, &Device::Cpu)?;
/// let sum = without_gradients(|| x.sum_all())?;
/// assert_eq!(sum.to_scalar::<f32>()?, 3.);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Errors of the computation.
pub fn without_gradients<R>(compute: impl FnOnce() -> Result<R>) -> Result<R> {
    Ok(with_tape(Tape::Paused, compute)?.0)
}

/// Runs `compute` without the CPU kernels, for code that uses [`gradients`](crate::gradients) or needs none.
///
/// On this thread every operation becomes the composition that Apple GPUs use, and NVIDIA GPUs where they have no kernel. Tests use it on
/// machines without a GPU.
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
    within(&IS_COMPOSED, true, compute)
}

/// Whether the CPU kernels with a backward pass support `x`: f32 or f64, on the CPU, and outside [`composed`].
///
/// See [`composed`] for an example.
pub fn has_cpu_kernels(x: &Tensor) -> bool {
    x.device().is_cpu()
        && matches!(x.dtype(), DType::F32 | DType::F64)
        && !IS_COMPOSED.with_borrow(|is_composed| *is_composed)
}

/// Function that returns whether to stop a computation, for [`interruptible`].
pub type Interrupt = Arc<dyn Fn() -> bool + Send + Sync>;

/// Runs `compute`, which fails with [`KernelError::Interrupted`] once `interrupt` returns true.
///
/// This thread calls `interrupt` in each CPU product, each differentiable operation and each block of a model, so it should be cheap.
/// Once true, it should stay true.
///
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
    within(&INTERRUPT, Some(interrupt), compute)
}

/// Whether this thread's computation can be interrupted.
pub(crate) fn is_interruptible() -> bool {
    INTERRUPT.with_borrow(Option::is_some)
}

/// Whether this thread's computation should stop, see [`interruptible`].
pub fn is_interrupted() -> bool {
    // The function may itself compute, and set another one.
    let interrupt = INTERRUPT.with_borrow(Option::clone);
    interrupt.is_some_and(|is_raised| is_raised())
}

/// Returns an error if this thread's computation should stop, see [`interruptible`].
///
/// # Errors
/// [`KernelError::Interrupted`] if it should stop.
pub fn check_interrupted() -> Result<()> {
    if is_interrupted() { Err(KernelError::Interrupted.into()) } else { Ok(()) }
}
