//! Server log: `tracing` events for any subscriber, or lines of text or JSON on standard error.

mod queue;

use std::fmt::{self, Debug, Display, Write as _};
use std::io::{self, Write as _};
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use queue::{Entry, Queue};
use tracing::subscriber::with_default;
use tracing::{Subscriber, error, field::Field, warn};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::{Writer, debug_fn};

/// Maximum number of bytes logged from a request's or an error's text.
const MAX_FIELD: usize = 1 << 10;

/// Number of this process's log lines that were not written.
static DROPPED_LINES: LazyLock<Counter> = LazyLock::new(Counter::default);
/// Queue of lines for standard error.
static STDERR: OnceLock<Queue> = OnceLock::new();

/// Log format.
///
/// The server's events go to the process's `tracing` subscriber; if there is none, nothing is written.
///
/// ```
/// use candle_gpt2_server::LogFormat;
///
/// LogFormat::Json.write_to_stderr();
/// // The process has a subscriber now, and keeps it.
/// LogFormat::Text.write_to_stderr();
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum LogFormat {
    /// A line of plain text: the request id and the event's other fields.
    #[default]
    Text,
    /// An object with `timestamp`, `level`, `request_id` and the event's other fields.
    Json,
}

impl LogFormat {
    /// Writes this process's events to standard error, one per line.
    ///
    /// If the process already has a `tracing` subscriber, this does nothing.
    ///
    /// A separate thread writes the lines, so a slow reader never blocks the server. While the thread's queue
    /// is full, lines are dropped and counted. A later line and the metric `gpt2_log_lines_dropped_total`
    /// report the count.
    pub fn write_to_stderr(self) {
        if tracing::dispatcher::has_been_set() {
            return;
        }
        let report = self.lines_to(io::stderr);
        let write = move |entry| match entry {
            Entry::Line(line) => io::stderr().write_all(&line),
            Entry::Dropped(count) => {
                with_default(Arc::clone(&report), || warn!(dropped_lines = count));
                Ok(())
            }
        };
        let queue = STDERR.get_or_init(|| Queue::start(DROPPED_LINES.clone(), write));
        // Fails if another thread has set a subscriber in the meantime.
        _ = tracing::subscriber::set_global_default(self.lines_to(queue.clone()));
    }

    /// Waits until all lines from [`write_to_stderr`](Self::write_to_stderr) are written.
    ///
    /// Call this before the process exits. Returns false if `timeout` expires first. In that case, the
    /// process that reads standard error has stalled, and writing to standard error would block.
    pub fn flush_stderr(timeout: Duration) -> bool {
        STDERR.get().is_none_or(|queue| queue.flush(timeout))
    }

    fn lines_to(
        self,
        writer: impl for<'a> MakeWriter<'a> + Send + Sync + 'static,
    ) -> Arc<dyn Subscriber + Send + Sync> {
        // Keeps `tracing_subscriber` from printing its own message when a write fails.
        let lines =
            tracing_subscriber::fmt().with_writer(writer).log_internal_errors(false).with_target(false);
        match self {
            Self::Text => {
                Arc::new(lines.with_level(false).without_time().fmt_fields(debug_fn(write_field)).finish())
            }
            Self::Json => Arc::new(lines.json().flatten_event(true).finish()),
        }
    }
}

/// Counter of unwritten log lines, shared by all servers in the process.
pub(crate) fn dropped_lines() -> Counter {
    DROPPED_LINES.clone()
}

/// Formats one field of an event. Fields arrive in the event's order.
fn write_field(line: &mut Writer<'_>, field: &Field, value: &dyn Debug) -> fmt::Result {
    match field.name() {
        "request_id" => write!(line, "{value:?}"),
        "cause" => write!(line, " failed: {}", one_line(value)),
        "prompt_tokens" => write!(line, " prompt={value:?}"),
        "new_tokens" => write!(line, " new={value:?}"),
        "seconds" => write!(line, " seconds={value:.3?}"),
        "dropped_lines" => {
            write!(line, "log: dropped {value:?} lines because standard error was not read in time")
        }
        _ => write!(line, " {}", one_line(value)),
    }
}

/// Joins a value's lines, because a log entry is one line.
fn one_line(value: &dyn Debug) -> String {
    let value = format!("{value:?}");
    let words: Vec<&str> = value.split(char::is_control).filter(|part| !part.is_empty()).collect();
    words.join(" ")
}

/// Logs why requests failed; `requests` lists their ids.
pub(crate) fn log_failure(requests: &str, cause: impl Display) {
    #[cfg(test)]
    tests::keep();
    error!(request_id = %requests, cause = %Shortened(cause));
}

/// Displays a value, cut after [`MAX_FIELD`] bytes with an ellipsis.
pub(crate) struct Shortened<T>(pub(crate) T);

impl<T: Display> Display for Shortened<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut limited = Limited { f, left: MAX_FIELD, is_cut: false };
        let written = write!(limited, "{}", self.0);
        match limited.is_cut {
            true => f.write_char('…'),
            false => written,
        }
    }
}

/// Writer that fails once its limit is reached, so that the rest is not even formatted.
struct Limited<'a, 'b> {
    f: &'a mut fmt::Formatter<'b>,
    left: usize,
    is_cut: bool,
}

impl fmt::Write for Limited<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let fitting = text.floor_char_boundary(self.left);
        self.f.write_str(text.get(..fitting).unwrap_or_default())?;
        self.left -= fitting;
        self.is_cut = fitting < text.len();
        if self.is_cut { Err(fmt::Error) } else { Ok(()) }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Mutex, PoisonError};

    use super::*;

    static LINES: Mutex<Vec<u8>> = Mutex::new(Vec::new());

    struct Capture;

    impl io::Write for Capture {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            LINES.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Captures the log lines of this process.
    pub(super) fn keep() {
        _ = tracing::subscriber::set_global_default(LogFormat::Text.lines_to(|| Capture));
    }

    /// Returns the captured lines that contain `words`.
    pub(crate) fn lines_with(words: &str) -> Vec<String> {
        let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
        let lines = str::from_utf8(&lines).unwrap().lines();
        lines.filter(|line| line.contains(words)).map(str::to_owned).collect()
    }

    #[test]
    fn long_values_are_cut_at_a_character_boundary() {
        let text = format!("{}é{}", "x".repeat(MAX_FIELD - 1), "y".repeat(1 << 20));
        assert_eq!(Shortened(text).to_string(), format!("{}…", "x".repeat(MAX_FIELD - 1)));
        let short = "é".repeat(MAX_FIELD / 2);
        assert_eq!(Shortened(&short).to_string(), short);
        log_failure("req-of-length", "z".repeat(1 << 20));
        let lines = lines_with("req-of-length");
        assert!(lines.len() == 1 && lines[0].len() < MAX_FIELD + 50, "{} lines", lines.len());
    }

    #[test]
    fn dropped_lines_are_reported_in_both_formats() {
        let report = || warn!(dropped_lines = 70_007_u64);
        with_default(LogFormat::Text.lines_to(|| Capture), report);
        let expected = "log: dropped 70007 lines because standard error was not read in time";
        assert_eq!(lines_with("70007"), [expected]);
        with_default(LogFormat::Json.lines_to(|| Capture), report);
        let line: serde_json::Value = serde_json::from_str(&lines_with("70007")[1]).unwrap();
        assert_eq!((&line["level"], &line["dropped_lines"]), (&"WARN".into(), &70_007.into()));
    }

    #[test]
    fn entries_are_single_lines() {
        let fail = || log_failure("req-of-lines", "first\nsecond\r\n\tthird");
        fail();
        assert_eq!(lines_with("req-of-lines"), ["req-of-lines failed: first second third"]);
        with_default(LogFormat::Json.lines_to(|| Capture), fail);
        let lines = lines_with("req-of-lines");
        let line: serde_json::Value = serde_json::from_str(&lines[1]).unwrap();
        assert_eq!((&line["level"], &line["request_id"]), (&"ERROR".into(), &"req-of-lines".into()));
        assert_eq!((&line["cause"], lines.len()), (&"first\nsecond\r\n\tthird".into(), 2));
    }
}
