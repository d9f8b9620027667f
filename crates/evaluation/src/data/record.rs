//! A data entry: its fields, with precise errors for invalid ones.

use std::path::PathBuf;

use serde_json::{Map, Value};

use crate::DataError;

/// Maximum length of an invalid value in an error message, in characters.
const SHOWN_CHARACTERS: usize = 60;
/// Maximum number of field names in an error message.
const SHOWN_NAMES: usize = 12;
/// Fields that identify an entry; the first one present is used.
const ID_FIELDS: [&str; 5] = ["id", "ind", "qID", "pairID", "index"];

/// Line number of an entry, with either its fields or the reason it is invalid.
pub(super) type Row = (usize, Result<Map<String, Value>, String>);

/// A data entry: the fields of a JSON object, a CSV row or a Parquet row.
///
/// Returned by [`Data::records`](crate::Data::records).
#[derive(Debug, Clone)]
pub struct Record {
    file: PathBuf,
    line: usize,
    /// Path of these fields within the entry, such as `question.`; empty for the entry itself.
    within: String,
    fields: Map<String, Value>,
}

impl Record {
    /// Creates an entry that begins at a line.
    pub(crate) fn new(file: PathBuf, line: usize, fields: Map<String, Value>) -> Self {
        Self { file, line, within: String::new(), fields }
    }

    /// Returns the line number in the file, from 1; for Parquet, the row number.
    pub fn line(&self) -> usize {
        self.line
    }

    /// Returns the file name without its extension.
    pub fn file_stem(&self) -> String {
        self.file.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Returns the entry's id, if it has one: a string or a number.
    pub fn id(&self) -> Option<String> {
        ID_FIELDS.iter().find_map(|field| match self.fields.get(*field)? {
            Value::String(text) => Some(text.clone()),
            Value::Number(number) => Some(number.to_string()),
            _ => None,
        })
    }

    /// Whether the entry has the field.
    pub fn has(&self, field: &str) -> bool {
        self.fields.contains_key(field)
    }

    /// Whether both entries have equal fields.
    pub(crate) fn has_the_fields_of(&self, other: &Self) -> bool {
        self.fields == other.fields
    }

    /// Returns all fields.
    pub(crate) fn map(&self) -> &Map<String, Value> {
        &self.fields
    }

    /// Returns a field's value.
    pub(crate) fn get(&self, field: &str) -> Option<&Value> {
        self.fields.get(field)
    }

    /// Whether the field exists and is an object.
    pub fn has_fields(&self, field: &str) -> bool {
        self.fields.get(field).is_some_and(Value::is_object)
    }

    /// Returns a string field.
    ///
    /// # Errors
    /// Fails if the field is missing or has another type.
    pub fn text(&self, field: &str) -> Result<&str, DataError> {
        let value = self.value(field)?;
        value.as_str().ok_or_else(|| self.unexpected(field, "a string", value))
    }

    /// Returns a string field that is not empty.
    ///
    /// # Errors
    /// Fails if the field is missing, has another type or is empty.
    pub fn filled(&self, field: &str) -> Result<&str, DataError> {
        let text = self.text(field)?;
        if text.is_empty() { Err(self.field_error(field, "expected a non-empty string")) } else { Ok(text) }
    }

    /// Returns a list of non-empty strings.
    ///
    /// # Errors
    /// Fails if the field is missing, has another type or contains an empty string.
    pub fn texts(&self, field: &str) -> Result<Vec<&str>, DataError> {
        let value = self.value(field)?;
        let list = value.as_array().ok_or_else(|| self.unexpected(field, "a list of strings", value))?;
        let texts = list.iter().enumerate().map(|(index, value)| match value.as_str() {
            Some("") => Err(self.field_error(&place(field, index), "expected a non-empty string")),
            Some(text) => Ok(text),
            None => Err(self.unexpected(&place(field, index), "a string", value)),
        });
        texts.collect()
    }

    /// Returns an answer label: a string, or the digits of a number.
    ///
    /// # Errors
    /// Fails if the field is missing, has another type or is empty.
    pub fn label(&self, field: &str) -> Result<String, DataError> {
        let value = self.value(field)?;
        self.as_label(field, value)
    }

    /// Returns a list of [labels](Self::label).
    ///
    /// # Errors
    /// Fails if the field is missing, has another type or contains an empty label.
    pub fn labels(&self, field: &str) -> Result<Vec<String>, DataError> {
        let value = self.value(field)?;
        let list = value.as_array().ok_or_else(|| self.unexpected(field, "a list of labels", value))?;
        let labels = list.iter().enumerate();
        labels.map(|(index, value)| self.as_label(&place(field, index), value)).collect()
    }

    fn as_label(&self, field: &str, value: &Value) -> Result<String, DataError> {
        match value {
            Value::String(label) if label.is_empty() => {
                Err(self.field_error(field, "expected a non-empty label"))
            }
            Value::String(label) => Ok(label.clone()),
            Value::Number(number) if number.is_u64() => Ok(number.to_string()),
            other => Err(self.unexpected(field, "a label (a string or a non-negative integer)", other)),
        }
    }

    /// Returns the fields of a nested object.
    ///
    /// # Errors
    /// Fails if the field is missing or has another type.
    pub fn fields(&self, field: &str) -> Result<Self, DataError> {
        self.inner(field, self.value(field)?)
    }

    /// Returns the fields of each object in a list.
    ///
    /// # Errors
    /// Fails if the field is missing or has another type.
    pub fn list(&self, field: &str) -> Result<Vec<Self>, DataError> {
        let value = self.value(field)?;
        let list = value.as_array().ok_or_else(|| self.unexpected(field, "a list of objects", value))?;
        list.iter().enumerate().map(|(index, value)| self.inner(&place(field, index), value)).collect()
    }

    fn inner(&self, field: &str, value: &Value) -> Result<Self, DataError> {
        let fields = value.as_object().ok_or_else(|| self.unexpected(field, "an object", value))?.clone();
        Ok(Self {
            file: self.file.clone(),
            line: self.line,
            within: format!("{}{field}.", self.within),
            fields,
        })
    }

    /// Returns an index below `count`, from a number or a string of digits.
    ///
    /// `first` is the number, 0 or 1, that stands for the first index in the data.
    ///
    /// # Errors
    /// Fails if the field is missing, has another type or is out of range.
    pub fn index(&self, field: &str, first: usize, count: usize) -> Result<usize, DataError> {
        let value = self.value(field)?;
        let number = match value {
            Value::Number(number) => number.as_u64(),
            // Digits only: Rust's parser also accepts a sign.
            Value::String(text) => {
                let digits = text.trim();
                digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
            }
            _ => None,
        };
        let number = number
            .and_then(|number| usize::try_from(number).ok())
            .and_then(|number| number.checked_sub(first));
        number.filter(|index| *index < count).ok_or_else(|| {
            self.unexpected(
                field,
                &format!("a number from {first} to {}", (first + count).saturating_sub(1)),
                value,
            )
        })
    }

    /// Creates an error about this entry.
    pub fn error(&self, what: impl Into<String>) -> DataError {
        DataError { file: self.file.display().to_string(), line: self.line, what: what.into() }
    }

    /// Creates an error about a field of this entry.
    pub fn field_error(&self, field: &str, what: &str) -> DataError {
        self.error(format!("field `{}{field}`: {what}", self.within))
    }

    fn unexpected(&self, field: &str, expected: &str, found: &Value) -> DataError {
        self.field_error(field, &format!("expected {expected}, found {}", shown(found)))
    }

    fn value(&self, field: &str) -> Result<&Value, DataError> {
        self.fields.get(field).ok_or_else(|| {
            let mut names: Vec<String> =
                self.fields.keys().map(|name| format!("`{}`", shortened(name))).collect();
            names.sort();
            names.truncate(SHOWN_NAMES);
            let has = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            self.field_error(field, &format!("missing; available fields: {has}"))
        })
    }
}

/// Path of a list element.
fn place(field: &str, index: usize) -> String {
    format!("{field}[{index}]")
}

/// A value as JSON, shortened for an error message.
pub(super) fn shown(value: &Value) -> String {
    shortened(&value.to_string())
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARACTERS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
