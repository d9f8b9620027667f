//! What is told while the server runs, and why requests failed.

use std::fmt::Display;
use std::io::Write;

/// Writes a line on standard error, where there is one.
pub(crate) fn log(line: &str) {
    // Causes may have several lines, and an entry has one.
    let words: Vec<&str> = line.split(char::is_control).filter(|part| !part.is_empty()).collect();
    let line = words.join(" ");
    #[cfg(test)]
    tests::keep(&line);
    _ = writeln!(std::io::stderr(), "{line}");
}

/// Writes why requests failed: `requests` are their ids.
pub(crate) fn log_failure(requests: &str, cause: impl Display) {
    log(&format!("{requests} failed: {cause}"));
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Mutex, PoisonError};

    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

    pub(super) fn keep(line: &str) {
        LINES.lock().unwrap_or_else(PoisonError::into_inner).push(line.to_owned());
    }

    /// The lines with these words.
    pub(crate) fn lines_with(words: &str) -> Vec<String> {
        let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().filter(|line| line.contains(words)).cloned().collect()
    }

    #[test]
    fn an_entry_is_one_line() {
        super::log_failure("req-of-lines", "first\nsecond\r\n\tthird");
        assert_eq!(lines_with("req-of-lines"), ["req-of-lines failed: first second third"]);
    }
}
