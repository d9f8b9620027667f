//! Detects whether standard output was closed when the program started, as with `gpt2 … >&-`.
//!
//! Before `main`, Rust's runtime opens /dev/null in place of a closed standard output, so that no other file
//! gets its descriptor. After that, it cannot be distinguished from `> /dev/null`, which is valid. A
//! constructor function therefore checks the descriptor earlier. The loader calls it before the runtime
//! starts.

use std::sync::atomic::{AtomicBool, Ordering};

static WAS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Whether standard output was closed at startup, so that all output is lost.
pub(crate) fn was_closed() -> bool {
    WAS_CLOSED.load(Ordering::Relaxed)
}

#[cfg(any(target_os = "linux", target_os = "macos"))]
mod before_main {
    use std::sync::atomic::Ordering;

    #[used]
    #[expect(unsafe_code, reason = "only a constructor runs before the runtime replaces closed streams")]
    // SAFETY: both sections hold pointers to functions that the loader calls. `check_descriptor` reads none
    // of the arguments that some loaders pass.
    #[cfg_attr(target_os = "linux", unsafe(link_section = ".init_array"))]
    #[cfg_attr(target_os = "macos", unsafe(link_section = "__DATA,__mod_init_func"))]
    static CONSTRUCTOR: extern "C" fn() = check_descriptor;

    extern "C" fn check_descriptor() {
        #[expect(unsafe_code, reason = "a C library call")]
        // SAFETY: F_GETFD takes no pointer and changes nothing. The call does not depend on the standard
        // library's runtime: it goes to the C library, and an atomic is plain memory.
        let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
        crate::closed_output::WAS_CLOSED.store(flags == -1, Ordering::Relaxed);
    }
}
