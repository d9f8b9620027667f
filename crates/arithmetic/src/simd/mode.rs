//! How the processor rounds, which is a setting of each thread: a library that was compiled for speed alone may have left results of
//! less than 2^-126 as zeros, and a program may round downwards. Kernels compute in the mode that IEEE 754 begins with, and leave the
//! thread as they found it.

/// Computes in the mode of IEEE 754 (to nearest, with denormal numbers), whatever this thread's is, and leaves that as it was. The
/// kernels do so by themselves: this is for what is computed around them.
///
/// ```
/// let third = candle_gpt2_arithmetic::rounded_to_nearest(|| std::hint::black_box(1f32) / 3.0);
/// assert_eq!(third, 1.0 / 3.0);
/// ```
#[inline]
pub fn rounded_to_nearest<R>(compute: impl FnOnce() -> R) -> R {
    /// A function of its own: the compiler knows no modes, and would compute before the mode is set.
    #[inline(never)]
    fn apart<R>(compute: impl FnOnce() -> R) -> R {
        compute()
    }
    let found = control();
    let _found = (found & CHANGED != 0).then(|| {
        set_control(found & !CHANGED);
        Found(found)
    });
    apart(compute)
}

/// The mode that a thread had, which comes back at the end.
struct Found(Control);

impl Drop for Found {
    fn drop(&mut self) {
        set_control(self.0);
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) use x86::{CHANGED, Control, control, set_control};

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[expect(unsafe_code, reason = "the register has no other way to it")]
mod x86 {
    use std::arch::asm;

    /// The register MXCSR.
    pub(in crate::simd) type Control = u32;

    /// Denormal operands as zeros, the direction of rounding, and denormal results as zeros.
    pub(in crate::simd) const CHANGED: Control = 1 << 6 | 0b11 << 13 | 1 << 15;

    #[inline(always)]
    pub(in crate::simd) fn control() -> Control {
        let mut control = 0;
        // SAFETY: the instruction writes the four bytes that the pointer leads to.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut control, options(nostack, preserves_flags)) };
        control
    }

    #[inline(always)]
    pub(in crate::simd) fn set_control(control: Control) {
        // SAFETY: the instruction reads the four bytes that the pointer leads to, which were read from the register, but for bits that
        // choose among valid modes.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const control, options(nostack, preserves_flags)) };
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
pub(super) use arm::{CHANGED, Control, control, set_control};

#[cfg(all(target_arch = "aarch64", not(miri)))]
#[expect(unsafe_code, reason = "the register has no other way to it")]
mod arm {
    use std::arch::asm;

    /// The register FPCR.
    pub(in crate::simd) type Control = u64;

    /// Denormal operands as zeros, other rules for them, denormal f16 as zeros, the direction of rounding, denormal numbers as zeros, one NaN
    /// for all, and another format of f16.
    pub(in crate::simd) const CHANGED: Control = 0b11 | 1 << 19 | 0b11 << 22 | 1 << 24 | 1 << 25 | 1 << 26;

    #[inline(always)]
    pub(in crate::simd) fn control() -> Control {
        let control;
        // SAFETY: the instruction only writes the register that is named.
        unsafe { asm!("mrs {}, fpcr", out(reg) control, options(nostack, preserves_flags)) };
        control
    }

    #[inline(always)]
    pub(in crate::simd) fn set_control(control: Control) {
        // SAFETY: the value was read from the register, but for bits that choose among valid modes.
        unsafe { asm!("msr fpcr, {}", in(reg) control, options(nostack, preserves_flags)) };
    }
}

/// WebAssembly has one mode, and of other processors Rust names no register.
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
