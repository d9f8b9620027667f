//! Body of `/v1/chat/completions`.
//!
//! Source: OpenAI's OpenAPI description, `CreateChatCompletionRequest`.

mod template;

use std::sync::LazyLock;

use candle_gpt2_generation::MAX_NEW_TOKENS;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub(crate) use template::ChatTemplate;

use crate::body::{
    Body, Count, Described, Field, Fields, List, Text, TextOrList, fields, words, wrong_value,
};
use crate::completion::supported_names;
use crate::options::{self, MAX_LOGPROBS, MAX_TOKENS, Options};
use crate::prompts::{check_length, encode_piece, kept, lost_note, to_read, truncate};
use crate::{ApiError, ServedModel, Warnings};

/// Maximum number of messages in a conversation and of parts in a message; exceeds any context.
const MAX_MESSAGES: usize = 2048;
/// Maximum length of a role or a speaker name, in bytes.
const MAX_ROLE_BYTES: usize = 64;

fields! {
    /// Fields of `/v1/chat/completions` that `/v1/completions` does not have.
    ChatFields {
        /// Conversation of at least one message; the chat template turns it into a prompt.
        @required messages: Option<List<Message, MAX_MESSAGES>>,
        /// Maximum number of new tokens; the default fills the context.
        max_tokens | max_completion_tokens | n_predict: Option<Count<0, MAX_TOKENS>>,
        /// Whether the log-probability of each token is returned.
        logprobs: bool = false,
        /// With `logprobs`: number of most probable tokens to return at each position.
        top_logprobs: Count<0, MAX_LOGPROBS> = Count(0),
        /// Value passed to the chat template under this name.
        add_generation_prompt: bool = true,
    }
    refused [
        "chat_template": "set the template with the server's --chat-template",
        "continue_final_message": "send the whole prompt to /v1/completions",
    ]
}

/// All fields of the body.
pub(crate) static FIELDS: LazyLock<Vec<Field>> =
    LazyLock::new(|| [ChatFields::fields(), &options::fields()].concat());

/// Parsed body of `/v1/chat/completions`, with every field in range.
///
/// ```
/// use candle_gpt2_api::{ApiOptions, Call, ChatRequest, ChatTemplateChoice, ServedModel};
///
/// # let model = candle_gpt2_engine::ModelOptions::default().open(&candle_gpt2_engine::Silent)?.load(&candle_gpt2_engine::Silent)?;
/// let template = "{% for message in messages %}{{ message.content }}\n{% endfor %}Tom:".into();
/// let options = ApiOptions { chat_template: ChatTemplateChoice::Jinja(template), ..ApiOptions::default() };
/// let served = ServedModel::new(&model, options)?;
/// let body = br#"{"messages": [{"role": "user", "content": "Mia: Good night!"}]}"#;
/// let call = Call::of_chat(ChatRequest::parse(body)?, &served, None)?;
/// let prompt = model.vocabulary().encode("Mia: Good night!\nTom:")?;
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

/// Message as passed to the chat template.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "MessageFields")]
pub(crate) struct Message {
    role: String,
    content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

fields! {
    /// Fields of a message.
    MessageFields {
        /// The speaker's role, such as `user`.
        @required role: Option<Text<MAX_ROLE_BYTES>>,
        /// The text, or its parts.
        content: Option<TextOrList<String, Part, MAX_MESSAGES>>,
        /// The name of the speaker.
        name: Option<Text<MAX_ROLE_BYTES>>,
    }
    // Clients copy the first three from OpenAI's replies into the conversation; lm-evaluation-harness
// adds `type`.
    ignored ["refusal", "annotations", "audio", "type"]
}

impl TryFrom<MessageFields> for Message {
    type Error = &'static str;

    fn try_from(fields: MessageFields) -> Result<Self, Self::Error> {
        let Text(role) = fields.role.ok_or("expected an object with a role")?;
        let content = match fields.content {
            None => String::new(),
            Some(TextOrList::Text(text)) => text,
            Some(TextOrList::List(parts)) => parts.into_iter().map(|Part(text)| text).collect(),
        };
        Ok(Self { role, content, name: fields.name.map(|Text(name)| name) })
    }
}

impl Described for Message {
    const PLURAL: &'static str = "messages";

    fn schema() -> Value {
        MessageFields::schema()
    }
}

words! {
    /// Supported kinds of message parts.
    PartKind { "text" => Text }
}

fields! {
    /// Fields of a message part.
    PartFields {
        /// The kind of part.
        @required r#type: Option<PartKind>,
        /// The text.
        @required text: Option<String>,
    }
}

/// Text of a message part.
#[derive(Debug, Clone, Deserialize)]
#[serde(try_from = "PartFields")]
pub(crate) struct Part(String);

impl TryFrom<PartFields> for Part {
    type Error = &'static str;

    fn try_from(fields: PartFields) -> Result<Self, Self::Error> {
        fields.r#type.ok_or("expected an object with a type")?;
        fields.text.map(Self).ok_or("expected an object with a text field")
    }
}

impl Described for Part {
    const PLURAL: &'static str = "parts";

    fn schema() -> Value {
        PartFields::schema()
    }
}

impl ChatRequest {
    /// Parses a body, like [`CompletionRequest::parse`](crate::CompletionRequest::parse).
    ///
    /// # Errors
    /// Same as [`CompletionRequest::parse`](crate::CompletionRequest::parse).
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut body = Body::parse(body, &FIELDS)?;
        let fields: ChatFields = body.read()?;
        let Some(List(messages)) = fields.messages.filter(|List(messages)| !messages.is_empty()) else {
            return Err(wrong_value("messages", "a list of at least one message", "none"));
        };
        let Count(top_logprobs) = fields.top_logprobs;
        if top_logprobs > 0 && !fields.logprobs {
            let message = "top_logprobs: requires logprobs to be true";
            return Err(ApiError::invalid(message).with_param("top_logprobs"));
        }
        Ok(Self {
            messages,
            add_generation_prompt: fields.add_generation_prompt,
            logprobs: fields.logprobs.then_some(top_logprobs),
            options: Options::read(&mut body, fields.max_tokens)?,
            warnings: body.warnings(),
        })
    }

    /// Whether the request uses structured output, which is slow to compile.
    pub fn has_grammar(&self) -> bool {
        self.options.grammar.is_some()
    }

    /// Names of the accepted fields, including ignored ones.
    pub fn fields() -> impl Iterator<Item = &'static str> {
        supported_names(&FIELDS)
    }

    /// Token ids of the rendered conversation, and a warning if a character has no token.
    pub(crate) fn prompt(&self, served: &ServedModel) -> Result<(Vec<u32>, Option<String>), ApiError> {
        let unusable = |what: &String| {
            let message = format!(
                "the chat template of this model cannot be used ({what}); use /v1/completions, or start the server with another \
                 --chat-template"
            );
            ApiError::invalid(message).with_code("chat_template_unusable")
        };
        let Some(template) = served.template.as_ref().map_err(unusable)? else {
            let message = "this model has no chat template: it continues text and was not trained on conversations; use \
                           /v1/completions, or start the server with --chat-template";
            return Err(ApiError::invalid(message).with_code("no_chat_template"));
        };
        let kept = kept(
            self.options.fields.truncate_prompt_tokens,
            self.options.reserved_tokens(MAX_NEW_TOKENS, served),
            served,
        );
        if kept.is_none() {
            let bytes = self.messages.iter().map(|message| message.content.len()).sum();
            check_length(bytes, "messages", served)?;
        }
        let (eos, bos) = (served.eos_token(), served.bos_token());
        let text = template.render(&self.messages, self.add_generation_prompt, eos, bos)?;
        let read = to_read(&text, kept, "messages", served)?;
        let mut ids = encode_piece(read, "messages", served)?;
        truncate(&mut ids, kept);
        Ok((served.vocabulary.start_if_empty(ids), lost_note([read], "messages", served)))
    }
}
