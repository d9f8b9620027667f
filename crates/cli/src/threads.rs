//! How many threads compute: `--threads`, else as many as this process may use.

use std::thread::available_parallelism;

/// What candle's own pools read when they start: that of its elementwise operations, and that of its matrix products.
const VARIABLES: [&str; 2] = ["CANDLE_NUM_THREADS", "RAYON_NUM_THREADS"];

/// How long candle's threads spin behind an operation, in loops: by default about half a millisecond, in which they would
/// keep the kernels' threads from their processors.
const SPIN_LIMIT: (&str, &str) = ("CANDLE_BARRIER_POOL_SPIN_LIMIT", "100");

/// Fixes the number of threads for the whole process; to be called before any of them starts.
///
/// candle alone would count the cores of the machine, which a container may use only some of.
pub(crate) fn set(threads: Option<usize>) {
    let default = available_parallelism().map_or(1, usize::from);
    gpt2_kernels::set_thread_count(threads.unwrap_or(default));
    let count = threads.unwrap_or(default).to_string();
    let counts = VARIABLES.map(|variable| (variable, count.as_str(), threads.is_some()));
    for (variable, value, overrides) in counts.into_iter().chain([(SPIN_LIMIT.0, SPIN_LIMIT.1, false)]) {
        if !overrides && std::env::var_os(variable).is_some() {
            continue;
        }
        #[expect(unsafe_code, reason = "candle takes these from the environment only")]
        // SAFETY: the program calls this while it has one thread, so nobody reads the environment meanwhile.
        unsafe {
            std::env::set_var(variable, value);
        }
    }
}
