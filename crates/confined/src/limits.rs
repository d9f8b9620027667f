//! Worker limits, which the operating system enforces inside the worker process.

use std::time::Duration;

/// Limits on one answer.
///
/// See [`Worker`](crate::Worker) for an example.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum CPU time.
    pub cpu: Duration,
    /// Maximum memory, including the stack, beyond what the process used before its first question.
    pub memory_bytes: u64,
    /// Maximum wall-clock time that the caller waits.
    pub wall: Duration,
}

/// Limit that a program can exceed.
///
/// Part of [`WorkerError::Exceeded`](crate::WorkerError::Exceeded); see [`Worker`](crate::Worker) for an
/// example.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Limit {
    /// CPU time.
    CpuTime,
    /// Memory.
    Memory,
    /// Stack: the program is nested too deeply.
    Stack,
    /// Wall-clock time.
    WallTime,
}

impl Limit {
    /// Marker sent in place of an answer's length.
    pub(crate) const fn mark(self) -> u64 {
        match self {
            Self::CpuTime => u64::MAX,
            Self::Memory => u64::MAX - 1,
            Self::Stack => u64::MAX - 2,
            Self::WallTime => u64::MAX - 3,
        }
    }

    pub(crate) fn of_mark(mark: u64) -> Option<Self> {
        [Self::CpuTime, Self::Memory, Self::Stack, Self::WallTime]
            .into_iter()
            .find(|limit| limit.mark() == mark)
    }
}

#[cfg(not(unix))]
pub(crate) use other::{
    bound_memory, bound_process, bound_time, close_other_files, data_bytes, private_bytes,
    report_limits_to_output, used_cpu,
};
#[cfg(target_os = "linux")]
pub(crate) use unix::report_limits;
#[cfg(unix)]
pub(crate) use unix::{
    bound_memory, bound_process, bound_time, close_other_files, data_bytes, private_bytes,
    report_limits_to_output, used_cpu,
};

/// Fallback for systems without OS-level limits.
///
/// Only the wall-clock limit applies: when it expires, the caller kills the process.
#[cfg(not(unix))]
mod other {
    use std::io;
    use std::time::Duration;

    pub(crate) fn bound_process() -> io::Result<()> {
        Ok(())
    }

    pub(crate) fn close_other_files() {}

    pub(crate) fn bound_memory(_: u64) -> io::Result<()> {
        Ok(())
    }

    pub(crate) fn bound_time(_: Option<Duration>) -> io::Result<()> {
        Ok(())
    }

    pub(crate) fn used_cpu() -> Duration {
        Duration::ZERO
    }

    pub(crate) fn data_bytes() -> u64 {
        0
    }

    pub(crate) fn private_bytes() -> u64 {
        0
    }

    pub(crate) fn report_limits_to_output() {}
}

#[cfg(unix)]
mod unix {
    use std::fs;
    use std::io;
    use std::os::fd::RawFd;
    use std::sync::atomic::{AtomicI32, Ordering};
    use std::time::Duration;

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::Limit;

    /// Maximum number of descriptors: standard streams, one or two sockets, and files in `/proc`.
    const MAX_FILES: u64 = 16;
    /// Stack size of the main thread, which prepares programs.
    const MAIN_STACK_BYTES: u64 = 8 << 20;

    /// Sets the limits that apply from the start.
    ///
    /// These forbid core dumps and writing to files, and bound the descriptors and the main thread's stack.
    pub(crate) fn bound_process() -> io::Result<()> {
        for (resource, limit) in [
            (Resource::Core, 0),
            (Resource::Fsize, 0),
            (Resource::Nofile, MAX_FILES),
            (Resource::Stack, MAIN_STACK_BYTES),
        ] {
            lower(resource, limit)?;
        }
        Ok(())
    }

    /// Closes all descriptors but the standard streams, including any that the caller's parent leaked.
    pub(crate) fn close_other_files() {
        #[cfg(target_os = "linux")]
        #[expect(unsafe_code, reason = "the standard library closes only files that it opened")]
        // SAFETY: a worker calls this first, so none of its objects owns a descriptor above the standard
        // streams.
        unsafe {
            libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0);
        }
    }

    /// Limits the private memory of this process, in bytes.
    pub(crate) fn bound_memory(bytes: u64) -> io::Result<()> {
        lower(Resource::Data, bytes)
    }

    /// Lowers the soft limit; keeps the hard limit, which only a privileged process could raise again.
    fn lower(resource: Resource, limit: u64) -> io::Result<()> {
        let Rlimit { current: _, maximum } = getrlimit(resource);
        let current = Some(maximum.map_or(limit, |maximum| maximum.min(limit)));
        Ok(setrlimit(resource, Rlimit { current, maximum })?)
    }

    /// Limits the CPU time of this process from now on; `None` removes the limit.
    pub(crate) fn bound_time(time: Option<Duration>) -> io::Result<()> {
        let zero = libc::timeval { tv_sec: 0, tv_usec: 0 };
        let value = time.map_or(zero, |time| libc::timeval {
            tv_sec: time.as_secs().try_into().unwrap_or(i32::MAX.into()),
            tv_usec: time.subsec_micros() as libc::suseconds_t,
        });
        #[expect(unsafe_code, reason = "the standard library has no timers")]
        // SAFETY: the first pointer refers to a value that outlives the call, and the null pointer means that
        // the old value is not requested.
        let set = unsafe {
            libc::setitimer(
                libc::ITIMER_PROF,
                &libc::itimerval { it_interval: zero, it_value: value },
                std::ptr::null_mut(),
            )
        };
        match set {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// CPU time that this process has used.
    pub(crate) fn used_cpu() -> Duration {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        #[expect(unsafe_code, reason = "the standard library has no CPU time clock")]
        // SAFETY: the pointer refers to a value that outlives the call.
        unsafe {
            libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time);
        }
        Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
    }

    /// Size of this process's data and stacks in bytes, as `RLIMIT_DATA` counts it.
    ///
    /// 0 if the system does not report it.
    pub(crate) fn data_bytes() -> u64 {
        field("/proc/self/status", "VmData:")
    }

    /// Memory that this process has written since it was forked, in bytes.
    ///
    /// 0 if the system does not report it.
    pub(crate) fn private_bytes() -> u64 {
        field("/proc/self/smaps_rollup", "Private_Dirty:")
    }

    fn field(file: &str, name: &str) -> u64 {
        let text = fs::read_to_string(file).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
        kilobytes.unwrap_or(0) << 10
    }

    /// File descriptor that the signal handlers write to.
    static REPORT: AtomicI32 = AtomicI32::new(-1);

    /// Calls [`report_limits`] for standard output.
    pub(crate) fn report_limits_to_output() {
        report_limits(libc::STDOUT_FILENO);
    }

    /// Installs signal handlers that write the exceeded limit to `to` in place of an answer.
    pub(crate) fn report_limits(to: RawFd) {
        REPORT.store(to, Ordering::Relaxed);
        // A failed allocation raises SIGABRT, and a stack overflow raises SIGSEGV or SIGBUS.
        for signal in [libc::SIGPROF, libc::SIGABRT, libc::SIGSEGV, libc::SIGBUS] {
            #[expect(unsafe_code, reason = "the standard library has no signal handlers")]
            // SAFETY: `report` calls only async-signal-safe functions. It runs on the alternate stack that
            // the standard library installs for each thread, so it works even after a stack overflow.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                let handler: extern "C" fn(libc::c_int) = report;
                action.sa_sigaction = handler as libc::sighandler_t;
                action.sa_flags = libc::SA_ONSTACK;
                libc::sigemptyset(&mut action.sa_mask);
                libc::sigaction(signal, &action, std::ptr::null_mut());
            }
        }
    }

    extern "C" fn report(signal: libc::c_int) {
        let limit = match signal {
            libc::SIGPROF => Limit::CpuTime,
            libc::SIGABRT => Limit::Memory,
            _ => Limit::Stack,
        };
        let mark = limit.mark().to_le_bytes();
        #[expect(unsafe_code, reason = "few other functions are safe in a signal handler")]
        // SAFETY: `write` and `_exit` are async-signal-safe, and the bytes outlive the call.
        unsafe {
            libc::write(REPORT.load(Ordering::Relaxed), mark.as_ptr().cast(), mark.len());
            libc::_exit(1);
        }
    }
}
