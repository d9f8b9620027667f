//! Memory that is freed stays with the program for what comes next.
//!
//! Every operation on tensors allocates its result. With GNU's allocator as it starts, blocks of some megabytes go back to
//! the system when they are freed and come as new pages again: a sixth of the time of a prompt of 512 tokens in f32 was
//! spent on clearing pages.

#![expect(unsafe_code, reason = "the allocator is tuned by a call of the C library")]

/// Tunes the allocator, where it is GNU's; others keep freed memory by themselves.
pub(crate) fn keep_freed() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        /// The most that the allocator takes: larger blocks, such as the weights, still come from the system and go back to it.
        const LARGEST_KEPT: libc::c_int = 32 << 20;
        /// Free memory at the end of the heap that is kept, more than one layer's results.
        const KEPT: libc::c_int = 256 << 20;
        // SAFETY: the call changes two numbers of the allocator and is made before there is a second thread.
        let tuned = unsafe {
            [libc::mallopt(libc::M_MMAP_THRESHOLD, LARGEST_KEPT), libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT)]
        };
        // Where a number is declined, everything works as before, only slower.
        let _ = tuned;
    }
}
