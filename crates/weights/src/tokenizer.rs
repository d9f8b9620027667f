//! The tokenizer of a checkpoint: `tokenizer.json`, or GPT-2's original pair of a vocabulary and merges, under Hugging
//! Face's names (`vocab.json`, `merges.txt`) or OpenAI's (`encoder.json`, `vocab.bpe`).

use std::collections::HashMap;
use std::path::Path;

use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

use crate::WeightsError;

/// The token that GPT-2 puts between texts; in `vocab.json` nothing marks it as special.
const END_OF_TEXT: &str = "<|endoftext|>";

/// The pairs of a vocabulary and merges.
const PAIRS: [(&str, &str); 2] = [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")];

/// Loads a tokenizer from a `tokenizer.json`, or from a folder with a `tokenizer.json` or with a vocabulary and merges.
/// Truncation and padding that a `tokenizer.json` may ask for are switched off: a prompt is taken whole.
///
/// # Errors
/// When there is none, or it cannot be used.
pub fn load_tokenizer(path: &Path) -> Result<Tokenizer, WeightsError> {
    let json = path.join("tokenizer.json");
    let pairs = PAIRS.map(|(vocabulary, merges)| (path.join(vocabulary), path.join(merges)));
    let mut tokenizer = if path.is_file() {
        from_json(path)?
    } else if json.is_file() {
        from_json(&json)?
    } else if let Some((vocabulary, merges)) = pairs
        .iter()
        .find(|(first, second)| first.is_file() && second.is_file())
    {
        from_vocabulary_and_merges(vocabulary, merges)?
    } else if path.is_dir() {
        return Err(WeightsError::NoTokenizer {
            folder: path.to_owned(),
        });
    } else {
        return Err(WeightsError::Tokenizer {
            path: path.to_owned(),
            error: "no such file or folder".into(),
        });
    };
    let failed = |error: tokenizers::Error| WeightsError::Tokenizer {
        path: path.to_owned(),
        error: error.to_string(),
    };
    tokenizer.with_truncation(None).map_err(failed)?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}

fn from_json(path: &Path) -> Result<Tokenizer, WeightsError> {
    let bytes = std::fs::read(path).map_err(|error| WeightsError::Read {
        path: path.to_owned(),
        error,
    })?;
    Tokenizer::from_bytes(bytes).map_err(|error| WeightsError::Tokenizer {
        path: path.to_owned(),
        error: error.to_string(),
    })
}

/// The tokenizer of a vocabulary file and a merges file, with the tokens of `added_tokens.json` beside them.
fn from_vocabulary_and_merges(vocabulary: &Path, merges: &Path) -> Result<Tokenizer, WeightsError> {
    let failed = |path: &Path, error: String| WeightsError::Tokenizer {
        path: path.to_owned(),
        error,
    };
    let (vocabulary_name, merges_name) = (vocabulary.to_string_lossy(), merges.to_string_lossy());
    let bpe = BPE::from_file(&vocabulary_name, &merges_name).build();
    let mut tokenizer = byte_level(bpe.map_err(|error| failed(vocabulary, error.to_string()))?);
    if tokenizer.token_to_id(END_OF_TEXT).is_some() {
        let added = tokenizer.add_special_tokens([AddedToken::from(END_OF_TEXT, true)]);
        added.map_err(|error| failed(vocabulary, error.to_string()))?;
    }
    let added_path = vocabulary.with_file_name("added_tokens.json");
    if added_path.is_file() {
        let bytes = std::fs::read(&added_path).map_err(|error| WeightsError::Read {
            path: added_path.clone(),
            error,
        })?;
        let ids: HashMap<String, u32> =
            serde_json::from_slice(&bytes).map_err(|error| failed(&added_path, error.to_string()))?;
        let mut in_order: Vec<(u32, String)> = ids.into_iter().map(|(token, id)| (id, token)).collect();
        in_order.sort();
        for (id, token) in in_order {
            let added = tokenizer.add_tokens([AddedToken::from(token.as_str(), false)]);
            added.map_err(|error| failed(&added_path, error.to_string()))?;
            if tokenizer.token_to_id(&token) != Some(id) {
                return Err(failed(
                    &added_path,
                    format!("the id {id} of `{token}` does not follow the others"),
                ));
            }
        }
    }
    Ok(tokenizer)
}

/// The tokenizer of lists, as GGUF files hold them: tokens in the order of their ids, merges of two tokens each with a
/// space between them, and the tokens that stand for themselves in a text.
pub(crate) fn from_lists(
    tokens: &[String],
    merges: &[String],
    special: impl IntoIterator<Item = String>,
) -> Result<Tokenizer, String> {
    let ids = 0u32..;
    let vocabulary = tokens.iter().cloned().zip(ids).collect();
    let pairs = merges.iter().map(|merge| {
        let (first, second) = merge
            .split_once(' ')
            .ok_or_else(|| format!("`{merge}` is no merge of two tokens"))?;
        Ok((first.to_owned(), second.to_owned()))
    });
    let pairs = pairs.collect::<Result<Vec<_>, String>>()?;
    let bpe = BPE::builder()
        .vocab_and_merges::<Vocab>(vocabulary, pairs)
        .build()
        .map_err(|error| error.to_string())?;
    let mut tokenizer = byte_level(bpe);
    let special = special.into_iter().map(|token| AddedToken::from(token, true));
    tokenizer
        .add_special_tokens(special)
        .map_err(|error| error.to_string())?;
    Ok(tokenizer)
}

/// GPT-2's tokenizer around a vocabulary, as transformers' `GPT2Tokenizer` sets it up.
fn byte_level(bpe: BPE) -> Tokenizer {
    let mut tokenizer = Tokenizer::new(bpe);
    tokenizer.with_pre_tokenizer(Some(ByteLevel::default().add_prefix_space(false)));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    tokenizer.with_post_processor(Some(ByteLevel::default().trim_offsets(false)));
    tokenizer
}
