//! Keywords, read by serde into the options of the libraries: the structs that the program's flags are read into.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::errors::{Failure, RESERVED, Result, wrong_type, wrong_value};
use crate::values::json_of;

/// Arguments that are texts, or token ids.
pub(crate) const TEXTS: [&str; 3] = ["text", "clean", "corrupt"];

/// The keyword for a BOS token in front of texts, as of a HookedTransformer.
pub(crate) const PREPEND_BOS: &str = "prepend_bos";

/// What serde says of a key that no option has.
const UNKNOWN: &str = "unknown field ";
/// What types of ours say of a value of another type, see `expecting` there.
const OTHER_TYPE: &str = "invalid type: expected ";
/// What serde says of an integer that the option's type does not hold.
const OUT_OF_RANGE: &str = "invalid value: integer `";

/// Takes out whether a BOS token goes in front of texts: `prepend_bos` is a keyword of methods, and of no options of the libraries.
pub(crate) fn take_bos(options: Option<&Bound<'_, PyDict>>) -> Result<bool> {
    let Some(options) = options else { return Ok(false) };
    let Some(bos) = options.get_item(PREPEND_BOS)? else { return Ok(false) };
    options.del_item(PREPEND_BOS)?;
    Ok(bos.extract()?)
}

/// Reads keywords, each by itself, so that an error names it; those that are None keep the default. `fields` are arguments that the
/// method names, and `others` keywords that it reads itself.
pub(crate) fn read<T: DeserializeOwned>(
    mut fields: Map<String, Value>,
    keywords: Option<&Bound<'_, PyDict>>,
    others: &[&str],
) -> Result<T> {
    let required = fields.clone();
    if let Err(error) = serde_json::from_value::<T>(Value::Object(required.clone())) {
        // A text can be anything.
        let argument = required.keys().find(|name| !TEXTS.contains(&name.as_str()));
        return Err(refused(argument.map_or("", String::as_str), &error.to_string()));
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
            return Err(unknown(&keyword, &error, others));
        }
        if value.is_none() {
            continue;
        }
        let json = json_of(&value)
            .map_err(|error| error.with_note(value.py(), &format!("in the option {keyword}")))?;
        alone(json.clone()).map_err(|error| refused(&keyword, &error))?;
        fields.insert(option.to_owned(), json);
    }
    serde_json::from_value(Value::Object(fields)).map_err(|error| wrong_value(error.to_string()))
}

fn refused(keyword: &str, told: &str) -> Failure {
    if let Some(expected) = told.strip_prefix(OTHER_TYPE) {
        return wrong_type(format!("{keyword}: expected {expected}"));
    }
    match told.strip_prefix(OUT_OF_RANGE).and_then(|rest| rest.split_once('`')) {
        Some((number, _)) => {
            let expected = if number.starts_with('-') { "from 0 on" } else { "that is not so large" };
            wrong_value(format!("{keyword}: expected a number {expected}, found {number}"))
        }
        None => wrong_value(format!("{keyword}: {told}")),
    }
}

/// A keyword that there is not, with the nearest of those that serde lists: ``unknown field `x`, expected one of `a`, `b` ``.
fn unknown(keyword: &str, told: &str, others: &[&str]) -> Failure {
    let listed = told.split('`').skip(1).step_by(2).skip(1);
    unknown_keyword(keyword, listed.chain(others.iter().copied()))
}

/// A keyword that there is not, with the one that is most like it.
pub(crate) fn unknown_keyword<'a>(keyword: &str, known: impl Iterator<Item = &'a str>) -> Failure {
    /// Similarity from which a name may be meant.
    const NEAR: f64 = 0.7;
    let near = known
        .map(|known| (strsim::jaro(keyword, known), known))
        .filter(|(similarity, _)| *similarity >= NEAR);
    let nearest = near.max_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, known)| known);
    let nearest = nearest.map_or(String::new(), |nearest| format!("; the nearest name is `{nearest}`"));
    wrong_type(format!("there is no option `{keyword}`{nearest}"))
}
