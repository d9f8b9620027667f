//! Error messages for invalid values: the path, the expected value and the value found.

use std::fmt::Display;

use serde_json::error::Category;
use serde_path_to_error::Segment;

use super::walk::{Key, walk};
use crate::ApiError;

/// Maximum number of characters that a message quotes from a value or name.
const SHOWN_CHARS: usize = 40;

/// Delimiter around the path that precedes the error message for an [`inner`] value.
pub(super) const INNER: char = '\u{1}';

/// Error for an invalid value at `path`.
pub(crate) fn wrong_value(path: &str, expected: impl Display, found: impl Display) -> ApiError {
    ApiError::invalid(format!("{path}: expected {expected}, found {found}")).with_param(path)
}

/// Returns the path of a nested value and its error message.
pub(super) fn located<'s>(
    segments: impl Iterator<Item = &'s Segment>,
    error: &serde_json::Error,
    mut path: String,
    mut json: &str,
) -> (String, String) {
    for segment in segments {
        let mut value = "";
        // Cannot fail, because the value has already been parsed.
        let _ = walk(json, |key, found| match (key, segment) {
            (Key::Name(name), Segment::Map { key }) if name == key => value = found.get(),
            (Key::Index(found_at), Segment::Seq { index }) if found_at == *index => value = found.get(),
            _ => {}
        });
        match segment {
            Segment::Map { key } => path = format!("{path}.{}", beginning(key)),
            Segment::Seq { index } => path = format!("{path}[{index}]"),
            Segment::Enum { .. } | Segment::Unknown => continue,
        }
        json = value;
    }
    let message = expected_and_found(error, json);
    match message.strip_prefix(INNER).and_then(|message| message.split_once(INNER)) {
        Some((inner, message)) => (path + inner, message.to_owned()),
        None => (path, message),
    }
}

/// Converts a serde error to the project's message style.
fn expected_and_found(error: &serde_json::Error, json: &str) -> String {
    let message = without_position(error);
    match error.classify() {
        Category::Data if message.starts_with("invalid ") => {
            let expected =
                message.rsplit_once(", expected ").map_or("a valid value", |(_, expected)| expected);
            let expected = if expected == "a boolean" { "true or false" } else { expected };
            format!("expected {expected}, found {}", found(json))
        }
        Category::Data if message.starts_with("expected ") && !message.contains(", found ") => {
            format!("{message}, found {}", found(json))
        }
        Category::Data => message,
        // The JSON string has already been scanned, so the only possible error is an unpaired `\u` surrogate.
        _ if json.starts_with('"') => format!("expected a string of Unicode characters, found {message}"),
        _ => format!("expected a valid value, found {}", found(json)),
    }
}

/// Returns serde's message without its position, which is relative to the value, not the body.
pub(crate) fn without_position(error: &serde_json::Error) -> String {
    let mut message = error.to_string();
    if let Some(end) = message.rfind(" at line ").filter(|_| error.line() > 0) {
        message.truncate(end);
    }
    message
}

/// Describes a value for a message: the JSON text if it is short, otherwise its type.
pub(crate) fn found(json: &str) -> String {
    if json.chars().count() <= SHOWN_CHARS && !json.is_empty() {
        return json.to_owned();
    }
    match json.chars().next() {
        Some('"') => "a long string".into(),
        Some('[') => "a list".into(),
        Some('{') => "an object".into(),
        None => "nothing".into(),
        Some(_) => beginning(json),
    }
}

pub(crate) fn beginning(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}
