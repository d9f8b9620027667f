//! Chat templates: Jinja, as transformers runs it. A checkpoint's template is a stranger's program: it reads the conversation and
//! nothing else, and its steps, its depth and the bytes that it makes are bounded.

use std::io::{self, Write};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{Environment, Error, ErrorKind, State, context};
use serde::Serialize;

use crate::ApiError;

/// Most steps of a template and bytes that it makes, together: a conversation that fills a context takes some tens of thousands.
const FUEL: u64 = 2_000_000;
/// Deepest nesting of macros and loops.
const MAX_DEPTH: usize = 64;
/// Most bytes that it writes, and that `replace` makes of a text; the longest context holds fewer.
const MAX_BYTES: usize = 1 << 20;
/// Under which the environment keeps it.
const NAME: &str = "chat_template";

/// A Jinja template that makes a prompt of a conversation.
#[derive(Debug)]
pub(crate) struct Template(Box<Environment<'static>>);

impl Template {
    /// A template; what is wrong with it is an error.
    pub(crate) fn new(source: &str) -> Result<Self, String> {
        let mut environment = Environment::new();
        // As transformers sets up its environment.
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| error.to_string())?);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(MAX_DEPTH);
        environment.set_unknown_method_callback(method_of_python);
        environment.add_function("raise_exception", |what: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, what))
        });
        environment.add_template_owned(NAME, source.to_owned()).map_err(|error| error.to_string())?;
        Ok(Self(Box::new(environment)))
    }

    /// As it is written.
    pub(crate) fn source(&self) -> String {
        self.0.get_template(NAME).map(|template| template.source().to_owned()).unwrap_or_default()
    }

    /// The text of a conversation, with the names of the tokens that end and begin texts.
    pub(super) fn render(
        &self,
        messages: &impl Serialize,
        add_generation_prompt: bool,
        eos_token: Option<String>,
        bos_token: Option<String>,
    ) -> Result<String, ApiError> {
        let context = context! {
            messages => Serde(messages),
            add_generation_prompt,
            eos_token => eos_token.unwrap_or_default(),
            bos_token => bos_token.unwrap_or_default(),
        };
        run(&self.0, context).map_err(|error| {
            let message = format!("messages: the chat template does not take them: {}", told(&error));
            ApiError::invalid(message).with_param("messages")
        })
    }
}

fn run(environment: &Environment<'_>, context: Value) -> Result<String, Error> {
    let mut written = Bounded(Vec::new());
    environment.get_template(NAME)?.render_captured_to(context, &mut written)?;
    String::from_utf8(written.0).map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))
}

/// What happened, without the template's lines.
fn told(error: &Error) -> String {
    match error.detail() {
        _ if error.kind() == ErrorKind::WriteFailure => format!("it writes more than {MAX_BYTES} bytes"),
        Some(detail) => detail.to_owned(),
        None => error.kind().to_string(),
    }
}

/// Bytes up to the most that a template may write.
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_BYTES {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The methods of Python's strings that templates use, which Jinja has from Python.
fn method_of_python(
    _: &mut State<'_, '_>,
    of: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let unknown = || Error::from(ErrorKind::UnknownMethod);
    let text = of.as_str().ok_or_else(unknown)?;
    let argument = |place: usize| arguments.get(place).and_then(Value::as_str);
    let is_one_of = |c: char| argument(0).map_or(c.is_whitespace(), |set| set.contains(c));
    Ok(match (method, argument(0), argument(1)) {
        ("strip", ..) => text.trim_matches(is_one_of).into(),
        ("lstrip", ..) => text.trim_start_matches(is_one_of).into(),
        ("rstrip", ..) => text.trim_end_matches(is_one_of).into(),
        ("lower", ..) => text.to_lowercase().into(),
        ("upper", ..) => text.to_uppercase().into(),
        ("startswith", Some(beginning), _) => text.starts_with(beginning).into(),
        ("endswith", Some(end), _) => text.ends_with(end).into(),
        ("split", Some(separator), _) if !separator.is_empty() => {
            Value::from_iter(text.split(separator).map(Value::from))
        }
        ("split", None, _) => Value::from_iter(text.split_whitespace().map(Value::from)),
        ("replace", Some(from), Some(to)) if !from.is_empty() => {
            if text.matches(from).count().saturating_mul(to.len()) > MAX_BYTES {
                return Err(Error::new(ErrorKind::InvalidOperation, "the text is too long"));
            }
            text.replace(from, to).into()
        }
        _ => return Err(unknown()),
    })
}
