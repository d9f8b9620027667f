//! The body of `/v1/completions`.
//!
//! Source: OpenAI's OpenAPI description, `CreateCompletionRequest`; vLLM's and llama.cpp's fields beside it.

use std::sync::LazyLock;

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::body::{Body, Count, Described, Field, Fields, List, TokenIds, Use, fields, inner, wrong_value};
use crate::options::{self, MAX_LOGPROBS, MAX_N, MAX_TOKENS, Options};
use crate::{ApiError, ServedModel, Warnings};

/// Most prompts; a server may allow fewer.
const MAX_PROMPTS: usize = 2048;
/// Most tokens of a prompt, more than any context: what is cut may be longer.
const MAX_PROMPT_TOKENS: usize = 1 << 20;
/// Largest `best_of`, as OpenAI has it.
const MAX_BEST_OF: usize = 20;

fields! {
    /// The fields of `/v1/completions` that conversations do not have.
    CompletionFields {
        /// What to continue; without one, or empty, the token that begins texts. Names of special tokens in a text are read as these
        /// tokens.
        prompt: Option<Prompts>,
        /// Maximum number of new tokens, which must fit into the context with the prompt. Default: 100, or what fits. 0 generates nothing,
        /// and with `echo` scores the prompt.
        max_tokens | n_predict: Option<Count<0, MAX_TOKENS>>,
        /// Completions of which the `n` with the greatest mean log-probability are returned; at least `n`, at most 20 or `n`, and
        /// `n` in a stream.
        best_of: Option<Count<0, MAX_N>>,
        /// Whether the text begins with the prompt, and the log-probabilities with those of its tokens.
        echo: bool = false,
        /// Returns the log-probability of each token, and as many of the most probable ones. They are those of the model and
        /// `logit_bias`, before anything else changes them. 0 of `n_probs` is none.
        logprobs | n_probs: Option<Count<0, MAX_LOGPROBS>>,
    }
    refused ["suffix": "GPT-2 cannot fill in; give a prompt alone"]
}

/// All fields of the body.
pub(crate) static FIELDS: LazyLock<Vec<Field>> =
    LazyLock::new(|| [CompletionFields::fields(), &options::fields()].concat());

/// What `/v1/completions` is asked for, with every field in its range.
///
/// ```
/// use candle_gpt2_api::CompletionRequest;
///
/// assert!(!CompletionRequest::parse(br#"{"prompt": [464, 3290], "max_tokens": 5}"#)?.has_grammar());
/// let error = CompletionRequest::parse(br#"{"prompt": "The dog", "n": -1}"#).err().ok_or("it is allowed")?;
/// assert_eq!((error.status(), error.param()), (400, Some("n")));
/// assert!(CompletionRequest::fields().any(|field| field == "logprobs"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct CompletionRequest {
    pub(crate) prompts: Prompts,
    /// At least `n`.
    pub(crate) best_of: usize,
    pub(crate) echo: bool,
    pub(crate) logprobs: Option<usize>,
    pub(crate) options: Options,
    pub(crate) warnings: Warnings,
}

impl CompletionRequest {
    /// Reads a body. Unknown fields become warnings of the answer, or a refusal by a [strict](crate::ApiOptions::strict) server.
    ///
    /// # Errors
    /// When it is no JSON object, or a field is of the wrong type, out of its range or not served: which one, what was
    /// expected and what was found.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        Self::of(&mut Body::parse(body, &FIELDS)?)
    }

    /// What the fields of a body say.
    pub(crate) fn of(body: &mut Body<'_>) -> Result<Self, ApiError> {
        let fields: CompletionFields = body.read()?;
        let options = Options::read(body, fields.max_tokens)?;
        // llama.cpp's clients send 0 for none.
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

    /// Whether its texts conform to something, which takes long to read.
    pub fn has_grammar(&self) -> bool {
        self.options.grammar.is_some()
    }

    /// The names of the fields that it reads or ignores.
    pub fn fields() -> impl Iterator<Item = &'static str> {
        known(&FIELDS)
    }
}

/// The names of these fields, without those that are refused.
pub(crate) fn known(fields: &'static [Field]) -> impl Iterator<Item = &'static str> {
    fields.iter().filter(|field| !matches!(field.use_, Use::Refused(_))).map(|field| field.name)
}

fn check_best_of(best_of: usize, options: &Options, body: &Body<'_>) -> Result<usize, ApiError> {
    let Count(n) = options.fields.n;
    // `best_of` may always be as large as n.
    let most = MAX_BEST_OF.max(n);
    match best_of.max(1) {
        best_of if best_of > most => {
            Err(body.wrong("best_of", format_args!("a whole number from 0 to {most}")))
        }
        best_of if best_of < n => Err(body.wrong("best_of", format_args!("at least n, which is {n}"))),
        best_of if options.fields.stream && best_of > n => {
            Err(body.wrong("best_of", "n if the texts are streamed"))
        }
        best_of => Ok(best_of),
    }
}

/// The prompts of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Prompts {
    /// The field that they are given in.
    pub(crate) field: &'static str,
    pub(crate) prompts: Vec<Prompt>,
    /// Whether they were a list, so that messages count them.
    pub(crate) is_list: bool,
}

/// A prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Prompt {
    Text(String),
    /// Not empty.
    Ids(Vec<u32>),
}

impl Prompts {
    /// An empty one, which starts from the token that begins texts.
    pub(crate) fn empty() -> Self {
        Self::single(Prompt::Text(String::new()))
    }

    fn single(prompt: Prompt) -> Self {
        Self { field: "prompt", prompts: vec![prompt], is_list: false }
    }

    /// The path of a prompt.
    pub(crate) fn path(&self, prompt: usize) -> String {
        if self.is_list { format!("{}[{prompt}]", self.field) } else { self.field.into() }
    }

    /// Those of the field `input`: at least one, and no more than the server takes.
    pub(crate) fn of_input(input: Option<Self>, served: &ServedModel) -> Result<Self, ApiError> {
        let input = input.ok_or_else(|| wrong_value("input", SHAPES, "nothing"))?;
        let input = Self { field: "input", ..input };
        input.check_count(served)?;
        Ok(input)
    }

    /// Refuses more of them than the server takes.
    pub(crate) fn check_count(&self, served: &ServedModel) -> Result<(), ApiError> {
        let (field, most, found) = (self.field, served.options.limits.max_prompts, self.prompts.len());
        if found <= most {
            return Ok(());
        }
        let what = if field == "input" { "texts" } else { "prompts" };
        let message = format!("{field}: this server takes at most {most} {what}, found {found}");
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
    /// The first item of a list decides what the others are.
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

/// Token ids of a prompt: at least one.
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
