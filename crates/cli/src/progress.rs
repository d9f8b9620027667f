//! Progress bars on standard error: they appear when a job takes longer than a moment, and only on a terminal.

use std::io::{IsTerminal, stderr};
use std::time::Duration;

use gpt2_engine::{Progress, Reporter, Unit};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output;

/// Redraws per second.
const REDRAWS_PER_S: u8 = 5;

/// Tells of jobs and notes at the terminal.
pub(crate) struct Terminal;

impl Reporter for Terminal {
    fn start(&self, what: &str, total: u64, unit: Unit) -> Box<dyn Progress> {
        let template = match unit {
            Unit::Bytes => "{msg} {wide_bar} {bytes}/{total_bytes} {eta}".to_owned(),
            Unit::Items(name) => format!("{{msg}} {{wide_bar}} {{pos}}/{{len}} {name} {{eta}}"),
        };
        Box::new(Bar(bar(what, total, &template)))
    }

    fn note(&self, note: &str) {
        output::print_note(note);
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

/// A bar that counts the steps of a training, of which some may be done.
pub(crate) fn steps(total: u64, done: u64) -> ProgressBar {
    let bar = bar("training", total, "{pos}/{len} {wide_bar} {msg} {eta}");
    bar.set_position(done);
    bar.reset_eta();
    bar
}

fn bar(what: &str, total: u64, template: &str) -> ProgressBar {
    if !stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(REDRAWS_PER_S));
    // A template that does not parse would be our mistake: the default style then still shows the progress.
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style);
    bar.set_message(what.to_owned());
    bar.enable_steady_tick(Duration::from_secs(1));
    bar
}
