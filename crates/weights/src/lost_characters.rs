//! Characters that a tokenizer drops because it has no token for them.
//!
//! A byte-level BPE that lacks some of the 256 bytes, and a character-level BPE without `unk_token`,
//! silently drop unknown characters. transformers does the same.

use std::fmt;

use serde_json::Value;
use tokenizers::models::ModelWrapper;
use tokenizers::{NormalizedString, Normalizer, Tokenizer};

use crate::byte_pairs::byte_of;
use crate::encode_with_places;

/// End of GPT-2's alphabet: the last of the 68 characters for non-printable bytes is U+0143.
const ALPHABET_END: u32 = 0x144;
/// Maximum number of bytes encoded on each side of a checked character.
const MAX_PART_BYTES: usize = 1 << 14;

/// First character that tokenization drops, as found by [`CharacterCheck::first_lost`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostCharacter {
    /// Dropped character.
    pub character: char,
    /// Line number, starting at 1.
    pub line: usize,
    /// Column in characters, starting at 1.
    pub column: usize,
}

impl fmt::Display for LostCharacter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { character, line, column } = self;
        write!(
            f,
            "the tokenizer has no token for {character:?} (line {line}, column {column}) and drops it; use a tokenizer that \
             covers all characters of the text, or remove them"
        )
    }
}

/// Check for characters that a tokenizer may drop.
///
/// ```
/// use candle_gpt2_weights::{CharacterCheck, load_tokenizer};
///
/// let folder = tempfile::tempdir()?;
/// std::fs::write(folder.path().join("vocab.json"), r#"{"a": 0, "b": 1, "Ġ": 2}"#)?;
/// std::fs::write(folder.path().join("merges.txt"), "#version: 0.2\n")?;
/// let tokenizer = load_tokenizer(folder.path())?;
/// let check = CharacterCheck::new(&tokenizer).ok_or("no character is dropped")?;
/// let lost = check.first_lost(&tokenizer, "ab\na 1").ok_or("no character was dropped")?;
/// assert_eq!((lost.character, lost.line, lost.column), ('\n', 1, 3));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct CharacterCheck {
    kind: Kind,
}

#[derive(Debug, Clone)]
enum Kind {
    /// Byte-level BPE: for each byte, whether it lacks a token.
    Bytes(Box<[bool; 256]>),
    /// Character-level BPE: whether spaces are dropped because they only separate words.
    Characters { drops_spaces: bool },
}

impl CharacterCheck {
    /// Creates a check; `None` if the tokenizer never drops a character.
    pub fn new(tokenizer: &Tokenizer) -> Option<Self> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
        if model.unk_token.is_some() || model.byte_fallback {
            return None;
        }
        let parts = serde_json::to_value((tokenizer.get_normalizer(), tokenizer.get_pre_tokenizer())).ok()?;
        if !contains(&parts, "ByteLevel") {
            let keeps_spaces = parts[1].is_null() || contains(&parts, "Metaspace");
            return Some(Self { kind: Kind::Characters { drops_spaces: !keeps_spaces } });
        }
        let mut is_missing = Box::new([true; 256]);
        for character in (0..ALPHABET_END).filter_map(char::from_u32) {
            if let Some(byte) = byte_of(character) {
                is_missing[usize::from(byte)] = tokenizer.token_to_id(&character.to_string()).is_none();
            }
        }
        is_missing.contains(&true).then_some(Self { kind: Kind::Bytes(is_missing) })
    }

    /// Finds the first dropped character. Pass the same tokenizer as to [`CharacterCheck::new`].
    pub fn first_lost(&self, tokenizer: &Tokenizer, text: &str) -> Option<LostCharacter> {
        for (line, number) in text.split_inclusive('\n').zip(1..) {
            let candidates =
                line.char_indices().zip(1..).filter(|((_, c), _)| self.may_be_lost(tokenizer, *c));
            for ((start, character), column) in candidates {
                if self.is_lost(tokenizer, line, start) {
                    return Some(LostCharacter { character, line: number, column });
                }
            }
        }
        None
    }

    fn may_be_lost(&self, tokenizer: &Tokenizer, character: char) -> bool {
        let mut bytes = [0; 4];
        let text = character.encode_utf8(&mut bytes);
        match &self.kind {
            Kind::Bytes(is_missing) => text.bytes().any(|byte| is_missing[usize::from(byte)]),
            Kind::Characters { drops_spaces } => {
                if (*drops_spaces && character.is_whitespace()) || tokenizer.token_to_id(text).is_some() {
                    return false;
                }
                let mut normalized = NormalizedString::from(&*text);
                // Normalizer errors are reported when the text is encoded.
                let is_normalized = tokenizer
                    .get_normalizer()
                    .is_none_or(|normalizer| normalizer.normalize(&mut normalized).is_ok());
                is_normalized && !normalized.get().chars().all(|letter| is_known(tokenizer, letter))
            }
        }
    }

    /// Whether no added token covers the character that starts at byte `start`.
    ///
    /// The offsets of other tokens are unreliable: after a dropped character, the library shifts them.
    fn is_lost(&self, tokenizer: &Tokenizer, line: &str, start: usize) -> bool {
        let from = line.floor_char_boundary(start.saturating_sub(MAX_PART_BYTES));
        let part = &line[from..line.ceil_char_boundary((start + MAX_PART_BYTES).min(line.len()))];
        let index = line[from..start].chars().count();
        // The error is reported when the text is encoded.
        let Ok((ids, places)) = encode_with_places(tokenizer, part) else { return false };
        let added = tokenizer.get_added_tokens_decoder();
        !ids.iter().zip(&places).any(|(id, place)| place.contains(&index) && added.contains_key(id))
    }
}

/// Whether a character-level BPE has a token for a letter at any position in a word.
fn is_known(tokenizer: &Tokenizer, letter: char) -> bool {
    // The `Metaspace` pre-tokenizer represents a space as `▁`.
    let letter = if letter == ' ' && tokenizer.token_to_id(" ").is_none() { '▁' } else { letter };
    let ModelWrapper::BPE(model) = tokenizer.get_model() else { return true };
    let affix = |affix: &Option<String>| affix.clone().unwrap_or_default();
    let (prefix, suffix) = (affix(&model.continuing_subword_prefix), affix(&model.end_of_word_suffix));
    [("", ""), (&*prefix, ""), ("", &*suffix), (&*prefix, &*suffix)]
        .iter()
        .any(|(before, after)| tokenizer.token_to_id(&format!("{before}{letter}{after}")).is_some())
}

/// Whether a tokenizer component, or any component inside it, has this type.
fn contains(part: &Value, kind: &str) -> bool {
    match part {
        Value::Object(fields) => {
            fields.get("type").is_some_and(|found| found == kind)
                || fields.values().any(|inner| contains(inner, kind))
        }
        Value::Array(parts) => parts.iter().any(|inner| contains(inner, kind)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load_tokenizer;

    /// Tokenizer for the letters a to z and the space, in GPT-2's alphabet.
    fn letters() -> Tokenizer {
        let folder = tempfile::tempdir().unwrap();
        let tokens = ('a'..='z').chain(['Ġ']).zip(0..).map(|(letter, id)| format!("\"{letter}\": {id}"));
        let tokens = tokens.collect::<Vec<_>>().join(", ");
        std::fs::write(folder.path().join("vocab.json"), format!("{{{tokens}}}")).unwrap();
        std::fs::write(folder.path().join("merges.txt"), "#version: 0.2\n").unwrap();
        load_tokenizer(folder.path()).unwrap()
    }

    fn lost(tokenizer: &Tokenizer, text: &str) -> Option<(char, usize, usize)> {
        let lost = CharacterCheck::new(tokenizer).unwrap().first_lost(tokenizer, text)?;
        Some((lost.character, lost.line, lost.column))
    }

    #[test]
    fn bytes_without_a_token_are_reported_with_their_position() {
        let tokenizer = letters();
        assert_eq!(lost(&tokenizer, "ab cd"), None);
        assert_eq!(lost(&tokenizer, "ab 12!"), Some(('1', 1, 4)));
        assert_eq!(lost(&tokenizer, "ab\ncd"), Some(('\n', 1, 3)));
        assert_eq!(lost(&tokenizer, "für"), Some(('ü', 1, 2)));
        let long = format!("{}é", "a".repeat(100_000));
        assert_eq!(lost(&tokenizer, &long), Some(('é', 1, 100_001)));
        // An added token matches its text literally.
        let mut added = tokenizer;
        added.add_tokens([tokenizers::AddedToken::from("für", false)]).unwrap();
        assert_eq!(lost(&added, "a für z"), None);
        assert_eq!(lost(&added, "a für ü"), Some(('ü', 1, 7)));
    }

    #[test]
    fn complete_tokenizers_need_no_check() {
        let tokenizer = Tokenizer::from_bytes(candle_gpt2_stories::TOKENIZER).unwrap();
        assert!(CharacterCheck::new(&tokenizer).is_none());
    }

    #[test]
    fn character_level_bpe_loses_unknown_characters() {
        let json =
            r#"{"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, " ": 2, "ab": 3}, "merges": ["a b"]}}"#;
        let tokenizer: Tokenizer = json.parse().unwrap();
        assert_eq!(lost(&tokenizer, "ab ba"), None);
        assert_eq!(lost(&tokenizer, "ab\tc"), Some(('\t', 1, 3)));
        assert_eq!(lost(&tokenizer, "ab b1a"), Some(('1', 1, 5)));
        let lower = json.replace("{\"model\"", "{\"normalizer\": {\"type\": \"Lowercase\"}, \"model\"");
        assert_eq!(lost(&lower.parse().unwrap(), "AB bC"), Some(('C', 1, 5)));
        let spaced = json.replace("{\"model\"", "{\"pre_tokenizer\": {\"type\": \"Metaspace\", \"replacement\": \"▁\", \"prepend_scheme\": \"always\"}, \"model\"");
        let spaced = spaced.replace("\" \": 2", "\"▁\": 2");
        assert_eq!(lost(&spaced.parse().unwrap(), "ab ba"), None);
        assert_eq!(lost(&spaced.parse().unwrap(), "ab 1a"), Some(('1', 1, 4)));
        let words = json.replace("{\"model\"", "{\"pre_tokenizer\": {\"type\": \"Whitespace\"}, \"model\"");
        assert_eq!(lost(&words.parse().unwrap(), "ab\tbc"), Some(('c', 1, 5)));
        let unknown = json.replace("\"merges\"", "\"unk_token\": \"a\", \"merges\"");
        assert!(CharacterCheck::new(&unknown.parse().unwrap()).is_none());
    }
}
