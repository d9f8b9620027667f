//! Paths in a schema: keys, indices and JSON pointers.

use serde_json::Value;

/// Returns a value's direct children, with their keys escaped for a JSON pointer.
pub(super) fn children(value: &Value) -> Vec<(String, &Value)> {
    match value {
        Value::Object(members) => members.iter().map(|(key, member)| (escaped(key), member)).collect(),
        Value::Array(items) => {
            items.iter().enumerate().map(|(index, item)| (index.to_string(), item)).collect()
        }
        _ => Vec::new(),
    }
}

/// Escapes a key for a JSON pointer.
pub(super) fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

/// Formats a path as a JSON pointer.
pub(super) fn pointer(place: &[String]) -> String {
    place.iter().map(|key| format!("/{}", escaped(key))).collect()
}

/// Returns the value at a path.
pub(super) fn at<'a>(root: &'a Value, place: &[String]) -> Option<&'a Value> {
    place.iter().try_fold(root, |value, key| match value {
        Value::Object(members) => members.get(key),
        Value::Array(items) => items.get(key.parse::<usize>().ok()?),
        _ => None,
    })
}

pub(super) fn at_mut<'a>(root: &'a mut Value, place: &[String]) -> Option<&'a mut Value> {
    place.iter().try_fold(root, |value, key| match value {
        Value::Object(members) => members.get_mut(key),
        Value::Array(items) => items.get_mut(key.parse::<usize>().ok()?),
        _ => None,
    })
}
