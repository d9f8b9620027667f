//! Large pages behind packed weights, where the system has them: memory that is touched for the first time then costs one
//! fault for each 2 MiB and not one for each 4 KiB, which is a third of the time that loading takes.

use std::mem::MaybeUninit;

/// Asks for large pages behind the part of `memory` that fills whole ones. It takes no more memory than before: what a large
/// page holds besides is not asked for.
#[cfg(target_os = "linux")]
pub(crate) fn prefer_large_pages<T>(memory: &mut [MaybeUninit<T>]) {
    /// The size of Linux on x86-64 and, with pages of 4 KiB, on AArch64; elsewhere the advice may be declined.
    const LARGE_PAGE: usize = 2 << 20;
    let bytes = size_of_val(memory);
    let start = memory.as_mut_ptr().cast::<u8>();
    let skipped = start.align_offset(LARGE_PAGE);
    let length = bytes.saturating_sub(skipped) / LARGE_PAGE * LARGE_PAGE;
    if length > 0 {
        #[expect(unsafe_code, reason = "advice on memory is a call of the system")]
        // SAFETY: the range lies inside `memory`, and the advice changes what stands behind it, not what it holds.
        let advised = unsafe { libc::madvise(start.add(skipped).cast(), length, libc::MADV_HUGEPAGE) };
        // Where it is declined, small pages do.
        let _ = advised;
    }
}

/// Other systems choose by themselves.
#[cfg(not(target_os = "linux"))]
pub(crate) fn prefer_large_pages<T>(_: &mut [MaybeUninit<T>]) {}
