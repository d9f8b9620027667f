//! What a text must conform to, as llguidance takes it.

use llguidance::JsonCompileOptions;
use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};

use crate::GrammarError;

/// Longest grammar that is read, in bytes, a JSON schema as it is written without spaces.
pub const MAX_SOURCE_BYTES: usize = 256 << 10;

/// What a text must conform to, from its first byte to its last.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Grammar {
    /// A JSON object.
    JsonObject,
    /// A JSON value by a schema. Of JSON Schema it knows [what llguidance
    /// does](https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md); other keywords are errors, and so is a
    /// schema elsewhere, which is never fetched. Between its parts stands one space at most.
    JsonSchema(Value),
    /// A regular expression in the [syntax of the crate `regex`](https://docs.rs/regex/latest/regex/#syntax), which matches the
    /// whole text.
    Regex(String),
    /// A grammar in [llguidance's variant of
    /// Lark](https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md), whose first rule is `start`.
    Lark(String),
}

impl Grammar {
    /// What it is, in the words of messages.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::JsonObject | Self::JsonSchema(_) => "JSON schema",
            Self::Regex(_) => "regular expression",
            Self::Lark(_) => "grammar",
        }
    }

    /// The same as llguidance takes it.
    pub(crate) fn to_llguidance(&self) -> Result<TopLevelGrammar, GrammarError> {
        let kind = self.kind();
        let length = match self {
            Self::JsonObject => 0,
            Self::JsonSchema(schema) => schema.to_string().len(),
            Self::Regex(source) | Self::Lark(source) => source.len(),
        };
        if length > MAX_SOURCE_BYTES {
            return Err(GrammarError::TooLong { kind, most: MAX_SOURCE_BYTES, found: length });
        }
        match self {
            Self::JsonObject => Ok(of_schema(json!({ "type": "object" }))),
            Self::JsonSchema(schema @ Value::Object(_)) => Ok(of_schema(schema.clone())),
            Self::JsonSchema(Value::Bool(true)) => Ok(of_schema(json!({}))),
            Self::JsonSchema(found) => {
                Err(GrammarError::Grammar { kind, what: format!("expected an object, found {found}") })
            }
            Self::Regex(source) => Ok(TopLevelGrammar::from_regex(source)),
            Self::Lark(source) => Ok(TopLevelGrammar::from_lark(source.clone())),
        }
    }
}

/// A schema that is an object, with at most one space between the parts of a value: without a bound a model may go on with
/// spaces for ever.
fn of_schema(mut schema: Value) -> TopLevelGrammar {
    let options = JsonCompileOptions { whitespace_pattern: Some(r"\x20".into()), ..JsonCompileOptions::default() };
    options.apply_to(&mut schema);
    TopLevelGrammar::from_json_schema(schema)
}
