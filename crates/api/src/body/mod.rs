//! Request bodies.
//!
//! [`fields!`] declares the fields of a body once, for parsing with serde and for the OpenAPI description.
//! Values that no field reads are skipped rather than built. A body therefore needs little more memory than
//! its own bytes, at any nesting depth.

mod messages;
mod unknown;
mod values;
mod walk;

use std::fmt::Display;

use serde::de::IgnoredAny;
use serde::de::value::MapDeserializer;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use serde_path_to_error::Segment;

pub(crate) use messages::{beginning, found, without_position, wrong_value};
pub use unknown::{Reply, Warnings};
pub(crate) use values::{
    Count, Described, Integer, List, Seed, Text, TextOrList, TokenId, TokenIds, inner, number, one_of,
    parse_raw, whole_number, words,
};

use messages::located;
use walk::{Key, walk};

use crate::ApiError;

/// Role of a known field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// The field is read.
    Read,
    /// The field is an alias of a field that is read.
    Alias(&'static str),
    /// The field accepts any value and has no effect.
    Ignored,
    /// The field is unsupported; a nonempty value is rejected with this hint.
    Refused(&'static str),
}

/// Field that a request body may contain.
#[derive(Debug, Clone)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) use_: Use,
    /// Description of the field.
    pub(crate) doc: String,
    pub(crate) is_required: bool,
    /// Schema for the values, in the OpenAPI description.
    pub(crate) schema: Value,
}

impl Field {
    /// Returns a field that is read, followed by its aliases.
    pub(crate) fn read(
        name: &'static str,
        aliases: &[&'static str],
        doc: &str,
        is_required: bool,
        schema: &Value,
    ) -> Vec<Self> {
        let of = |name, use_, doc| Self { name, use_, doc, is_required, schema: schema.clone() };
        let alias = |alias: &&'static str| of(*alias, Use::Alias(name), format!("Another name of `{name}`."));
        let first = of(name, Use::Read, doc.trim().to_owned());
        std::iter::once(first).chain(aliases.iter().map(alias)).collect()
    }

    /// Creates a field that is not read.
    pub(crate) fn unread(name: &'static str, use_: Use) -> Self {
        Self { name, use_, doc: "Has no effect.".into(), is_required: false, schema: json!({}) }
    }
}

/// Object that serde deserializes, with fields declared by [`fields!`].
pub(crate) trait Fields {
    /// All known fields, including ignored and rejected ones.
    fn fields() -> &'static [Field];
}

/// Declares the fields of an object: documentation, name, aliases, type and default.
///
/// `@required` only marks a field in the description. `ignored` fields accept any value. `refused` fields are
/// rejected with a hint.
macro_rules! fields {
    (
        $(#[doc = $about:literal])+
        $name:ident {
            $( $(#[doc = $doc:literal])+ $(@ $required:ident)? $field:ident $(| $alias:ident)*: $kind:ty $(= $default:expr)?, )*
        }
        $(ignored [$($ignored:literal),* $(,)?])?
        $(refused [$($refused:literal: $hint:expr),* $(,)?])?
    ) => {
        $(#[doc = $about])+
        #[derive(Debug, Clone, serde::Deserialize)]
        #[serde(default)]
        pub(crate) struct $name {
            $( $(#[doc = $doc])+ pub(crate) $field: $kind, )*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $( $field: $crate::body::default_of!($($default)?), )* }
            }
        }

        impl $crate::body::Fields for $name {
            fn fields() -> &'static [$crate::body::Field] {
                static FIELDS: std::sync::LazyLock<Vec<$crate::body::Field>> = std::sync::LazyLock::new($name::all_fields);
                &FIELDS
            }
        }

        impl $name {
            fn all_fields() -> Vec<$crate::body::Field> {
                use $crate::body::{Described, Field, name_of};
                let mut fields = Vec::new();
                $(
                    let (name, schema) = (name_of(stringify!($field)), <$kind as Described>::schema());
                    $( let schema = $crate::body::with_default::<$kind>(schema, $default); )?
                    let (aliases, doc) = (&[$(stringify!($alias)),*], concat!($($doc),+));
                    let is_required = !<[&str]>::is_empty(&[$(stringify!($required))?]);
                    fields.extend(Field::read(name, aliases, doc, is_required, &schema));
                )*
                $( $( fields.push(Field::unread($ignored, $crate::body::Use::Ignored)); )* )?
                $( $( fields.push(Field::unread($refused, $crate::body::Use::Refused($hint))); )* )?
                fields
            }
        }

        impl $crate::body::Described for $name {
            fn schema() -> serde_json::Value {
                $crate::body::object_schema(<Self as $crate::body::Fields>::fields())
            }
        }
    };
}
pub(crate) use fields;

/// Default value of a field.
macro_rules! default_of {
    () => {
        Default::default()
    };
    ($default:expr) => {
        $default
    };
}
pub(crate) use default_of;

/// Field name in JSON, without `r#`.
pub(crate) fn name_of(field: &'static str) -> &'static str {
    field.trim_start_matches("r#")
}

pub(crate) fn with_default<T: Serialize>(mut schema: Value, default: T) -> Value {
    schema["default"] = json!(default);
    schema
}

/// OpenAPI schema of an object with these fields; all but required fields are nullable.
pub(crate) fn object_schema(fields: &[Field]) -> Value {
    let known = fields.iter().filter(|field| !matches!(field.use_, Use::Refused(_)));
    let property = |field: &Field| {
        let mut schema = json!({ "description": field.doc });
        let of_values = if field.is_required { field.schema.clone() } else { or_null(field.schema.clone()) };
        if let (Value::Object(schema), Value::Object(of_values)) = (&mut schema, of_values) {
            schema.extend(of_values);
        }
        (field.name.to_owned(), schema)
    };
    let properties: Map<String, Value> = known.map(property).collect();
    let required: Vec<&str> =
        fields.iter().filter(|field| field.is_required).map(|field| field.name).collect();
    match required.is_empty() {
        true => json!({ "type": "object", "properties": properties }),
        false => json!({ "type": "object", "required": required, "properties": properties }),
    }
}

/// Makes a schema nullable.
fn or_null(mut schema: Value) -> Value {
    for (key, absent) in
        [("type", json!("null")), ("enum", Value::Null), ("oneOf", json!({ "type": "null" }))]
    {
        match schema.get_mut(key) {
            Some(Value::Array(values)) => values.push(absent),
            Some(kind) => *kind = json!([kind, absent]),
            None => {}
        }
    }
    schema
}

/// Value in a body and the field that it belongs to.
#[derive(Debug, Clone, Copy)]
struct Entry<'a> {
    field: &'static Field,
    json: &'a RawValue,
}

impl Entry<'_> {
    /// Name of the field after resolving aliases.
    fn read_as(&self) -> &'static str {
        if let Use::Alias(of) = self.field.use_ { of } else { self.field.name }
    }
}

/// Known, non-null fields in a body.
#[derive(Debug)]
pub(crate) struct Body<'a> {
    given: Vec<Entry<'a>>,
    unknown: Warnings,
}

impl<'a> Body<'a> {
    /// Parses a body, which must be a JSON object.
    pub(crate) fn parse(bytes: &'a [u8], known: &'static [Field]) -> Result<Self, ApiError> {
        let wrong = |expected: &str, found: String| {
            ApiError::invalid(format!("the body: expected {expected}, found {found}"))
        };
        let text = std::str::from_utf8(bytes)
            .map_err(|error| wrong("UTF-8", format!("an invalid byte at offset {}", error.valid_up_to())))?
            .trim_matches([' ', '\t', '\n', '\r']);
        let is_json = || serde_json::from_str::<IgnoredAny>(text).is_ok();
        if text.is_empty() || (!text.starts_with('{') && is_json()) {
            return Err(wrong("a JSON object", found(text)));
        }
        let (mut body, mut first_error) = (Self { given: Vec::new(), unknown: Warnings::default() }, None);
        let walked = walk(text, |key, json| {
            if let Key::Name(name) = key
                && let Err(error) = body.add_field(name, json, known)
            {
                first_error.get_or_insert(error);
            }
        });
        walked.map_err(|error| ApiError::invalid(format!("the body is not valid JSON: {error}")))?;
        first_error.map_or(Ok(()), Err)?;
        body.given.retain(|given| given.json.get() != "null");
        body.join_aliases().map(|()| body)
    }

    fn add_field(&mut self, name: &str, json: &'a RawValue, known: &'static [Field]) -> Result<(), ApiError> {
        let Some(field) = known.iter().find(|field| field.name == name) else {
            if json.get() != "null" {
                let known = known.iter().filter(|field| !matches!(field.use_, Use::Refused(_)));
                self.unknown.note(&beginning(name), name, known.map(|field| field.name));
            }
            return Ok(());
        };
        match field.use_ {
            Use::Ignored => {}
            _ if self.given.iter().any(|given| given.field.name == name) => {
                return Err(wrong_value(name, "one value", "two"));
            }
            Use::Refused(hint) if !is_empty(json.get()) => {
                let message = format!("{name}: this server does not support this field; {hint}");
                return Err(ApiError::invalid(message).with_param(name).with_code("unsupported_parameter"));
            }
            Use::Refused(_) => {}
            Use::Read | Use::Alias(_) => self.given.push(Entry { field, json }),
        }
        Ok(())
    }

    /// Merges aliases into one value per field; conflicting values are an error.
    fn join_aliases(&mut self) -> Result<(), ApiError> {
        let mut joined: Vec<Entry<'a>> = Vec::with_capacity(self.given.len());
        for given in self.given.drain(..) {
            match joined.iter().find(|other| other.read_as() == given.read_as()) {
                None => joined.push(given),
                Some(other) if other.json.get() == given.json.get() => {}
                Some(other) => {
                    let (name, other) = (given.field.name, other.field.name);
                    let message =
                        format!("{name} and {other} are aliases with different values; set only one of them");
                    return Err(ApiError::invalid(message).with_param(name));
                }
            }
        }
        self.given = joined;
        Ok(())
    }

    /// Deserializes the fields that `T` declares.
    pub(crate) fn read<T: Deserialize<'a> + Fields>(&self) -> Result<T, ApiError> {
        let is_declared = |entry: &&Entry<'_>| T::fields().iter().any(|field| field.name == entry.read_as());
        let values = self.given.iter().filter(is_declared).map(|entry| (entry.read_as(), entry.json));
        serde_path_to_error::deserialize(MapDeserializer::new(values)).map_err(|error| self.error(&error))
    }

    /// Converts a deserialization error to an [`ApiError`] with the path of the invalid value.
    fn error(&self, error: &serde_path_to_error::Error<serde_json::Error>) -> ApiError {
        let mut segments = error.path().iter();
        let field = match segments.next() {
            Some(Segment::Map { key }) => key.as_str(),
            _ => "the body",
        };
        let (path, json) = (self.name(field).to_owned(), self.json(field).unwrap_or_default());
        let (path, message) = located(segments, error.inner(), path, json);
        ApiError::invalid(format!("{path}: {message}")).with_param(path)
    }

    fn entry(&self, field: &str) -> Option<&Entry<'a>> {
        self.given.iter().find(|entry| entry.read_as() == field)
    }

    /// Raw JSON value of a field, if present.
    pub(crate) fn json(&self, field: &str) -> Option<&'a str> {
        self.entry(field).map(|entry| entry.json.get())
    }

    /// Name that the body uses for a field: the field's own name or an alias.
    pub(crate) fn name<'n>(&self, field: &'n str) -> &'n str {
        self.entry(field).map_or(field, |entry| entry.field.name)
    }

    /// Error for an invalid field value.
    pub(crate) fn wrong(&self, field: &str, expected: impl Display) -> ApiError {
        wrong_value(self.name(field), expected, found(self.json(field).unwrap_or_default()))
    }

    /// Warnings about unknown fields, including nested ones.
    pub(crate) fn warnings(&self) -> Warnings {
        let mut warnings = self.unknown.clone();
        for given in &self.given {
            warnings.note_inner(given.json.get(), &given.field.schema, given.field.name);
        }
        warnings
    }
}

/// Whether a value is null, false or empty and therefore has no effect.
fn is_empty(json: &str) -> bool {
    let written: String = json.chars().take(16).filter(|c| !c.is_ascii_whitespace()).collect();
    json == "\"\"" || ["null", "false", "[]", "{}"].contains(&written.as_str())
}
