//! Conversion of `vocab.txt`, the vocabulary of transformers' `BertTokenizer`, to `tokenizer.json`.

use std::collections::HashMap;

use serde_json::{Value, json};

/// Default unknown token, unless `tokenizer_config.json` specifies another.
pub(crate) const UNKNOWN: &str = "[UNK]";
/// Settings in `tokenizer_config.json` for word splitting, case and accents.
const OPTIONS: [&str; 3] = ["do_lower_case", "tokenize_chinese_chars", "strip_accents"];
/// Maximum length of a word in characters; longer words are unknown.
const MAX_WORD_CHARS: usize = 100;

/// Converts a vocabulary with one token per line to `tokenizer.json`.
///
/// `config` is the content of `tokenizer_config.json`, or null.
///
/// # Errors
/// If the vocabulary is not UTF-8 or lacks the unknown token, or a setting has the wrong type.
pub(crate) fn tokenizer_json(bytes: &[u8], config: &Value, unknown: &str) -> Result<String, String> {
    let text = text(bytes)?;
    let mut vocabulary: HashMap<&str, usize> = HashMap::new();
    // If lines repeat, the last one wins, as in transformers.
    vocabulary.extend(lines(&text).zip(0..));
    if !vocabulary.contains_key(unknown) {
        return Err(format!(
            "the unknown token `{unknown}` is missing, so this is not the vocabulary of a BertTokenizer; use the checkpoint's own \
             vocab.txt, or set `unk_token` in tokenizer_config.json"
        ));
    }
    let [lowercase, chinese, accents] = options(config)?;
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
        "normalizer": {
            "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": chinese.unwrap_or(true),
            "strip_accents": accents, "lowercase": lowercase.unwrap_or(true),
        },
        "pre_tokenizer": { "type": "BertPreTokenizer" },
        "post_processor": null,
        "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": true },
        "model": {
            "type": "WordPiece", "unk_token": unknown, "continuing_subword_prefix": "##",
            "max_input_chars_per_word": MAX_WORD_CHARS, "vocab": vocabulary,
        },
    });
    Ok(json.to_string())
}

fn options(config: &Value) -> Result<[Option<bool>; 3], String> {
    let mut found = [None; 3];
    for (option, found) in OPTIONS.iter().zip(&mut found) {
        let value = &config[option];
        *found = value.as_bool();
        if found.is_none() && !value.is_null() {
            return Err(format!("tokenizer_config.json: {option} is {value}; expected true, false or null"));
        }
    }
    Ok(found)
}

/// Decodes a file without its byte order mark.
fn text(bytes: &[u8]) -> Result<String, String> {
    let text = str::from_utf8(bytes).map_err(|error| {
        let line = bytes[..error.valid_up_to()].split(|byte| *byte == b'\n').count();
        format!("line {line} is not UTF-8; save the file in UTF-8")
    })?;
    // Python reads any line ending as a line feed.
    Ok(text.trim_start_matches('\u{feff}').replace("\r\n", "\n").replace('\r', "\n"))
}

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.split_terminator('\n')
}
