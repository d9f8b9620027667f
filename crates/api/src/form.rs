//! Fields for structured output.
//!
//! Supported are OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_…`, and llama.cpp's
//! `json_schema`.

use candle_gpt2_grammar::Grammar;
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::ApiError;
use crate::body::{Body, Described, List, Text, fields, inner, without_position, words, wrong_value};

/// Maximum length of a schema or grammar in a body, in bytes.
const MAX_GRAMMAR_BYTES: usize = candle_gpt2_grammar::MAX_SOURCE_BYTES;
/// Maximum number of choices.
const MAX_CHOICES: usize = 1024;
/// Maximum length of a regular expression in bytes; each byte costs about ten microseconds to parse.
const MAX_REGEX_BYTES: usize = 8 << 10;

/// Names of the structured output fields.
const FORMS: [&str; 6] = [
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_grammar",
    "guided_choice",
];

fields! {
    /// Structured output fields; a request sets at most one of them.
    FormFields {
        /// Format of the completion, as in OpenAI's API.
        response_format: Option<FormatFields>,
        /// Format of the completion, as in vLLM's API; set exactly one field.
        structured_outputs: Option<OutputFields>,
        /// A JSON schema that the completion conforms to.
        guided_json | json_schema: Option<Schema>,
        /// A regular expression that the whole completion matches.
        guided_regex: Option<Text<MAX_REGEX_BYTES>>,
        /// A grammar in llguidance's variant of Lark that the completion conforms to.
        guided_grammar: Option<Text<MAX_GRAMMAR_BYTES>>,
        /// Texts to choose from; the completion is exactly one of them.
        guided_choice: Option<Choices>,
    }
}

/// Reads the completion's grammar and the name of the field that contains the grammar.
pub(crate) fn read_grammar(body: &mut Body<'_>) -> Result<Option<(String, Grammar)>, ApiError> {
    let fields: FormFields = body.read()?;
    let grammars = [
        fields.response_format.map(|format| of_format(format, body)).transpose()?.flatten(),
        fields.structured_outputs.map(|outputs| of_outputs(outputs, body)).transpose()?,
        fields.guided_json.map(|Schema(grammar)| grammar),
        fields.guided_regex.map(|Text(regex)| Grammar::Regex(regex)),
        fields.guided_grammar.map(|Text(lark)| Grammar::Lark(lark)),
        fields.guided_choice.map(|choices| of_choices(choices, "guided_choice", body)).transpose()?,
    ];
    let named = |(field, grammar): (&str, Option<Grammar>)| Some((body.name(field).to_owned(), grammar?));
    let mut grammars = FORMS.into_iter().zip(grammars).filter_map(named);
    let first = grammars.next();
    match grammars.next() {
        None => Ok(first),
        Some((name, _)) => Err(wrong_value(&name, "one structured output field", "several")),
    }
}

fn of_format(format: FormatFields, body: &Body<'_>) -> Result<Option<Grammar>, ApiError> {
    let wrong = |expected: &str| body.wrong("response_format", expected);
    let kind =
        format.r#type.ok_or_else(|| wrong("an object with type `text`, `json_object` or `json_schema`"))?;
    let schema = match kind {
        FormatKind::Text => return Ok(None),
        FormatKind::JsonObject => format.schema.unwrap_or(Schema(Grammar::JsonObject)),
        FormatKind::JsonSchema => {
            let named = format.json_schema.ok_or_else(|| wrong("an object with json_schema"))?;
            named.schema.ok_or_else(|| wrong("an object with json_schema.schema"))?
        }
    };
    Ok(Some(schema.0))
}

fn of_outputs(outputs: OutputFields, body: &Body<'_>) -> Result<Grammar, ApiError> {
    let grammars = [
        outputs.json.map(|Schema(grammar)| grammar),
        outputs.regex.map(|Text(regex)| Grammar::Regex(regex)),
        outputs.grammar.map(|Text(lark)| Grammar::Lark(lark)),
        outputs.choice.map(|choices| of_choices(choices, "structured_outputs", body)).transpose()?,
        outputs.json_object.filter(|is_object| *is_object).map(|_| Grammar::JsonObject),
    ];
    let mut grammars = grammars.into_iter().flatten();
    match (grammars.next(), grammars.next()) {
        (Some(grammar), None) => Ok(grammar),
        _ => {
            Err(body
                .wrong("structured_outputs", "exactly one of json, regex, grammar, choice and json_object"))
        }
    }
}

/// Creates a grammar that accepts any one of several texts.
fn of_choices(List(texts): Choices, field: &str, body: &Body<'_>) -> Result<Grammar, ApiError> {
    let texts: Vec<String> = texts.into_iter().map(|Text(text)| text).collect();
    match Grammar::choice(&texts) {
        Some(Grammar::Regex(pattern)) if pattern.len() > MAX_REGEX_BYTES => {
            Err(body.wrong(field, format_args!("choices of at most {MAX_REGEX_BYTES} bytes in total")))
        }
        Some(grammar) => Ok(grammar),
        None => Err(body.wrong(field, "a list of non-empty strings")),
    }
}

/// JSON schema as an object or a string; `true` allows any object.
#[derive(Debug, Clone)]
pub(crate) struct Schema(Grammar);

impl<'de> Deserialize<'de> for Schema {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?;
        let schema = match raw.get() {
            "true" => return Ok(Self(Grammar::JsonObject)),
            json if json.starts_with('"') => {
                let Text::<MAX_GRAMMAR_BYTES>(text) = inner(raw)?;
                serde_json::from_str(&text).map_err(|_| D::Error::custom("expected a JSON schema"))?
            }
            json if json.len() > MAX_GRAMMAR_BYTES => {
                let (most, length) = (MAX_GRAMMAR_BYTES, json.len());
                let what = format_args!("expected JSON of at most {most} bytes, found {length} bytes");
                return Err(D::Error::custom(what));
            }
            json => serde_json::from_str(json).map_err(|error| {
                D::Error::custom(format_args!("expected JSON, found {}", without_position(&error)))
            })?,
        };
        match schema {
            Value::Object(_) => Ok(Self(Grammar::JsonSchema(schema))),
            _ => Err(D::Error::custom("expected a JSON schema object")),
        }
    }
}

impl Described for Schema {
    fn schema() -> Value {
        json!({ "type": ["object", "string", "boolean"] })
    }
}

/// Texts to choose from.
type Choices = List<Text<MAX_REGEX_BYTES>, MAX_CHOICES>;

words! {
    /// Kinds of `response_format`.
    FormatKind { "text" => Text, "json_object" => JsonObject, "json_schema" => JsonSchema }
}

fields! {
    /// OpenAI's `response_format`.
    FormatFields {
        /// The kind of output.
        @required r#type: Option<FormatKind>,
        /// The schema, for type `json_schema`.
        json_schema: Option<NamedSchema>,
        /// A JSON schema for type `json_object`, as in llama.cpp.
        schema: Option<Schema>,
    }
}

fields! {
    /// Named schema; always enforced exactly, as with OpenAI's `strict`.
    NamedSchema {
        /// A JSON schema.
        @required schema: Option<Schema>,
    }
    ignored ["name", "description", "strict"]
}

fields! {
    /// vLLM's `structured_outputs`.
    OutputFields {
        /// Same as `guided_json`.
        json: Option<Schema>,
        /// Same as `guided_regex`.
        regex: Option<Text<MAX_REGEX_BYTES>>,
        /// Same as `guided_grammar`.
        grammar: Option<Text<MAX_GRAMMAR_BYTES>>,
        /// Whether the completion is a JSON object.
        json_object: Option<bool>,
        /// Same as `guided_choice`.
        choice: Option<Choices>,
    }
}
