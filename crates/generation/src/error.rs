//! Errors from generation and scoring.

use std::borrow::Cow;

use candle_gpt2::{Diagnose, ErrorKind};
use thiserror::Error;

/// An invalid request, or a model without usable output.
///
/// [`GenerationConfig::check`](crate::GenerationConfig::check) and all functions that generate or score
/// tokens return it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GenerationError {
    /// An option is out of its range.
    #[error("`{option}`: expected {expected}, found {found}")]
    OptionOutOfRange {
        /// Name of the option.
        option: &'static str,
        /// Allowed values.
        expected: String,
        /// Actual value.
        found: String,
    },
    /// An option is unknown, or its value has the wrong type.
    #[error("{what}")]
    Option {
        /// Name of the option, and the problem with it.
        what: String,
    },
    /// Two options contradict each other.
    #[error("{what}")]
    Conflict {
        /// Description of the conflict and how to resolve it.
        what: String,
    },
    /// A `generation_config.json` is invalid or unsupported.
    #[error("{what}")]
    Json {
        /// Description of the problem.
        what: String,
    },
    /// The function for allowed tokens returned no token, or one outside the vocabulary.
    #[error("allowed_tokens: expected one or more token ids, all below {vocab_size}, found {found:?}")]
    AllowedTokens {
        /// Number of rows in the token embedding.
        vocab_size: usize,
        /// Returned ids.
        found: Vec<u32>,
    },
    /// The prompt has no tokens.
    #[error(
        "the prompt has no tokens, and the configuration has no valid `bos_token_id` to start from; \
         pass a prompt"
    )]
    EmptyPrompt,
    /// A continuation has no tokens.
    #[error("continuation {number} is empty; it needs at least one token")]
    EmptyContinuation {
        /// Number of the continuation, counted from 1.
        number: usize,
    },
    /// A prompt and its continuation exceed the context.
    #[error("the prompt and continuation {number} need {tokens} positions, but the model's context has \
        {n_positions}; shorten them by {}", .tokens - .n_positions)]
    ContinuationTooLong {
        /// Number of the continuation, counted from 1.
        number: usize,
        /// Number of tokens in prompt and continuation, except the last one, which is not read.
        tokens: usize,
        /// Context length of the model.
        n_positions: usize,
    },
    /// A token id is outside the vocabulary.
    #[error("token id {id} (token {position} of the input) is outside the vocabulary of {vocab_size} \
        tokens; ids range from 0 to {}", .vocab_size - 1)]
    IdBeyondVocabulary {
        /// Token id.
        id: u32,
        /// Position of the token, counted from 1.
        position: usize,
        /// Number of rows in the token embedding.
        vocab_size: usize,
    },
    /// The prompt exceeds the context.
    #[error("the prompt has {tokens} tokens, but the model's context has {n_positions}; \
        shorten the prompt by {}, or keep only part of it", .tokens - .n_positions)]
    PromptTooLong {
        /// Number of tokens in the prompt.
        tokens: usize,
        /// Context length of the model.
        n_positions: usize,
    },
    /// The number of tokens to keep exceeds the context.
    #[error("cannot keep {kept} tokens: the model's context has {n_positions}; keep fewer tokens")]
    WindowTooLong {
        /// Number of tokens to keep.
        kept: usize,
        /// Context length of the model.
        n_positions: usize,
    },
    /// Stop strings are set, but there is no tokenizer.
    #[error("stop_strings need a tokenizer, and the model has none")]
    StopStringsWithoutTokenizer,
    /// A time limit is set, but there is no clock.
    #[error("`max_time` needs a clock, and none is set")]
    NoClock,
    /// A prompt and its completion exceed the KV cache.
    #[error(
        "prompt and completion may need {needed} tokens, but the KV cache holds {kv_tokens}; \
         request fewer new tokens, or enlarge the cache"
    )]
    KvTokens {
        /// Number of tokens in prompt and completion.
        needed: usize,
        /// Capacity of the KV cache in tokens.
        kv_tokens: usize,
    },
    /// The assistant's vocabulary differs from the assisted model's vocabulary.
    #[error(
        "the assistant's vocabulary has {found} tokens, but the model's has {vocab_size}; \
         choose an assistant with the same vocabulary"
    )]
    AssistantVocabulary {
        /// Vocabulary size of the model.
        vocab_size: usize,
        /// Vocabulary size of the assistant.
        found: usize,
    },
    /// A context of one token is too short for scoring.
    #[error("the model's context of {n_positions} tokens is too short to score with; at least 2 are needed")]
    ContextTooShortToScore {
        /// Context length of the model.
        n_positions: usize,
    },
    /// A text of fewer than two tokens is too short for scoring.
    #[error("the text has {tokens} tokens; scoring needs at least 2, because the first has no context")]
    TooShortToScore {
        /// Number of tokens in the text.
        tokens: usize,
    },
    /// A sequence has no token to score, or no token precedes the first one to score.
    #[error(
        "cannot score a sequence of {tokens} tokens from index {first}; \
         the index must be at least 1 and less than the number of tokens"
    )]
    NothingToScore {
        /// Number of tokens in the sequence.
        tokens: usize,
        /// Index of the first token to score.
        first: usize,
    },
    /// A sequence exceeds the context.
    #[error("the sequence needs {tokens} positions, but the model's context has {n_positions}; \
        shorten it by {}", .tokens - .n_positions)]
    SequenceTooLong {
        /// Number of tokens in the sequence, except the last one, which is not read.
        tokens: usize,
        /// Context length of the model.
        n_positions: usize,
    },
    /// One of several sequences cannot be scored.
    #[error("sequence {number} of group {group}: {error}")]
    Sequence {
        /// Number of the group, counted from 1.
        group: usize,
        /// Number of the sequence in its group, counted from 1.
        number: usize,
        /// Problem with the sequence.
        error: Box<Self>,
    },
    /// The two models to compare have different vocabularies.
    #[error(
        "the base model's vocabulary has {vocab_size} tokens, but the other model's has {found}; \
         compare models with the same vocabulary"
    )]
    OtherVocabulary {
        /// Vocabulary size of the base model.
        vocab_size: usize,
        /// Vocabulary size of the other model.
        found: usize,
    },
    /// The model's logits are not finite.
    #[error("the model's logits are not finite; verify its weights, and use an f32 KV cache")]
    NotFinite,
    /// A constraint on the completion cannot be applied.
    #[error("{what}")]
    Constraint {
        /// Description of the problem.
        what: String,
    },
    /// A function that changes logits failed.
    #[error("{what}")]
    Function {
        /// Reason for the failure.
        what: String,
    },
    /// The options remove every token.
    #[error("no token is left to choose from: each is excluded by {}; relax one of them", listed(.options))]
    NoTokenLeft {
        /// Options and kinds of structured output that remove tokens, named as in a request.
        options: Vec<&'static str>,
    },
    /// The tokenizer cannot turn these ids into text.
    #[error("the tokenizer cannot decode the token ids: {0}")]
    Decode(String),
    /// The computation failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl GenerationError {
    /// Returns whether the request, not the model, is at fault.
    pub fn is_usage(&self) -> bool {
        self.kind().is_usage()
    }
}

impl Diagnose for GenerationError {
    fn kind(&self) -> ErrorKind {
        match self {
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
            | Self::OtherVocabulary { .. } => ErrorKind::Usage,
            _ => ErrorKind::Failed,
        }
    }

    fn option(&self) -> Option<&'static str> {
        match self {
            Self::OptionOutOfRange { option, .. } => Some(option),
            Self::NoTokenLeft { options } => options.first().copied(),
            Self::StopStringsWithoutTokenizer => Some("stop_strings"),
            _ => None,
        }
    }

    fn hint(&self) -> Option<Cow<'static, str>> {
        match self {
            Self::PromptTooLong { .. } => Some("`keep_last`".into()),
            Self::NotFinite => Some("`gpt2 verify`, `kv_dtype` f32".into()),
            _ => None,
        }
    }
}

/// Formats options for a message: names in backquotes, kinds of structured output as words.
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
