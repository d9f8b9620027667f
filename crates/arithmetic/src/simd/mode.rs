//! Floating-point mode of the processor: rounding direction and denormal numbers.
//!
//! Each thread has its own mode. A library compiled with fast-math may have enabled flushing of results below
//! 2^-126 to zero, and a program may round downward. Kernels compute in the default IEEE 754 mode and then
//! restore the thread's mode.

/// Runs `compute` in the default IEEE 754 mode and then restores this thread's mode.
///
/// The default mode rounds to nearest and keeps denormal numbers. Kernels set it themselves. Use this
/// function for computations around them.
///
/// ```
/// let third = candle_gpt2_arithmetic::rounded_to_nearest(|| std::hint::black_box(1f32) / 3.0);
/// assert_eq!(third, 1.0 / 3.0);
/// ```
#[inline]
pub fn rounded_to_nearest<R>(compute: impl FnOnce() -> R) -> R {
    /// Calls `compute` without inlining; otherwise the compiler could move it before the mode change.
    #[inline(never)]
    fn call_not_inlined<R>(compute: impl FnOnce() -> R) -> R {
        compute()
    }
    let found = control();
    let _guard = (found & CHANGED != 0).then(|| {
        set_control(found & !CHANGED);
        ModeGuard(found)
    });
    call_not_inlined(compute)
}

/// RAII guard that restores the thread's mode when dropped.
struct ModeGuard(Control);

impl Drop for ModeGuard {
    fn drop(&mut self) {
        set_control(self.0);
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) use x86::{CHANGED, Control, control, set_control};

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[expect(unsafe_code, reason = "only inline assembly can access the register")]
mod x86 {
    use std::arch::asm;

    /// Value of the MXCSR register.
    pub(in crate::simd) type Control = u32;

    /// Bits to clear: denormals-are-zero, the rounding direction, and flush-to-zero.
    pub(in crate::simd) const CHANGED: Control = 1 << 6 | 0b11 << 13 | 1 << 15;

    #[inline(always)]
    pub(in crate::simd) fn control() -> Control {
        let mut control = 0;
        // SAFETY: the instruction writes the four bytes that the pointer refers to.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut control, options(nostack, preserves_flags)) };
        control
    }

    #[inline(always)]
    pub(in crate::simd) fn set_control(control: Control) {
        // SAFETY: the instruction reads the four bytes that the pointer refers to. The value comes from the
        // register, except for bits that select among valid modes.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const control, options(nostack, preserves_flags)) };
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
pub(super) use arm::{CHANGED, Control, control, set_control};

#[cfg(all(target_arch = "aarch64", not(miri)))]
#[expect(unsafe_code, reason = "only inline assembly can access the register")]
mod arm {
    use std::arch::asm;

    /// Value of the FPCR register.
    pub(in crate::simd) type Control = u64;

    /// Bits to clear: FIZ, AH, FZ16, RMode, FZ, DN and AHP.
    ///
    /// FIZ, FZ16 and FZ replace denormal numbers with zeros, and AH changes other rules for them. RMode is
    /// the rounding direction. DN replaces every NaN with the default NaN, and AHP selects a different f16
    /// format.
    pub(in crate::simd) const CHANGED: Control = 0b11 | 1 << 19 | 0b11 << 22 | 1 << 24 | 1 << 25 | 1 << 26;

    #[inline(always)]
    pub(in crate::simd) fn control() -> Control {
        let control;
        // SAFETY: the instruction only writes the named register.
        unsafe { asm!("mrs {}, fpcr", out(reg) control, options(nostack, preserves_flags)) };
        control
    }

    #[inline(always)]
    pub(in crate::simd) fn set_control(control: Control) {
        // SAFETY: the value comes from the register, except for bits that select among valid modes.
        unsafe { asm!("msr fpcr, {}", in(reg) control, options(nostack, preserves_flags)) };
    }
}

/// Platforms without an adjustable mode.
///
/// WebAssembly has a single mode, and Rust gives no access to the register on other processors.
#[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
mod fixed {
    pub(in crate::simd) type Control = u32;
    pub(in crate::simd) const CHANGED: Control = 0;

    #[inline(always)]
    pub(in crate::simd) fn control() -> Control {
        0
    }

    #[inline(always)]
    pub(in crate::simd) fn set_control(_: Control) {}
}
#[cfg(not(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri))))]
pub(super) use fixed::{CHANGED, Control, control, set_control};
