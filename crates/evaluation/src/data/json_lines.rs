//! Entries as objects of JSON, one a line.

use serde_json::Value;

use super::record::{Row, shown};

/// What some programs put before UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The lines that are not empty, numbered from 1.
pub(super) fn rows(bytes: &[u8]) -> Box<dyn Iterator<Item = Row> + '_> {
    let bytes = bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes);
    let lines = bytes.split(|byte| *byte == b'\n').enumerate();
    let written = lines.filter(|(_, line)| !line.trim_ascii().is_empty());
    Box::new(written.map(|(index, line)| (index + 1, fields(line))))
}

fn fields(line: &[u8]) -> Result<serde_json::Map<String, Value>, String> {
    let text = std::str::from_utf8(line).map_err(|error| {
        format!("expected UTF-8, found something else after {} bytes of the line", error.valid_up_to())
    })?;
    match serde_json::from_str(text) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(other) => Err(format!("expected a JSON object, found {}", shown(&other))),
        Err(error) => {
            // Its own position counts lines from the one it was given.
            let message = error.to_string();
            let message = message.split(" at line ").next().unwrap_or_default();
            Err(format!("expected a JSON object, found invalid JSON: {message} at column {}", error.column()))
        }
    }
}
