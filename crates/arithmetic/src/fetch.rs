//! Asking for memory before it is needed.
//!
//! A walk through memory that computes more than it reads does not look far enough ahead to keep memory busy, and the processor's
//! own guesses end with each page.

/// How far ahead of a walk to fetch: a page, further than the processor's guesses go.
pub(crate) const AHEAD: usize = 4096;
/// Bytes of a cache line.
const LINE: usize = 64;

/// Fetches what lies `distance` bytes after `values`. Nothing happens where that is no memory of the program.
#[inline(always)]
pub(crate) fn fetch<T>(values: &[T], distance: usize) {
    let start = values.as_ptr().cast::<i8>().wrapping_add(distance);
    for line in 0..size_of_val(values).div_ceil(LINE) {
        let address = start.wrapping_add(line * LINE);
        #[cfg(target_arch = "x86_64")]
        #[expect(unsafe_code, reason = "fetching is an instruction of the processor")]
        // SAFETY: every x86-64 processor has the instruction, which reads and writes no value and fails at no address.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(address);
        }
        #[cfg(target_arch = "aarch64")]
        #[expect(unsafe_code, reason = "fetching is an instruction of the processor")]
        // SAFETY: every AArch64 processor has the instruction, which reads and writes no value and fails at no address.
        unsafe {
            std::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = address;
    }
}
