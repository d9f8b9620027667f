//! Python keywords, deserialized into the same options structs as the program's flags.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::errors::{Failure, RESERVED, Result, type_error, value_error};
use crate::values::to_json;

/// Arguments that accept texts or token IDs.
pub(crate) const TEXTS: [&str; 3] = ["text", "clean", "corrupt"];

/// Keyword that prepends a BOS token to texts, as in a HookedTransformer.
pub(crate) const PREPEND_BOS: &str = "prepend_bos";

/// Prefix of serde's message for an unknown field.
const UNKNOWN: &str = "unknown field ";
/// Prefix of the message for a value of the wrong type, from this project's `expecting` methods.
const OTHER_TYPE: &str = "invalid type: expected ";
/// Prefix of serde's message for an integer outside the range of the option's type.
const OUT_OF_RANGE: &str = "invalid value: integer `";

/// Removes `prepend_bos` from the keywords and returns its value.
///
/// It is a keyword of the methods, but not an option of the libraries.
pub(crate) fn take_bos(options: Option<&Bound<'_, PyDict>>) -> Result<bool> {
    let Some(options) = options else { return Ok(false) };
    let Some(bos) = options.get_item(PREPEND_BOS)? else { return Ok(false) };
    options.del_item(PREPEND_BOS)?;
    Ok(bos.extract()?)
}

/// Deserializes keywords into an options struct.
///
/// Each keyword is checked separately, so that an error can name it. Keywords that are None keep the default.
/// `fields` are the method's declared arguments, and `others` are keywords that the method reads itself.
pub(crate) fn read<T: DeserializeOwned>(
    mut fields: Map<String, Value>,
    keywords: Option<&Bound<'_, PyDict>>,
    others: &[&str],
) -> Result<T> {
    let required = fields.clone();
    if let Err(error) = serde_json::from_value::<T>(Value::Object(required.clone())) {
        // Any text is valid, so the error is in another argument.
        let argument = required.keys().find(|name| !TEXTS.contains(&name.as_str()));
        return Err(invalid_keyword(argument.map_or("", String::as_str), &error.to_string()));
    }
    for (keyword, value) in keywords.into_iter().flatten() {
        let keyword: String = keyword.extract()?;
        let option = keyword.strip_suffix('_').filter(|name| RESERVED.contains(name)).unwrap_or(&keyword);
        let alone = |value: Value| {
            let mut fields = required.clone();
            fields.insert(option.to_owned(), value);
            serde_json::from_value::<T>(Value::Object(fields)).map_err(|error| error.to_string())
        };
        if let Err(error) = alone(Value::Null)
            && error.starts_with(UNKNOWN)
        {
            return Err(unknown_field(&keyword, &error, others));
        }
        if value.is_none() {
            continue;
        }
        let json = to_json(&value)
            .map_err(|error| error.with_note(value.py(), &format!("in the option {keyword}")))?;
        alone(json.clone()).map_err(|error| invalid_keyword(&keyword, &error))?;
        fields.insert(option.to_owned(), json);
    }
    serde_json::from_value(Value::Object(fields)).map_err(|error| value_error(error.to_string()))
}

fn invalid_keyword(keyword: &str, message: &str) -> Failure {
    if let Some(expected) = message.strip_prefix(OTHER_TYPE) {
        return type_error(format!("{keyword}: expected {expected}"));
    }
    match message.strip_prefix(OUT_OF_RANGE).and_then(|rest| rest.split_once('`')) {
        Some((number, _)) => {
            let expected = if number.starts_with('-') { "a non-negative number" } else { "a smaller number" };
            value_error(format!("{keyword}: expected {expected}, found {number}"))
        }
        None => value_error(format!("{keyword}: {message}")),
    }
}

/// Creates an error for an unknown keyword, with the most similar field that serde lists.
///
/// serde's message is ``unknown field `x`, expected one of `a`, `b` ``.
fn unknown_field(keyword: &str, message: &str, others: &[&str]) -> Failure {
    let listed = message.split('`').skip(1).step_by(2).skip(1);
    unknown_keyword(keyword, listed.chain(others.iter().copied()))
}

/// Creates an error for an unknown keyword, with the most similar known keyword.
pub(crate) fn unknown_keyword<'a>(keyword: &str, known: impl Iterator<Item = &'a str>) -> Failure {
    /// Minimum similarity for a suggestion.
    const MIN_SIMILARITY: f64 = 0.7;
    let similar = known
        .map(|known| (strsim::jaro(keyword, known), known))
        .filter(|(similarity, _)| *similarity >= MIN_SIMILARITY);
    let nearest = similar.max_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, known)| known);
    let nearest = nearest.map_or(String::new(), |nearest| format!("; did you mean `{nearest}`?"));
    type_error(format!("unknown option `{keyword}`{nearest}"))
}
