//! Settings of the whole process, each a call of its own: no other function of this crate touches one.
//!
//! A program makes these calls at its start; a library inside another program leaves those that need a single-threaded process to
//! that program.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::available_parallelism;

use candle_gpt2::Gpt2LMHeadModel;
use candle_gpt2_arithmetic::{large_pages, limits};

use crate::EngineError;
pub use crate::panics::{keep_panics, panic_message};

/// [`set_thread_count`] is safe at any time, for an interpreter or a server that has threads already: it sets how many compute
/// the products, and answers false, changing nothing, once that is fixed, by an earlier call or by the first computation.
/// candle's own pools stay as they are; [`set_threads`] sets those too.
pub use candle_gpt2_arithmetic::{set_thread_count, thread_count};
pub use candle_gpt2_kernels::use_tf32;

/// How many threads candle's own pools have: that of its elementwise operations, and that of its matrix products.
const VARIABLES: [&str; 2] = ["CANDLE_NUM_THREADS", "RAYON_NUM_THREADS"];

/// How long candle's threads spin after an operation, in loops: by default about half a millisecond, in which they would
/// keep the kernels' threads from their processors.
const SPIN_LIMIT: (&str, &str) = ("CANDLE_BARRIER_POOL_SPIN_LIMIT", "100");

/// What candle's own pools are to find in the environment when they start, and no way around it leads there: names and values. A
/// number of `threads` goes before what the environment says; without one, and for all else, what is set there stays.
///
/// [`set_threads`] sets them for a program. An interpreter that leaves its environment alone sets them for as long as
/// [`start_candles_pools`] takes.
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

/// Starts the pools of candle that have not been started yet; they read [`candles_settings`] here and never again.
///
/// ```
/// candle_gpt2_engine::process::start_candles_pools();
/// ```
pub fn start_candles_pools() {
    candle_core::utils::barrier_pool();
    candle_core::utils::init_global_threadpool();
}

/// Names the instruction set that the kernels are to take, such as `avx2` if the processor has more: to measure what others
/// would get. The program reads it from here; without it they take the fastest.
///
/// For [`use_instruction_set`].
pub const INSTRUCTION_SET: &str = "GPT2_INSTRUCTION_SET";

/// Makes the kernels take the instruction set of this name, see [`limits::instruction_sets`]. To be called before the first
/// computation.
///
/// # Errors
/// When the processor has none of this name, or the kernels take another one already.
///
/// ```
/// use candle_gpt2_engine::process::{INSTRUCTION_SET, instruction_set, use_instruction_set};
///
/// assert!(use_instruction_set(instruction_set()).is_ok(), "they take it already");
/// let told = use_instruction_set("avx9").map_err(|error| error.to_string());
/// assert!(told.is_err_and(|told| told.starts_with(INSTRUCTION_SET)));
/// ```
pub fn use_instruction_set(name: &str) -> Result<(), EngineError> {
    if limits::choose_instruction_set(name) {
        return Ok(());
    }
    Err(EngineError::InstructionSet { found: name.to_owned(), available: limits::instruction_sets() })
}

/// Name of the instruction set that the kernels take.
///
/// See [`use_instruction_set`].
pub fn instruction_set() -> &'static str {
    limits::instruction_set()
}

/// Whether memory for weights, keys and values asks the system for large pages: `on`, the default, or `off`. The program reads it
/// from here.
///
/// For [`use_large_pages`].
pub const LARGE_PAGES: &str = "GPT2_LARGE_PAGES";

/// Makes memory for weights, keys and values ask for large pages from now on, or not. `gpt2 doctor` shows what the system does.
///
/// # Errors
/// If the choice is neither `on` nor `off`.
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

/// Fixes the number of threads that compute: this many, by default all that the process may use. Returns false if they run
/// already, and keeps their number.
///
/// candle alone would count the cores of the machine, of which a container may use only some. Its pools take their number
/// from the environment, which this sets if it is not set or `threads` are given.
///
/// # Safety
/// To be called while the process has one thread, so that no other thread reads the environment meanwhile.
///
/// ```
/// use candle_gpt2_engine::process::{set_threads, thread_count};
///
/// // SAFETY: the first line of `main`; nothing has started a thread yet.
/// assert!(unsafe { set_threads(Some(2)) });
/// assert_eq!(thread_count(), 2);
/// ```
#[expect(unsafe_code, reason = "candle takes these from the environment only")]
pub unsafe fn set_threads(threads: Option<usize>) -> bool {
    let is_set = set_thread_count(threads.unwrap_or_else(|| available_parallelism().map_or(1, usize::from)));
    for (variable, value) in candles_settings(threads) {
        // SAFETY: the caller sees to it that there is one thread.
        unsafe { std::env::set_var(variable, value) };
    }
    is_set
}

/// Keeps memory that is freed for what comes next, if the allocator is GNU's; others are left as they are.
///
/// Every operation on tensors allocates its result. With GNU's allocator as it starts, blocks of some megabytes go back to
/// the system when they are freed and come as new pages again, which have to be cleared: `gpt2 bench --dtype f32` reads a
/// prompt of 512 tokens in about a sixth less time with this call than without it (124M, two Zen 5 cores). Whatever else runs in the
/// process allocates so too from then on, and other threads may do so meanwhile.
///
/// ```
/// candle_gpt2_engine::process::keep_freed_memory(); // at the beginning of `main`
/// assert_eq!(vec![1.0_f32; 1 << 20].len(), 1 << 20);
/// ```
#[cfg_attr(
    all(target_os = "linux", target_env = "gnu"),
    expect(unsafe_code, reason = "the allocator is tuned by calls of the C library")
)]
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        /// The most that the allocator takes: larger blocks, such as the weights, still come from the system and go back to it.
        const LARGEST_KEPT: libc::c_int = 32 << 20;
        /// Free memory at the end of the heap that is kept, more than one layer's results.
        const KEPT: libc::c_int = 256 << 20;
        // SAFETY: each call takes the lock of the allocator's main arena and writes a word or two that other threads read without it,
        // as the allocator itself does whenever it frees a large block: either the old number counts for them or the new one.
        let tuned = unsafe {
            [libc::mallopt(libc::M_MMAP_THRESHOLD, LARGEST_KEPT), libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT)]
        };
        // Where a number is declined, everything works as before, only slower.
        let _ = tuned;
    }
}

/// Set by [`allow_recorded_steps`].
static RECORDS_STEPS: AtomicBool = AtomicBool::new(false);

/// Lets models that are loaded from now on record their decoding steps on NVIDIA GPUs and replay them, which is three to four times
/// as fast. Without this call a library inside another program computes each step as usual.
///
/// # Safety
/// All work that this process submits to a GPU outside this workspace's crates must run inside [`candle_gpt2_kernels::using`];
/// [`Gpt2LMHeadModel::with_recorded_steps`] states the contract.
///
/// ```
/// // SAFETY: this program uses GPUs through the models alone.
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
    #[expect(unsafe_code, reason = "recording steps has a contract")]
    // SAFETY: the caller of `allow_recorded_steps` has promised it.
    unsafe {
        model.with_recorded_steps()
    }
}

/// Makes all threads allocate from one heap, if the allocator is GNU's. To be called before a second thread starts.
///
/// By default each thread gets a heap of its own, with 64 MB of address space, and keeps the memory of its largest request. A server
/// with many threads for few cores needs several times the memory then, and [`return_freed_memory`] finds little to return.
///
/// ```
/// candle_gpt2_engine::process::use_one_heap();
/// ```
#[cfg_attr(
    all(target_os = "linux", target_env = "gnu"),
    expect(unsafe_code, reason = "the allocator is tuned by calls of the C library")
)]
pub fn use_one_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: as in `keep_freed_memory`. Where the number is declined, threads keep their heaps.
    let _ = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Returns freed memory to the system, if the allocator is GNU's: the opposite of [`keep_freed_memory`], for once.
///
/// Worth its milliseconds after a request that took tens of megabytes.
///
/// ```
/// drop(vec![1_u8; 1 << 20]);
/// candle_gpt2_engine::process::return_freed_memory();
/// ```
#[cfg_attr(
    all(target_os = "linux", target_env = "gnu"),
    expect(unsafe_code, reason = "the allocator is trimmed by a call of the C library")
)]
pub fn return_freed_memory() {
    // SAFETY: the call takes the lock of each arena in turn, and touches free memory only.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    let _ = unsafe { libc::malloc_trim(0) };
}

/// Raises the number of files and connections that the process may have open to `wanted`, as far as the system lets it, and never
/// lowers it. Returns the number that holds from then on, if there is one.
///
/// Many systems start a process with 256 or 1024 and let it have far more.
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
            #[expect(unsafe_code, reason = "the limit is set by a call of the C library")]
            // SAFETY: the call reads the structure that it is given.
            let set = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const raised) };
            // Where it is declined, the old number holds, which is what is returned.
            let _ = set;
        }
    }
    let _ = wanted;
    open_files()
}

/// Whether the process ignores SIGHUP, as one started with `nohup` does. False where the signal does not exist.
///
/// ```
/// // Only true under `nohup`.
/// println!("{}", candle_gpt2_engine::process::ignores_hangup());
/// ```
#[cfg_attr(unix, expect(unsafe_code, reason = "the action is read by a call of the C library"))]
pub fn ignores_hangup() -> bool {
    #[cfg(unix)]
    let is_ignored = {
        let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: the call writes the current action into the structure and changes nothing. All fields are valid when zero.
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

/// The number of files and connections that the process may have open, if there is one.
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
#[expect(unsafe_code, reason = "the limit is read by a call of the C library")]
fn open_files_limit() -> Option<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes into the structure that it is given.
    let read = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    (read == 0).then_some(limit)
}
