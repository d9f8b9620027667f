//! The fields that `/v1/completions` and `/v1/chat/completions` share.

use std::collections::BTreeMap;

use candle_gpt2_generation::{GenerationConfig, GenerationOptions, samples_at};
use candle_gpt2_grammar::Grammar;

use crate::body::{Field, Fields, Given, Use, fields};
use crate::{ApiError, ServedModel};

/// Largest `n`, as OpenAI has it; a server may allow fewer.
pub(crate) const MAX_N: usize = 128;
/// Most alternatives for each token; OpenAI's completions allow 5, its chat 20.
pub(crate) const MAX_LOGPROBS: usize = 20;
/// Most stop strings; OpenAI allows 4, and lm-evaluation-harness sends more.
const MAX_STOPS: usize = 32;
/// Longest stop string in bytes. A search keeps nine bytes for each of them.
const MAX_STOP_BYTES: usize = 1024;
/// Most tokens with a bias.
const MAX_BIASES: usize = 1024;
/// Most words that are never generated, and the bytes of each.
const MAX_BAD_WORDS: usize = 128;
const MAX_BAD_WORD_BYTES: usize = 256;
/// Most tokens that end a text.
const MAX_STOP_TOKENS: usize = 128;
/// Most tokens that a text is restricted to: more than any vocabulary of this model has.
const MAX_ALLOWED_TOKENS: usize = 1 << 18;
/// Longest name, salt or number of a request, in bytes.
pub(crate) const MAX_NAME_BYTES: usize = 256;
/// Longest number of a request: it comes back in every chunk.
const MAX_ID_BYTES: usize = 64;
/// Longest schema or grammar, as it is written in a body.
const MAX_GRAMMAR_BYTES: usize = candle_gpt2_grammar::MAX_SOURCE_BYTES;
/// Most texts to choose from.
const MAX_CHOICES: usize = 1024;
/// Longest regular expression, each byte of which costs some ten microseconds before anything is known of it.
const MAX_REGEX_BYTES: usize = 8 << 10;

const SERVED: [Field; 32] = fields(
    [
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
        "n",
        "stop",
        "stream",
        "stream_options",
        "seed",
        "logit_bias",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "no_repeat_ngram_size",
        "bad_words",
        "allowed_token_ids",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "include_stop_str_in_output",
        "truncate_prompt_tokens",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "cache_prompt",
        "cache_salt",
        "request_id",
        "response_format",
        "structured_outputs",
        "guided_json",
    ],
    Use::Served,
);
const GUIDED: [Field; 3] = fields(["guided_regex", "guided_grammar", "guided_choice"], Use::Served);
const ALIASES: [Field; 4] = [
    Field { name: "n_predict", use_: Use::Alias("max_tokens") },
    Field { name: "repeat_penalty", use_: Use::Alias("repetition_penalty") },
    Field { name: "typical", use_: Use::Alias("typical_p") },
    Field { name: "json_schema", use_: Use::Alias("guided_json") },
];
/// What changes no answer here: who asks, what OpenAI keeps of it, and how tools are called, of which there are none.
const IGNORED: [Field; 14] = fields(
    [
        "user",
        "safety_identifier",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "tool_choice",
        "function_call",
        "priority",
        "add_special_tokens",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    ],
    Use::Ignored,
);
const REFUSED: [Field; 5] = [
    Field { name: "use_beam_search", use_: Use::Refused("leave it out, or use `gpt2 generate --num-beams`") },
    Field { name: "prompt_logprobs", use_: Use::Refused("ask for echo and logprobs at /v1/completions") },
    Field { name: "grammar", use_: Use::Refused("write it in Lark's syntax as guided_grammar") },
    Field { name: "tools", use_: Use::Refused(NO_TOOLS) },
    Field { name: "functions", use_: Use::Refused(NO_TOOLS) },
];
const NO_TOOLS: &str = "the model calls no tools; leave it out";

/// The fields that both routes know.
pub(crate) const OPTIONS: &[&[Field]] = &[&SERVED, &GUIDED, &ALIASES, &IGNORED, &REFUSED];

/// What both routes are asked for.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) model: Option<String>,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) n: usize,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    /// How the next token is chosen, and what ends a text.
    pub(crate) settings: GenerationOptions,
    pub(crate) seed: Option<i64>,
    pub(crate) stop_token_ids: Vec<u32>,
    pub(crate) ignore_eos: bool,
    pub(crate) bad_words: Vec<String>,
    pub(crate) allowed_token_ids: Option<Vec<u32>>,
    pub(crate) include_stop: bool,
    pub(crate) truncation: Option<Truncation>,
    pub(crate) return_token_ids: bool,
    pub(crate) tokens_as_ids: bool,
    pub(crate) cache_prompt: bool,
    pub(crate) cache_salt: Option<String>,
    pub(crate) request_id: Option<String>,
    /// What the text must conform to, and the field that says so.
    pub(crate) grammar: Option<(String, Grammar)>,
}

/// What is kept of a long prompt, at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Truncation {
    /// What leaves room for the new tokens.
    ToContext,
    /// At most so many tokens.
    ToTokens(usize),
}

impl Options {
    pub(crate) fn read(fields: &Fields<'_, '_>) -> Result<Self, ApiError> {
        let stream = fields.boolean("stream", false)?;
        let max_tokens = fields.read("max_tokens", |given| given.count(0..=MAX_TOKENS))?;
        let min_tokens = fields.read("min_tokens", |given| {
            let min_tokens = given.count(0..=MAX_TOKENS)?;
            let is_more = max_tokens.is_some_and(|max_tokens| min_tokens > max_tokens);
            if is_more { Err(given.wrong("at most max_tokens")) } else { Ok(min_tokens) }
        })?;
        let settings = GenerationOptions { min_new_tokens: min_tokens, ..settings(fields)? };
        Ok(Self {
            model: fields.read("model", |given| given.short_text(MAX_NAME_BYTES))?,
            max_tokens,
            n: fields.read("n", |given| given.count(1..=MAX_N))?.unwrap_or(1),
            include_usage: fields
                .read("stream_options", |given| include_usage(given, stream))?
                .unwrap_or(false),
            stream,
            settings,
            seed: fields.read("seed", |given| given.integer(i64::MIN..=i64::MAX))?,
            stop_token_ids: fields
                .read("stop_token_ids", |given| given.token_ids(MAX_STOP_TOKENS))?
                .unwrap_or_default(),
            ignore_eos: fields.boolean("ignore_eos", false)?,
            bad_words: fields.read("bad_words", bad_words)?.unwrap_or_default(),
            allowed_token_ids: fields
                .read("allowed_token_ids", |given| given.token_ids(MAX_ALLOWED_TOKENS))?
                .filter(|ids| !ids.is_empty()),
            include_stop: fields.boolean("include_stop_str_in_output", false)?,
            truncation: fields.read("truncate_prompt_tokens", truncation)?,
            return_token_ids: fields.boolean("return_token_ids", false)?,
            tokens_as_ids: fields.boolean("return_tokens_as_token_ids", false)?,
            cache_prompt: fields.boolean("cache_prompt", true)?,
            cache_salt: fields.read("cache_salt", |given| given.short_text(MAX_NAME_BYTES))?,
            request_id: fields.read("request_id", request_id)?,
            grammar: grammar(fields)?,
        })
    }

    /// How the next token is chosen: as the request says, else as the checkpoint's `generation_config.json` says if the operator wants
    /// that, and else as OpenAI does.
    pub(crate) fn sampling(&self, served: &ServedModel) -> GenerationConfig {
        sampling(self.settings.clone(), served)
    }

    /// New tokens that prompts leave room for. A number that is not given adapts to the prompts: all that is asked for is room for a
    /// token, or up to half of the context if they are cut to fit.
    pub(crate) fn room(&self, usual: usize, served: &ServedModel) -> usize {
        let half = served.config().n_positions / 2;
        self.max_tokens.unwrap_or(if self.truncation.is_some() { usual.min(half) } else { 1 })
    }
}

/// See [`Options::sampling`].
pub(crate) fn sampling(settings: GenerationOptions, served: &ServedModel) -> GenerationConfig {
    let mut config = GenerationConfig { do_sample: true, top_k: 0, ..GenerationConfig::default() };
    settings.or(&stated(served)).put_into(&mut config);
    config.do_sample = samples_at(config.temperature) && config.top_p > 0.0;
    if !config.do_sample {
        (config.temperature, config.top_p) = (1.0, 1.0);
    }
    config.min_p = config.min_p.filter(|min_p| *min_p > 0.0);
    config
}

/// What the checkpoint's files set for requests that do not, if the operator wants that: as much as vLLM takes of them.
fn stated(served: &ServedModel) -> GenerationOptions {
    if !served.options.use_generation_config {
        return GenerationOptions::default();
    }
    let GenerationOptions { max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, .. } =
        *served.defaults.stated();
    let unset = GenerationOptions::default();
    GenerationOptions { max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, ..unset }
}

/// More than any context holds; the model's own is checked later.
const MAX_TOKENS: usize = u32::MAX as usize;

/// What the fields set.
fn settings(fields: &Fields<'_, '_>) -> Result<GenerationOptions, ApiError> {
    let number = |name, range: std::ops::RangeInclusive<f64>| {
        let expected = format!("a number from {} to {}", range.start(), range.end());
        fields.read(name, |given| given.number(&expected, |number| range.contains(&number)))
    };
    let typical = |given: Given<'_, '_>| {
        given.number("a number above 0 and at most 1", |number| number > 0.0 && number <= 1.0)
    };
    let penalty = |given: Given<'_, '_>| {
        given.number("a number above 0 and at most 1000", |number| number > 0.0 && number <= 1000.0)
    };
    let top_k = |given: Given<'_, '_>| given.integer(-1..=i64::from(u32::MAX));
    Ok(GenerationOptions {
        temperature: number("temperature", 0.0..=2.0)?,
        top_p: number("top_p", 0.0..=1.0)?,
        // -1 and 0 keep all.
        top_k: fields.read("top_k", top_k)?.map(|top_k| top_k.try_into().unwrap_or(0)),
        min_p: number("min_p", 0.0..=1.0)?,
        typical_p: fields.read("typical_p", typical)?,
        repetition_penalty: fields.read("repetition_penalty", penalty)?,
        presence_penalty: number("presence_penalty", -2.0..=2.0)?,
        frequency_penalty: number("frequency_penalty", -2.0..=2.0)?,
        no_repeat_ngram_size: fields.read("no_repeat_ngram_size", |given| given.count(0..=MAX_TOKENS))?,
        sequence_bias: fields.read("logit_bias", logit_bias)?,
        stop_strings: fields.read("stop", stop)?,
        ..GenerationOptions::default()
    })
}

fn include_usage(given: Given<'_, '_>, stream: bool) -> Result<bool, ApiError> {
    const STREAM_OPTIONS: &[Field] = &fields(["include_usage"], Use::Served);
    // Nothing is written beside the text to hide its length.
    const IGNORED: &[Field] = &fields(["include_obfuscation"], Use::Ignored);
    let options = Fields::of(given, &[STREAM_OPTIONS, IGNORED])?;
    match stream {
        true => options.boolean("include_usage", false),
        false => Err(given.wrong("nothing where stream is false")),
    }
}

fn stop(given: Given<'_, '_>) -> Result<Vec<String>, ApiError> {
    let string = |given: Given<'_, '_>| given.short_text(MAX_STOP_BYTES);
    if given.is_text() {
        return Ok(vec![string(given)?]);
    }
    given.list("a string or a list of strings", MAX_STOPS, string)
}

fn logit_bias(given: Given<'_, '_>) -> Result<Vec<(Vec<u32>, f64)>, ApiError> {
    let mut biases = BTreeMap::new();
    given.each_entry("an object of token ids and biases", |id, bias| {
        let Ok(id) = id.parse::<u32>() else {
            return Err(bias.wrong_as("a token id as its name", "another"));
        };
        let bias_of =
            bias.number("a number from -100 to 100", |number| (-100.0..=100.0).contains(&number))?;
        if biases.len() == MAX_BIASES {
            return Err(given.wrong_as(format!("at most {MAX_BIASES} biases"), "more"));
        }
        match biases.insert(vec![id], bias_of) {
            None => Ok(()),
            Some(_) => Err(bias.wrong_as("one bias for a token", "a second one")),
        }
    })?;
    Ok(biases.into_iter().collect())
}

fn bad_words(given: Given<'_, '_>) -> Result<Vec<String>, ApiError> {
    given.list("a list of strings", MAX_BAD_WORDS, |word| word.short_text(MAX_BAD_WORD_BYTES))
}

pub(crate) fn truncation(given: Given<'_, '_>) -> Result<Truncation, ApiError> {
    match given.integer(-1..=i64::from(u32::MAX))? {
        -1 => Ok(Truncation::ToContext),
        tokens => match usize::try_from(tokens) {
            Ok(tokens @ 1..) => Ok(Truncation::ToTokens(tokens)),
            _ => Err(given.wrong("-1, or a whole number of at least 1")),
        },
    }
}

pub(crate) fn request_id(given: Given<'_, '_>) -> Result<String, ApiError> {
    let id = given.short_text(MAX_ID_BYTES)?;
    let is_visible = id.bytes().all(|byte| byte.is_ascii_graphic());
    if is_visible { Ok(id) } else { Err(given.wrong("visible ASCII characters")) }
}

/// What the text must conform to: at most one of the fields that say so.
fn grammar(fields: &Fields<'_, '_>) -> Result<Option<(String, Grammar)>, ApiError> {
    let mut found = None;
    for (name, read) in [
        ("response_format", response_format as fn(Given<'_, '_>) -> Result<Option<Grammar>, ApiError>),
        ("structured_outputs", structured_outputs),
        ("guided_json", |given| schema(given).map(Some)),
        ("guided_regex", |given| regex(given).map(Some)),
        ("guided_grammar", |given| lark(given).map(Some)),
        ("guided_choice", |given| choice(given).map(Some)),
    ] {
        let Some(given) = fields.get(name) else { continue };
        // Empty is what some clients send for nothing.
        let Some(grammar) = (if given.is_nothing() { None } else { read(given)? }) else { continue };
        if found.replace((given.name(), grammar)).is_some() {
            return Err(given.wrong_as("one description of the text", "a second one"));
        }
    }
    Ok(found)
}

fn schema(given: Given<'_, '_>) -> Result<Grammar, ApiError> {
    if given.json() == "true" {
        return Ok(Grammar::JsonObject);
    }
    let schema = match given.is_text() {
        true => serde_json::from_str(&given.short_text(MAX_GRAMMAR_BYTES)?)
            .map_err(|_| given.wrong("a JSON schema"))?,
        false => given.tree(MAX_GRAMMAR_BYTES)?,
    };
    match schema {
        serde_json::Value::Object(_) => Ok(Grammar::JsonSchema(schema)),
        _ => Err(given.wrong("a JSON schema, which is an object")),
    }
}

fn regex(given: Given<'_, '_>) -> Result<Grammar, ApiError> {
    Ok(Grammar::Regex(given.short_text(MAX_REGEX_BYTES)?))
}

fn lark(given: Given<'_, '_>) -> Result<Grammar, ApiError> {
    Ok(Grammar::Lark(given.short_text(MAX_GRAMMAR_BYTES)?))
}

/// One of several texts.
fn choice(given: Given<'_, '_>) -> Result<Grammar, ApiError> {
    const EXPECTED: &str = "a list of texts that are not empty";
    let texts = given.list(EXPECTED, MAX_CHOICES, |text| text.short_text(MAX_REGEX_BYTES))?;
    match Grammar::choice(&texts) {
        Some(Grammar::Regex(pattern)) if pattern.len() > MAX_REGEX_BYTES => {
            Err(given.wrong_as(format!("texts of at most {MAX_REGEX_BYTES} bytes together"), "more"))
        }
        Some(grammar) => Ok(grammar),
        None => Err(given.wrong(EXPECTED)),
    }
}

/// OpenAI's `response_format`.
fn response_format(given: Given<'_, '_>) -> Result<Option<Grammar>, ApiError> {
    const FORMAT: &[Field] = &fields(["type", "json_schema", "schema"], Use::Served);
    const SCHEMA: &[Field] = &fields(["schema"], Use::Served);
    // A schema is always kept to the letter.
    const ABOUT_IT: &[Field] = &fields(["name", "description", "strict"], Use::Ignored);
    const TYPES: &str = "\"text\", \"json_object\" or \"json_schema\"";
    let format = Fields::of(given, &[FORMAT])?;
    let Some(kind) = format.get("type") else { return Err(given.wrong(format!("a type, {TYPES}"))) };
    match kind.text()?.as_str() {
        "text" => Ok(None),
        // llama.cpp's form names a schema here.
        "json_object" => Ok(Some(format.read("schema", schema)?.unwrap_or(Grammar::JsonObject))),
        "json_schema" => {
            let named = format.get("json_schema").ok_or_else(|| given.wrong("an object with json_schema"))?;
            let inner = Fields::of(named, &[SCHEMA, ABOUT_IT])?;
            let inner = inner.get("schema").ok_or_else(|| named.wrong("an object with a schema"))?;
            schema(inner).map(Some)
        }
        _ => Err(kind.wrong(TYPES)),
    }
}

/// vLLM's `structured_outputs`.
fn structured_outputs(given: Given<'_, '_>) -> Result<Option<Grammar>, ApiError> {
    const OUTPUTS: [Field; 5] = fields(["json", "regex", "grammar", "json_object", "choice"], Use::Served);
    let outputs = Fields::of(given, &[&OUTPUTS])?;
    let is_object = outputs.boolean("json_object", false)?;
    let mut found: Vec<Grammar> = [
        outputs.read("json", schema)?,
        outputs.read("regex", regex)?,
        outputs.read("grammar", lark)?,
        outputs.read("choice", choice)?,
        is_object.then_some(Grammar::JsonObject),
    ]
    .into_iter()
    .flatten()
    .collect();
    match found.len() {
        0 | 1 => Ok(found.pop()),
        _ => Err(given.wrong("one of json, regex, grammar, choice and json_object")),
    }
}
