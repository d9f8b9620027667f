//! How to generate: fields named as in transformers' `generation_config.json`, with the defaults of transformers.
//!
//! Source: `src/transformers/generation/configuration_utils.py` and the range checks of `logits_process.py`. Presence
//! and frequency penalty are those of OpenAI's API, which transformers does not have.

use gpt2::Gpt2Config;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

use crate::GenerationError;

/// Smallest temperature: below it, logits divided by it could leave the range of f32. The draw is greedy long before.
pub const MIN_TEMPERATURE: f64 = 1e-6;

/// Most beams, and most texts of one prompt: far more than anyone reads, and less than memory holds.
pub const MAX_TEXTS: usize = 4096;
/// Largest power of the length, either way: beyond it scores leave the range of f64.
const MAX_LENGTH_PENALTY: f64 = 20.0;

/// What to generate, how the next token is chosen, and when to stop.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GenerationConfig {
    /// Most tokens to generate.
    pub max_new_tokens: usize,
    /// Most tokens of prompt and text together; the smaller of both limits counts.
    pub max_length: Option<usize>,
    /// No end-of-text token before as many new tokens; at most `max_new_tokens`.
    pub min_new_tokens: usize,
    /// Longest time of a text in seconds, its prompt included, looked at after each token.
    pub max_time: Option<f64>,
    /// Tokens that end the text.
    #[serde(deserialize_with = "one_or_many")]
    pub eos_token_id: Vec<u32>,
    /// Texts that end the text in front of them, also where they begin and end within tokens.
    #[serde(deserialize_with = "one_or_many")]
    pub stop_strings: Vec<String>,

    /// Draw the next token at random; without it the most probable token is taken.
    pub do_sample: bool,
    /// Divides the logits: below 1 the distribution becomes sharper, above 1 flatter. At least [`MIN_TEMPERATURE`].
    pub temperature: f64,
    /// Keeps the most probable tokens, this many and those equal to the last; 0 keeps all.
    pub top_k: usize,
    /// Keeps the smallest set of most probable tokens whose probabilities add up to this; in (0, 1].
    pub top_p: f64,
    /// Removes tokens whose probability is below this share of the largest; in [0, 1].
    pub min_p: Option<f64>,
    /// Keeps the tokens whose information is closest to the entropy, until they add up to this; in (0, 1].
    pub typical_p: f64,
    /// Removes tokens below this probability; in [0, 1), 0 removes none.
    pub epsilon_cutoff: f64,
    /// Removes tokens below the smaller of this and of its root times `exp(-entropy)`; in [0, 1), 0 removes none.
    pub eta_cutoff: f64,
    /// Seed of the draws (ChaCha8): the same seed gives the same tokens on every machine.
    pub seed: u64,

    /// Divides positive and multiplies negative logits of every token so far; above 0, 1 changes nothing.
    pub repetition_penalty: f64,
    /// Subtracted from the logit of every token generated so far.
    pub presence_penalty: f64,
    /// Subtracted from the logit of a token for each time it was generated so far.
    pub frequency_penalty: f64,
    /// Sequences of this many tokens occur only once, the prompt included; 0 allows all.
    pub no_repeat_ngram_size: usize,
    /// Sequences that are never generated.
    pub bad_words_ids: Vec<Vec<u32>>,
    /// Added to the logit of a sequence's last token where the others stand before it (logit bias).
    pub sequence_bias: Vec<(Vec<u32>, f64)>,
    /// Tokens that are never generated, such as padding rows of the vocabulary.
    pub suppress_tokens: Vec<u32>,
    /// Tokens that are not generated first.
    pub begin_suppress_tokens: Vec<u32>,
    /// The first token to generate. (transformers forces it behind a prompt of one token only, as encoder-decoder models
    /// have it.)
    pub forced_bos_token_id: Option<u32>,
    /// Turns the processed logits back into log-probabilities; it changes the scores of beams only.
    pub renormalize_logits: bool,

    /// Beams of the beam search; 1 is no beam search.
    pub num_beams: usize,
    /// Groups of beams that avoid each other's tokens; divides the number of beams.
    pub num_beam_groups: usize,
    /// What a token of another group costs a beam; above 0 with more than one group.
    pub diversity_penalty: f64,
    /// What the other groups take for the token of a group that has finished; without it the first end-of-text token.
    /// Nothing else pads here.
    pub pad_token_id: Option<u32>,
    /// Power of the length that divides the score of a beam: above 0 favours long texts, below 0 short ones.
    pub length_penalty: f64,
    /// When a beam search ends.
    pub early_stopping: EarlyStopping,
    /// Texts for each prompt.
    pub num_return_sequences: usize,
    /// Weight of the degeneration penalty in contrastive search among the `top_k` tokens; in [0, 1], 0 is no
    /// contrastive search.
    pub penalty_alpha: f64,

    /// What becomes of a prompt longer than the context.
    #[serde(skip)]
    pub long_prompt: LongPrompt,
    /// What happens when the text fills the context.
    #[serde(skip)]
    pub when_full: WhenFull,
}

impl Default for GenerationConfig {
    fn default() -> Self {
        Self {
            max_new_tokens: 20,
            max_length: None,
            min_new_tokens: 0,
            max_time: None,
            eos_token_id: Vec::new(),
            stop_strings: Vec::new(),
            do_sample: false,
            temperature: 1.0,
            top_k: 50,
            top_p: 1.0,
            min_p: None,
            typical_p: 1.0,
            epsilon_cutoff: 0.0,
            eta_cutoff: 0.0,
            seed: 0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            no_repeat_ngram_size: 0,
            bad_words_ids: Vec::new(),
            sequence_bias: Vec::new(),
            suppress_tokens: Vec::new(),
            begin_suppress_tokens: Vec::new(),
            forced_bos_token_id: None,
            renormalize_logits: false,
            num_beams: 1,
            num_beam_groups: 1,
            diversity_penalty: 0.0,
            pad_token_id: None,
            length_penalty: 1.0,
            early_stopping: EarlyStopping::Heuristic,
            num_return_sequences: 1,
            penalty_alpha: 0.0,
            long_prompt: LongPrompt::Refuse,
            when_full: WhenFull::Stop,
        }
    }
}

/// When a beam search ends, once there are as many finished texts as beams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EarlyStopping {
    /// At once: `true`.
    Full,
    /// When no running beam, at its present length, beats the worst finished text: `false`.
    #[default]
    Heuristic,
    /// When no running beam can ever beat it: `"never"`.
    Never,
}

impl Serialize for EarlyStopping {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Full => serializer.serialize_bool(true),
            Self::Heuristic => serializer.serialize_bool(false),
            Self::Never => serializer.serialize_str("never"),
        }
    }
}

impl<'de> Deserialize<'de> for EarlyStopping {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::Bool(true) => Ok(Self::Full),
            Value::Bool(false) => Ok(Self::Heuristic),
            Value::String(name) if name == "never" => Ok(Self::Never),
            other => {
                Err(serde::de::Error::custom(format!("expected true, false or \"never\", found {other}")))
            }
        }
    }
}

/// What becomes of a prompt longer than the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LongPrompt {
    /// It is refused, with the numbers.
    #[default]
    Refuse,
    /// Its first `head` and its last `last` tokens are kept.
    Keep {
        /// Tokens kept at the beginning.
        head: usize,
        /// Tokens kept at the end; at least 1.
        last: usize,
    },
}

/// What happens when prompt and text fill the context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WhenFull {
    /// Generation ends.
    #[default]
    Stop,
    /// The window slides: its first `head` tokens and the last half of the context are computed again at new
    /// positions (GPT-2's positions are absolute, so the cache cannot move), and generation goes on.
    Slide {
        /// Tokens kept at the beginning.
        head: usize,
    },
}

/// How the next token is searched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SearchMode {
    /// One token after the other, greedily or at random.
    TokenByToken,
    /// Beam search, with or without groups.
    Beams,
    /// Contrastive search.
    Contrastive,
}

/// Keys of `generation_config.json` that would change the text and that are not served; with the value, beside null
/// and false, that changes nothing.
const REFUSED_KEYS: [(&str, Option<f64>); 14] = [
    ("guidance_scale", Some(1.0)),
    ("encoder_repetition_penalty", Some(1.0)),
    ("encoder_no_repeat_ngram_size", Some(0.0)),
    ("min_length", Some(0.0)),
    ("top_h", None),
    ("exponential_decay_length_penalty", None),
    ("forced_eos_token_id", None),
    ("force_words_ids", None),
    ("constraints", None),
    ("watermarking_config", None),
    ("token_healing", None),
    ("dola_layers", None),
    ("assistant_early_exit", None),
    ("custom_generate", None),
];

impl GenerationConfig {
    /// The same configuration with what a `generation_config.json` sets. Keys that do not change the text are not
    /// looked at.
    ///
    /// # Errors
    /// When it is no valid JSON, a value has another type, or something is asked for that is not served.
    pub fn with_json(mut self, json: &str) -> Result<Self, GenerationError> {
        let refuse = |what: String| GenerationError::Json { what };
        let mut keys: Map<String, Value> =
            serde_json::from_str(json).map_err(|error| refuse(format!("not a JSON object: {error}")))?;
        // A key that is null is not set.
        keys.retain(|_, value| !value.is_null());
        for (key, neutral) in REFUSED_KEYS {
            let value = keys.get(key).unwrap_or(&Value::Null);
            let changes_nothing = matches!(value, Value::Null | Value::Bool(false));
            if !changes_nothing && (neutral.is_none() || value.as_f64() != neutral) {
                return Err(refuse(format!("`{key}` is {value}, which is not supported; remove the key")));
            }
        }
        // A number of new tokens goes before a number of all tokens, and a number of all before our own default.
        match (keys.contains_key("max_new_tokens"), keys.get("max_length").is_some_and(Value::is_u64)) {
            (true, _) => _ = keys.remove("max_length"),
            (false, true) => self.max_new_tokens = usize::MAX,
            (false, false) => {}
        }
        let known = serde_json::to_value(&self).map_err(|error| refuse(error.to_string()))?;
        for (key, value) in keys.into_iter().filter(|(key, _)| known.get(key).is_some()) {
            self = self.with_value(&key, value).map_err(|error| refuse(format!("`{key}`: {error}")))?;
        }
        Ok(self)
    }

    /// The same configuration with one field set by its name.
    fn with_value(&self, key: &str, value: Value) -> serde_json::Result<Self> {
        let mut fields = serde_json::to_value(self)?;
        // JSON has no infinity, which a bias may be.
        fields["sequence_bias"] = Value::Array(Vec::new());
        fields[key] = value;
        let mut changed: Self = serde_json::from_value(fields)?;
        (changed.long_prompt, changed.when_full) = (self.long_prompt, self.when_full);
        if key != "sequence_bias" {
            changed.sequence_bias.clone_from(&self.sequence_bias);
        }
        Ok(changed)
    }

    /// How the next token is searched for; as in transformers, the options decide.
    pub fn search_mode(&self) -> SearchMode {
        match self {
            Self { num_beams: 2.., .. } => SearchMode::Beams,
            Self { do_sample: false, penalty_alpha, .. } if *penalty_alpha > 0.0 => SearchMode::Contrastive,
            _ => SearchMode::TokenByToken,
        }
    }

    /// Checks every option, alone and with the others.
    ///
    /// # Errors
    /// When one is out of its range, or two contradict each other.
    pub fn check(&self) -> Result<(), GenerationError> {
        self.check_ranges()?;
        self.check_combinations()
    }

    /// Checks what depends on the model: that every token that is named is one of the vocabulary, and that the tokens to
    /// be kept of long texts fit into the context.
    ///
    /// # Errors
    /// When one does not.
    pub fn check_model(&self, model: &Gpt2Config) -> Result<(), GenerationError> {
        self.check_window(model.n_positions)?;
        let lists: [(&'static str, Vec<u32>); 7] = [
            ("pad_token_id", self.pad_token_id.into_iter().collect()),
            ("eos_token_id", self.eos_token_id.clone()),
            ("bad_words_ids", self.bad_words_ids.concat()),
            ("sequence_bias", self.sequence_bias.iter().flat_map(|(ids, _)| ids.clone()).collect()),
            ("suppress_tokens", self.suppress_tokens.clone()),
            ("begin_suppress_tokens", self.begin_suppress_tokens.clone()),
            ("forced_bos_token_id", self.forced_bos_token_id.into_iter().collect()),
        ];
        for (option, ids) in lists {
            if let Some(id) = ids.into_iter().find(|id| !model.has_token(*id)) {
                let expected = format!("token ids below the vocabulary's size of {}", model.vocab_size);
                return Err(out_of_range(option, &expected, id));
            }
        }
        Ok(())
    }

    /// Checks everything for a search of this kind on a model.
    pub(crate) fn check_for(&self, mode: SearchMode, model: &Gpt2Config) -> Result<(), GenerationError> {
        self.check()?;
        self.check_model(model)?;
        if self.search_mode() == mode {
            return Ok(());
        }
        let what = match mode {
            SearchMode::TokenByToken => {
                "beam and contrastive search have functions of their own: beam_search, contrastive_search"
            }
            SearchMode::Beams => "beam search needs num_beams of at least 2",
            SearchMode::Contrastive => "contrastive search needs a penalty_alpha above 0 and no do_sample",
        };
        Err(GenerationError::Conflict { what: what.into() })
    }

    /// Checks that the tokens to be kept of long texts fit into the context.
    fn check_window(&self, n_positions: usize) -> Result<(), GenerationError> {
        let fits = |kept: usize| match kept <= n_positions {
            true => Ok(()),
            false => Err(GenerationError::WindowTooLong { kept, n_positions }),
        };
        if let WhenFull::Slide { head } = self.when_full {
            fits(head.saturating_add(slid_tokens(n_positions)))?;
        }
        if let LongPrompt::Keep { head, last } = self.long_prompt {
            fits(head.saturating_add(last))?;
        }
        Ok(())
    }

    /// Checks every option alone.
    ///
    /// # Errors
    /// When one is out of its range.
    pub fn check_ranges(&self) -> Result<(), GenerationError> {
        // Logits are f32: a number must be one there too.
        let finite = |number: f64| to_f32(number).is_finite();
        let positive = |number: f64| finite(number) && to_f32(number) > 0.0;
        let probability = |number: f64| number > 0.0 && number <= 1.0;
        let texts = |count: usize| (1..=MAX_TEXTS).contains(&count);
        let (up_to_1, below_1) = ("a number greater than 0 and at most 1", "at least 0 and less than 1");
        let (number, above_0) = ("a finite number in f32", "greater than 0, and finite in f32");
        let up_to_max = format!("at least 1 and at most {MAX_TEXTS}");
        let length_penalty = format!("from -{MAX_LENGTH_PENALTY} to {MAX_LENGTH_PENALTY}");
        let max_time = self.max_time.unwrap_or(f64::MAX);
        let min_p = self.min_p.unwrap_or(0.0);
        let temperature_range = format!("at least {MIN_TEMPERATURE:.6} (0 is --greedy)");
        // What only a random draw looks at may be anything without one, as in transformers.
        let draws = |holds: bool| holds || !self.do_sample;
        let (temperature, alpha) = (self.temperature, self.penalty_alpha);
        let checks: [(bool, &'static str, &str, f64); 17] = [
            (max_time > 0.0, "max_time", "seconds, more than 0", max_time),
            (
                draws(temperature >= MIN_TEMPERATURE && finite(temperature)),
                "temperature",
                &temperature_range,
                temperature,
            ),
            (draws(probability(self.top_p)), "top_p", up_to_1, self.top_p),
            (draws((0.0..=1.0).contains(&min_p)), "min_p", "from 0 to 1", min_p),
            (draws(probability(self.typical_p)), "typical_p", up_to_1, self.typical_p),
            (
                draws((0.0..1.0).contains(&self.epsilon_cutoff)),
                "epsilon_cutoff",
                below_1,
                self.epsilon_cutoff,
            ),
            (draws((0.0..1.0).contains(&self.eta_cutoff)), "eta_cutoff", below_1, self.eta_cutoff),
            (positive(self.repetition_penalty), "repetition_penalty", above_0, self.repetition_penalty),
            (finite(self.presence_penalty), "presence_penalty", number, self.presence_penalty),
            (finite(self.frequency_penalty), "frequency_penalty", number, self.frequency_penalty),
            (texts(self.num_beams), "num_beams", &up_to_max, self.num_beams as f64),
            (texts(self.num_beam_groups), "num_beam_groups", &up_to_max, self.num_beam_groups as f64),
            (
                self.diversity_penalty >= 0.0 && finite(self.diversity_penalty),
                "diversity_penalty",
                "at least 0, and finite in f32",
                self.diversity_penalty,
            ),
            (
                self.length_penalty.abs() <= MAX_LENGTH_PENALTY,
                "length_penalty",
                &length_penalty,
                self.length_penalty,
            ),
            (
                texts(self.num_return_sequences),
                "num_return_sequences",
                &up_to_max,
                self.num_return_sequences as f64,
            ),
            ((0.0..=1.0).contains(&alpha), "penalty_alpha", "from 0 to 1", alpha),
            (
                alpha == 0.0 || self.top_k <= MAX_TEXTS,
                "top_k",
                "at most 4096 in contrastive search",
                self.top_k as f64,
            ),
        ];
        for (holds, option, expected, found) in checks {
            if !holds {
                return Err(out_of_range(option, expected, found));
            }
        }
        if self.stop_strings.iter().any(String::is_empty) {
            return Err(out_of_range("stop_strings", "texts that are not empty", "\"\""));
        }
        if self.bad_words_ids.iter().chain(self.sequence_bias.iter().map(|(ids, _)| ids)).any(Vec::is_empty) {
            return Err(out_of_range(
                "bad_words_ids, sequence_bias",
                "sequences of at least one token",
                "[]",
            ));
        }
        let is_bias = |bias: f64| finite(bias) || bias == f64::NEG_INFINITY;
        if let Some((_, bias)) = self.sequence_bias.iter().find(|(_, bias)| !is_bias(*bias)) {
            return Err(out_of_range("sequence_bias", "numbers that are finite in f32, or -inf", bias));
        }
        if matches!(self.long_prompt, LongPrompt::Keep { last: 0, .. }) {
            return Err(out_of_range("tokens kept of a long prompt", "at least 1 at its end", 0));
        }
        Ok(())
    }

    fn check_combinations(&self) -> Result<(), GenerationError> {
        let conflict = |what: &str| Err(GenerationError::Conflict { what: what.into() });
        let (beams, groups, texts) = (self.num_beams, self.num_beam_groups, self.num_return_sequences);
        if self.min_new_tokens > self.max_new_tokens {
            let (min, max) = (self.min_new_tokens, self.max_new_tokens);
            return conflict(&format!("min_new_tokens {min} is more than max_new_tokens {max}"));
        }
        match self.search_mode() {
            SearchMode::Beams if self.do_sample => {
                conflict("beam search does not draw; set do_sample to false")
            }
            SearchMode::Beams if self.penalty_alpha > 0.0 => {
                conflict("penalty_alpha is of contrastive search, num_beams of beam search; set one of both")
            }
            SearchMode::Beams if !beams.is_multiple_of(groups) => {
                conflict(&format!("num_beam_groups {groups} does not divide num_beams {beams}"))
            }
            SearchMode::Beams if groups > 1 && self.diversity_penalty <= 0.0 => conflict(
                "num_beam_groups needs a diversity_penalty above 0, or all groups find the same texts",
            ),
            SearchMode::Beams if texts > beams => {
                conflict(&format!("num_return_sequences {texts} is more than num_beams {beams}"))
            }
            SearchMode::Contrastive if self.top_k < 2 => {
                conflict("contrastive search chooses among top_k tokens; set top_k to at least 2")
            }
            SearchMode::TokenByToken if self.penalty_alpha > 0.0 => {
                conflict("contrastive search does not draw; set do_sample to false")
            }
            SearchMode::Contrastive | SearchMode::TokenByToken
                if groups > 1 || self.diversity_penalty > 0.0 =>
            {
                conflict("num_beam_groups and diversity_penalty are of beam search; set num_beams")
            }
            SearchMode::Contrastive | SearchMode::TokenByToken if texts > 1 && !self.do_sample => conflict(
                "without do_sample and num_beams all texts would be the same; set num_return_sequences to 1",
            ),
            SearchMode::Beams | SearchMode::Contrastive if !self.stop_strings.is_empty() => conflict(
                "stop_strings end a text token by token; beam and contrastive search do not know them",
            ),
            SearchMode::Beams | SearchMode::Contrastive if self.when_full != WhenFull::Stop => {
                conflict("the window slides token by token; beam and contrastive search end with the context")
            }
            _ => Ok(()),
        }
    }

    /// The prompt as the model gets it, after the policy for long prompts; everything that can be refused is refused
    /// here, before any work.
    ///
    /// # Errors
    /// When it is empty, an id is outside the vocabulary, or it is too long for the policy.
    pub fn fit_prompt(&self, prompt: &[u32], model: &Gpt2Config) -> Result<Vec<u32>, GenerationError> {
        let n_positions = model.n_positions;
        check_ids(prompt, model)?;
        self.check_window(n_positions)?;
        match (prompt.len(), self.long_prompt) {
            (0, _) => Err(GenerationError::EmptyPrompt),
            (tokens, _) if tokens <= n_positions => Ok(prompt.to_vec()),
            (tokens, LongPrompt::Refuse) => Err(GenerationError::PromptTooLong { tokens, n_positions }),
            (tokens, LongPrompt::Keep { head, last }) => {
                Ok([&prompt[..head], &prompt[tokens - last..]].concat())
            }
        }
    }

    /// Most tokens that are generated for a prompt of this length, whatever the context holds.
    pub(crate) fn new_tokens(&self, prompt_len: usize) -> usize {
        let of_length = self.max_length.map(|length| length.saturating_sub(prompt_len));
        self.max_new_tokens.min(of_length.unwrap_or(usize::MAX))
    }
}

#[expect(clippy::cast_possible_truncation, reason = "logits are f32, as in the reference")]
pub(crate) fn to_f32(number: f64) -> f32 {
    number as f32
}

/// Tokens behind the head that stay when the window slides: half of the context.
pub(crate) fn slid_tokens(n_positions: usize) -> usize {
    (n_positions / 2).max(1)
}

fn out_of_range(option: &'static str, expected: &str, found: impl std::fmt::Display) -> GenerationError {
    GenerationError::OptionOutOfRange { option, expected: expected.to_owned(), found: found.to_string() }
}

/// Checks that every id is in the vocabulary.
pub(crate) fn check_ids(ids: &[u32], model: &Gpt2Config) -> Result<(), GenerationError> {
    match ids.iter().position(|id| !model.has_token(*id)) {
        Some(index) => Err(GenerationError::IdBeyondVocabulary {
            id: ids[index],
            position: index + 1,
            vocab_size: model.vocab_size,
        }),
        None => Ok(()),
    }
}

/// A list, or one value in place of a list of one.
fn one_or_many<'de, D: Deserializer<'de>, T: serde::de::DeserializeOwned>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    let value = Value::deserialize(deserializer)?;
    let list = if value.is_array() { value } else { Value::Array(vec![value]) };
    serde_json::from_value(list).map_err(serde::de::Error::custom)
}
