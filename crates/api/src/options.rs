//! Fields shared by `/v1/completions` and `/v1/chat/completions`.
//!
//! Fields that set a generation option come from the option table (`crates/generation/src/config/table.rs`).

use std::collections::BTreeMap;
use std::fmt;

use candle_gpt2_generation::{
    GenerationConfig, GenerationOptions, OPTIONS, OptionRow, RequestField, samples_at,
};
use candle_gpt2_grammar::Grammar;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use crate::body::{
    Body, Count, Described, Field, Fields, List, Seed, Text, TextOrList, TokenIds, beginning, fields, number,
    parse_raw, whole_number,
};
use crate::form::{FormFields, read_grammar};
use crate::inside_fields::{InsideFields, InsideOptions};
use crate::{ApiError, ServedModel};

/// Maximum `n`, as in OpenAI's API; a server may set a lower limit.
pub(crate) const MAX_N: usize = 128;
/// Maximum number of alternatives per token; OpenAI allows 5 for completions and 20 for chat.
pub(crate) const MAX_LOGPROBS: usize = 20;
/// Maximum token count in a field, above any context length; the context is checked later.
pub(crate) const MAX_TOKENS: usize = u32::MAX as usize;
/// Maximum number of stop strings; OpenAI allows 4, but lm-evaluation-harness sends more.
const MAX_STOPS: usize = 32;
/// Maximum length of a stop string in bytes, each of which takes nine bytes in the matcher.
const MAX_STOP_BYTES: usize = 1024;
/// Maximum number of tokens with a bias.
const MAX_BIASES: usize = 1024;
/// Maximum number of banned words, and maximum length of a banned word in bytes.
const MAX_BAD_WORDS: usize = 128;
const MAX_BAD_WORD_BYTES: usize = 256;
/// Maximum number of stop tokens.
const MAX_STOP_TOKENS: usize = 128;
/// Maximum number of allowed tokens; exceeds the size of any GPT-2 vocabulary.
const MAX_ALLOWED_TOKENS: usize = 1 << 18;
/// Maximum length of a name or salt, in bytes.
pub(crate) const MAX_NAME_BYTES: usize = 256;
/// Maximum length of a request id in bytes; every chunk repeats the id.
pub(crate) const MAX_ID_BYTES: usize = 64;
const NO_TOOLS: &str = "remove it, because the model does not support tool calls";

fields! {
    /// Shared fields that are not in the option table.
    SharedFields {
        /// The served name of the model, or an alias; may be absent.
        model: Option<Text<MAX_NAME_BYTES>>,
        /// Number of completions for each prompt; the server's own limit is lower.
        n: Count<1, MAX_N> = Count(1),
        /// Stop strings; a completion ends right before the first one. The name of a special token stops at
        /// that token.
        stop: Option<TextOrList<Text<MAX_STOP_BYTES>, Text<MAX_STOP_BYTES>, MAX_STOPS>>,
        /// Whether to stream the response as server-sent events that end with `data: [DONE]`.
        stream: bool = false,
        /// Streaming options; allowed only with `stream`.
        stream_options: Option<StreamOptions>,
        /// Random seed; without one, a fresh seed is used and returned as `seed`. Completion j of prompt i
        /// samples from stream i × best_of + j of the seed. The range is -2^63 to 2^64 - 1; a negative seed
        /// means that number plus 2^64, as in `gpt2 generate --seed`.
        seed: Option<Seed>,
        /// Biases added to logits, by token id. They affect sampling and the returned log-probabilities.
        logit_bias: Option<Biases>,
        /// Words that are never generated, with or without a leading space.
        bad_words: List<Text<MAX_BAD_WORD_BYTES>, MAX_BAD_WORDS>,
        /// The only tokens that may be generated.
        allowed_token_ids: TokenIds<MAX_ALLOWED_TOKENS>,
        /// Minimum number of new tokens before a completion may end.
        min_tokens: Option<Count<0, MAX_TOKENS>>,
        /// Whether to continue past the model's own end-of-text token.
        ignore_eos: bool = false,
        /// Additional tokens that end a completion.
        stop_token_ids: TokenIds<MAX_STOP_TOKENS>,
        /// Whether a completion includes the stop string that ended it.
        include_stop_str_in_output: bool = false,
        /// Number of tokens to keep from the end of a prompt; -1 keeps all that fit in front of the new
        /// tokens. If a text exceeds 1 MiB, only its end is read.
        truncate_prompt_tokens: Option<Truncation>,
        /// Whether choices include `token_ids` and `prompt_token_ids`.
        return_token_ids: bool = false,
        /// Whether log-probabilities identify tokens as `token_id:N`.
        return_tokens_as_token_ids: bool = false,
        /// Whether to share the KV cache for common prefixes with other requests that use the same API key.
        cache_prompt: bool = true,
        /// Salt; the request shares the KV cache only with requests that have the same salt.
        cache_salt: Option<Text<MAX_NAME_BYTES>>,
        /// Request id in visible ASCII; the response's `id` ends with it.
        request_id: Option<Text<MAX_ID_BYTES>>,
    }
    ignored [
        "user", "safety_identifier", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention",
        "parallel_tool_calls", "tool_choice", "function_call", "priority", "add_special_tokens", "skip_special_tokens",
        "spaces_between_special_tokens",
    ]
    refused [
        "use_beam_search": "remove it, or use `gpt2 generate --num-beams`",
        "prompt_logprobs": "use echo and logprobs at /v1/completions",
        "grammar": "use guided_grammar with Lark's syntax",
        "tools": NO_TOOLS,
        "functions": NO_TOOLS,
    ]
}

fields! {
    /// Streaming options.
    StreamOptions {
        /// Whether to send a final chunk with the token usage.
        include_usage: Option<bool>,
    }
    ignored ["include_obfuscation"]
}

/// All fields shared by both routes.
pub(crate) fn fields() -> Vec<Field> {
    [SharedFields::fields(), &table_fields(), FormFields::fields(), InsideFields::fields()].concat()
}

/// Options from the table that are also request fields.
pub(crate) fn request_options() -> impl Iterator<Item = (&'static OptionRow, RequestField)> {
    OPTIONS.iter().filter_map(|option| Some((option, option.request?)))
}

fn is_whole(option: &OptionRow) -> bool {
    option.kind == "usize"
}

fn table_fields() -> Vec<Field> {
    // `to_string` writes whole numbers without a fraction.
    let bound = |bound: f64| serde_json::from_str(&bound.to_string()).unwrap_or(Value::Null);
    let defaults = json!(GenerationConfig::default());
    let fields_of = |(option, field): (&OptionRow, RequestField)| {
        let kind = if is_whole(option) { "integer" } else { "number" };
        let least = if field.is_above { "exclusiveMinimum" } else { "minimum" };
        let mut schema = json!({ "type": kind, least: bound(field.min), "maximum": bound(field.max) });
        if let Some(default) = defaults.get(option.name).filter(|default| !default.is_null()) {
            schema["default"] = default.clone();
        }
        let doc = option.doc.split(" [default: ").next().unwrap_or_default();
        Field::read(option.name, field.alias.as_slice(), doc, false, &schema)
    };
    request_options().flat_map(fields_of).collect()
}

/// Parsed options shared by both routes.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) fields: SharedFields,
    pub(crate) max_tokens: Option<usize>,
    /// Sampling settings and stop conditions.
    pub(crate) settings: GenerationOptions,
    /// Structured output grammar, and the field that contains it.
    pub(crate) grammar: Option<(String, Grammar)>,
    /// Activations to return and steering edits.
    pub(crate) inside: InsideOptions,
}

/// Truncation of a long prompt, which keeps the end of the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Truncation {
    /// Leaves enough room for the new tokens.
    ToContext,
    /// Keeps at most this many tokens.
    ToTokens(usize),
}

impl<'de> Deserialize<'de> for Truncation {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parse_raw(deserializer, "-1, or a whole number of at least 1", |json| match whole_number(json)? {
            -1 => Some(Self::ToContext),
            tokens => usize::try_from(tokens).ok().filter(|tokens| *tokens > 0).map(Self::ToTokens),
        })
    }
}

impl Described for Truncation {
    fn schema() -> Value {
        json!({ "type": "integer", "minimum": -1 })
    }
}

/// Logit biases, each for a token.
#[derive(Debug, Clone)]
pub(crate) struct Biases(Vec<(Vec<u32>, f64)>);

/// Value added to a logit.
struct Bias(f64);

impl<'de> Deserialize<'de> for Bias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bias = |json| number(json).filter(|bias| (-100.0..=100.0).contains(bias));
        parse_raw(deserializer, "a number from -100 to 100", bias).map(Self)
    }
}

impl<'de> Deserialize<'de> for Biases {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(BiasesVisitor)
    }
}

impl Described for Biases {
    fn schema() -> Value {
        let bias = json!({ "type": "number", "minimum": -100, "maximum": 100 });
        json!({ "type": "object", "maxProperties": MAX_BIASES, "additionalProperties": bias })
    }
}

struct BiasesVisitor;

impl<'de> Visitor<'de> for BiasesVisitor {
    type Value = Biases;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object that maps token ids to biases")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Biases, A::Error> {
        let mut biases = BTreeMap::new();
        while let Some(name) = object.next_key::<String>()? {
            let Bias(bias) = object.next_value()?;
            let wrong = |what: String| Err(A::Error::custom(format_args!("expected {what}")));
            let Ok(id) = name.parse::<u32>() else {
                return wrong(format!("token ids as keys, found {:?}", beginning(&name)));
            };
            if biases.len() == MAX_BIASES {
                return wrong(format!("at most {MAX_BIASES} biases, found more"));
            }
            if biases.insert(vec![id], bias).is_some() {
                return wrong(format!("one bias for token {id}, found two"));
            }
        }
        Ok(Biases(biases.into_iter().collect()))
    }
}

impl Options {
    pub(crate) fn read(
        body: &mut Body<'_>,
        max_tokens: Option<Count<0, MAX_TOKENS>>,
    ) -> Result<Self, ApiError> {
        let fields: SharedFields = body.read()?;
        let max_tokens = max_tokens.map(|Count(max_tokens)| max_tokens);
        let min_tokens = fields.min_tokens.map(|Count(min_tokens)| min_tokens);
        if max_tokens.is_some() && min_tokens > max_tokens {
            return Err(body.wrong("min_tokens", "at most max_tokens"));
        }
        if fields.stream_options.is_some() && !fields.stream {
            return Err(body.wrong("stream_options", "no value unless stream is true"));
        }
        check_request_id(fields.request_id.as_ref(), body)?;
        let stops = fields.stop.clone().map(|stop| match stop {
            TextOrList::Text(stop) => vec![stop],
            TextOrList::List(stops) => stops,
        });
        let settings = GenerationOptions {
            min_new_tokens: min_tokens,
            sequence_bias: fields.logit_bias.as_ref().map(|Biases(biases)| biases.clone()),
            stop_strings: stops.map(|stops| stops.into_iter().map(|Text(stop)| stop).collect()),
            ..settings(body)?
        };
        Ok(Self {
            max_tokens,
            settings,
            grammar: read_grammar(body)?,
            inside: InsideOptions::read(body)?,
            fields,
        })
    }

    /// Whether validating the options against a model may take longer than a few milliseconds.
    pub(crate) fn takes_long(&self) -> bool {
        self.grammar.is_some() || self.inside.is_used()
    }

    /// Whether a stream ends with a usage chunk.
    pub(crate) fn includes_usage(&self) -> bool {
        self.fields.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false)
    }

    /// Sampling configuration for the request.
    ///
    /// The request's settings take precedence, then the checkpoint's `generation_config.json` if the operator
    /// enables it, then the defaults shared by all front ends.
    pub(crate) fn sampling(&self, served: &ServedModel) -> GenerationConfig {
        sampling(self.settings.clone(), served)
    }

    /// Number of new tokens that prompts must leave room for.
    ///
    /// A missing `max_tokens` adapts to the prompts: it requires room for one token. For truncated prompts, it
    /// requires room for up to half of the context.
    pub(crate) fn reserved_tokens(&self, usual: usize, served: &ServedModel) -> usize {
        let half = served.config().n_positions / 2;
        let is_truncated = self.fields.truncate_prompt_tokens.is_some();
        self.max_tokens.unwrap_or(if is_truncated { usual.min(half) } else { 1 })
    }
}

/// Checks a client-supplied request id.
pub(crate) fn check_request_id(id: Option<&Text<MAX_ID_BYTES>>, body: &Body<'_>) -> Result<(), ApiError> {
    let is_visible = id.is_none_or(|Text(id)| id.bytes().all(|byte| byte.is_ascii_graphic()));
    if is_visible { Ok(()) } else { Err(body.wrong("request_id", "visible ASCII characters")) }
}

/// Implements [`Options::sampling`].
pub(crate) fn sampling(settings: GenerationOptions, served: &ServedModel) -> GenerationConfig {
    let mut config = defaults(served);
    if let Some(temperature) = settings.temperature {
        config.do_sample = samples_at(temperature);
    } else if settings.non_greedy_option().is_some() {
        config.do_sample = true;
    }
    settings.put_into(&mut config);
    config.do_sample &= config.top_p > 0.0;
    if !config.do_sample {
        (config.temperature, config.top_p) = (1.0, 1.0);
    }
    config.min_p = config.min_p.filter(|min_p| *min_p > 0.0);
    config
}

/// Generation defaults shared by all front ends.
///
/// Requests have no search fields, so search settings in the checkpoint's files are dropped. Options that
/// every request sets itself are dropped too.
fn defaults(served: &ServedModel) -> GenerationConfig {
    let own = GenerationConfig { do_sample: true, ..GenerationConfig::default() };
    if !served.options.use_generation_config {
        return own;
    }
    /// Sampling options that each request sets itself.
    const OF_REQUEST: [&str; 2] = ["seed", "num_return_sequences"];
    let is_taken = |name: &str| {
        let option = OPTIONS.iter().find(|option| option.name == name);
        let group = option.map_or("", |option| option.group);
        name == "max_new_tokens"
            || (["Sampling", "Logits processors"].contains(&group) && !OF_REQUEST.contains(&name))
    };
    let stated = served.defaults.file_options().only(is_taken);
    let mut config = own;
    stated.put_into(&mut config);
    config
}

/// Generation options from the request fields in the option table.
fn settings(body: &Body<'_>) -> Result<GenerationOptions, ApiError> {
    let mut settings = GenerationOptions::default();
    for (option, field) in request_options() {
        let Some(json) = body.json(option.name) else { continue };
        let (kind, found) = match is_whole(option) {
            // A negative value means 0, because clients send -1 to disable an option.
            true => ("a whole number", whole_number(json).map(|whole| (whole as f64, json!(whole.max(0))))),
            false => ("a number", number(json).map(|number| (number, json!(number)))),
        };
        let value = found.filter(|(number, _)| field.contains(*number)).map(|(_, value)| value);
        let value = value.ok_or_else(|| body.wrong(option.name, format_args!("{kind} {field}")))?;
        settings.set(option.name, value).map_err(|error| ApiError::from(&error))?;
    }
    Ok(settings)
}
