//! Process-wide settings, each changed only by its own function in this module.
//!
//! Programs call these functions at startup. A library inside another program leaves the functions that
//! require a single-threaded process to that program.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::available_parallelism;

use candle_gpt2::Gpt2LMHeadModel;
use candle_gpt2_arithmetic::{large_pages, limits};

use crate::EngineError;
pub use crate::panics::{keep_panics, panic_message};

/// Number of compute threads.
///
/// [`set_thread_count`] is safe at any time, even in an interpreter or server that already has threads. An
/// earlier call or the first computation fixes the number; after that, it returns false and changes nothing.
/// The pools of candle keep their sizes; [`set_threads`] sets those too.
pub use candle_gpt2_arithmetic::{set_thread_count, thread_count};
pub use candle_gpt2_kernels::use_tf32;

/// Environment variables for the sizes of candle's elementwise pool and matrix-product pool.
const VARIABLES: [&str; 2] = ["CANDLE_NUM_THREADS", "RAYON_NUM_THREADS"];

/// Environment variable that limits how long candle's idle threads spin, and its value.
///
/// By default they spin for about half a millisecond after each operation, which blocks the kernels' threads.
const SPIN_LIMIT: (&str, &str) = ("CANDLE_BARRIER_POOL_SPIN_LIMIT", "100");

/// Environment variables for candle's own pools, as names and values.
///
/// The pools read them at startup and cannot be configured in any other way. `threads` overrides the
/// environment. Without it, and for all other settings, variables that are already set take precedence.
///
/// [`set_threads`] sets the variables for a program. An interpreter that must not change its environment sets
/// them only during [`start_candles_pools`].
///
/// ```
/// use candle_gpt2_engine::process::candles_settings;
///
/// let settings = candles_settings(Some(3));
/// assert!(settings.contains(&("CANDLE_NUM_THREADS", "3".to_owned())));
/// ```
pub fn candles_settings(threads: Option<usize>) -> Vec<(&'static str, String)> {
    let count = threads.unwrap_or_else(|| available_parallelism().map_or(1, usize::from)).to_string();
    let counts = VARIABLES.map(|variable| (variable, count.clone(), threads.is_some()));
    let all = counts.into_iter().chain([(SPIN_LIMIT.0, SPIN_LIMIT.1.to_owned(), false)]);
    let is_open =
        |(variable, _, overrides): &(&str, String, bool)| *overrides || std::env::var_os(variable).is_none();
    all.filter(is_open).map(|(variable, value, _)| (variable, value)).collect()
}

/// Starts the candle pools that are not running yet; pools read [`candles_settings`] at startup.
///
/// ```
/// candle_gpt2_engine::process::start_candles_pools();
/// ```
pub fn start_candles_pools() {
    candle_core::utils::barrier_pool();
    candle_core::utils::init_global_threadpool();
}

/// Environment variable for the instruction set of the kernels, such as `avx2`.
///
/// It allows measuring the speed of processors with fewer instructions. The program passes the
/// value to [`use_instruction_set`]. If the variable is not set, the kernels use the fastest instruction set.
pub const INSTRUCTION_SET: &str = "GPT2_INSTRUCTION_SET";

/// Makes the kernels use the instruction set with this name; see [`limits::instruction_sets`].
///
/// Call this before the first computation.
///
/// # Errors
/// If the processor does not support the instruction set, or the kernels already use another one.
///
/// ```
/// use candle_gpt2_engine::process::{INSTRUCTION_SET, instruction_set, use_instruction_set};
///
/// assert!(use_instruction_set(instruction_set()).is_ok(), "this set is already in use");
/// let refusal = use_instruction_set("avx9").map_err(|error| error.to_string());
/// assert!(refusal.is_err_and(|message| message.starts_with(INSTRUCTION_SET)));
/// ```
pub fn use_instruction_set(name: &str) -> Result<(), EngineError> {
    if limits::choose_instruction_set(name) {
        return Ok(());
    }
    Err(EngineError::InstructionSet { found: name.to_owned(), available: limits::instruction_sets() })
}

/// Name of the instruction set that the kernels use.
///
/// See [`use_instruction_set`].
pub fn instruction_set() -> &'static str {
    limits::instruction_set()
}

/// Environment variable for large pages, either `on` (the default) or `off`.
///
/// The program passes the value to [`use_large_pages`]. It applies to memory for weights and KV caches.
pub const LARGE_PAGES: &str = "GPT2_LARGE_PAGES";

/// Enables or disables large pages for new weights and KV caches.
///
/// `gpt2 doctor` shows the system's setting.
///
/// # Errors
/// If `choice` is neither `on` nor `off`.
///
/// ```
/// use candle_gpt2_engine::process::{LARGE_PAGES, use_large_pages};
///
/// assert!(use_large_pages("on").is_ok());
/// let refusal = use_large_pages("huge").map_err(|error| error.to_string());
/// assert_eq!(refusal, Err(format!("{LARGE_PAGES}: expected on or off, found `huge`")));
/// ```
pub fn use_large_pages(choice: &str) -> Result<(), EngineError> {
    match choice {
        "on" => large_pages::ask(true),
        "off" => large_pages::ask(false),
        _ => return Err(EngineError::LargePages { found: choice.to_owned() }),
    }
    Ok(())
}

/// Sets the number of compute threads; by default, all cores that the process may use.
///
/// Returns false and keeps the number if the threads are already running.
///
/// By default, candle counts all cores of the machine, but a container may be limited to fewer. Its pools
/// read their sizes from the environment. This function sets those variables if they are not set or if
/// `threads` is `Some`.
///
/// # Safety
/// Call this while the process has a single thread, so that no other thread reads the environment
/// concurrently.
///
/// ```
/// use candle_gpt2_engine::process::{set_threads, thread_count};
///
/// // SAFETY: this is the first line of `main`, so no other thread is running.
/// assert!(unsafe { set_threads(Some(2)) });
/// assert_eq!(thread_count(), 2);
/// ```
#[expect(unsafe_code, reason = "candle reads these only from the environment")]
pub unsafe fn set_threads(threads: Option<usize>) -> bool {
    let is_set = set_thread_count(threads.unwrap_or_else(|| available_parallelism().map_or(1, usize::from)));
    for (variable, value) in candles_settings(threads) {
        // SAFETY: the caller guarantees that the process has a single thread.
        unsafe { std::env::set_var(variable, value) };
    }
    is_set
}

/// Keeps freed memory for reuse if the allocator is glibc's; has no effect on other allocators.
///
/// Every tensor operation allocates its result. By default, glibc returns freed blocks of several megabytes
/// to the system, and the next allocation gets new pages, which must be cleared. With this call, the prefill
/// of 512 tokens in `gpt2 bench --dtype f32` takes about a sixth less time (124M, two Zen 5 cores).
///
/// The setting applies to all allocations in the process. Other threads may allocate during the call.
///
/// ```
/// candle_gpt2_engine::process::keep_freed_memory(); // at the beginning of `main`
/// assert_eq!(vec![1.0_f32; 1 << 20].len(), 1 << 20);
/// ```
#[cfg_attr(
    all(target_os = "linux", target_env = "gnu"),
    expect(unsafe_code, reason = "tuning the allocator takes C library calls")
)]
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        /// Largest freed block that the allocator keeps for reuse, in bytes.
        ///
        /// Larger blocks, such as the weights, still come from the system and return to it.
        const LARGEST_KEPT: libc::c_int = 32 << 20;
        /// Free memory kept at the end of the heap, in bytes; more than one layer's results.
        const KEPT: libc::c_int = 256 << 20;
        // SAFETY: each call takes the lock of the allocator's main arena and writes one or two words that
        // other threads read without the lock. The allocator does the same whenever it frees a large block:
        // other threads see either the old number or the new one.
        let tuned = unsafe {
            [libc::mallopt(libc::M_MMAP_THRESHOLD, LARGEST_KEPT), libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT)]
        };
        // If a value is rejected, the program still works, only more slowly.
        let _ = tuned;
    }
}

/// Flag set by [`allow_recorded_steps`].
static RECORDS_STEPS: AtomicBool = AtomicBool::new(false);

/// Allows models loaded from now on to record decoding steps on NVIDIA GPUs and replay them.
///
/// Replay is three to four times as fast. Without this call, a library inside another program computes each
/// step as usual.
///
/// # Safety
/// While a thread records a step, other threads must submit GPU work only inside
/// [`candle_gpt2_kernels::using`]. [`Gpt2LMHeadModel::with_recorded_steps`] states the contract.
///
/// ```
/// // SAFETY: this program uses GPUs only through the models.
/// unsafe { candle_gpt2_engine::process::allow_recorded_steps() };
/// ```
#[expect(unsafe_code, reason = "the caller vouches for the rest of the program")]
pub unsafe fn allow_recorded_steps() {
    RECORDS_STEPS.store(true, Ordering::Relaxed);
}

/// Applies [`Gpt2LMHeadModel::with_recorded_steps`] if the program allows it.
pub(crate) fn with_recorded_steps(model: Gpt2LMHeadModel) -> Gpt2LMHeadModel {
    if !RECORDS_STEPS.load(Ordering::Relaxed) {
        return model;
    }
    #[expect(unsafe_code, reason = "recording steps has a safety contract")]
    // SAFETY: the caller of `allow_recorded_steps` guarantees the contract.
    unsafe {
        model.with_recorded_steps()
    }
}

/// Makes all threads allocate from one heap, if the allocator is glibc's.
///
/// Call this before a second thread starts. By default, each thread has its own heap, with 64 MB of address
/// space, and keeps the memory of its largest request. A server with many threads on few cores then needs
/// several times the memory, and [`return_freed_memory`] finds little to return.
///
/// ```
/// candle_gpt2_engine::process::use_one_heap();
/// ```
#[cfg_attr(
    all(target_os = "linux", target_env = "gnu"),
    expect(unsafe_code, reason = "tuning the allocator takes C library calls")
)]
pub fn use_one_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: same as in `keep_freed_memory`. If the value is rejected, threads keep their own heaps.
    let _ = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Returns freed memory to the system once, if the allocator is glibc's.
///
/// This reverses [`keep_freed_memory`] for the memory that is free now. The call takes milliseconds, which
/// pay off after a request that used tens of megabytes.
///
/// ```
/// drop(vec![1_u8; 1 << 20]);
/// candle_gpt2_engine::process::return_freed_memory();
/// ```
#[cfg_attr(
    all(target_os = "linux", target_env = "gnu"),
    expect(unsafe_code, reason = "trimming the allocator takes a C library call")
)]
pub fn return_freed_memory() {
    // SAFETY: the call takes the lock of each arena in turn and touches only free memory.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    let _ = unsafe { libc::malloc_trim(0) };
}

/// Raises the limit on open files and connections to `wanted`, as far as the system allows.
///
/// The limit is never lowered. Returns the resulting limit, if there is one. Many systems start a process
/// with a limit of 256 or 1024 but allow far more.
///
/// ```
/// use candle_gpt2_engine::process::{allow_open_files, open_files};
///
/// let before = open_files();
/// assert!(allow_open_files(300) >= before);
/// ```
pub fn allow_open_files(wanted: usize) -> Option<usize> {
    #[cfg(unix)]
    if let Some(limit) = open_files_limit() {
        let wanted = libc::rlim_t::try_from(wanted).unwrap_or(libc::rlim_t::MAX).min(limit.rlim_max);
        if wanted > limit.rlim_cur {
            let raised = libc::rlimit { rlim_cur: wanted, ..limit };
            #[expect(unsafe_code, reason = "setting the limit takes a C library call")]
            // SAFETY: the call only reads the structure that the pointer refers to.
            let set = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised) };
            // If the call fails, the old limit remains and is returned.
            let _ = set;
        }
    }
    let _ = wanted;
    open_files()
}

/// Whether the process ignores SIGHUP, as under `nohup`; false if the signal does not exist.
///
/// ```
/// // True only under `nohup`.
/// println!("{}", candle_gpt2_engine::process::ignores_hangup());
/// ```
#[cfg_attr(unix, expect(unsafe_code, reason = "reading the signal action takes a C library call"))]
pub fn ignores_hangup() -> bool {
    #[cfg(unix)]
    let is_ignored = {
        let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: the call only writes the current action into the structure, whose fields are all valid when
        // zero.
        let (read, action) = unsafe {
            let read = libc::sigaction(libc::SIGHUP, std::ptr::null(), action.as_mut_ptr());
            (read, action.assume_init())
        };
        read == 0 && action.sa_sigaction == libc::SIG_IGN
    };
    #[cfg(not(unix))]
    let is_ignored = false;
    is_ignored
}

/// Limit on open files and connections, if there is one.
///
/// See [`allow_open_files`].
pub fn open_files() -> Option<usize> {
    #[cfg(unix)]
    let limit = open_files_limit().map(|limit| usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX));
    #[cfg(not(unix))]
    let limit = None;
    limit
}

#[cfg(unix)]
#[expect(unsafe_code, reason = "reading the limit takes a C library call")]
fn open_files_limit() -> Option<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call only writes into the structure that the pointer refers to.
    let read = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    (read == 0).then_some(limit)
}
