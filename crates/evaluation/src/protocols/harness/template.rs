//! The templates of a task file: Jinja, as lm-evaluation-harness runs it. They are a stranger's programs: they read one entry, and
//! their steps, their depth and what they write are bounded.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value as JinjaValue, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde_json::Value;

use crate::{DataError, EvaluationError, Record};

/// Most steps of a template for one entry.
const FUEL: u64 = 1_000_000;
/// Deepest nesting.
const MAX_DEPTH: usize = 64;

/// A `doc_to_…` of a task file.
#[derive(Debug, Clone)]
pub(super) enum Form {
    /// The name of a field, or a template.
    Text(String),
    /// A number.
    Index(usize),
    /// Texts.
    List(Vec<String>),
}

/// What a form gives of an entry.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum FormValue {
    Text(String),
    /// The place of a choice.
    Index(usize),
    List(Vec<String>),
}

/// What runs templates.
pub(super) fn environment() -> Result<Environment<'static>, String> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().keep_trailing_newline(true).build();
    environment.set_syntax(syntax.map_err(|error| error.to_string())?);
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(MAX_DEPTH);
    environment.set_unknown_method_callback(method_of_python);
    Ok(environment)
}

/// The methods of Python's texts, lists and dicts, and `index` of lists.
fn method_of_python(
    state: &mut State<'_, '_>,
    of: &JinjaValue,
    method: &str,
    arguments: &[JinjaValue],
) -> Result<JinjaValue, Error> {
    match (method, of.kind(), arguments) {
        ("index", ValueKind::Seq | ValueKind::Iterable, [wanted]) => {
            let place = of.try_iter()?.position(|value| value == *wanted);
            let missing = || Error::new(ErrorKind::InvalidOperation, format!("{wanted} is not in the list"));
            place.map(JinjaValue::from).ok_or_else(missing)
        }
        _ => unknown_method_callback(state, of, method, arguments),
    }
}

/// An entry under the templates of its task.
pub(super) struct Entry<'a> {
    pub(super) environment: &'a Environment<'static>,
    pub(super) record: &'a Record,
    /// Whether the task has choices, of which a number is the place of one.
    pub(super) has_choices: bool,
}

impl Entry<'_> {
    /// What the form `key` gives.
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

    /// The texts that the form `key` gives.
    pub(super) fn list(&self, key: &str, form: &Form) -> Result<Vec<String>, EvaluationError> {
        let given = match self.value(key, form)? {
            // As Python's `ast.literal_eval`: what the template writes is read as a list.
            FormValue::Text(text) => self.literal(&text).unwrap_or(FormValue::Text(text)),
            given => given,
        };
        match given {
            FormValue::List(texts) => Ok(texts),
            other => Err(self.error(key, &format!("expected a list of texts, found {other:?}")).into()),
        }
    }

    /// The text that the form `key` gives.
    pub(super) fn text(&self, key: &str, form: &Form) -> Result<String, EvaluationError> {
        match self.value(key, form)? {
            FormValue::Text(text) => Ok(text),
            other => Err(self.error(key, &format!("expected a text, found {other:?}")).into()),
        }
    }

    pub(super) fn error(&self, key: &str, what: &str) -> DataError {
        self.record.error(format!("`{key}` of the task file: {what}"))
    }

    fn rendered(&self, key: &str, template: &str) -> Result<String, DataError> {
        let entry = JinjaValue::from(Serde(self.record.map()));
        self.environment.render_str(template, entry).map_err(|error| {
            let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
            self.error(key, &format!("the template does not fit: {what}"))
        })
    }

    fn of_field(&self, key: &str, name: &str, value: &Value) -> Result<FormValue, DataError> {
        let unexpected = || {
            self.error(key, &format!("field `{name}`: expected a text, a number from 0 or a list of texts"))
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

    /// A list that is written as Python writes one.
    fn literal(&self, text: &str) -> Option<FormValue> {
        let value = self.environment.compile_expression(text).ok()?.eval(()).ok()?;
        let values = value.try_iter().ok().filter(|_| value.kind() == ValueKind::Seq)?;
        values.map(|value| value.as_str().map(str::to_owned)).collect::<Option<_>>().map(FormValue::List)
    }
}
