//! Data entries from JSON objects, one per line.

use serde_json::Value;

use super::record::{Row, shown};

/// UTF-8 byte order mark, which some programs write at the start of a file.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// Iterates over the non-empty lines, numbered from 1.
pub(super) fn rows(bytes: &[u8]) -> Box<dyn Iterator<Item = Row> + '_> {
    let bytes = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
    let lines = bytes.split(|byte| *byte == b'\n').enumerate();
    let written = lines.filter(|(_, line)| !line.trim_ascii().is_empty());
    Box::new(written.map(|(index, line)| (index + 1, fields(line))))
}

fn fields(line: &[u8]) -> Result<serde_json::Map<String, Value>, String> {
    let text = std::str::from_utf8(line).map_err(|error| {
        format!("expected UTF-8, found an invalid byte after {} bytes of the line", error.valid_up_to())
    })?;
    match serde_json::from_str(text) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(other) => Err(format!("expected a JSON object, found {}", shown(&other))),
        Err(error) => {
            // The parser sees a single line, so its line number is always 1 and is dropped.
            let message = error.to_string();
            let message = message.split(" at line ").next().unwrap_or_default();
            Err(format!("expected a JSON object, found invalid JSON: {message} at column {}", error.column()))
        }
    }
}
