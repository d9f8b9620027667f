//! Progress bars on standard error.

pub(crate) use candle_gpt2_engine::Terminal;
use candle_gpt2_engine::terminal::bar;
use indicatif::ProgressBar;

/// Creates a progress bar over `total` training steps with `done` steps complete.
pub(crate) fn steps(total: u64, done: u64) -> ProgressBar {
    let bar = bar("training", total, "{pos}/{len} {wide_bar} {msg} {eta}");
    bar.set_position(done);
    bar.reset_eta();
    bar
}
