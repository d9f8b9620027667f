//! The server's log: events of `tracing`, which a program shows as it likes, or as lines of text or of JSON.

use std::fmt::{self, Debug, Display};
use std::io;
use std::sync::Arc;

use tracing::{Subscriber, error, field::Field};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::{Writer, debug_fn};

/// The format of the log.
///
/// The server's events go to the subscriber of `tracing` that the process has; without one nothing is written.
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
    /// The number of the request, and what there is to tell of it.
    #[default]
    Text,
    /// An object with `timestamp`, `level`, `request_id` and the other fields of the event.
    Json,
}

impl LogFormat {
    /// From here on, writes each event of this process as one line on standard error, unless the process has a subscriber already.
    pub fn write_to_stderr(self) {
        // An error says that it has one.
        _ = tracing::subscriber::set_global_default(self.lines_to(io::stderr));
    }

    fn lines_to(
        self,
        writer: impl for<'a> MakeWriter<'a> + Send + Sync + 'static,
    ) -> Arc<dyn Subscriber + Send + Sync> {
        // What cannot be written is not told elsewhere.
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

/// Writes a field of an event as the line has it. The fields come in the order that the event names them in.
fn write_field(line: &mut Writer<'_>, field: &Field, value: &dyn Debug) -> fmt::Result {
    match field.name() {
        "request_id" => write!(line, "{value:?}"),
        "cause" => write!(line, " failed: {}", one_line(value)),
        "prompt_tokens" => write!(line, " prompt={value:?}"),
        "new_tokens" => write!(line, " new={value:?}"),
        "seconds" => write!(line, " seconds={value:.3?}"),
        _ => write!(line, " {}", one_line(value)),
    }
}

/// Causes may have several lines, and an entry has one.
fn one_line(value: &dyn Debug) -> String {
    let value = format!("{value:?}");
    let words: Vec<&str> = value.split(char::is_control).filter(|part| !part.is_empty()).collect();
    words.join(" ")
}

/// Tells why requests failed: `requests` are their ids.
pub(crate) fn log_failure(requests: &str, cause: impl Display) {
    #[cfg(test)]
    tests::keep();
    error!(request_id = %requests, %cause);
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Mutex, PoisonError};

    use super::*;

    static LINES: Mutex<Vec<u8>> = Mutex::new(Vec::new());

    struct Kept;

    impl io::Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            LINES.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// From here on, keeps the lines of this process.
    pub(super) fn keep() {
        _ = tracing::subscriber::set_global_default(LogFormat::Text.lines_to(|| Kept));
    }

    /// The lines with these words.
    pub(crate) fn lines_with(words: &str) -> Vec<String> {
        let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
        let lines = str::from_utf8(&lines).unwrap().lines();
        lines.filter(|line| line.contains(words)).map(str::to_owned).collect()
    }

    #[test]
    fn an_entry_is_one_line() {
        let fail = || log_failure("req-of-lines", "first\nsecond\r\n\tthird");
        fail();
        assert_eq!(lines_with("req-of-lines"), ["req-of-lines failed: first second third"]);
        tracing::subscriber::with_default(LogFormat::Json.lines_to(|| Kept), fail);
        let lines = lines_with("req-of-lines");
        let line: serde_json::Value = serde_json::from_str(&lines[1]).unwrap();
        assert_eq!((&line["level"], &line["request_id"]), (&"ERROR".into(), &"req-of-lines".into()));
        assert_eq!((&line["cause"], lines.len()), (&"first\nsecond\r\n\tthird".into(), 2));
    }
}
