//! How many threads compute: `--threads`, else the variables that candle reads, else what this process may use.

use std::thread::available_parallelism;

/// What candle's pools read when they start: that of the packed products, and that of its own matrix products.
const VARIABLES: [&str; 2] = ["CANDLE_NUM_THREADS", "RAYON_NUM_THREADS"];

/// Fixes the number of threads for the whole process; to be called before any of them starts.
///
/// candle alone would count the cores of the machine, which a container may use only some of.
pub(crate) fn set(threads: Option<usize>) {
    let default = available_parallelism().map_or(1, usize::from);
    for variable in VARIABLES {
        let count = match threads {
            Some(threads) => threads,
            None if std::env::var_os(variable).is_some() => continue,
            None => default,
        };
        #[expect(unsafe_code, reason = "candle takes the number of threads from the environment only")]
        // SAFETY: the program calls this first of all, while it has one thread, so nobody reads the environment meanwhile.
        unsafe {
            std::env::set_var(variable, count.to_string());
        }
    }
}
