//! Wrappers around the tokenizers library, which panics on some invalid files.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::Deserialize;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::{Model, OffsetReferential, OffsetType, PreTokenizer, Tokenizer};

use crate::WeightsError;

/// Calls the library and turns a panic into an error.
///
/// With `panic = "abort"`, as in a browser, a panic ends the page's worker instead. `tokenizer_limits`
/// rejects all inputs known to cause panics.
pub(crate) fn without_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work))
        .map_err(|_| "the tokenizers library panicked; the file may be damaged".to_owned())
}

/// Encodes text with a single library call.
pub(crate) fn encode_whole(
    tokenizer: &Tokenizer,
    text: &str,
    special_tokens: bool,
) -> Result<Vec<u32>, WeightsError> {
    let failed = |error| WeightsError::Encode { error };
    let encoding = without_panic(|| tokenizer.encode_fast(text, special_tokens)).map_err(failed)?;
    let encoding = encoding
        .map_err(|error| failed(unknown_word(tokenizer, text).unwrap_or_else(|| error.to_string())))?;
    Ok(encoding.get_ids().to_vec())
}

/// Encodes text with a single library call and returns the character range of each token.
pub(crate) fn encode_whole_with_places(
    tokenizer: &Tokenizer,
    text: &str,
) -> Result<(Vec<u32>, Vec<Range<usize>>), WeightsError> {
    let failed = |error| WeightsError::Encode { error };
    let encoding = without_panic(|| tokenizer.encode_char_offsets(text, true)).map_err(failed)?;
    let encoding = encoding.map_err(|error| failed(error.to_string()))?;
    let ranges = encoding.get_offsets().iter().map(|(start, end)| *start..*end);
    Ok((encoding.get_ids().to_vec(), ranges.collect()))
}

/// Describes the first word that a word-level tokenizer without an unknown token cannot encode.
///
/// The library's own error does not name the word.
fn unknown_word(tokenizer: &Tokenizer, text: &str) -> Option<String> {
    let ModelWrapper::WordLevel(model) = tokenizer.get_model() else { return None };
    let mut words = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), text);
    if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
        pre_tokenizer.pre_tokenize(&mut words).ok()?;
    }
    let splits = words.get_splits(OffsetReferential::Original, OffsetType::Char);
    let (word, range, _) =
        splits.into_iter().find(|(word, _, tokens)| tokens.is_none() && model.token_to_id(word).is_none())?;
    Some(format!(
        "the vocabulary has no token for {word:?} (at character {}) and no unknown token; \
         use a tokenizer with a token for every word",
        range.0 + 1
    ))
}

/// Merges of a BPE model, which the library exposes only as JSON.
#[derive(Deserialize)]
struct BpeMerges {
    merges: Vec<(String, String)>,
}

/// Returns the merges of a model in rank order.
pub(crate) fn merges_of(model: &BPE) -> Option<Vec<(String, String)>> {
    let written: BpeMerges = serde_json::from_value(serde_json::to_value(model).ok()?).ok()?;
    Some(written.merges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn word_without_a_token_is_reported() {
        let json = r#"{"pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "[UNK]"}}"#;
        let tokenizer: Tokenizer = json.parse().unwrap();
        assert_eq!(encode_whole(&tokenizer, "a b", true).unwrap(), [0, 1]);
        let error = encode_whole(&tokenizer, "a é cd", true).unwrap_err().to_string();
        assert!(error.contains("no token for \"é\" (at character 3)"), "{error}");
    }
}
