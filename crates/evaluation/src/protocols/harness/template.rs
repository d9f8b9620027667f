//! Jinja templates in task files, rendered as in lm-evaluation-harness.
//!
//! Templates are untrusted programs. `candle-gpt2-confined` parses them and renders each with one entry
//! at a time.

use candle_gpt2_confined::{TemplateError, Templates};
use serde_json::Value;

use crate::{DataError, EvaluationError, Record};

/// Value of a `doc_to_…` key in a task file.
#[derive(Debug, Clone)]
pub(super) enum Form {
    /// Field name or template.
    Text(String),
    /// A number.
    Index(usize),
    /// List of texts.
    List(Vec<String>),
}

/// Result of evaluating a [`Form`] on an entry.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum FormValue {
    Text(String),
    /// Index of a choice.
    Index(usize),
    List(Vec<String>),
}

/// An entry together with the templates of its task.
pub(super) struct Entry<'a> {
    pub(super) templates: &'a Templates,
    pub(super) record: &'a Record,
    /// Whether the task has choices, so that numbers are indices of choices.
    pub(super) has_choices: bool,
}

impl Entry<'_> {
    /// Evaluates `form`, the value of the task file's key `key`.
    pub(super) fn value(&self, key: &str, form: &Form) -> Result<FormValue, EvaluationError> {
        let text = match form {
            Form::Index(index) => return Ok(FormValue::Index(*index)),
            Form::List(texts) => return Ok(FormValue::List(texts.clone())),
            Form::Text(name) => match self.record.get(name) {
                Some(value) => return Ok(self.of_field(key, name, value)?),
                None => self.rendered(key, name)?,
            },
        };
        let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        if self.has_choices
            && is_number
            && let Ok(index) = text.parse()
        {
            return Ok(FormValue::Index(index));
        }
        Ok(FormValue::Text(text))
    }

    /// Evaluates `form` like [`Entry::value`], but requires a list of texts.
    pub(super) fn list(&self, key: &str, form: &Form) -> Result<Vec<String>, EvaluationError> {
        let given = match self.value(key, form)? {
            // Parse the rendered text as a list, like Python's `ast.literal_eval`.
            FormValue::Text(text) => {
                let list = self.templates.list(&text).map_err(|error| self.unfit(key, &error))?;
                list.map_or(FormValue::Text(text), FormValue::List)
            }
            given => given,
        };
        match given {
            FormValue::List(texts) => Ok(texts),
            other => Err(self.error(key, &format!("expected a list of strings, found {other:?}")).into()),
        }
    }

    /// Evaluates `form` like [`Entry::value`], but requires a string.
    pub(super) fn text(&self, key: &str, form: &Form) -> Result<String, EvaluationError> {
        match self.value(key, form)? {
            FormValue::Text(text) => Ok(text),
            other => Err(self.error(key, &format!("expected a string, found {other:?}")).into()),
        }
    }

    pub(super) fn error(&self, key: &str, what: &str) -> DataError {
        self.record.error(format!("`{key}` in the task file: {what}"))
    }

    fn rendered(&self, key: &str, template: &str) -> Result<String, DataError> {
        self.templates.render(template, self.record.map()).map_err(|error| self.unfit(key, &error))
    }

    fn unfit(&self, key: &str, error: &TemplateError) -> DataError {
        self.error(key, &format!("the template cannot be rendered: {error}"))
    }

    fn of_field(&self, key: &str, name: &str, value: &Value) -> Result<FormValue, DataError> {
        let unexpected = || {
            self.error(
                key,
                &format!("field `{name}`: expected a string, a non-negative integer or a list of strings"),
            )
        };
        match value {
            Value::String(text) => Ok(FormValue::Text(text.clone())),
            Value::Number(number) => {
                let index = number.as_u64().and_then(|index| usize::try_from(index).ok());
                index.map(FormValue::Index).ok_or_else(unexpected)
            }
            Value::Array(values) => {
                let texts = values.iter().map(|value| value.as_str().map(str::to_owned));
                texts.collect::<Option<_>>().map(FormValue::List).ok_or_else(unexpected)
            }
            _ => Err(unexpected()),
        }
    }
}
