//! The body of `/v1/completions`.
//!
//! Source: OpenAI's OpenAPI description, `CreateCompletionRequest`; vLLM's and llama.cpp's fields beside it.

use crate::body::{Field, Fields, Given, Unknown, Use, fields};
use crate::options::{MAX_LOGPROBS, MAX_N, OPTIONS, Options};
use crate::{ApiError, ServedModel, Warnings};

/// Most prompts; a server may allow fewer.
const MAX_PROMPTS: usize = 2048;
/// Most tokens of a prompt, more than any context: what is cut may be longer.
const MAX_PROMPT_TOKENS: usize = 1 << 20;
/// Largest `best_of`, as OpenAI has it.
const MAX_BEST_OF: usize = 20;

const SERVED: [Field; 4] = fields(["prompt", "best_of", "echo", "logprobs"], Use::Served);
const ALIASES: [Field; 1] = [Field { name: "n_probs", use_: Use::Alias("logprobs") }];
const REFUSED: [Field; 1] = fields(["suffix"], Use::Refused("GPT-2 cannot fill in; give a prompt alone"));
const TABLES: &[&[Field]] = &[&SERVED, &ALIASES, &REFUSED];

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
    /// The path of a prompt.
    pub(crate) fn path(&self, prompt: usize) -> String {
        if self.is_list { format!("{}[{prompt}]", self.field) } else { self.field.into() }
    }
}

impl CompletionRequest {
    /// Reads a body. Unknown fields become warnings of the answer, or a refusal by a [strict](crate::ApiOptions::strict) server.
    ///
    /// # Errors
    /// When it is no JSON object, or a field is of the wrong type, out of its range or not served: which one, what was
    /// expected and what was found.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let unknown = Unknown::default();
        let request = Self::of(&Fields::of_body(body, &Self::tables(), &unknown)?)?;
        Ok(Self { warnings: unknown.take(), ..request })
    }

    /// The fields that it knows.
    pub(crate) fn tables() -> Vec<&'static [Field]> {
        TABLES.iter().chain(OPTIONS).copied().collect()
    }

    /// What the fields of a body say; of unknown ones it has no warnings yet.
    pub(crate) fn of(fields: &Fields<'_, '_>) -> Result<Self, ApiError> {
        let options = Options::read(fields)?;
        let best_of = fields.read("best_of", |given| best_of(given, &options))?.unwrap_or(options.n);
        // llama.cpp's clients send 0 for none.
        let logprobs =
            fields.get("logprobs").filter(|given| !given.is_named("n_probs") || given.json() != "0");
        Ok(Self {
            prompts: match fields.get("prompt") {
                Some(given) => prompts(given, "prompt")?,
                None => {
                    Prompts { field: "prompt", prompts: vec![Prompt::Text(String::new())], is_list: false }
                }
            },
            best_of,
            echo: fields.boolean("echo", false)?,
            logprobs: logprobs.map(|given| given.count(0..=MAX_LOGPROBS)).transpose()?,
            options,
            warnings: Warnings::default(),
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
}

/// The names of these fields and of those that both routes know, without those that are refused.
pub(crate) fn known(tables: &'static [&'static [Field]]) -> impl Iterator<Item = &'static str> {
    let fields = tables.iter().chain(OPTIONS).copied().flatten();
    fields.filter(|field| !matches!(field.use_, Use::Refused(_))).map(|field| field.name)
}

fn best_of(given: Given<'_, '_>, options: &Options) -> Result<usize, ApiError> {
    // As many as n may always be asked for.
    let best_of = given.count(0..=MAX_BEST_OF.max(options.n).min(MAX_N))?.max(1);
    if best_of < options.n {
        return Err(given.wrong(format!("at least n, which is {}", options.n)));
    }
    if options.stream && best_of > options.n {
        return Err(given.wrong("n where the texts are streamed"));
    }
    Ok(best_of)
}

/// The texts of the field `input`: at least one, and as many as the server takes.
pub(crate) fn input(fields: &Fields<'_, '_>, served: &ServedModel) -> Result<Prompts, ApiError> {
    let wrong = |what: String| ApiError::invalid(format!("input: {what}")).with_param("input");
    let Some(given) = fields.get("input") else {
        return Err(wrong(
            "expected a string, strings, token ids, or lists of token ids, found nothing".into(),
        ));
    };
    let input = prompts(given, "input")?;
    let (most, found) = (served.options.limits.max_prompts, input.prompts.len());
    if found > most {
        return Err(wrong(format!("this server takes at most {most} texts, found {found}")));
    }
    Ok(input)
}

/// A text, a list of texts, a list of token ids, or a list of such lists: the first item tells.
pub(crate) fn prompts(given: Given<'_, '_>, field: &'static str) -> Result<Prompts, ApiError> {
    const SHAPES: &str = "a string, strings, token ids, or lists of token ids";
    let single = |prompt| Prompts { field, prompts: vec![prompt], is_list: false };
    if given.is_text() {
        return Ok(single(Prompt::Text(given.text()?)));
    }
    if !given.is_list() {
        return Err(given.wrong(SHAPES));
    }
    let list = if given.first_item_begins_with(&['"']) {
        given.list(SHAPES, MAX_PROMPTS, |item| Ok(Prompt::Text(item.text()?)))?
    } else if given.first_item_begins_with(&['[']) {
        given.list(SHAPES, MAX_PROMPTS, |item| match item.token_ids(MAX_PROMPT_TOKENS)? {
            ids if ids.is_empty() => Err(item.wrong("at least one token id")),
            ids => Ok(Prompt::Ids(ids)),
        })?
    } else if given.first_item_begins_with(&[']']) {
        return Err(given.wrong("at least one prompt"));
    } else {
        return Ok(single(Prompt::Ids(given.token_ids(MAX_PROMPT_TOKENS)?)));
    };
    Ok(Prompts { field, prompts: list, is_list: true })
}
