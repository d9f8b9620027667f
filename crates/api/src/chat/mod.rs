//! The body of `/v1/chat/completions`.
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
use crate::completion::known;
use crate::options::{self, MAX_LOGPROBS, MAX_TOKENS, Options};
use crate::prompts::{check_length, encode_piece, kept, lost_note, to_read, truncate};
use crate::{ApiError, ServedModel, Warnings};

/// Most messages of a conversation, and parts of a message: more than any context holds.
const MAX_MESSAGES: usize = 2048;
/// Longest name of a role, or of a speaker, in bytes.
const MAX_ROLE_BYTES: usize = 64;

fields! {
    /// The fields of `/v1/chat/completions` that completions do not have.
    ChatFields {
        /// The conversation, at least one message; the model's chat template makes a prompt of it.
        @required messages: Option<List<Message, MAX_MESSAGES>>,
        /// Most new tokens; without it, to the end of the context.
        max_tokens | max_completion_tokens | n_predict: Option<Count<0, MAX_TOKENS>>,
        /// Whether the log-probability of each token is returned.
        logprobs: bool = false,
        /// With `logprobs`: this many of the most probable tokens in each place.
        top_logprobs: Count<0, MAX_LOGPROBS> = Count(0),
        /// What the chat template gets under this name.
        add_generation_prompt: bool = true,
    }
    refused [
        "chat_template": "the server's --chat-template names one",
        "continue_final_message": "write the whole prompt for /v1/completions",
    ]
}

/// All fields of the body.
pub(crate) static FIELDS: LazyLock<Vec<Field>> =
    LazyLock::new(|| [ChatFields::fields(), &options::fields()].concat());

/// What `/v1/chat/completions` is asked for, with every field in its range.
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

/// A message, as templates read it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "MessageFields")]
pub(crate) struct Message {
    role: String,
    content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
}

fields! {
    /// A message.
    MessageFields {
        /// The speaker's role, such as `user`.
        @required role: Option<Text<MAX_ROLE_BYTES>>,
        /// The text, or its parts.
        content: Option<TextOrList<String, Part, MAX_MESSAGES>>,
        /// The name of the speaker.
        name: Option<Text<MAX_ROLE_BYTES>>,
    }
    // OpenAI's answers have the first three, which come back with the next message; lm-evaluation-harness adds the type.
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
    /// The kinds of parts that the model reads.
    PartKind { "text" => Text }
}

fields! {
    /// A part of a message.
    PartFields {
        /// The kind of the part.
        @required r#type: Option<PartKind>,
        /// The text.
        @required text: Option<String>,
    }
}

/// The text of a part.
#[derive(Debug, Clone, Deserialize)]
#[serde(try_from = "PartFields")]
pub(crate) struct Part(String);

impl TryFrom<PartFields> for Part {
    type Error = &'static str;

    fn try_from(fields: PartFields) -> Result<Self, Self::Error> {
        fields.r#type.ok_or("expected an object with a type")?;
        fields.text.map(Self).ok_or("expected an object with a text")
    }
}

impl Described for Part {
    const PLURAL: &'static str = "parts";

    fn schema() -> Value {
        PartFields::schema()
    }
}

impl ChatRequest {
    /// Reads a body, as [`CompletionRequest::parse`](crate::CompletionRequest::parse) does.
    ///
    /// # Errors
    /// As [`CompletionRequest::parse`](crate::CompletionRequest::parse).
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut body = Body::parse(body, &FIELDS)?;
        let fields: ChatFields = body.read()?;
        let Some(List(messages)) = fields.messages.filter(|List(messages)| !messages.is_empty()) else {
            return Err(wrong_value("messages", "a list of at least one message", "none"));
        };
        let Count(top_logprobs) = fields.top_logprobs;
        if top_logprobs > 0 && !fields.logprobs {
            return Err(wrong_value("top_logprobs", "logprobs to be true with it", "it is not"));
        }
        Ok(Self {
            messages,
            add_generation_prompt: fields.add_generation_prompt,
            logprobs: fields.logprobs.then_some(top_logprobs),
            options: Options::read(&mut body, fields.max_tokens)?,
            warnings: body.warnings(),
        })
    }

    /// Whether its texts conform to something, which takes long to read.
    pub fn has_grammar(&self) -> bool {
        self.options.grammar.is_some()
    }

    /// The names of the fields that it reads or ignores.
    pub fn fields() -> impl Iterator<Item = &'static str> {
        known(&FIELDS)
    }

    /// The tokens of the conversation, as the model's template writes it, and a note on a character without a token.
    pub(crate) fn prompt(&self, served: &ServedModel) -> Result<(Vec<u32>, Option<String>), ApiError> {
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
        let kept = kept(
            self.options.fields.truncate_prompt_tokens,
            self.options.room(MAX_NEW_TOKENS, served),
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
