//! Jinja chat templates, rendered as in transformers.
//!
//! A checkpoint's template is an untrusted program, which `candle-gpt2-confined` parses and renders.

use candle_gpt2_confined::{Style, TemplateError, Templates, WorkerProgram};
use serde::Serialize;

use crate::ApiError;
use crate::error::RETRY_AFTER;

/// Jinja template that turns a conversation into a prompt.
#[derive(Debug)]
pub(crate) struct ChatTemplate {
    source: String,
    templates: Templates,
}

/// Variables that a template can use.
#[derive(Serialize)]
struct Context<'a, M> {
    messages: &'a M,
    add_generation_prompt: bool,
    eos_token: String,
    bos_token: String,
}

impl ChatTemplate {
    /// Parses a template in a child process that runs `program`, or in this process if there is none.
    ///
    /// The error describes the problem with the template.
    pub(crate) fn new(source: &str, program: Option<&WorkerProgram>) -> Result<Self, String> {
        let templates = Templates::new(Style::Chat, &[source], program).map_err(|error| error.to_string())?;
        Ok(Self { source: source.to_owned(), templates })
    }

    pub(crate) fn source(&self) -> String {
        self.source.clone()
    }

    /// Renders a conversation; the template also receives the names of the EOS and BOS tokens.
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
                let message = format!("messages: the chat template failed: {error}");
                ApiError::invalid(message).with_param("messages")
            }
        })
    }
}
