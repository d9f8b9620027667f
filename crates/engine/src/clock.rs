//! System clock for the `max_time` limit in a checkpoint's `generation_config.json`.

use candle_gpt2_generation::Clock;

/// Starts a clock for `max_time` limits; returns `None` in a browser, which has no clock.
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
