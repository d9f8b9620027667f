//! Whether standard output was closed when the program was started, as by `gpt2 … >&-`.
//!
//! Before `main`, Rust's runtime opens /dev/null in the place of a closed standard output, so that no file gets its number. From
//! then on it looks as with `> /dev/null`, which is no mistake. So it is asked for earlier: by a function that the loader calls
//! among the constructors of the program, before the runtime begins.

use std::sync::atomic::{AtomicBool, Ordering};

static WAS_CLOSED: AtomicBool = AtomicBool::new(false);

/// Whether nothing that is written to standard output arrives anywhere, since it was closed from the beginning.
pub(crate) fn was_closed() -> bool {
    WAS_CLOSED.load(Ordering::Relaxed)
}

#[cfg(any(target_os = "linux", target_os = "macos"))]
mod before_main {
    use std::sync::atomic::Ordering;

    #[used]
    #[expect(unsafe_code, reason = "only a constructor runs before the runtime hides what was closed")]
    // SAFETY: both sections hold pointers to functions that the loader calls without arguments it needs read.
    #[cfg_attr(target_os = "linux", unsafe(link_section = ".init_array"))]
    #[cfg_attr(target_os = "macos", unsafe(link_section = "__DATA,__mod_init_func"))]
    static CONSTRUCTOR: extern "C" fn() = look;

    extern "C" fn look() {
        #[expect(unsafe_code, reason = "a call of the C library")]
        // SAFETY: F_GETFD takes no pointer and changes nothing. Nothing of the standard library's runtime is needed here: the
        // call is the C library's, and an atomic is plain memory.
        let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
        crate::closed_output::WAS_CLOSED.store(flags == -1, Ordering::Relaxed);
    }
}
