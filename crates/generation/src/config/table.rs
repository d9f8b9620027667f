//! Table of all generation options: name, type, default, range, description and command-line flag.
//!
//! Each row generates a field of [`GenerationConfig`], which generators read, and a field of
//! [`GenerationOptions`], which requests set. It also generates an entry of [`OPTIONS`], from which
//! stubs and reference tables are written. A new option needs a row here and a logits processor that
//! implements it.
//!
//! Names and defaults follow transformers' `src/transformers/generation/configuration_utils.py`, and
//! ranges follow the checks in its `logits_process.py`. Presence and frequency penalty come from
//! OpenAI's API; transformers lacks them.

use std::fmt;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::kinds::{EarlyStopping, LongPrompt, MAX_TEXTS, MIN_TEMPERATURE, WhenFull};
use crate::GenerationError;
use crate::logits::to_f32;

/// Default maximum number of new tokens in every front end; see [`GenerationConfig`].
pub const MAX_NEW_TOKENS: usize = 100;

/// Largest absolute value of the length penalty; beyond it, scores leave the range of f64.
const MAX_LENGTH_PENALTY: f64 = 20.0;

/// Values that an option accepts.
struct Range {
    expected: &'static str,
    holds: fn(f64) -> bool,
    /// Whether the option applies only to sampling.
    ///
    /// Without sampling, any value is accepted, as in transformers.
    of_sampling: bool,
}

const fn range(expected: &'static str, holds: fn(f64) -> bool) -> Range {
    Range { expected, holds, of_sampling: false }
}

const fn sampling(expected: &'static str, holds: fn(f64) -> bool) -> Range {
    Range { expected, holds, of_sampling: true }
}

// Logits are f32, so a number must be finite in f32 too.
fn is_finite(x: f64) -> bool {
    to_f32(x).is_finite()
}

const FINITE: Range = range("a number that is finite in f32", is_finite);
const POSITIVE: Range = range("greater than 0, and finite in f32", |x| is_finite(x) && to_f32(x) > 0.0);
const NOT_NEGATIVE: Range = range("at least 0, and finite in f32", |x| x >= 0.0 && is_finite(x));
const SECONDS: Range = range("a number of seconds greater than 0", |x| x > 0.0);
const TEXTS: Range = range("from 1 to 4096", |x| (1.0..=MAX_TEXTS as f64).contains(&x));
const SHARE: Range = range("from 0 to 1", |x| (0.0..=1.0).contains(&x));
const LENGTH_POWER: Range = range("from -20 to 20", |x| x.abs() <= MAX_LENGTH_PENALTY);
const TEMPERATURE: Range = sampling("at least 0.000001 (for greedy decoding, set do_sample to false)", |x| {
    x >= MIN_TEMPERATURE && is_finite(x)
});
const SAMPLED_MASS: Range = sampling("a number greater than 0 and at most 1", |x| x > 0.0 && x <= 1.0);
const SAMPLED_SHARE: Range = sampling("from 0 to 1", |x| (0.0..=1.0).contains(&x));
const SAMPLED_CUTOFF: Range = sampling("at least 0 and less than 1", |x| (0.0..1.0).contains(&x));

/// A value that a [`Range`] can check.
trait Number {
    /// Returns the number; `None` if the option is unset.
    fn number(&self) -> Option<f64>;
}

impl Number for f64 {
    fn number(&self) -> Option<f64> {
        Some(*self)
    }
}

impl Number for usize {
    fn number(&self) -> Option<f64> {
        Some(*self as f64)
    }
}

impl Number for Option<f64> {
    fn number(&self) -> Option<f64> {
        *self
    }
}

/// Description of an option for tables and stubs; [`OPTIONS`] lists all of them.
#[derive(Debug, Clone, Copy)]
pub struct OptionRow {
    /// Option name, the same in every front end.
    pub name: &'static str,
    /// Rust type, such as `usize` or `Vec<u32>`.
    pub kind: &'static str,
    /// Default value as a Rust expression.
    pub default: &'static str,
    /// Name of the option's group.
    pub group: &'static str,
    /// Description of the option.
    pub doc: &'static str,
    /// Field of an HTTP request that sets the option; `None` if there is no field of this name.
    pub request: Option<RequestField>,
}

/// Numeric field of an HTTP request; its range may be narrower than the option's.
///
/// ```
/// use candle_gpt2_generation::OPTIONS;
///
/// let option = OPTIONS.iter().find(|option| option.name == "temperature").ok_or("unknown option")?;
/// let field = option.request.ok_or("not a request field")?;
/// assert!(field.contains(2.0) && !field.contains(2.1));
/// assert_eq!(field.to_string(), "from 0 to 2");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct RequestField {
    /// Smallest value.
    pub min: f64,
    /// Whether `min` itself is excluded.
    pub is_above: bool,
    /// Largest value.
    pub max: f64,
    /// Alternative name of the field, for compatibility with other servers.
    pub alias: Option<&'static str>,
}

impl RequestField {
    const fn from(min: f64, max: f64) -> Self {
        Self { min, is_above: false, max, alias: None }
    }

    const fn above(min: f64, max: f64) -> Self {
        Self { is_above: true, ..Self::from(min, max) }
    }

    const fn alias(self, alias: &'static str) -> Self {
        Self { alias: Some(alias), ..self }
    }

    /// Returns whether a request may set this number.
    pub fn contains(&self, number: f64) -> bool {
        (self.min..=self.max).contains(&number) && !(self.is_above && number == self.min)
    }
}

/// Formats the range as words that follow "a number", such as "from 0 to 2".
impl fmt::Display for RequestField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_above {
            true => write!(f, "above {} and at most {}", self.min, self.max),
            false => write!(f, "from {} to {}", self.min, self.max),
        }
    }
}

/// Largest integer that a request may set; it exceeds every context size.
const MAX_WHOLE: f64 = u32::MAX as f64;

/// Type of an option's field in the configuration: the option's type, unless the row overrides it.
macro_rules! config_type {
    ($kind:ty) => {
        $kind
    };
    ($kind:ty, $config_type:ty) => {
        $config_type
    };
}

/// Returns whether the option applies only to sampling.
///
/// This holds for the `Sampling` group except `do_sample` and `num_return_sequences`.
fn is_for_sampling(group: &str, name: &str) -> bool {
    group == "Sampling" && name != "do_sample" && name != "num_return_sequences"
}

macro_rules! options {
    ($(
        $group:literal {
            $(
                $(#[doc = $doc:literal])+
                #[arg($($arg:tt)*)]
                $(#[request($request:expr)])?
                $name:ident: $kind:ty $(as $config_type:ty)? = $default:expr $(, in $range:expr)?;
            )+
        }
    )+) => {
        /// Generation configuration: token selection and stop conditions.
        ///
        /// ```
        /// use candle_gpt2_generation::{GenerationConfig, SearchMode};
        ///
        /// let config = GenerationConfig { do_sample: true, temperature: 0.8, top_k: 40, seed: 7, ..GenerationConfig::default() };
        /// config.check()?;
        /// assert_eq!(config.search_mode(), SearchMode::TokenByToken);
        ///
        /// // Values from a `generation_config.json`.
        /// let config = config.with_json(r#"{"num_beams": 4, "do_sample": false}"#)?;
        /// assert_eq!(config.search_mode(), SearchMode::Beams);
        /// assert!(GenerationConfig { do_sample: true, top_p: 1.5, ..GenerationConfig::default() }.check().is_err());
        /// # Ok::<(), candle_gpt2_generation::GenerationError>(())
        /// ```
        #[derive(Debug, Clone, PartialEq, Serialize)]
        pub struct GenerationConfig {
            $($(
                $(#[doc = $doc])+
                pub $name: config_type!($kind $(, $config_type)?),
            )+)+
            /// Policy for prompts that are longer than the context.
            #[serde(skip)]
            pub long_prompt: LongPrompt,
            /// Behavior when prompt and completion fill the context.
            #[serde(skip)]
            pub when_full: WhenFull,
        }

        impl Default for GenerationConfig {
            fn default() -> Self {
                Self {
                    $($( $name: $default, )+)+
                    long_prompt: LongPrompt::Refuse,
                    when_full: WhenFull::Stop,
                }
            }
        }

        impl GenerationConfig {
            /// Checks each option against its range.
            pub(super) fn check_numbers(&self) -> Result<(), GenerationError> {
                $($($(
                    let range: Range = $range;
                    if let Some(found) = self.$name.number()
                        && !(range.holds)(found)
                        && (self.do_sample || !range.of_sampling)
                    {
                        return Err(GenerationError::OptionOutOfRange {
                            option: stringify!($name),
                            expected: range.expected.into(),
                            found: found.to_string(),
                        });
                    }
                )?)+)+
                Ok(())
            }
        }

        /// Options in a request; unset options keep the model's defaults.
        ///
        /// Fields have the same meaning as in [`GenerationConfig`], with one exception. A `temperature` of 0
        /// requests greedy decoding; see [`samples_at`](crate::samples_at).
        ///
        /// ```
        /// use candle_gpt2_generation::GenerationOptions;
        ///
        /// let mut options: GenerationOptions = serde_json::from_str(r#"{"max_new_tokens": 20, "stop_strings": "\n"}"#)?;
        /// options.set("num_beams", 4.into())?;
        /// options.set("top_p", 0.5.into())?;
        /// let error = options.check().err().ok_or("expected an error")?.to_string();
        /// assert!(error.starts_with("`top_p` is for sampling"), "{error}");
        /// # Ok::<(), Box<dyn std::error::Error>>(())
        /// ```
        #[derive(Debug, Clone, Default, PartialEq, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        #[cfg_attr(feature = "clap", derive(clap::Args))]
        pub struct GenerationOptions {
            $($(
                $(#[doc = $doc])+
                #[serde(deserialize_with = "deserialize_option")]
                #[cfg_attr(feature = "clap", arg(long, help_heading = $group, allow_negative_numbers = true, $($arg)*))]
                pub $name: Option<$kind>,
            )+)+
            /// Never generate TEXT, with or without a space before it; may be given several times
            #[serde(deserialize_with = "deserialize_option")]
            #[cfg_attr(feature = "clap", arg(long = "bad-word", value_name = "TEXT", help_heading = "Logits processors"))]
            pub bad_words: Option<Vec<String>>,
            /// Keep the last N tokens of a prompt that is longer than the context; by default such a prompt
            /// is rejected
            #[cfg_attr(feature = "clap", arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Long texts"))]
            pub keep_last: Option<usize>,
            /// Also keep the first N tokens of a long prompt and of a full context whose window slides
            #[cfg_attr(feature = "clap", arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Long texts"))]
            pub keep_head: Option<usize>,
            /// When the context is full, keep its last half and continue
            #[cfg_attr(feature = "clap", arg(long, help_heading = "Long texts"))]
            pub slide: bool,
            /// Whether the model has an assistant.
            ///
            /// An assistant disables the default prompt lookup, unless these options request prompt lookup.
            #[serde(skip)]
            #[cfg_attr(feature = "clap", arg(skip))]
            pub has_assistant: bool,
        }

        impl GenerationOptions {
            /// Sets one of the [`OPTIONS`] by name; a list option also accepts a single element.
            ///
            /// # Errors
            /// Returns an error if the option does not exist or the value has the wrong type.
            pub fn set(&mut self, option: &str, value: Value) -> Result<(), GenerationError> {
                let set = match option {
                    $($( stringify!($name) => OptionValue::read(value).map(|value| self.$name = Some(value)), )+)+
                    _ => return Err(GenerationError::Option { what: format!("unknown option `{option}`") }),
                };
                set.map_err(|error| GenerationError::Option { what: format!("`{option}`: {error}") })
            }

            /// Fills unset options from `others`.
            ///
            /// Only fields of [`GenerationConfig`] are filled.
            pub fn or(mut self, others: &Self) -> Self {
                $($( self.$name = self.$name.or_else(|| others.$name.clone()); )+)+
                self
            }

            /// Returns a copy with only the options whose names `keeps` accepts.
            ///
            /// The copy contains only fields of [`GenerationConfig`].
            pub fn only(&self, keeps: impl Fn(&str) -> bool) -> Self {
                let mut selected = Self::default();
                $($( selected.$name = self.$name.clone().filter(|_| keeps(stringify!($name))); )+)+
                selected
            }

            /// Returns the sampling-only options, and whether each one is set.
            pub(super) fn options_for_sampling(&self) -> impl Iterator<Item = (&'static str, bool)> {
                let options = [$($( ($group, stringify!($name), self.$name.is_some()), )+)+];
                let for_sampling = |(group, name, is_set)| is_for_sampling(group, name).then_some((name, is_set));
                options.into_iter().filter_map(for_sampling)
            }

            /// Unsets the sampling-only options, except those that `keeps` accepts.
            pub(super) fn without_sampling(mut self, keeps: impl Fn(&str) -> bool) -> Self {
                $($(
                    if is_for_sampling($group, stringify!($name)) && !keeps(stringify!($name)) {
                        self.$name = None;
                    }
                )+)+
                self
            }

            /// Overwrites the fields of `config` with the options that are set.
            ///
            /// [`GenerationOptions::applied_to`] also resolves conflicts between options.
            pub fn put_into(&self, config: &mut GenerationConfig) {
                $($(
                    if let Some(value) = &self.$name {
                        config.$name = value.clone().into();
                    }
                )+)+
            }
        }

        /// Every option that is a field of [`GenerationConfig`].
        ///
        /// ```
        /// use candle_gpt2_generation::OPTIONS;
        ///
        /// let top_k = OPTIONS.iter().find(|option| option.name == "top_k").ok_or("unknown option")?;
        /// assert_eq!((top_k.kind, top_k.default, top_k.group), ("usize", "50", "Sampling"));
        /// # Ok::<(), Box<dyn std::error::Error>>(())
        /// ```
        pub const OPTIONS: &[OptionRow] = &[
            $($(
                OptionRow {
                    name: stringify!($name),
                    kind: stringify!($kind),
                    default: stringify!($default),
                    group: $group,
                    doc: concat!($($doc),+),
                    request: [$(Some($request),)? None][0],
                },
            )+)+
        ];
    };
}

options! {
    "When to stop" {
        /// Maximum number of tokens to generate; generation also ends at an end-of-text token and when the
        /// context is full [default: 100]
        #[arg(short = 'n', value_name = "N")]
        max_new_tokens: usize = MAX_NEW_TOKENS;
        /// Maximum total number of tokens in prompt and completion; a prompt of this length or more gets no
        /// completion; --max-new-tokens takes precedence
        #[arg(value_name = "N")]
        max_length: usize as Option<usize> = None;
        /// Minimum number of new tokens before an end-of-text token
        #[arg(value_name = "N")]
        min_new_tokens: usize = 0;
        /// Maximum time for a completion including its prompt, checked after each token
        #[arg(value_name = "SECONDS")]
        max_time: f64 as Option<f64> = None, in SECONDS;
        /// Token that ends the completion, instead of the checkpoint's; may be given several times
        #[arg(value_name = "ID", value_delimiter = ',')]
        eos_token_id: Vec<u32> = Vec::new();
        /// End the completion before TEXT, which is not printed; may be given several times
        #[arg(long = "stop", alias = "stop-strings", value_name = "TEXT")]
        stop_strings: Vec<String> = Vec::new();
    }

    "Sampling" {
        /// Sample the next token; --greedy always takes the most probable one
        #[arg(
            long = "greedy", num_args = 0, allow_negative_numbers = false, default_missing_value = "false", help = "Always take the most probable token"
        )]
        do_sample: bool = false;
        /// Divide the logits by T: below 1 sharper, above 1 flatter, 0 takes the most probable token
        /// [default: 1]
        #[arg(value_name = "T")]
        #[request(RequestField::from(0.0, 2.0))]
        temperature: f64 = 1.0, in TEMPERATURE;
        /// Sample from the K most probable tokens and any tied with the last; 0 keeps all [default: 50]
        #[arg(value_name = "K")]
        #[request(RequestField::from(-1.0, MAX_WHOLE))]
        top_k: usize = 50;
        /// Sample from the smallest set of tokens whose probabilities add up to P, in [0, 1]; 0 keeps one
        /// token [default: 1]
        #[arg(value_name = "P")]
        #[request(RequestField::from(0.0, 1.0))]
        top_p: f64 = 1.0, in SAMPLED_SHARE;
        /// Sample from tokens with at least P times the largest probability, with P from 0 to 1
        #[arg(value_name = "P")]
        #[request(RequestField::from(0.0, 1.0))]
        min_p: f64 as Option<f64> = None, in SAMPLED_SHARE;
        /// Locally typical sampling with mass P, in (0, 1]
        #[arg(value_name = "P")]
        #[request(RequestField::above(0.0, 1.0).alias("typical"))]
        typical_p: f64 = 1.0, in SAMPLED_MASS;
        /// Top-H sampling: sample from the most probable tokens that add up to H times the entropy, in (0, 1]
        #[arg(value_name = "H")]
        #[request(RequestField::above(0.0, 1.0))]
        top_h: f64 as Option<f64> = None, in SAMPLED_MASS;
        /// Sample from tokens with at least probability P, in [0, 1)
        #[arg(value_name = "P")]
        epsilon_cutoff: f64 = 0.0, in SAMPLED_CUTOFF;
        /// Eta sampling: like --epsilon-cutoff, but with a lower threshold when the distribution is flat, in
        /// [0, 1)
        #[arg(value_name = "P")]
        eta_cutoff: f64 = 0.0, in SAMPLED_CUTOFF;
        /// Random seed (ChaCha8); the same seed gives the same samples on every machine [default: 0]
        #[arg(short, value_name = "SEED")]
        seed: u64 = 0;
        /// Number of completions for each prompt [default: 1]
        #[arg(value_name = "N")]
        num_return_sequences: usize = 1, in TEXTS;
    }

    "Logits processors" {
        /// Multiply positive and divide negative logits of the prompt's tokens by X, greater than 0
        #[arg(value_name = "X")]
        #[request(RequestField::above(0.0, 1000.0))]
        encoder_repetition_penalty: f64 = 1.0, in POSITIVE;
        /// Divide positive and multiply negative logits of all tokens so far by X, greater than 0
        #[arg(value_name = "X")]
        #[request(RequestField::above(0.0, 1000.0).alias("repeat_penalty"))]
        repetition_penalty: f64 = 1.0, in POSITIVE;
        /// Subtract X from the logits of tokens generated so far
        #[arg(value_name = "X")]
        #[request(RequestField::from(-2.0, 2.0))]
        presence_penalty: f64 = 0.0, in FINITE;
        /// Subtract X from a token's logit for each time it was generated
        #[arg(value_name = "X")]
        #[request(RequestField::from(-2.0, 2.0))]
        frequency_penalty: f64 = 0.0, in FINITE;
        /// Forbid repeating an N-gram from the prompt or the completion
        #[arg(value_name = "N")]
        #[request(RequestField::from(0.0, MAX_WHOLE))]
        no_repeat_ngram_size: usize = 0;
        /// Forbid repeating an N-gram from the prompt
        #[arg(value_name = "N")]
        #[request(RequestField::from(0.0, MAX_WHOLE))]
        encoder_no_repeat_ngram_size: usize = 0;
        /// Never generate this sequence of tokens; may be given several times
        #[arg(value_name = "ID,ID", value_parser = ids_of_text)]
        bad_words_ids: Vec<Vec<u32>> = Vec::new();
        /// Add X to the logit of token ID (-inf removes the token); with several ids, bias the last one
        /// where the others precede it; may be given several times
        #[arg(long = "logit-bias", alias = "sequence-bias", value_name = "ID=X", value_parser = bias_of_text)]
        sequence_bias: Vec<(Vec<u32>, f64)> = Vec::new();
        /// Never generate these tokens
        #[arg(value_name = "ID", value_delimiter = ',')]
        suppress_tokens: Vec<u32> = Vec::new();
        /// Never generate these tokens first
        #[arg(value_name = "ID", value_delimiter = ',')]
        begin_suppress_tokens: Vec<u32> = Vec::new();
        /// Begin the completion of a one-token prompt with token ID, as transformers does
        #[arg(value_name = "ID")]
        forced_bos_token_id: u32 as Option<u32> = None;
        /// Normalize the processed logits to log-probabilities; this changes only beam scores
        #[arg(num_args = 0, allow_negative_numbers = false, default_missing_value = "true")]
        renormalize_logits: bool = false;
    }

    "Search" {
        /// Beam search with N beams
        #[arg(value_name = "N")]
        num_beams: usize = 1, in TEXTS;
        /// Divide the beams into N groups that avoid each other's tokens
        #[arg(value_name = "N")]
        num_beam_groups: usize = 1, in TEXTS;
        /// Penalty for tokens that another group chose
        #[arg(value_name = "X")]
        diversity_penalty: f64 = 0.0, in NOT_NEGATIVE;
        /// Token that the other beam groups avoid once a group has finished; by default the first
        /// end-of-text token
        #[arg(value_name = "ID")]
        pad_token_id: u32 as Option<u32> = None;
        /// Divide a beam's score by its length to the power X: above 0 favors long completions [default: 1]
        #[arg(value_name = "X")]
        length_penalty: f64 = 1.0, in LENGTH_POWER;
        /// End the search once every beam has a completion (true), once a better completion is unlikely
        /// (false), or once a better completion is impossible (never)
        #[arg(value_name = "WHEN", num_args = 0..=1, default_missing_value = "true")]
        early_stopping: EarlyStopping = EarlyStopping::Heuristic;
        /// Contrastive search among the --top-k most probable tokens, with weight X on the penalty for
        /// resembling earlier tokens; the model reads each candidate, so the search ends one token before
        /// the context is full
        #[arg(value_name = "X")]
        penalty_alpha: f64 = 0.0, in SHARE;
    }

    "Speculative decoding" {
        /// Maximum number of tokens that the assistant drafts at once; fewer if they are rarely accepted
        /// [default: 20]
        #[arg(value_name = "N")]
        num_assistant_tokens: usize = 20;
        /// Prompt lookup decoding: draft up to N tokens that followed an earlier occurrence of the last
        /// tokens; the completion does not change
        #[arg(long = "prompt-lookup", alias = "prompt-lookup-num-tokens", value_name = "N")]
        prompt_lookup_num_tokens: usize as Option<usize> = None;
    }
}

/// Deserializes an option with serde; null leaves it unset.
fn deserialize_option<'de, D: Deserializer<'de>, T: OptionValue>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    let value = Value::deserialize(deserializer)?;
    if value.is_null() { Ok(None) } else { T::read(value).map(Some).map_err(serde::de::Error::custom) }
}

/// Option value that can be read from JSON.
trait OptionValue: DeserializeOwned {
    /// Reads the value; a list also accepts a single element.
    fn read(value: Value) -> serde_json::Result<Self> {
        serde_json::from_value(value)
    }
}

impl OptionValue for bool {}
impl OptionValue for f64 {}
impl OptionValue for u32 {}
impl OptionValue for u64 {}
impl OptionValue for usize {}
impl OptionValue for EarlyStopping {}

impl<T: DeserializeOwned> OptionValue for Vec<T> {
    fn read(value: Value) -> serde_json::Result<Self> {
        serde_json::from_value(if value.is_array() { value } else { Value::Array(vec![value]) })
    }
}

/// Parses a list of token ids from the command line, such as `464,262`.
#[cfg(feature = "clap")]
fn ids_of_text(text: &str) -> Result<Vec<u32>, String> {
    let id = |id: &str| id.trim().parse().map_err(|error| format!("`{id}` is not a token id: {error}"));
    text.split(',').map(id).collect()
}

/// Parses a logit bias from the command line, such as `464=-2.5`.
#[cfg(feature = "clap")]
fn bias_of_text(text: &str) -> Result<(Vec<u32>, f64), String> {
    let (ids, bias) =
        text.split_once('=').ok_or("expected a token id, an equals sign and a number, such as 464=-2.5")?;
    let bias = bias.trim().parse().map_err(|error| format!("`{bias}` is not a number: {error}"))?;
    Ok((ids_of_text(ids)?, bias))
}
