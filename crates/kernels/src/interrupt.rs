//! Computations that end before their end.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::Result;

use crate::error::KernelError;

/// Asked whether to end what is being computed. [`interruptible`] takes it.
pub type Interrupt = Arc<dyn Fn() -> bool + Send + Sync>;

thread_local! {
    static INTERRUPT: RefCell<Option<Interrupt>> = const { RefCell::new(None) };
}

/// Computes what ends with [`KernelError::Interrupted`] once `interrupt` says so. It is asked on this thread, in each product on
/// the CPU, in each operation with a way back and in each block of a model, so it should cost little; and what it says once it should go
/// on saying.
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
    /// Puts the one before it back, in a panic too.
    struct Restore(Option<Interrupt>);
    impl Drop for Restore {
        fn drop(&mut self) {
            INTERRUPT.set(self.0.take());
        }
    }
    let _restore = Restore(INTERRUPT.replace(Some(interrupt)));
    compute()
}

/// Whether what this thread computes may be ended.
pub(crate) fn is_interruptible() -> bool {
    INTERRUPT.with_borrow(Option::is_some)
}

/// Whether what this thread computes is to end, see [`interruptible`].
pub fn is_interrupted() -> bool {
    // Whoever is asked may compute something else.
    let interrupt = INTERRUPT.with_borrow(Option::clone);
    interrupt.is_some_and(|is_raised| is_raised())
}

/// Goes on unless what this thread computes is to end, see [`interruptible`].
///
/// # Errors
/// [`KernelError::Interrupted`] where it is.
pub fn go_on() -> Result<()> {
    if is_interrupted() { Err(KernelError::Interrupted.into()) } else { Ok(()) }
}
