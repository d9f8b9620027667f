//! What messages say about a value: where it is, what was expected, what was found.

use std::fmt::Display;

use serde_json::error::Category;
use serde_path_to_error::Segment;

use super::walk::{Key, walk};
use crate::ApiError;

/// Most characters of a value, or of a name, that a message repeats.
const SHOWN_CHARS: usize = 40;

/// Around the path of an [`inner`] value, in front of what is wrong with it.
pub(super) const INNER: char = '\u{1}';

/// That a value, at this path, is wrong.
pub(crate) fn wrong_value(path: &str, expected: impl Display, found: impl Display) -> ApiError {
    ApiError::invalid(format!("{path}: expected {expected}, found {found}")).with_param(path)
}

/// The path of a value in a value, and what is wrong with it.
pub(super) fn located<'s>(
    segments: impl Iterator<Item = &'s Segment>,
    error: &serde_json::Error,
    mut path: String,
    mut json: &str,
) -> (String, String) {
    for segment in segments {
        let mut value = "";
        // What walks over a value that was read before finds nothing wrong.
        let _ = walk(json, |key, found| match (key, segment) {
            (Key::Name(name), Segment::Map { key }) if name == key => value = found.get(),
            (Key::Index(place), Segment::Seq { index }) if place == *index => value = found.get(),
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

/// What serde found wrong with a value, in the words of messages.
fn expected_and_found(error: &serde_json::Error, json: &str) -> String {
    let message = without_place(error);
    match error.classify() {
        Category::Data if message.starts_with("invalid ") => {
            let expected =
                message.rsplit_once(", expected ").map_or("another value", |(_, expected)| expected);
            let expected = if expected == "a boolean" { "true or false" } else { expected };
            format!("expected {expected}, found {}", found(json))
        }
        Category::Data if message.starts_with("expected ") && !message.contains(", found ") => {
            format!("{message}, found {}", found(json))
        }
        Category::Data => message,
        // All that can be wrong with a string by now is a `\u` of half a character.
        _ if json.starts_with('"') => format!("expected a string of Unicode characters, found {message}"),
        _ => format!("expected another value, found {}", found(json)),
    }
}

/// What serde says, without the place, which is one of the value and not of the body.
pub(crate) fn without_place(error: &serde_json::Error) -> String {
    let mut message = error.to_string();
    if let Some(end) = message.rfind(" at line ").filter(|_| error.line() > 0) {
        message.truncate(end);
    }
    message
}

/// A value as a message repeats it: as it is written if that is short, otherwise what it is.
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
