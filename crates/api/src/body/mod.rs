//! Bodies of requests. [`fields!`] declares the fields of a body once: serde reads them, and the OpenAPI description is made of them.
//! Values that no field asks for are never built, so a body costs little more memory than its own bytes, however it is nested.

mod told;
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

pub(crate) use told::{beginning, found, without_place, wrong_value};
pub use unknown::{Reply, Warnings};
pub(crate) use values::{
    Count, Described, Integer, List, Seed, Text, TextOrList, TokenId, TokenIds, inner, number, one_of,
    whole_number, words, written,
};

use told::located;
use walk::{Key, walk};

use crate::ApiError;

/// What becomes of a field that is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// It is read.
    Read,
    /// It is another name of a field that is read.
    Alias(&'static str),
    /// It may have any value, which has no effect.
    Ignored,
    /// It is not served, and refused if it asks for something; with the way out.
    Refused(&'static str),
}

/// A field that is known.
#[derive(Debug, Clone)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) use_: Use,
    /// What it means.
    pub(crate) doc: String,
    pub(crate) is_required: bool,
    /// What the OpenAPI description says of its values.
    pub(crate) schema: Value,
}

impl Field {
    /// A field that is read, under its name and its further names.
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

    /// A field that is not read.
    pub(crate) fn unread(name: &'static str, use_: Use) -> Self {
        Self { name, use_, doc: "Has no effect.".into(), is_required: false, schema: json!({}) }
    }
}

/// An object whose fields serde reads, declared by [`fields!`].
pub(crate) trait Fields {
    /// All that are known, those included that are not read.
    fn fields() -> &'static [Field];
}

/// Declares the fields of an object: documentation, name and further names, type, and what a missing one means. `@required` only marks a
/// field in the description. Fields that are `ignored` may have any value; `refused` ones are errors, with the way out.
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

/// What a field is without a value.
macro_rules! default_of {
    () => {
        Default::default()
    };
    ($default:expr) => {
        $default
    };
}
pub(crate) use default_of;

/// A field's name as JSON writes it.
pub(crate) fn name_of(field: &'static str) -> &'static str {
    field.trim_start_matches("r#")
}

pub(crate) fn with_default<T: Serialize>(mut schema: Value, default: T) -> Value {
    schema["default"] = json!(default);
    schema
}

/// An object with these fields in the OpenAPI description. All but the required ones may be null.
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

/// The schema of values that may also be null.
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

/// A value of a body, with its field.
#[derive(Debug, Clone, Copy)]
struct Entry<'a> {
    field: &'static Field,
    json: &'a RawValue,
}

impl Entry<'_> {
    /// The name of the field as which it is read.
    fn read_as(&self) -> &'static str {
        if let Use::Alias(of) = self.field.use_ { of } else { self.field.name }
    }
}

/// A body: its fields that are known and not null.
#[derive(Debug)]
pub(crate) struct Body<'a> {
    given: Vec<Entry<'a>>,
    unknown: Warnings,
}

impl<'a> Body<'a> {
    /// A body, which is a JSON object with fields of these.
    pub(crate) fn parse(bytes: &'a [u8], known: &'static [Field]) -> Result<Self, ApiError> {
        let wrong = |expected: &str, found: String| {
            ApiError::invalid(format!("the body: expected {expected}, found {found}"))
        };
        let text = std::str::from_utf8(bytes)
            .map_err(|error| wrong("UTF-8", format!("another byte at {}", error.valid_up_to())))?
            .trim_matches([' ', '\t', '\n', '\r']);
        let is_json = || serde_json::from_str::<IgnoredAny>(text).is_ok();
        if text.is_empty() || (!text.starts_with('{') && is_json()) {
            return Err(wrong("a JSON object", found(text)));
        }
        let (mut body, mut first_error) = (Self { given: Vec::new(), unknown: Warnings::default() }, None);
        let walked = walk(text, |key, json| {
            if let Key::Name(name) = key
                && let Err(error) = body.take(name, json, known)
            {
                first_error.get_or_insert(error);
            }
        });
        walked.map_err(|error| ApiError::invalid(format!("the body is not JSON: {error}")))?;
        first_error.map_or(Ok(()), Err)?;
        body.given.retain(|given| given.json.get() != "null");
        body.join_aliases().map(|()| body)
    }

    fn take(&mut self, name: &str, json: &'a RawValue, known: &'static [Field]) -> Result<(), ApiError> {
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
                return Err(wrong_value(name, "one value", "a second one"));
            }
            Use::Refused(hint) if !is_empty(json.get()) => {
                let message = format!("{name}: this server does not serve this field; {hint}");
                return Err(ApiError::invalid(message).with_param(name).with_code("unsupported_parameter"));
            }
            Use::Refused(_) => {}
            Use::Read | Use::Alias(_) => self.given.push(Entry { field, json }),
        }
        Ok(())
    }

    /// Leaves one value of each field. Two names of a field may not have different values.
    fn join_aliases(&mut self) -> Result<(), ApiError> {
        let mut joined: Vec<Entry<'a>> = Vec::with_capacity(self.given.len());
        for given in self.given.drain(..) {
            match joined.iter().find(|other| other.read_as() == given.read_as()) {
                None => joined.push(given),
                Some(other) if other.json.get() == given.json.get() => {}
                Some(other) => {
                    let (name, other) = (given.field.name, other.field.name);
                    let message = format!(
                        "{name} and {other} are the same and have different values; give one of them"
                    );
                    return Err(ApiError::invalid(message).with_param(name));
                }
            }
        }
        self.given = joined;
        Ok(())
    }

    /// The fields that `T` declares.
    pub(crate) fn read<T: Deserialize<'a> + Fields>(&self) -> Result<T, ApiError> {
        let is_declared = |entry: &&Entry<'_>| T::fields().iter().any(|field| field.name == entry.read_as());
        let values = self.given.iter().filter(is_declared).map(|entry| (entry.read_as(), entry.json));
        serde_path_to_error::deserialize(MapDeserializer::new(values)).map_err(|error| self.error(&error))
    }

    /// What is wrong, with the path of the value.
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

    /// The value of a field as it is written, if it was given.
    pub(crate) fn json(&self, field: &str) -> Option<&'a str> {
        self.entry(field).map(|entry| entry.json.get())
    }

    /// The name under which a field was given: its own or another.
    pub(crate) fn name<'n>(&self, field: &'n str) -> &'n str {
        self.entry(field).map_or(field, |entry| entry.field.name)
    }

    /// That the value of a field is wrong.
    pub(crate) fn wrong(&self, field: &str, expected: impl Display) -> ApiError {
        wrong_value(self.name(field), expected, found(self.json(field).unwrap_or_default()))
    }

    /// The unknown fields, also those of objects in this one.
    pub(crate) fn warnings(&self) -> Warnings {
        let mut warnings = self.unknown.clone();
        for given in &self.given {
            warnings.note_inner(given.json.get(), &given.field.schema, given.field.name);
        }
        warnings
    }
}

/// Whether a value asks for nothing.
fn is_empty(json: &str) -> bool {
    let written: String = json.chars().take(16).filter(|c| !c.is_ascii_whitespace()).collect();
    json == "\"\"" || ["null", "false", "[]", "{}"].contains(&written.as_str())
}
