//! The clock of the system, by which the `max_time` of a checkpoint's `generation_config.json` is counted.

use candle_gpt2_generation::Clock;

/// A clock that starts now; `None` if the system has none, as in a browser. Only the time that a text may take is counted by it.
///
/// ```
/// assert!(candle_gpt2_engine::system_clock().is_some());
/// ```
pub fn system_clock() -> Option<Clock> {
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    return None;
    #[cfg(not(all(target_family = "wasm", target_os = "unknown")))]
    {
        let start = std::time::Instant::now();
        Some(std::sync::Arc::new(move || start.elapsed()))
    }
}
