//! Converts a request's prompts to tokens that fit into the context.

use candle_gpt2_engine::{EngineError, Vocabulary};
use candle_gpt2_weights::WeightsError;

use crate::completion::{Prompt, Prompts};
use crate::encoding_memory::{EncodingMemory, Permit};
use crate::options::Truncation;
use crate::{ApiError, ServedModel};

/// Maximum number of bytes that are encoded if the text may be truncated.
///
/// Only [the end](end_of) of a longer text is encoded.
pub(crate) const MAX_TEXT_BYTES: usize = 1 << 20;

/// Tokenized prompt.
pub(crate) struct PromptTokens {
    pub(crate) ids: Vec<u32>,
    /// Index of the first echoed token; skips the start token that replaces an empty prompt.
    pub(crate) echo_start: usize,
    /// Path of the prompt in the request.
    pub(crate) path: String,
}

/// Warning about the first character in `texts` that has no token; `path` locates the text.
pub(crate) fn lost_note<'t>(
    texts: impl IntoIterator<Item = &'t str>,
    path: &str,
    served: &ServedModel,
) -> Option<String> {
    let note = texts.into_iter().find_map(|text| served.vocabulary.lost_note(text))?;
    Some(format!("{path}: {note}"))
}

/// Tokenizes all prompts and checks that they leave room for the new tokens.
pub(crate) fn tokens_of(
    prompts: Prompts,
    truncation: Option<Truncation>,
    max_tokens: usize,
    served: &ServedModel,
) -> Result<Vec<PromptTokens>, ApiError> {
    let paths: Vec<String> = (0..prompts.prompts.len()).map(|prompt| prompts.path(prompt)).collect();
    let mut tokens = Vec::with_capacity(paths.len());
    let kept = kept(truncation, max_tokens, served);
    for (prompt, path) in prompts.prompts.into_iter().zip(paths) {
        let mut ids = match prompt {
            Prompt::Ids(ids) => check_ids(ids, &path, served)?,
            Prompt::Text(text) => encode(to_read(&text, kept, &path, served)?, &path, served)?,
        };
        let is_empty = ids.is_empty();
        ids = served.vocabulary.start_if_empty(ids);
        if ids.is_empty() {
            return Err(empty(&path));
        }
        truncate(&mut ids, kept);
        check_context(&path, ids.len(), max_tokens, served)?;
        tokens.push(PromptTokens { ids, echo_start: usize::from(is_empty), path });
    }
    Ok(tokens)
}

/// Number of tokens kept from the end of a prompt.
pub(crate) fn kept(truncation: Option<Truncation>, max_tokens: usize, served: &ServedModel) -> Option<usize> {
    match truncation? {
        Truncation::ToTokens(tokens) => Some(tokens),
        Truncation::ToContext => Some(served.config().n_positions.saturating_sub(max_tokens).max(1)),
    }
}

/// Keeps the last `kept` tokens.
pub(crate) fn truncate(ids: &mut Vec<u32>, kept: Option<usize>) {
    ids.drain(..ids.len().saturating_sub(kept.unwrap_or(usize::MAX)));
}

/// Part of a text to encode: the whole text, or only its end if a very long text is truncated.
///
/// Without truncation, a text that cannot fit into the context is rejected.
pub(crate) fn to_read<'t>(
    text: &'t str,
    kept: Option<usize>,
    path: &str,
    served: &ServedModel,
) -> Result<&'t str, ApiError> {
    match kept {
        None => check_length(text.len(), path, served).map(|()| text),
        Some(_) if text.len() <= MAX_TEXT_BYTES && fits(text, served) => Ok(text),
        Some(kept) => Ok(end_of(text, kept.saturating_mul(served.pieces.longest()))),
    }
}

/// Returns the part of a text to encode with token offsets, and a permit for the memory this needs.
pub(crate) fn to_read_with_places<'t, 's>(
    text: &'t str,
    kept: Option<usize>,
    path: &str,
    served: &'s ServedModel,
) -> Result<(&'t str, Permit<'s>), ApiError> {
    let encoder = served.vocabulary.encoder().map_err(|error| unreadable(&error, path))?;
    let mut read = to_read(text, kept, path, served)?;
    if let Some(kept) = kept
        && !EncodingMemory::fits(encoder.memory_with_places(read))
    {
        read = end_of(read, kept.saturating_mul(served.pieces.longest()));
    }
    let permit = served.encoding_memory.acquire(encoder.memory_with_places(read), read, path)?;
    Ok((read, permit))
}

/// Whether the tokenizer can encode a text within the memory limit.
fn fits(text: &str, served: &ServedModel) -> bool {
    served.vocabulary.encoder().is_ok_and(|encoder| EncodingMemory::fits(encoder.memory(text)))
}

/// Returns the last `bytes` to `2 * bytes` bytes of a text, but at most [`MAX_TEXT_BYTES`].
///
/// The part begins with the whitespace after a word. GPT-2's tokens never cross that boundary, so the
/// part's last tokens equal the whole text's. In a text without whitespace, the part may begin anywhere.
fn end_of(text: &str, bytes: usize) -> &str {
    let read = bytes.saturating_mul(2).min(MAX_TEXT_BYTES);
    let start = text.ceil_char_boundary(text.len().saturating_sub(read));
    let end = text.get(start..).unwrap_or(text);
    let ends_word = |pair: &[u8]| matches!(pair, [before, b' ' | b'\n'] if before.is_ascii_graphic());
    let first_half = end.as_bytes().get(..read / 2).unwrap_or_default();
    let word_end = first_half.windows(2).position(ends_word).map_or(0, |place| place + 1);
    end.get(word_end..).unwrap_or(end)
}

/// Checks the token ids found at `path` in a body.
pub(crate) fn check_ids(ids: Vec<u32>, path: &str, served: &ServedModel) -> Result<Vec<u32>, ApiError> {
    for (index, id) in ids.iter().enumerate() {
        served.check_token(*id, || format!("{path}[{index}]"))?;
    }
    Ok(ids)
}

/// Checks that a prompt leaves room for its new tokens.
///
/// If completions [end at the context](crate::Limits::ends_at_context), only the prompt itself must fit.
pub(crate) fn check_context(
    path: &str,
    prompt_tokens: usize,
    max_tokens: usize,
    served: &ServedModel,
) -> Result<(), ApiError> {
    let n_positions = served.config().n_positions;
    let total = prompt_tokens.saturating_add(max_tokens);
    let ends = served.options.limits.ends_at_context;
    if (ends || max_tokens == 0) && prompt_tokens > n_positions {
        let message = format!(
            "{path}: this model's context is {n_positions} tokens, but the text has {prompt_tokens}; shorten it"
        );
        return Err(too_long(message, path));
    }
    if ends || total <= n_positions {
        return Ok(());
    }
    let message = format!(
        "{path}: this model's context is {n_positions} tokens, but {total} were requested: {prompt_tokens} in the prompt and \
         {max_tokens} for the completion (max_tokens); shorten the prompt, or request fewer"
    );
    Err(too_long(message, path))
}

/// Rejects a text that cannot fit even with the longest tokens, before tokenizing it.
pub(crate) fn check_length(bytes: usize, path: &str, served: &ServedModel) -> Result<(), ApiError> {
    let least = bytes.div_ceil(served.pieces.longest());
    let n_positions = served.config().n_positions;
    if least <= n_positions {
        return Ok(());
    }
    let message = format!(
        "{path}: this model's context is {n_positions} tokens, but the prompt alone has at least {least}; shorten it"
    );
    Err(too_long(message, path))
}

/// Error for a text without tokens.
pub(crate) fn empty(path: &str) -> ApiError {
    let message = format!("{path}: the text is empty, and this model has no BOS token; add some text");
    ApiError::invalid(message).with_param(path)
}

/// Error for a text that exceeds the context.
pub(crate) fn too_long(message: String, path: &str) -> ApiError {
    ApiError::invalid(message).with_param(path).with_code("context_length_exceeded")
}

/// Encodes a text, including the special tokens that the tokenizer adds.
pub(crate) fn encode(text: &str, path: &str, served: &ServedModel) -> Result<Vec<u32>, ApiError> {
    encode_with(text, path, served, Vocabulary::encode)
}

/// Encodes part of a text without adding special tokens.
pub(crate) fn encode_piece(text: &str, path: &str, served: &ServedModel) -> Result<Vec<u32>, ApiError> {
    encode_with(text, path, served, Vocabulary::encode_piece)
}

fn encode_with(
    text: &str,
    path: &str,
    served: &ServedModel,
    encode: impl FnOnce(&Vocabulary, &str) -> Result<Vec<u32>, EngineError>,
) -> Result<Vec<u32>, ApiError> {
    let encoder = served.vocabulary.encoder().map_err(|error| unreadable(&error, path))?;
    let _permit = served.encoding_memory.acquire(encoder.memory(text), text, path)?;
    encode(&served.vocabulary, text).map_err(|error| unreadable(&error, path))
}

/// Converts an encoding error without revealing the paths of the model's files.
pub(crate) fn unreadable(error: &EngineError, path: &str) -> ApiError {
    let what = match error {
        EngineError::Weights(WeightsError::NoTokenizer { .. }) => {
            "this model has no tokenizer; pass token ids".to_owned()
        }
        EngineError::Weights(error @ WeightsError::Encode { .. }) => error.to_string(),
        error @ EngineError::ForeignTokenizer { .. } => error.to_string(),
        error => return ApiError::failed(error),
    };
    ApiError::invalid(format!("{path}: {what}")).with_param(path)
}
