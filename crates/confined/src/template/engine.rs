//! Jinja engine with a style's settings.
//!
//! Steps, the depth of macros and loops, and the output size are limited. The nesting of values is not.
//! Values that are nested a hundred thousand levels deep, or that contain themselves, overflow the stack
//! when dropped or printed.

use std::io::{self, Write};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, UndefinedBehavior};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::style::Style;

/// Fuel for a chat template; each instruction and each 64 bytes of generated data use one unit.
///
/// A conversation that fills the context uses tens of thousands of units.
const CHAT_FUEL: u64 = 2_000_000;
const TASK_FUEL: u64 = 1_000_000;
/// Maximum nesting depth of macros and loops.
const MAX_DEPTH: usize = 64;
/// Maximum output size of a template or of one `replace` call, in bytes.
///
/// The chat limit exceeds the longest context, and the task limit exceeds the longest document.
const MAX_CHAT_BYTES: usize = 1 << 20;
const MAX_TASK_BYTES: usize = 16 << 20;
/// Maximum length of an error message, in characters.
const MAX_MESSAGE: usize = 1000;

/// Jinja environment with parsed templates.
#[derive(Debug, Clone)]
pub(super) struct Engine {
    environment: Environment<'static>,
    max_bytes: usize,
}

impl Engine {
    pub(super) fn new(style: Style) -> Result<Self, String> {
        let mut environment = Environment::new();
        // A template's source is also its name, so a suffix such as `.html` must not enable escaping.
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_recursion_limit(MAX_DEPTH);
        let (fuel, max_bytes) = match style {
            Style::Chat => (CHAT_FUEL, MAX_CHAT_BYTES),
            Style::Task => (TASK_FUEL, MAX_TASK_BYTES),
        };
        environment.set_fuel(Some(fuel));
        environment.set_unknown_method_callback(move |state, of, method, arguments| {
            method_of_python(state, of, method, arguments, max_bytes)
        });
        let mut syntax = SyntaxConfig::builder();
        match style {
            Style::Chat => {
                syntax.trim_blocks(true).lstrip_blocks(true);
                environment.add_function("raise_exception", |what: String| -> Result<Value, Error> {
                    Err(Error::new(ErrorKind::InvalidOperation, what))
                });
            }
            Style::Task => {
                syntax.keep_trailing_newline(true);
                environment.set_undefined_behavior(UndefinedBehavior::Strict);
            }
        }
        environment.set_syntax(syntax.build().map_err(|error| error.to_string())?);
        Ok(Self { environment, max_bytes })
    }

    /// Parses a template unless it has already been parsed.
    pub(super) fn add(&mut self, template: String) -> Result<(), String> {
        if self.environment.get_template(&template).is_ok() {
            return Ok(());
        }
        let parsed = self.environment.add_template_owned(template.clone(), template);
        parsed.map_err(|error| {
            let line = error.line().map_or_else(String::new, |line| format!(" (line {line})"));
            format!("{}: {}{line}", error.kind(), message(&error, self.max_bytes))
        })
    }

    pub(super) fn render(&self, template: &str, context: Value) -> Result<String, String> {
        let mut written = Bounded { bytes: Vec::new(), max_bytes: self.max_bytes };
        let template = self.environment.get_template(template);
        let rendered = template.and_then(|template| template.render_captured_to(context, &mut written));
        rendered.map_err(|error| message(&error, self.max_bytes))?;
        String::from_utf8(written.bytes).map_err(|error| error.to_string())
    }

    /// Evaluates an expression that is a list of strings, like Python's `ast.literal_eval`.
    pub(super) fn list(&self, text: &str) -> Option<Vec<String>> {
        let value = self.environment.compile_expression(text).ok()?.eval(()).ok()?;
        let values = value.try_iter().ok().filter(|_| value.kind() == ValueKind::Seq)?;
        values.map(|value| value.as_str().map(str::to_owned)).collect()
    }
}

/// Formats an error without quoting lines from the template.
fn message(error: &Error, max_bytes: usize) -> String {
    let message = match error.detail() {
        _ if error.kind() == ErrorKind::WriteFailure => format!("the output exceeds {max_bytes} bytes"),
        Some(detail) => detail.to_owned(),
        None => error.kind().to_string(),
    };
    match message.char_indices().nth(MAX_MESSAGE) {
        Some((end, _)) => format!("{} …", &message[..end]),
        None => message,
    }
}

/// Output buffer with a size limit.
struct Bounded {
    bytes: Vec<u8>,
    max_bytes: usize,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.max_bytes {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Calls a Python method on a string, list or dict, including `list.index`.
fn method_of_python(
    state: &mut State<'_, '_>,
    of: &Value,
    method: &str,
    arguments: &[Value],
    max_bytes: usize,
) -> Result<Value, Error> {
    let wrong = |what: String| Error::new(ErrorKind::InvalidOperation, what);
    match (method, of.kind(), arguments) {
        ("index", ValueKind::Seq | ValueKind::Iterable, [wanted]) => {
            let index = of.try_iter()?.position(|value| value == *wanted);
            index.map(Value::from).ok_or_else(|| wrong("the list does not contain this value".into()))
        }
        ("replace", ValueKind::String, [from, to, ..]) => {
            if let (Some(text), Some(from), Some(to)) = (of.as_str(), from.as_str(), to.as_str())
                && text.matches(from).count().saturating_mul(to.len()) > max_bytes
            {
                return Err(wrong("the result is too long".into()));
            }
            unknown_method_callback(state, of, method, arguments)
        }
        _ => unknown_method_callback(state, of, method, arguments),
    }
}
