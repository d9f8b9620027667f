//! The tokenizer of a checkpoint: `tokenizer.json`, or GPT-2's original pair `vocab.json` and `merges.txt`.

use std::path::Path;

use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

use crate::WeightsError;

/// The token that GPT-2 puts between texts; in `vocab.json` nothing marks it as special.
const END_OF_TEXT: &str = "<|endoftext|>";

/// Loads a tokenizer from a `tokenizer.json`, or from a folder with a `tokenizer.json` or with `vocab.json` and
/// `merges.txt`. Truncation and padding that a `tokenizer.json` may ask for are switched off: a prompt is taken whole.
///
/// # Errors
/// When there is none, or it cannot be used.
pub fn load_tokenizer(path: &Path) -> Result<Tokenizer, WeightsError> {
    let json = path.join("tokenizer.json");
    let (vocab, merges) = (path.join("vocab.json"), path.join("merges.txt"));
    let mut tokenizer = if path.is_file() {
        from_json(path)?
    } else if json.is_file() {
        from_json(&json)?
    } else if vocab.is_file() && merges.is_file() {
        from_vocab_and_merges(&vocab, &merges)?
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

/// The byte-level BPE of GPT-2, as transformers' `GPT2Tokenizer` sets it up.
fn from_vocab_and_merges(vocab: &Path, merges: &Path) -> Result<Tokenizer, WeightsError> {
    let failed = |error: tokenizers::Error| WeightsError::Tokenizer {
        path: vocab.to_owned(),
        error: error.to_string(),
    };
    let (vocab_name, merges_name) = (vocab.to_string_lossy(), merges.to_string_lossy());
    let bpe = BPE::from_file(&vocab_name, &merges_name)
        .build()
        .map_err(failed)?;
    let mut tokenizer = Tokenizer::new(bpe);
    tokenizer.with_pre_tokenizer(Some(ByteLevel::default().add_prefix_space(false)));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    tokenizer.with_post_processor(Some(ByteLevel::default().trim_offsets(false)));
    if tokenizer.token_to_id(END_OF_TEXT).is_some() {
        tokenizer
            .add_special_tokens([AddedToken::from(END_OF_TEXT, true)])
            .map_err(failed)?;
    }
    Ok(tokenizer)
}
