//! Chat templates: Jinja, as transformers runs it. A checkpoint's template is an untrusted program, which `candle-gpt2-confined`
//! parses and renders.

use candle_gpt2_confined::{Style, TemplateError, Templates, WorkerProgram};
use serde::Serialize;

use crate::ApiError;
use crate::error::RETRY_AFTER;

/// A Jinja template that turns a conversation into a prompt.
#[derive(Debug)]
pub(crate) struct ChatTemplate {
    source: String,
    templates: Templates,
}

/// What a template reads.
#[derive(Serialize)]
struct Context<'a, M> {
    messages: &'a M,
    add_generation_prompt: bool,
    eos_token: String,
    bos_token: String,
}

impl ChatTemplate {
    /// A template, which child processes of `program` parse and render; without it this process does. The error is what is wrong
    /// with it.
    pub(crate) fn new(source: &str, program: Option<&WorkerProgram>) -> Result<Self, String> {
        let templates = Templates::new(Style::Chat, &[source], program).map_err(|error| error.to_string())?;
        Ok(Self { source: source.to_owned(), templates })
    }

    pub(crate) fn source(&self) -> String {
        self.source.clone()
    }

    /// The text of a conversation, with the names of the tokens that end and begin texts.
    pub(super) fn render(
        &self,
        messages: &impl Serialize,
        add_generation_prompt: bool,
        eos_token: Option<String>,
        bos_token: Option<String>,
    ) -> Result<String, ApiError> {
        let (eos_token, bos_token) = (eos_token.unwrap_or_default(), bos_token.unwrap_or_default());
        let context = Context { messages, add_generation_prompt, eos_token, bos_token };
        self.templates.render(&self.source, &context).map_err(|error| match error {
            TemplateError::Busy { .. } => {
                ApiError::busy(503, error.to_string(), "templates_busy", RETRY_AFTER)
            }
            error => {
                let message = format!("messages: the chat template does not take them: {error}");
                ApiError::invalid(message).with_param("messages")
            }
        })
    }
}
