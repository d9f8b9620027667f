//! Progress bars on standard error: they appear when a job takes longer than a moment, and only on a terminal.

use std::io::{IsTerminal, stderr};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Redraws per second.
const REDRAWS_PER_S: u8 = 5;

/// A bar that counts bytes.
pub(crate) fn bytes(what: &'static str, total: u64) -> ProgressBar {
    bar(what, total, "{msg} {wide_bar} {bytes}/{total_bytes} {eta}")
}

/// A bar that counts things of this name, such as `tokens`.
pub(crate) fn items(what: &'static str, total: u64, name: &str) -> ProgressBar {
    bar(what, total, &format!("{{msg}} {{wide_bar}} {{pos}}/{{len}} {name} {{eta}}"))
}

/// A bar that counts the steps of a training, of which some may be done.
pub(crate) fn steps(total: u64, done: u64) -> ProgressBar {
    let bar = bar("training", total, "{pos}/{len} {wide_bar} {msg} {eta}");
    bar.set_position(done);
    bar.reset_eta();
    bar
}

/// No bar: the job is done at once.
pub(crate) fn none() -> ProgressBar {
    ProgressBar::hidden()
}

fn bar(what: &'static str, total: u64, template: &str) -> ProgressBar {
    if !stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(REDRAWS_PER_S));
    // A template that does not parse would be our mistake: the default style then still shows the progress.
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style);
    bar.set_message(what);
    bar.enable_steady_tick(Duration::from_secs(1));
    bar
}
