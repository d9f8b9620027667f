//! How to generate: fields named as in transformers' `generation_config.json`, with the defaults of transformers.
//!
//! Source: `src/transformers/generation/configuration_utils.py`. Presence and frequency penalty are those of OpenAI's API,
//! which transformers does not have.

mod checks;
mod json;

use candle_gpt2::Gpt2Config;
use serde::{Deserialize, Serialize};

pub(crate) use checks::check_ids;
use json::one_or_many;

use crate::GenerationError;

/// Smallest temperature: below it, logits divided by it could leave the range of f32. The draw is greedy long before.
/// [`GenerationConfig::check`] refuses less.
pub const MIN_TEMPERATURE: f64 = 1e-6;

/// Most beams, and most texts of one prompt: far more than anyone reads. Whether memory holds their keys and values depends on
/// the model, and is another question. [`GenerationConfig::check`] refuses more.
pub const MAX_TEXTS: usize = 4096;
/// What to generate, how the next token is chosen, and when to stop.
///
/// ```
/// use candle_gpt2_generation::{GenerationConfig, SearchMode};
///
/// let config = GenerationConfig { do_sample: true, temperature: 0.8, top_k: 40, seed: 7, ..GenerationConfig::default() };
/// config.check()?;
/// assert_eq!(config.search_mode(), SearchMode::TokenByToken);
///
/// // What a `generation_config.json` sets.
/// let config = config.with_json(r#"{"num_beams": 4, "do_sample": false}"#)?;
/// assert_eq!(config.search_mode(), SearchMode::Beams);
/// assert!(GenerationConfig { do_sample: true, top_p: 1.5, ..GenerationConfig::default() }.check().is_err());
/// # Ok::<(), candle_gpt2_generation::GenerationError>(())
/// ```
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
    /// Seed of the draws (ChaCha8): the same seed gives the same draws on every machine.
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
    /// The first token to generate. (transformers forces it after a prompt of one token only, as encoder-decoder models
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

    /// Most tokens that an assistant drafts at once ([`Scheduler::set_assistant`](crate::Scheduler::set_assistant)); it drafts
    /// fewer where they are seldom right.
    pub num_assistant_tokens: usize,
    /// Most tokens that are drafted at once from what followed the last ones where they stood before; then no assistant is asked.
    pub prompt_lookup_num_tokens: Option<usize>,

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
            num_assistant_tokens: 20,
            prompt_lookup_num_tokens: None,
            long_prompt: LongPrompt::Refuse,
            when_full: WhenFull::Stop,
        }
    }
}

/// When a beam search ends, once there are as many finished texts as beams. [`GenerationConfig::early_stopping`] chooses.
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

/// What becomes of a prompt longer than the context. A choice of [`GenerationConfig`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
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

/// What happens when prompt and text fill the context. A choice of [`GenerationConfig`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
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

/// How the next token is searched for. [`GenerationConfig::search_mode`] says which it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SearchMode {
    /// One token after the other, greedily or at random.
    TokenByToken,
    /// Beam search, with or without groups.
    Beams,
    /// Contrastive search.
    Contrastive,
}

impl GenerationConfig {
    /// How the next token is searched for; as in transformers, the options decide.
    pub fn search_mode(&self) -> SearchMode {
        match self {
            Self { num_beams: 2.., .. } => SearchMode::Beams,
            Self { do_sample: false, penalty_alpha, .. } if *penalty_alpha > 0.0 => SearchMode::Contrastive,
            _ => SearchMode::TokenByToken,
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

/// Tokens after the head that stay when the window slides: half of the context.
pub(crate) fn slid_tokens(n_positions: usize) -> usize {
    (n_positions / 2).max(1)
}
