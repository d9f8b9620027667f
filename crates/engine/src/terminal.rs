//! Progress bars on standard error, shown only on a terminal and only for longer jobs.

use std::io::{IsTerminal, Write, stderr};
use std::time::Duration;

use candle_gpt2::{bounded_message, printable};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{Progress, Reporter, Unit};

/// Number of redraws per second.
const REDRAWS_PER_S: u8 = 5;

/// Reporter that prints notes to standard error and shows progress bars if that is a terminal.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Terminal};
///
/// let model = ModelOptions::default().open(&Terminal)?.load(&Terminal)?;
/// assert_eq!(model.config().n_layer, 7);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Terminal;

impl Reporter for Terminal {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        let template = match unit {
            Unit::Bytes => "{msg} {wide_bar} {bytes}/{total_bytes} {eta}".to_owned(),
            Unit::Items(name) => format!("{{msg}} {{wide_bar}} {{pos}}/{{len}} {name} {{eta}}"),
        };
        Box::new(Bar(bar(what, total, &template)))
    }

    fn note(&self, note: &str) {
        // If standard error is closed, there is no other place to report to.
        let _ = writeln!(stderr(), "note: {}", printable(&bounded_message(note)));
    }
}

/// Progress bar that disappears when its job ends.
struct Bar(ProgressBar);

impl Progress for Bar {
    fn advance(&self, by: u64) {
        self.0.inc(by);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Creates a progress bar of `total` units named `what`, which replaces `{msg}` in the template.
///
/// The bar is hidden if standard error is not a terminal.
///
/// ```
/// let bar = candle_gpt2_engine::terminal::bar("tokens", 10, "{msg} {pos}/{len}");
/// bar.inc(3);
/// assert_eq!(bar.position(), 3);
/// bar.finish_and_clear();
/// ```
pub fn bar(what: &str, total: u64, template: &str) -> ProgressBar {
    if !stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(REDRAWS_PER_S));
    // An invalid template is a bug in this project; the default style still shows the progress.
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style);
    bar.set_message(printable(what));
    bar.enable_steady_tick(Duration::from_secs(1));
    bar
}
