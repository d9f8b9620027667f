//! What a thread computes under: the state that passes from a caller to what it calls without being an argument. Three values; the
//! lower crates have no other thread-local.
//!
//! | value | what it holds | who sets it | who reads it | at first |
//! |---|---|---|---|---|
//! | `TAPE` | what operations leave for the way back, see [`Tape`] | [`gradients`](crate::gradients) and [`recomputed`](crate::recomputed) record, [`without_gradients`] pauses | each operation that has a way back, and layers that choose a kernel by it ([`runs_as_in_training`](crate::runs_as_in_training)) | off |
//! | `IS_COMPOSED` | whether the kernels of the CPU are off | [`composed`], in tests | [`has_cpu_kernels`], which all who choose a kernel ask | they are on |
//! | `INTERRUPT` | who is asked whether to end | [`interruptible`]; a CUDA recording puts in one that never ends | [`check_interrupted`] and [`is_interrupted`]: products, operations, the blocks of a model | none |
//!
//! Each is set for the time of one call and ends with it, by an error or a panic too: the value before it is put back, so calls lie
//! within one another. None goes to another thread: the pool's threads compute on slices and ask for none of them, and code that
//! starts a thread for operations sets them there anew.
//!
//! Which threads use a GPU ([`using`](crate::using)) is no such value, since other threads wait for it: `device_use` counts it for the
//! whole process, by the threads' numbers.

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

/// Computes with another value of this thread's, and puts the one before it back, in a panic too.
fn within<T, R>(place: &'static LocalKey<RefCell<T>>, value: T, compute: impl FnOnce() -> R) -> R {
    struct Restore<T: 'static>(&'static LocalKey<RefCell<T>>, Option<T>);
    impl<T> Drop for Restore<T> {
        fn drop(&mut self) {
            // The old value may be large, and is dropped when the place is not borrowed.
            drop(self.1.take().map(|before| self.0.replace(before)));
        }
    }
    let _restore = Restore(place, Some(place.replace(value)));
    compute()
}

/// What operations on this thread leave behind.
pub(crate) enum Tape {
    /// Nothing but candle's graph.
    Off,
    /// The steps since the recording began.
    Recording(Recording),
    /// Nothing at all: the results are constants.
    Paused,
}

/// What is known of gradients while a loss is computed.
#[derive(Default)]
pub(crate) struct Recording {
    pub(crate) steps: Vec<Step>,
    pub(crate) sums: Sums,
}

/// An operation that was computed.
pub(crate) struct Step {
    pub(crate) output: TensorId,
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) operation: Arc<dyn Operation>,
}

/// The backward pass of an operation.
pub(crate) trait Operation: Send + Sync + 'static {
    /// Name for messages.
    fn name(&self) -> &'static str;

    /// Adds the gradients of the inputs, as far as they are wanted, to the sums.
    fn backward(&self, inputs: &[Tensor], gradient: &Tensor, sums: &mut Sums) -> Result<()>;
}

/// Sums of gradients by the tensor that they belong to.
#[derive(Default)]
pub(crate) struct Sums(pub(crate) HashMap<TensorId, Sum>);

/// The gradient of one tensor so far.
pub(crate) enum Sum {
    /// Memory for the first gradient; what it holds means nothing.
    Memory(Tensor),
    /// A tensor without other owners.
    Owned(Tensor),
    /// A tensor that may be the gradient of other tensors too.
    Shared(Tensor),
}

/// Whether this thread computes within [`gradients`](crate::gradients) or [`without_gradients`].
pub(crate) fn has_tape() -> bool {
    TAPE.with_borrow(|tape| !matches!(tape, Tape::Off))
}

/// Whether what this thread computes is a constant.
pub(crate) fn is_paused() -> bool {
    TAPE.with_borrow(|tape| matches!(tape, Tape::Paused))
}

/// Whether this thread keeps steps.
pub(crate) fn is_recording() -> bool {
    TAPE.with_borrow(|tape| matches!(tape, Tape::Recording(_)))
}

/// What `change` makes of this thread's recording, if there is one.
pub(crate) fn with_recording<R>(change: impl FnOnce(&mut Recording) -> R) -> Option<R> {
    TAPE.with_borrow_mut(|tape| match tape {
        Tape::Recording(recording) => Some(change(recording)),
        Tape::Off | Tape::Paused => None,
    })
}

/// Computes with another tape, and gives back what it holds then.
pub(crate) fn with_tape<R>(tape: Tape, compute: impl FnOnce() -> Result<R>) -> Result<(R, Recording)> {
    within(&TAPE, tape, || {
        let result = compute()?;
        match TAPE.replace(Tape::Off) {
            Tape::Recording(recording) => Ok((result, recording)),
            Tape::Off | Tape::Paused => Ok((result, Recording::default())),
        }
    })
}

/// Computes without keeping anything for gradients.
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
/// Those of the computation.
pub fn without_gradients<R>(compute: impl FnOnce() -> Result<R>) -> Result<R> {
    Ok(with_tape(Tape::Paused, compute)?.0)
}

/// Computes without the kernels of the CPU, for what goes through [`gradients`](crate::gradients) or needs none: on this thread
/// every operation is then the composition that an Apple GPU takes, and an NVIDIA GPU where it has no kernel. For tests, on machines
/// without a GPU.
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

/// Whether the CPU's operations with a backward pass of their own compute with `x`: it is in f32 or f64 on the CPU, and not
/// computed within [`composed`]. An example is at [`composed`].
pub fn has_cpu_kernels(x: &Tensor) -> bool {
    x.device().is_cpu()
        && matches!(x.dtype(), DType::F32 | DType::F64)
        && !IS_COMPOSED.with_borrow(|is_composed| *is_composed)
}

/// Returns whether to end the computation. [`interruptible`] takes it.
pub type Interrupt = Arc<dyn Fn() -> bool + Send + Sync>;

/// Computes what ends with [`KernelError::Interrupted`] once `interrupt` returns true. It is called on this thread, in each product
/// on the CPU, in each differentiable operation and in each block of a model, so it should cost little; once true, it should stay
/// true.
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

/// Whether what this thread computes may be ended.
pub(crate) fn is_interruptible() -> bool {
    INTERRUPT.with_borrow(Option::is_some)
}

/// Whether what this thread computes is to end, see [`interruptible`].
pub fn is_interrupted() -> bool {
    // The function that is asked may compute something else.
    let interrupt = INTERRUPT.with_borrow(Option::clone);
    interrupt.is_some_and(|is_raised| is_raised())
}

/// Returns an error if what this thread computes is to end, see [`interruptible`].
///
/// # Errors
/// [`KernelError::Interrupted`] if it is.
pub fn check_interrupted() -> Result<()> {
    if is_interrupted() { Err(KernelError::Interrupted.into()) } else { Ok(()) }
}
