//! What is told while the server runs.

use std::io::Write;

/// Writes a line on standard error, where there is one.
pub(crate) fn log(line: &str) {
    _ = writeln!(std::io::stderr(), "{line}");
}
