//! The body of `/v1/chat/completions`.
//!
//! Source: OpenAI's OpenAPI description, `CreateChatCompletionRequest`.

mod template;

use candle_gpt2_generation::MAX_NEW_TOKENS;
use serde::Serialize;

pub(crate) use template::Template;

use crate::body::{Field, Fields, Given, Unknown, Use, fields};
use crate::completion::known;
use crate::options::{MAX_LOGPROBS, OPTIONS, Options};
use crate::prompts::{check_length, encode_piece, kept, to_read, truncate};
use crate::{ApiError, ServedModel, Warnings};

/// Most messages of a conversation, and parts of a message: more than any context holds.
const MAX_MESSAGES: usize = 2048;
/// Longest name of a role, or of who speaks, in bytes.
const MAX_ROLE_BYTES: usize = 64;

const SERVED: [Field; 4] =
    fields(["messages", "logprobs", "top_logprobs", "add_generation_prompt"], Use::Served);
const ALIASES: [Field; 1] = [Field { name: "max_completion_tokens", use_: Use::Alias("max_tokens") }];
const REFUSED: [Field; 2] = [
    Field { name: "chat_template", use_: Use::Refused("the server's --chat-template names one") },
    Field {
        name: "continue_final_message",
        use_: Use::Refused("write the whole prompt for /v1/completions"),
    },
];
const TABLES: &[&[Field]] = &[&SERVED, &ALIASES, &REFUSED];

/// What `/v1/chat/completions` is asked for, with every field in its range.
///
/// ```
/// use candle_gpt2_api::{ApiOptions, Call, ChatRequest, ChatTemplateChoice, ServedModel};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&candle_gpt2_engine::Silent)?.load(&candle_gpt2_engine::Silent)?;
/// let template = "{% for message in messages %}{{ message.content }}\n{% endfor %}ROMEO:".into();
/// let options = ApiOptions { chat_template: ChatTemplateChoice::Jinja(template), ..ApiOptions::default() };
/// let served = ServedModel::new(&model, options)?;
/// let body = br#"{"messages": [{"role": "user", "content": "JULIET: Good night!"}]}"#;
/// let call = Call::of_chat(ChatRequest::parse(body)?, &served, None)?;
/// let prompt = model.vocabulary().encode("JULIET: Good night!\nROMEO:")?;
/// assert_eq!(call.requests[0].prompt, prompt);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct ChatRequest {
    messages: Vec<Message>,
    add_generation_prompt: bool,
    pub(crate) logprobs: Option<usize>,
    pub(crate) options: Options,
    pub(crate) warnings: Warnings,
}

/// A message, as templates read it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Message {
    role: String,
    content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

impl ChatRequest {
    /// Reads a body, as [`CompletionRequest::parse`](crate::CompletionRequest::parse) does.
    ///
    /// # Errors
    /// As [`CompletionRequest::parse`](crate::CompletionRequest::parse).
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let tables: Vec<&'static [Field]> = TABLES.iter().chain(OPTIONS).copied().collect();
        let unknown = Unknown::default();
        let fields = Fields::of_body(body, &tables, &unknown)?;
        let messages =
            fields.read("messages", |given| given.list("a list of messages", MAX_MESSAGES, message))?;
        let Some(messages) = messages.filter(|messages| !messages.is_empty()) else {
            let message = "messages: expected a list of at least one message, found none";
            return Err(ApiError::invalid(message).with_param("messages"));
        };
        let logprobs = fields.boolean("logprobs", false)?;
        let top_logprobs = fields.read("top_logprobs", |given| match given.count(0..=MAX_LOGPROBS)? {
            1.. if !logprobs => Err(given.wrong_as("logprobs to be true with it", "it is not")),
            top_logprobs => Ok(top_logprobs),
        })?;
        Ok(Self {
            messages,
            add_generation_prompt: fields.boolean("add_generation_prompt", true)?,
            logprobs: logprobs.then_some(top_logprobs.unwrap_or(0)),
            options: Options::read(&fields)?,
            warnings: unknown.take(),
        })
    }

    /// Whether its texts conform to something, which takes long to read.
    pub fn has_grammar(&self) -> bool {
        self.options.grammar.is_some()
    }

    /// The names of the fields that it reads or lets pass.
    pub fn fields() -> impl Iterator<Item = &'static str> {
        known(TABLES)
    }

    /// The tokens of the conversation, as the model's template writes it.
    pub(crate) fn prompt(&self, served: &ServedModel) -> Result<Vec<u32>, ApiError> {
        let unusable = |what: &String| {
            let message = format!(
                "the chat template of this model cannot be used ({what}); use /v1/completions, or start the server with another \
                 --chat-template"
            );
            ApiError::invalid(message).with_code("chat_template_unusable")
        };
        let Some(template) = served.template.as_ref().map_err(unusable)? else {
            let message = "this model has no chat template: it continues texts, and was not trained on conversations; use \
                           /v1/completions, or start the server with --chat-template";
            return Err(ApiError::invalid(message).with_code("no_chat_template"));
        };
        let kept = kept(self.options.truncation, self.options.room(MAX_NEW_TOKENS, served), served);
        if kept.is_none() {
            let bytes = self.messages.iter().map(|message| message.content.len()).sum();
            check_length(bytes, "messages", served)?;
        }
        let text = template.render(&self.messages, self.add_generation_prompt, served)?;
        let read = to_read(&text, kept, "messages", served)?;
        let mut ids = encode_piece(read, "messages", served)?;
        truncate(&mut ids, kept);
        Ok(served.vocabulary.start_if_empty(ids))
    }
}

fn message(given: Given<'_, '_>) -> Result<Message, ApiError> {
    const MESSAGE: &[Field] = &fields(["role", "content", "name"], Use::Served);
    // OpenAI's answers have the first three, which come back with the next message; lm-evaluation-harness adds the type.
    const IGNORED: &[Field] = &fields(["refusal", "annotations", "audio", "type"], Use::Ignored);
    let message = Fields::of(given, &[MESSAGE, IGNORED])?;
    let name = |given: Given<'_, '_>| given.short_text(MAX_ROLE_BYTES);
    let role = message.get("role").ok_or_else(|| given.wrong("an object with a role"))?;
    Ok(Message {
        role: name(role)?,
        content: message.read("content", content)?.unwrap_or_default(),
        name: message.read("name", name)?,
    })
}

/// A text, or parts of which each is one.
fn content(given: Given<'_, '_>) -> Result<String, ApiError> {
    const PART: &[Field] = &fields(["type", "text"], Use::Served);
    if given.is_text() {
        return given.text();
    }
    let parts = given.list("a string or a list of parts", MAX_MESSAGES, |part| {
        let fields = Fields::of(part, &[PART])?;
        let kind = fields.get("type").ok_or_else(|| part.wrong("an object with a type"))?;
        if kind.text()? != "text" {
            return Err(kind.wrong("\"text\": this model reads nothing else"));
        }
        fields.get("text").ok_or_else(|| part.wrong("an object with a text"))?.text()
    })?;
    Ok(parts.concat())
}
