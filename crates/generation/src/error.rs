//! Why tokens could not be generated or scored.

use thiserror::Error;

/// A request that cannot be served, or a model that gives no usable numbers.
/// [`GenerationConfig::check`](crate::GenerationConfig::check) and all that makes or scores a text return it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GenerationError {
    /// An option is out of its range.
    #[error("`{option}`: expected {expected}, found {found}")]
    OptionOutOfRange {
        /// The option.
        option: &'static str,
        /// Its range.
        expected: String,
        /// The value.
        found: String,
    },
    /// An option is not known, or has a value of another kind.
    #[error("{what}")]
    Option {
        /// The option, and what is wrong with it.
        what: String,
    },
    /// Two options contradict each other.
    #[error("{what}")]
    Conflict {
        /// The contradiction and the way out.
        what: String,
    },
    /// A `generation_config.json` cannot be used.
    #[error("{what}")]
    Json {
        /// What is wrong.
        what: String,
    },
    /// The callback for allowed tokens allows none, or one outside the vocabulary.
    #[error("allowed_tokens: expected at least one token id below {vocab_size}, found {found:?}")]
    AllowedTokens {
        /// Rows of the token embedding.
        vocab_size: usize,
        /// The ids.
        found: Vec<u32>,
    },
    /// The prompt has no tokens.
    #[error(
        "the prompt has no tokens, and the configuration names no bos_token_id of the vocabulary to start from; give a prompt"
    )]
    EmptyPrompt,
    /// A continuation has no tokens.
    #[error("continuation {number} is empty; there is nothing to score")]
    EmptyContinuation {
        /// Its place, counted from 1.
        number: usize,
    },
    /// A prompt and its continuation are longer than the context.
    #[error("the prompt and continuation {number} have {tokens} tokens to read, the model's context {n_positions}; shorten them by {}", .tokens - .n_positions)]
    ContinuationTooLong {
        /// Place of the continuation, counted from 1.
        number: usize,
        /// Tokens of both, but for the last, which is not read.
        tokens: usize,
        /// Positions of the model.
        n_positions: usize,
    },
    /// A token id is outside the vocabulary.
    #[error("token id {id} (number {position} of the prompt) is beyond the vocabulary of {vocab_size} tokens; ids go from 0 to {}", .vocab_size - 1)]
    IdBeyondVocabulary {
        /// The id.
        id: u32,
        /// Its place, counted from 1.
        position: usize,
        /// Rows of the token embedding.
        vocab_size: usize,
    },
    /// The prompt is longer than the context.
    #[error("the prompt has {tokens} tokens, the model's context {n_positions}; shorten the prompt by {}, or keep a part of it", .tokens - .n_positions)]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Positions of the model.
        n_positions: usize,
    },
    /// More tokens are to be kept than the context holds.
    #[error("cannot keep {kept} tokens: the model's context has {n_positions}; keep fewer")]
    WindowTooLong {
        /// Tokens to be kept.
        kept: usize,
        /// Positions of the model.
        n_positions: usize,
    },
    /// Stop strings are searched in text.
    #[error("stop_strings need a tokenizer, and the model has none")]
    StopStringsWithoutTokenizer,
    /// A text is to end after a time.
    #[error("max_time needs a clock, and none was given")]
    NoClock,
    /// A prompt and its text need more memory than there is for keys and values.
    #[error(
        "prompt and completion may need {needed} tokens, and the KV cache holds {kv_tokens}; \
         ask for fewer new tokens, or enlarge it"
    )]
    KvTokens {
        /// Tokens of prompt and text.
        needed: usize,
        /// Tokens that there is memory for.
        kv_tokens: usize,
    },
    /// An assistant has other tokens than the model that it assists.
    #[error(
        "the assistant has a vocabulary of {found} tokens, the model one of {vocab_size}; an assistant needs the same"
    )]
    AssistantVocabulary {
        /// Tokens of the model.
        vocab_size: usize,
        /// Tokens of the assistant.
        found: usize,
    },
    /// A context of one token leaves nothing to predict from.
    #[error("the model's context of {n_positions} tokens is too short to score with; at least 2 are needed")]
    ContextTooShortToScore {
        /// Positions of the model.
        n_positions: usize,
    },
    /// A text of fewer than two tokens has nothing to predict.
    #[error("the text has {tokens} tokens; scoring needs at least 2, since the first has nothing before it")]
    TooShortToScore {
        /// Tokens of the text.
        tokens: usize,
    },
    /// A sequence has no token to score, or nothing before it.
    #[error(
        "{tokens} tokens are to be scored from token {first} on, counted from 0; there must be one to score, and the first has nothing before it"
    )]
    NothingToScore {
        /// Tokens of the sequence.
        tokens: usize,
        /// The first that is to be scored, counted from 0.
        first: usize,
    },
    /// A sequence is longer than the context.
    #[error("a sequence has {tokens} tokens to read, the model's context {n_positions}; shorten it by {}", .tokens - .n_positions)]
    SequenceTooLong {
        /// Tokens of the sequence, but for the last, which is not read.
        tokens: usize,
        /// Positions of the model.
        n_positions: usize,
    },
    /// A sequence of many cannot be scored.
    #[error("sequence {number} of group {group}: {error}")]
    Sequence {
        /// The place of its group, counted from 1.
        group: usize,
        /// Its place in the group, counted from 1.
        number: usize,
        /// What is wrong with it.
        error: Box<Self>,
    },
    /// Two models that are to be compared have different tokens.
    #[error(
        "the base has a vocabulary of {vocab_size} tokens, the other model one of {found}; only models of the same tokens can be compared"
    )]
    OtherVocabulary {
        /// Tokens of the base.
        vocab_size: usize,
        /// Tokens of the other model.
        found: usize,
    },
    /// The model's logits are not numbers.
    #[error("the model's logits are not finite; verify its weights, and keep keys and values in f32")]
    NotFinite,
    /// What the text must conform to cannot be followed.
    #[error("{what}")]
    Constraint {
        /// What is wrong.
        what: String,
    },
    /// A function that changes logits failed.
    #[error("{what}")]
    Function {
        /// Why.
        what: String,
    },
    /// The options remove every token.
    #[error("no token is left to choose from: each is excluded by {}; relax one of them", listed(.options))]
    NoTokenLeft {
        /// Options that remove tokens, by their names in a request, and kinds of structured output.
        options: Vec<&'static str>,
    },
    /// The tokenizer cannot turn these ids into text.
    #[error("the tokenizer cannot decode: {0}")]
    Decode(String),
    /// The computation failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl GenerationError {
    /// Whether the request is at fault, and not the model.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::OptionOutOfRange { .. }
                | Self::Option { .. }
                | Self::Conflict { .. }
                | Self::WindowTooLong { .. }
                | Self::StopStringsWithoutTokenizer
                | Self::NoClock
                | Self::KvTokens { .. }
                | Self::AssistantVocabulary { .. }
                | Self::EmptyPrompt
                | Self::EmptyContinuation { .. }
                | Self::ContinuationTooLong { .. }
                | Self::IdBeyondVocabulary { .. }
                | Self::PromptTooLong { .. }
                | Self::TooShortToScore { .. }
                | Self::ContextTooShortToScore { .. }
                | Self::NothingToScore { .. }
                | Self::SequenceTooLong { .. }
                | Self::Sequence { .. }
                | Self::OtherVocabulary { .. }
        )
    }
}

/// Options as a message lists them: names in quotes, kinds of structured output as words.
fn listed(options: &[&str]) -> String {
    let is_name = |option: &str| option.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    let quoted = options.iter().map(|option| match is_name(option) {
        true => format!("`{option}`"),
        false => format!("the {option}"),
    });
    let mut quoted: Vec<String> = quoted.collect();
    let last = quoted.pop().unwrap_or_default();
    if quoted.is_empty() { last } else { format!("{} or {last}", quoted.join(", ")) }
}
