//! Warnings of an answer: unknown fields, which a strict server refuses, and characters that the tokenizer leaves out.

use std::fmt;

use serde_json::Value;

use super::told::beginning;
use super::walk::{Key, walk};
use crate::ApiError;

/// Most unknown fields of a body that are named; of the others it is said how many there are.
const MOST_NAMED: usize = 16;
/// Longest name, in bytes, that is compared with those of known fields.
const MOST_COMPARED: usize = 64;
/// The least likeness of a name that is suggested: `max_new_tokens` is 0.71 like `max_tokens`, which it means, and `length_penalty` 0.64
/// like `repeat_penalty`, which it does not mean.
const NEAR: f64 = 0.7;

/// Least letters of a name that is taken for the beginning of another.
const SHORTENED: usize = 4;

/// Parts of a request that were ignored: unknown fields, and characters without a token.
///
/// ```
/// use candle_gpt2_api::{ApiOptions, Endpoint, ServedModel, Work};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&candle_gpt2_engine::Silent)?.load(&candle_gpt2_engine::Silent)?;
/// # let served = ServedModel::new(&model, ApiOptions { name: "built-in".into(), ..ApiOptions::default() })?;
/// let body = br#"{"tokens": [5, 6], "modle": "built-in"}"#;
/// let Work::Reply(reply) = served.read(Endpoint::Detokenize, body, None)? else { panic!("nothing is left to do") };
/// let warning = "unknown field `modle` was ignored; did you mean `model`?";
/// assert_eq!(reply.warnings.iter().collect::<Vec<_>>(), [warning]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Warnings {
    ignored: Vec<Ignored>,
    /// Unknown fields beside those.
    more: usize,
}

/// A part of a request that was ignored.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Ignored {
    Field {
        /// Without control characters: a log has a line for each request.
        path: String,
        nearest: Option<String>,
    },
    /// Anything else, as a sentence.
    Other(String),
}

impl Warnings {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ignored.is_empty()
    }

    /// Adds a note, such as that on a character of the prompt.
    pub(crate) fn add(&mut self, note: Option<String>) {
        self.ignored.extend(note.map(Ignored::Other));
    }

    /// A sentence for each part.
    pub fn iter(&self) -> impl Iterator<Item = String> {
        let named = self.ignored.iter().map(|ignored| match ignored {
            Ignored::Field { path, nearest } => {
                format!("unknown field `{path}` was ignored{}", suggestion(nearest.as_deref()))
            }
            Ignored::Other(note) => note.clone(),
        });
        named.chain((self.more > 0).then(|| format!("{} more unknown fields were ignored", self.more)))
    }

    /// Notes an unknown field, with the known name that is meant by it, if one is like it.
    pub(super) fn note<'k>(&mut self, path: &str, name: &str, known: impl Iterator<Item = &'k str>) {
        if self.ignored.len() == MOST_NAMED {
            self.more += 1;
            return;
        }
        let path: String = path.chars().flat_map(char::escape_debug).collect();
        let is_other =
            |ignored: &Ignored| !matches!(ignored, Ignored::Field { path: named, .. } if *named == path);
        if self.ignored.iter().all(is_other) {
            self.ignored.push(Ignored::Field { path, nearest: nearest(name, known) });
        }
    }

    /// Notes the fields of a value, and of the objects in it, that its description does not have.
    pub(super) fn note_inner(&mut self, json: &str, schema: &Value, path: &str) {
        if !json.starts_with(['{', '[']) || !has_fields(schema) {
            return;
        }
        for alternative in schema["oneOf"].as_array().into_iter().flatten() {
            self.note_inner(json, alternative, path);
        }
        let properties = schema["properties"].as_object();
        // The body was read as JSON before.
        let _ = walk(json, |key, value| match (key, properties, schema.get("items")) {
            (Key::Index(index), _, Some(items)) => {
                self.note_inner(value.get(), items, &format!("{path}[{index}]"));
            }
            (Key::Name(name), Some(properties), _) => {
                let path = format!("{path}.{}", beginning(name));
                match properties.get(name) {
                    Some(schema) => self.note_inner(value.get(), schema, &path),
                    None if value.get() == "null" => {}
                    None => self.note(&path, name, properties.keys().map(String::as_str)),
                }
            }
            _ => {}
        });
    }

    /// The first of them as a reason to refuse the request.
    pub(crate) fn refusal(&self) -> Option<ApiError> {
        let Ignored::Field { path, nearest } = self.ignored.first()? else { return None };
        let message = match nearest {
            Some(nearest) => format!("unknown field `{path}`; did you mean `{nearest}`?"),
            None => {
                format!("unknown field `{path}`; leave it out, this server refuses what it does not know")
            }
        };
        Some(ApiError::invalid(message).with_param(path).with_code("unknown_parameter"))
    }

    /// A JSON object with these as its last entry, `warnings`; without any as it is.
    pub(crate) fn added_to(&self, json: String) -> String {
        let Some(entries) = json.trim_end().strip_suffix('}').filter(|_| !self.is_empty()) else {
            return json;
        };
        let comma = if entries.ends_with('{') { "" } else { "," };
        let warnings: Value = self.iter().collect();
        format!("{entries}{comma}\"warnings\":{warnings}}}")
    }
}

/// All of them on one line.
impl fmt::Display for Warnings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iter().enumerate().try_for_each(|(place, warning)| {
            let before = if place == 0 { "" } else { "; " };
            write!(f, "{before}{warning}")
        })
    }
}

/// An answer as a whole.
///
/// A part of [`Work`](crate::Work); [`Warnings`] have an example.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// A JSON object, with the warnings under `warnings` if there are any.
    pub json: String,
    /// The request's unknown fields, for a log.
    pub warnings: Warnings,
}

impl Reply {
    /// The answer with this JSON object to a request with these warnings.
    pub fn new(json: String, warnings: Warnings) -> Self {
        Self { json: warnings.added_to(json), warnings }
    }
}

fn suggestion(nearest: Option<&str>) -> String {
    nearest.map_or(String::new(), |nearest| format!("; did you mean `{nearest}`?"))
}

/// The known name that is most like this one, if one is like it at all: `temp` is the beginning of `temperature`.
fn nearest<'k>(name: &str, known: impl Iterator<Item = &'k str>) -> Option<String> {
    if name.len() > MOST_COMPARED {
        return None;
    }
    let likeness = |known: &str| match name.len() >= SHORTENED && known.starts_with(name) {
        true => 1.0,
        false => strsim::normalized_damerau_levenshtein(name, known),
    };
    let likeness = known.map(|known| (likeness(known), known));
    let near = likeness.filter(|(likeness, _)| *likeness >= NEAR);
    near.max_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, name)| name.to_owned())
}

/// Whether the description of a value has fields.
fn has_fields(schema: &Value) -> bool {
    let alternatives = schema["oneOf"].as_array();
    !schema["properties"].is_null()
        || schema.get("items").is_some_and(has_fields)
        || alternatives.is_some_and(|alternatives| alternatives.iter().any(has_fields))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_the_last_entry_of_an_object() {
        let ignored = vec![Ignored::Field { path: "a\\\"".into(), nearest: Some("b".into()) }];
        let warnings = Warnings { ignored, more: 2 };
        let expected = r#""warnings":["unknown field `a\\\"` was ignored; did you mean `b`?","2 more unknown fields were ignored"]}"#;
        assert_eq!(warnings.added_to("{}".into()), format!("{{{expected}"));
        assert_eq!(warnings.added_to("{\"x\":1}\n".into()), format!("{{\"x\":1,{expected}"));
        assert_eq!(Warnings::default().added_to("{\"x\":1}\n".into()), "{\"x\":1}\n");
        let line = "unknown field `a\\\"` was ignored; did you mean `b`?; 2 more unknown fields were ignored";
        assert_eq!(warnings.to_string(), line);
    }
}
