//! Calls of the tokenizers library, which panics on some files that it should reject.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::Deserialize;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::{Model, OffsetReferential, OffsetType, PreTokenizer, Tokenizer};

use crate::WeightsError;

/// Runs a call of the library and turns a panic into an error.
///
/// With `panic = "abort"`, in a browser, a panic ends the page's worker instead. `tokenizer_limits` rejects every input that is
/// known to panic.
pub(crate) fn without_panic<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work))
        .map_err(|_| "the file is damaged in a way its reader does not expect".to_owned())
}

/// Encodes a text in one call of the library.
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

/// Encodes a text in one call of the library, with the characters that each token stands for.
pub(crate) fn places_of_library(
    tokenizer: &Tokenizer,
    text: &str,
) -> Result<(Vec<u32>, Vec<Range<usize>>), WeightsError> {
    let failed = |error| WeightsError::Encode { error };
    let encoding = without_panic(|| tokenizer.encode_char_offsets(text, true)).map_err(failed)?;
    let encoding = encoding.map_err(|error| failed(error.to_string()))?;
    let places = encoding.get_offsets().iter().map(|(start, end)| *start..*end);
    Ok((encoding.get_ids().to_vec(), places.collect()))
}

/// Describes the first word of a text that a word-level tokenizer without an unknown token lacks. The library's error does not
/// name it.
fn unknown_word(tokenizer: &Tokenizer, text: &str) -> Option<String> {
    let ModelWrapper::WordLevel(model) = tokenizer.get_model() else { return None };
    let mut words = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), text);
    if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
        pre_tokenizer.pre_tokenize(&mut words).ok()?;
    }
    let splits = words.get_splits(OffsetReferential::Original, OffsetType::Char);
    let (word, place, _) =
        splits.into_iter().find(|(word, _, tokens)| tokens.is_none() && model.token_to_id(word).is_none())?;
    Some(format!(
        "it has no token for {word:?} (from character {} on), and no unknown token; use a tokenizer that knows all words",
        place.0 + 1
    ))
}

/// The merges of a BPE model, which the library only shows in JSON.
#[derive(Deserialize)]
struct Written {
    merges: Vec<(String, String)>,
}

/// Merges of a model in their order.
pub(crate) fn merges_of(model: &BPE) -> Option<Vec<(String, String)>> {
    let written: Written = serde_json::from_value(serde_json::to_value(model).ok()?).ok()?;
    Some(written.merges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_without_a_token_is_named() {
        let json = r#"{"pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "[UNK]"}}"#;
        let tokenizer: Tokenizer = json.parse().unwrap();
        assert_eq!(encode_whole(&tokenizer, "a b", true).unwrap(), [0, 1]);
        let error = encode_whole(&tokenizer, "a é cd", true).unwrap_err().to_string();
        assert!(error.contains("no token for \"é\" (from character 3 on)"), "{error}");
    }
}
