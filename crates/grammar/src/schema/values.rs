//! Rejects `const` and `enum` values that the library would not write exactly.

use serde_json::{Map, Value};

use super::numbers;
use super::places::children;

/// Rejects a schema with a `const` or `enum` value that the library cannot write exactly.
///
/// # Errors
/// The keyword and the reason.
pub(super) fn check(schema: &Map<String, Value>) -> Result<(), (&'static str, String)> {
    for keyword in ["const", "enum"] {
        schema.get(keyword).map_or(Ok(()), check_value).map_err(|what| (keyword, what))?;
    }
    Ok(())
}

fn check_value(value: &Value) -> Result<(), String> {
    match value {
        Value::Number(number) if !numbers::is_written_exactly(number) => Err(format!(
            "expected numbers of at most {} in magnitude, found {number}, which would lose digits; use a string",
            numbers::LARGEST_EXACT
        )),
        Value::String(text) if text.chars().any(is_unwritable) => Err(format!(
            "expected text without control characters other than \\b, \\f, \\n, \\r and \\t, found {value}"
        )),
        value => children(value).into_iter().try_for_each(|(_, inner)| check_value(inner)),
    }
}

/// Whether JSON requires `\u` for the character, or the library never writes the character.
fn is_unwritable(character: char) -> bool {
    character.is_ascii_control() && !['\u{8}', '\t', '\n', '\u{c}', '\r'].contains(&character)
}
