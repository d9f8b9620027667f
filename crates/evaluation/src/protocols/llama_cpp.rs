//! Conventions from llama.cpp's `llama-perplexity`: windows, scored tokens and encoding.

use candle_gpt2_engine::{EngineError, Vocabulary};

use super::shared::wrong_setting;
use crate::long_text::encode_long;
use crate::{EvaluationError, Setting};

/// Default window length.
const DEFAULT_WINDOW: usize = 512;
/// Smallest window with a scored token in its second half.
pub(crate) const SHORTEST_WINDOW: usize = 3;

/// Returns the window length, with a note if the context is shorter than llama.cpp's default.
pub(crate) fn window_length(setting: &Setting<'_>) -> Result<(usize, Option<String>), EvaluationError> {
    let n_positions = setting.vocabulary.config().n_positions;
    let length = setting.context.unwrap_or(DEFAULT_WINDOW.min(n_positions));
    if !(SHORTEST_WINDOW..=n_positions).contains(&length) {
        let expected = format!("from {SHORTEST_WINDOW} to {n_positions} tokens (the model's context)");
        return Err(wrong_setting("`context`", expected, length.to_string()));
    }
    let note = || {
        format!("windows have {length} tokens (the model's context) instead of llama.cpp's {DEFAULT_WINDOW}")
    };
    Ok((length, (setting.context.is_none() && length < DEFAULT_WINDOW).then(note)))
}

/// Index of the first scored token of a window.
///
/// llama.cpp starts with the logits at the middle token, which predict the token after it.
pub(crate) fn first_scored(window_length: usize) -> usize {
    window_length / 2 + 1
}

/// Encodes a file after removing one trailing line break.
pub(crate) fn encode_file(setting: &Setting<'_>, text: &str) -> Result<Vec<u32>, EvaluationError> {
    encode_long(setting, text.strip_suffix('\n').unwrap_or(text), encode_plain)
}

/// Encodes text; names of special tokens, such as `<|endoftext|>`, are plain text.
pub(crate) fn encode_plain(vocabulary: &Vocabulary, text: &str) -> Result<Vec<u32>, EvaluationError> {
    let tokenizer = vocabulary.required_tokenizer()?;
    let is_named = |name: &str| !name.is_empty() && text.contains(name);
    if !tokenizer.get_added_tokens_decoder().values().any(|token| token.special && is_named(&token.content)) {
        return Ok(vocabulary.encode(text)?);
    }
    let mut plain = tokenizers::Tokenizer::clone(tokenizer);
    plain.set_encode_special_tokens(true);
    let ids = candle_gpt2_weights::encode(&plain, text).map_err(EngineError::from)?;
    let config = vocabulary.config();
    match ids.iter().find(|id| !config.has_token(**id)) {
        Some(id) => Err(EngineError::ForeignTokenizer { id: *id, vocab_size: config.vocab_size }.into()),
        None => Ok(ids),
    }
}
