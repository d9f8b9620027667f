//! Fields that say what the text must conform to: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_…`, llama.cpp's
//! `json_schema`.

use candle_gpt2_grammar::Grammar;
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::ApiError;
use crate::body::{Body, Described, List, Text, fields, inner, without_place, words, wrong_value};

/// Longest schema or grammar, as it is written in a body.
const MAX_GRAMMAR_BYTES: usize = candle_gpt2_grammar::MAX_SOURCE_BYTES;
/// Most texts to choose from.
const MAX_CHOICES: usize = 1024;
/// Longest regular expression, each byte of which costs some ten microseconds before anything is known of it.
const MAX_REGEX_BYTES: usize = 8 << 10;

/// The names of the fields.
const FORMS: [&str; 6] = [
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_grammar",
    "guided_choice",
];

fields! {
    /// The fields, of which a request has at most one.
    FormFields {
        /// What the completion must be, in OpenAI's words.
        response_format: Option<FormatFields>,
        /// What the completion must be, in vLLM's words: one of these.
        structured_outputs: Option<OutputFields>,
        /// A JSON schema that the completion conforms to.
        guided_json | json_schema: Option<Schema>,
        /// A regular expression that the whole completion matches.
        guided_regex: Option<Text<MAX_REGEX_BYTES>>,
        /// A grammar in Lark's syntax, as llguidance reads it, that the completion conforms to.
        guided_grammar: Option<Text<MAX_GRAMMAR_BYTES>>,
        /// The completion is one of these texts.
        guided_choice: Option<Choices>,
    }
}

/// What the text must conform to, and the field that says so, as it was given.
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
        Some((name, _)) => Err(wrong_value(&name, "one description of the text", "a second one")),
    }
}

fn of_format(format: FormatFields, body: &Body<'_>) -> Result<Option<Grammar>, ApiError> {
    let wrong = |expected: &str| body.wrong("response_format", expected);
    let kind = format.r#type.ok_or_else(|| wrong("a type, `text`, `json_object` or `json_schema`"))?;
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
        _ => Err(body.wrong("structured_outputs", "one of json, regex, grammar, choice and json_object")),
    }
}

/// One of several texts.
fn of_choices(List(texts): Choices, field: &str, body: &Body<'_>) -> Result<Grammar, ApiError> {
    let texts: Vec<String> = texts.into_iter().map(|Text(text)| text).collect();
    match Grammar::choice(&texts) {
        Some(Grammar::Regex(pattern)) if pattern.len() > MAX_REGEX_BYTES => {
            Err(body.wrong(field, format_args!("texts of at most {MAX_REGEX_BYTES} bytes together")))
        }
        Some(grammar) => Ok(grammar),
        None => Err(body.wrong(field, "a list of texts that are not empty")),
    }
}

/// A JSON schema, also as a string; `true` allows any object.
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
                let what = format_args!("expected JSON of at most {most} bytes, found one of {length} bytes");
                return Err(D::Error::custom(what));
            }
            json => serde_json::from_str(json).map_err(|error| {
                D::Error::custom(format_args!("expected JSON, found {}", without_place(&error)))
            })?,
        };
        match schema {
            Value::Object(_) => Ok(Self(Grammar::JsonSchema(schema))),
            _ => Err(D::Error::custom("expected a JSON schema, which is an object")),
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
    /// The kinds of a `response_format`.
    FormatKind { "text" => Text, "json_object" => JsonObject, "json_schema" => JsonSchema }
}

fields! {
    /// OpenAI's `response_format`.
    FormatFields {
        /// The kind of text.
        @required r#type: Option<FormatKind>,
        /// With the type `json_schema`.
        json_schema: Option<NamedSchema>,
        /// With the type `json_object`, as llama.cpp has it: a JSON schema.
        schema: Option<Schema>,
    }
}

fields! {
    /// A schema with its name. It is always kept to the letter, as OpenAI's `strict` asks for.
    NamedSchema {
        /// A JSON schema.
        @required schema: Option<Schema>,
    }
    ignored ["name", "description", "strict"]
}

fields! {
    /// vLLM's `structured_outputs`.
    OutputFields {
        /// As `guided_json`.
        json: Option<Schema>,
        /// As `guided_regex`.
        regex: Option<Text<MAX_REGEX_BYTES>>,
        /// As `guided_grammar`.
        grammar: Option<Text<MAX_GRAMMAR_BYTES>>,
        /// Whether the completion is a JSON object.
        json_object: Option<bool>,
        /// As `guided_choice`.
        choice: Option<Choices>,
    }
}
