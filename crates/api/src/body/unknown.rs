//! Response warnings about unknown fields and about characters that the tokenizer drops.

use std::fmt;

use serde_json::Value;

use super::messages::beginning;
use super::walk::{Key, walk};
use crate::ApiError;

/// Maximum number of unknown fields listed by name; the others are only counted.
const MAX_NAMED: usize = 16;
/// Maximum length in bytes of a name that is compared with the known names.
const MAX_COMPARED_BYTES: usize = 64;
/// Minimum similarity between an unknown name and a suggestion.
///
/// `max_new_tokens` scores 0.71 against `max_tokens`, which is the intended field. `length_penalty` scores
/// 0.64 against `repeat_penalty`, which is not.
const MIN_SIMILARITY: f64 = 0.7;

/// Minimum number of letters in a name that counts as a prefix of another.
const MIN_PREFIX_LETTERS: usize = 4;

/// Ignored parts of a request: unknown fields and characters that have no token.
///
/// ```
/// use candle_gpt2_api::{ApiOptions, Endpoint, ServedModel, Work};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&candle_gpt2_engine::Silent)?.load(&candle_gpt2_engine::Silent)?;
/// # let served = ServedModel::new(&model, ApiOptions { name: "built-in".into(), ..ApiOptions::default() })?;
/// let body = br#"{"tokens": [5, 6], "modle": "built-in"}"#;
/// let Work::Reply(reply) = served.read(Endpoint::Detokenize, body, None)? else { panic!("expected a reply") };
/// let warning = "unknown field `modle` was ignored; did you mean `model`?";
/// assert_eq!(reply.warnings.iter().collect::<Vec<_>>(), [warning]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Warnings {
    ignored: Vec<Ignored>,
    /// Number of unknown fields beyond those listed by name.
    more: usize,
}

/// Ignored part of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Ignored {
    Field {
        /// Path of the field with control characters escaped, so that a log entry stays on one line.
        path: String,
        nearest: Option<String>,
    },
    /// Any other warning, as a sentence.
    Other(String),
}

impl Warnings {
    /// Whether there are no warnings.
    pub fn is_empty(&self) -> bool {
        self.ignored.is_empty()
    }

    /// Adds a note, for example about a character without a token.
    pub(crate) fn add(&mut self, note: Option<String>) {
        self.ignored.extend(note.map(Ignored::Other));
    }

    /// Returns one sentence for each ignored part.
    pub fn iter(&self) -> impl Iterator<Item = String> {
        let named = self.ignored.iter().map(|ignored| match ignored {
            Ignored::Field { path, nearest } => {
                format!("unknown field `{path}` was ignored{}", suggestion(nearest.as_deref()))
            }
            Ignored::Other(note) => note.clone(),
        });
        named.chain((self.more > 0).then(|| format!("{} more unknown fields were ignored", self.more)))
    }

    /// Adds an unknown field and the most similar known name, if one is similar enough.
    pub(super) fn note<'k>(&mut self, path: &str, name: &str, known: impl Iterator<Item = &'k str>) {
        if self.ignored.len() == MAX_NAMED {
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

    /// Adds the fields in a value and its nested objects that are missing from `schema`.
    pub(super) fn note_inner(&mut self, json: &str, schema: &Value, path: &str) {
        if !json.starts_with(['{', '[']) || !has_fields(schema) {
            return;
        }
        for alternative in schema["oneOf"].as_array().into_iter().flatten() {
            self.note_inner(json, alternative, path);
        }
        let properties = schema["properties"].as_object();
        // Cannot fail, because the body has already been parsed.
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

    /// Error about the first unknown field, for servers that reject unknown fields.
    pub(crate) fn refusal(&self) -> Option<ApiError> {
        let Ignored::Field { path, nearest } = self.ignored.first()? else { return None };
        let message = match nearest {
            Some(nearest) => format!("unknown field `{path}`; did you mean `{nearest}`?"),
            None => {
                format!("unknown field `{path}`; remove it, because this server rejects unknown fields")
            }
        };
        Some(ApiError::invalid(message).with_param(path).with_code("unknown_parameter"))
    }

    /// Appends the `warnings` entry to a JSON object; without warnings, returns the object unchanged.
    pub(crate) fn added_to(&self, json: String) -> String {
        let Some(entries) = json.trim_end().strip_suffix('}').filter(|_| !self.is_empty()) else {
            return json;
        };
        let comma = if entries.ends_with('{') { "" } else { "," };
        let warnings: Value = self.iter().collect();
        format!("{entries}{comma}\"warnings\":{warnings}}}")
    }
}

/// Joins all warnings into one line.
impl fmt::Display for Warnings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.iter().enumerate().try_for_each(|(index, warning)| {
            let before = if index == 0 { "" } else { "; " };
            write!(f, "{before}{warning}")
        })
    }
}

/// Complete answer.
///
/// Part of [`Work`](crate::Work). See [`Warnings`] for an example.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// JSON object, with any warnings under `warnings`.
    pub json: String,
    /// Warnings about the request, for a log.
    pub warnings: Warnings,
}

impl Reply {
    /// Creates a reply from a JSON object and adds the warnings to it.
    pub fn new(json: String, warnings: Warnings) -> Self {
        Self { json: warnings.added_to(json), warnings }
    }
}

fn suggestion(nearest: Option<&str>) -> String {
    nearest.map_or(String::new(), |nearest| format!("; did you mean `{nearest}`?"))
}

/// Most similar known name, if one is similar enough; `temp` matches as a prefix of `temperature`.
fn nearest<'k>(name: &str, known: impl Iterator<Item = &'k str>) -> Option<String> {
    if name.len() > MAX_COMPARED_BYTES {
        return None;
    }
    let similarity = |known: &str| match name.len() >= MIN_PREFIX_LETTERS && known.starts_with(name) {
        true => 1.0,
        false => strsim::normalized_damerau_levenshtein(name, known),
    };
    let similarity = known.map(|known| (similarity(known), known));
    let near = similarity.filter(|(similarity, _)| *similarity >= MIN_SIMILARITY);
    near.max_by(|(a, _), (b, _)| a.total_cmp(b)).map(|(_, name)| name.to_owned())
}

/// Whether a value's schema describes fields.
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
    fn warnings_are_appended_as_the_last_key() {
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
