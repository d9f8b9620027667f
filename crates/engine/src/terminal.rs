//! Progress bars on standard error: they appear when a job takes longer than a moment, and only on a terminal.

use std::io::{IsTerminal, Write, stderr};
use std::time::Duration;

use candle_gpt2::{bounded_message, printable};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{Progress, Reporter, Unit};

/// Redraws per second.
const REDRAWS_PER_S: u8 = 5;

/// Shows jobs and notes on standard error: jobs as bars, if it is a terminal.
///
/// ```
/// use candle_gpt2_engine::{ModelOptions, Terminal};
///
/// let model = ModelOptions::default().open(&Terminal)?.load(&Terminal)?;
/// assert_eq!(model.config().n_layer, 6);
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
        // Nothing is left to tell when standard error is closed.
        let _ = writeln!(stderr(), "note: {}", printable(&bounded_message(note)));
    }
}

/// A bar that goes with its job.
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

/// A bar of `total` things under the name `what`, which is `{msg}` in its template; nothing if standard error is no terminal.
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
    // A template that does not parse would be our mistake: the default style then still shows the progress.
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style);
    bar.set_message(printable(what));
    bar.enable_steady_tick(Duration::from_secs(1));
    bar
}
