//! An entry of the data: its fields, and precise words for what is wrong with one.

use std::path::PathBuf;

use serde_json::{Map, Value};

use crate::DataError;

/// Characters of a wrong value that a message shows.
const SHOWN_CHARACTERS: usize = 60;
/// Names of fields that a message shows.
const SHOWN_NAMES: usize = 12;
/// Fields that name an entry, the first that it has.
const ID_FIELDS: [&str; 5] = ["id", "ind", "qID", "pairID", "index"];

/// The fields of an entry, or what is wrong with it, at its line.
pub(super) type Row = (usize, Result<Map<String, Value>, String>);

/// An entry of the data: the fields of a JSON object, of a row of CSV, or of a row of Parquet.
///
/// Given by [`Data::records`](crate::Data::records).
#[derive(Debug, Clone)]
pub struct Record {
    file: PathBuf,
    line: usize,
    /// Where in the entry these fields are, as `question.`; empty for the entry itself.
    within: String,
    fields: Map<String, Value>,
}

impl Record {
    /// The fields of the entry that begins at a line.
    pub(crate) fn new(file: PathBuf, line: usize, fields: Map<String, Value>) -> Self {
        Self { file, line, within: String::new(), fields }
    }

    /// The line of its file, from 1; of Parquet the row.
    pub fn line(&self) -> usize {
        self.line
    }

    /// The name of its file without its ending.
    pub fn file_stem(&self) -> String {
        self.file.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Its name, if it has one: a text or a number.
    pub fn id(&self) -> Option<String> {
        ID_FIELDS.iter().find_map(|field| match self.fields.get(*field)? {
            Value::String(text) => Some(text.clone()),
            Value::Number(number) => Some(number.to_string()),
            _ => None,
        })
    }

    /// Whether it has the field.
    pub fn has(&self, field: &str) -> bool {
        self.fields.contains_key(field)
    }

    /// Whether it is the same entry by its fields.
    pub(crate) fn has_the_fields_of(&self, other: &Self) -> bool {
        self.fields == other.fields
    }

    /// Its fields.
    pub(crate) fn map(&self) -> &Map<String, Value> {
        &self.fields
    }

    /// The value of a field.
    pub(crate) fn get(&self, field: &str) -> Option<&Value> {
        self.fields.get(field)
    }

    /// Whether it has the field, and that is an object.
    pub fn has_fields(&self, field: &str) -> bool {
        self.fields.get(field).is_some_and(Value::is_object)
    }

    /// A text.
    ///
    /// # Errors
    /// When the field is missing or something else.
    pub fn text(&self, field: &str) -> Result<&str, DataError> {
        let value = self.value(field)?;
        value.as_str().ok_or_else(|| self.unexpected(field, "a text", value))
    }

    /// A text that is not empty.
    ///
    /// # Errors
    /// When the field is missing, something else, or empty.
    pub fn filled(&self, field: &str) -> Result<&str, DataError> {
        let text = self.text(field)?;
        if text.is_empty() {
            Err(self.field_error(field, "expected a text, found an empty one"))
        } else {
            Ok(text)
        }
    }

    /// A list of texts, none of them empty.
    ///
    /// # Errors
    /// When the field is missing or something else.
    pub fn texts(&self, field: &str) -> Result<Vec<&str>, DataError> {
        let value = self.value(field)?;
        let list = value.as_array().ok_or_else(|| self.unexpected(field, "a list of texts", value))?;
        let texts = list.iter().enumerate().map(|(index, value)| match value.as_str() {
            Some("") => Err(self.field_error(&place(field, index), "expected a text, found an empty one")),
            Some(text) => Ok(text),
            None => Err(self.unexpected(&place(field, index), "a text", value)),
        });
        texts.collect()
    }

    /// What an answer is called: a text, or a number, whose digits it is then.
    ///
    /// # Errors
    /// When the field is missing, something else, or empty.
    pub fn label(&self, field: &str) -> Result<String, DataError> {
        let value = self.value(field)?;
        self.as_label(field, value)
    }

    /// A list of [labels](Self::label).
    ///
    /// # Errors
    /// When the field is missing or something else.
    pub fn labels(&self, field: &str) -> Result<Vec<String>, DataError> {
        let value = self.value(field)?;
        let list = value.as_array().ok_or_else(|| self.unexpected(field, "a list of labels", value))?;
        let labels = list.iter().enumerate();
        labels.map(|(index, value)| self.as_label(&place(field, index), value)).collect()
    }

    fn as_label(&self, field: &str, value: &Value) -> Result<String, DataError> {
        match value {
            Value::String(label) if label.is_empty() => {
                Err(self.field_error(field, "expected a label, found an empty text"))
            }
            Value::String(label) => Ok(label.clone()),
            Value::Number(number) if number.is_u64() => Ok(number.to_string()),
            other => Err(self.unexpected(field, "a label, a text or a number", other)),
        }
    }

    /// The fields of an object in this one.
    ///
    /// # Errors
    /// When the field is missing or something else.
    pub fn fields(&self, field: &str) -> Result<Self, DataError> {
        self.inner(field, self.value(field)?)
    }

    /// The fields of each object of a list.
    ///
    /// # Errors
    /// When the field is missing or something else.
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

    /// A number below `count`, as a number or as a text of its digits; `first` is what the first is called, 0 or 1.
    ///
    /// # Errors
    /// When the field is missing, something else, or out of range.
    pub fn index(&self, field: &str, first: usize, count: usize) -> Result<usize, DataError> {
        let value = self.value(field)?;
        let number = match value {
            Value::Number(number) => number.as_u64(),
            // Digits alone: Rust would take a sign too.
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

    /// An error about this entry.
    pub fn error(&self, what: impl Into<String>) -> DataError {
        DataError { file: self.file.display().to_string(), line: self.line, what: what.into() }
    }

    /// An error about a field of this entry.
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
            let has = if names.is_empty() { "no fields".to_owned() } else { names.join(", ") };
            self.field_error(field, &format!("missing; there are {has}"))
        })
    }
}

/// The place of an element of a list.
fn place(field: &str, index: usize) -> String {
    format!("{field}[{index}]")
}

/// A value as JSON, so long as a message can be.
pub(super) fn shown(value: &Value) -> String {
    shortened(&value.to_string())
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARACTERS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
