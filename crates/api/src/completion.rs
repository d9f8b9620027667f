//! Body of `/v1/completions`.
//!
//! Source: OpenAI's OpenAPI description, `CreateCompletionRequest`, plus fields of vLLM and llama.cpp.

use std::sync::LazyLock;

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::body::{Body, Count, Described, Field, Fields, List, TokenIds, Use, fields, inner, wrong_value};
use crate::options::{self, MAX_LOGPROBS, MAX_N, MAX_TOKENS, Options};
use crate::{ApiError, ServedModel, Warnings};

/// Maximum number of prompts; a server may allow fewer.
const MAX_PROMPTS: usize = 2048;
/// Maximum number of tokens in a prompt; exceeds any context, because prompts may be truncated.
const MAX_PROMPT_TOKENS: usize = 1 << 20;
/// Maximum `best_of`, as in OpenAI's API.
const MAX_BEST_OF: usize = 20;

fields! {
    /// Fields of `/v1/completions` that `/v1/chat/completions` does not have.
    CompletionFields {
        /// Prompt to continue; if absent or empty, the BOS token. Names of special tokens in a text are
        /// parsed as special tokens.
        prompt: Option<Prompts>,
        /// Maximum number of new tokens; they must fit into the context together with the prompt. Default:
        /// 100, or fewer if 100 do not fit. 0 generates nothing; with `echo`, it scores the prompt.
        max_tokens | n_predict: Option<Count<0, MAX_TOKENS>>,
        /// Number of candidates; the `n` with the highest mean log-probability are returned. At least `n`,
        /// at most 20 (or `n` if larger), and equal to `n` in a stream.
        best_of: Option<Count<0, MAX_N>>,
        /// Whether to return the prompt, with its log-probabilities, in front of the completion.
        echo: bool = false,
        /// Number of most probable tokens to return at each position, in addition to the token itself. The
        /// log-probabilities reflect the model and `logit_bias`, but no other processing. `n_probs` 0
        /// returns none.
        logprobs | n_probs: Option<Count<0, MAX_LOGPROBS>>,
    }
    refused ["suffix": "GPT-2 cannot insert text; send only a prompt"]
}

/// All fields of the body.
pub(crate) static FIELDS: LazyLock<Vec<Field>> =
    LazyLock::new(|| [CompletionFields::fields(), &options::fields()].concat());

/// Parsed body of `/v1/completions`, with every field in range.
///
/// ```
/// use candle_gpt2_api::CompletionRequest;
///
/// assert!(!CompletionRequest::parse(br#"{"prompt": [464, 3290], "max_tokens": 5}"#)?.has_grammar());
/// let error = CompletionRequest::parse(br#"{"prompt": "The dog", "n": -1}"#).err().ok_or("expected an error")?;
/// assert_eq!((error.status(), error.param()), (400, Some("n")));
/// assert!(CompletionRequest::fields().any(|field| field == "logprobs"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct CompletionRequest {
    pub(crate) prompts: Prompts,
    /// Number of candidates, at least `n`.
    pub(crate) best_of: usize,
    pub(crate) echo: bool,
    pub(crate) logprobs: Option<usize>,
    pub(crate) options: Options,
    pub(crate) warnings: Warnings,
}

impl CompletionRequest {
    /// Parses a request body.
    ///
    /// Unknown fields become warnings in the answer. A [strict](crate::ApiOptions::strict) server rejects
    /// them.
    ///
    /// # Errors
    /// If the body is not a JSON object, or a field has the wrong type, is out of range or is unsupported.
    /// The message names the field, the expected value and the value found.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        Self::from_body(&mut Body::parse(body, &FIELDS)?)
    }

    /// Builds a request from a parsed body.
    pub(crate) fn from_body(body: &mut Body<'_>) -> Result<Self, ApiError> {
        let fields: CompletionFields = body.read()?;
        let options = Options::read(body, fields.max_tokens)?;
        // llama.cpp's clients send `n_probs: 0` to disable log-probabilities.
        let is_none = |logprobs: usize| logprobs == 0 && body.name("logprobs") == "n_probs";
        Ok(Self {
            prompts: fields.prompt.unwrap_or_else(Prompts::empty),
            best_of: fields
                .best_of
                .map_or(Ok(options.fields.n.0), |best_of| check_best_of(best_of.0, &options, body))?,
            echo: fields.echo,
            logprobs: fields.logprobs.map(|Count(logprobs)| logprobs).filter(|logprobs| !is_none(*logprobs)),
            options,
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
}

/// Names of the supported fields.
pub(crate) fn supported_names(fields: &'static [Field]) -> impl Iterator<Item = &'static str> {
    fields.iter().filter(|field| !matches!(field.use_, Use::Refused(_))).map(|field| field.name)
}

fn check_best_of(best_of: usize, options: &Options, body: &Body<'_>) -> Result<usize, ApiError> {
    let Count(n) = options.fields.n;
    // An `n` above the maximum raises the maximum to `n`.
    let most = MAX_BEST_OF.max(n);
    match best_of.max(1) {
        best_of if best_of > most => {
            Err(body.wrong("best_of", format_args!("a whole number from 0 to {most}")))
        }
        best_of if best_of < n => Err(body.wrong("best_of", format_args!("at least n, which is {n}"))),
        best_of if options.fields.stream && best_of > n => {
            Err(body.wrong("best_of", "the value of n when stream is true"))
        }
        best_of => Ok(best_of),
    }
}

/// Prompts in a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Prompts {
    /// Field that contains the prompts.
    pub(crate) field: &'static str,
    pub(crate) prompts: Vec<Prompt>,
    /// Whether the prompts were sent as a list; if so, error messages include the index.
    pub(crate) is_list: bool,
}

/// Prompt as text or token ids.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Prompt {
    Text(String),
    /// Nonempty list of token ids.
    Ids(Vec<u32>),
}

impl Prompts {
    /// Creates a single empty prompt; generation starts from the BOS token.
    pub(crate) fn empty() -> Self {
        Self::single(Prompt::Text(String::new()))
    }

    fn single(prompt: Prompt) -> Self {
        Self { field: "prompt", prompts: vec![prompt], is_list: false }
    }

    /// Path of a prompt in the request.
    pub(crate) fn path(&self, prompt: usize) -> String {
        if self.is_list { format!("{}[{prompt}]", self.field) } else { self.field.into() }
    }

    /// Checks that `input` is present and that its prompts do not exceed the server's limit.
    pub(crate) fn of_input(input: Option<Self>, served: &ServedModel) -> Result<Self, ApiError> {
        let input = input.ok_or_else(|| wrong_value("input", SHAPES, "nothing"))?;
        let input = Self { field: "input", ..input };
        input.check_count(served)?;
        Ok(input)
    }

    /// Rejects more prompts than the server allows.
    pub(crate) fn check_count(&self, served: &ServedModel) -> Result<(), ApiError> {
        let (field, most, found) = (self.field, served.options.limits.max_prompts, self.prompts.len());
        if found <= most {
            return Ok(());
        }
        let what = if field == "input" { "texts" } else { "prompts" };
        let message = format!("{field}: this server accepts at most {most} {what}, found {found}");
        Err(ApiError::invalid(message).with_param(field))
    }
}

const SHAPES: &str = "a string, strings, token ids, or lists of token ids";

impl Described for Prompts {
    fn schema() -> Value {
        let several =
            |item: Value| json!({ "type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": item });
        let (text, ids) = (String::schema(), PromptIds::schema());
        json!({ "oneOf": [text, several(text.clone()), ids, several(ids.clone())] })
    }
}

impl<'de> Deserialize<'de> for Prompts {
    /// Deserializes prompts; the first item of a list determines the type of all items.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let json = <&RawValue>::deserialize(deserializer)?;
        let mut beginning = json.get().chars().filter(|c| !c.is_ascii_whitespace());
        let prompts = match (beginning.next(), beginning.next()) {
            (Some('"'), _) => return Ok(Self::single(Prompt::Text(inner(json)?))),
            (Some('['), Some(']')) => return Err(D::Error::custom("expected at least one prompt")),
            (Some('['), Some('"')) => {
                let List::<String, MAX_PROMPTS>(texts) = inner(json)?;
                texts.into_iter().map(Prompt::Text).collect()
            }
            (Some('['), Some('[')) => {
                let List::<PromptIds, MAX_PROMPTS>(lists) = inner(json)?;
                lists.into_iter().map(|PromptIds(ids)| Prompt::Ids(ids)).collect()
            }
            (Some('['), _) => {
                let TokenIds::<MAX_PROMPT_TOKENS>(ids) = inner(json)?;
                return Ok(Self::single(Prompt::Ids(ids)));
            }
            _ => return Err(D::Error::custom(format_args!("expected {SHAPES}"))),
        };
        Ok(Self { field: "prompt", prompts, is_list: true })
    }
}

/// Nonempty list of a prompt's token ids.
struct PromptIds(Vec<u32>);

impl<'de> Deserialize<'de> for PromptIds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let TokenIds::<MAX_PROMPT_TOKENS>(ids) = TokenIds::deserialize(deserializer)?;
        if ids.is_empty() { Err(D::Error::custom("expected at least one token id")) } else { Ok(Self(ids)) }
    }
}

impl Described for PromptIds {
    fn schema() -> Value {
        let mut ids = TokenIds::<MAX_PROMPT_TOKENS>::schema();
        ids["minItems"] = json!(1);
        ids
    }
}
