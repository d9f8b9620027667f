//! Text cleaning as in transformers' `GPTSw3Tokenizer`, applied before SentencePiece.
//!
//! Source: `preprocess_text` in `tokenization_gpt_sw3.py`.

use std::iter::repeat_n;

use serde_json::{Value, json};
use tokenizers::NormalizedString;
use tokenizers::normalizer::Range;

/// Class name in transformers, as it appears in `tokenizer_config.json`.
pub(crate) const CLASS: &str = "GPTSw3Tokenizer";
/// Default special tokens of the class.
pub(crate) const SPECIAL: [(&str, &str); 4] =
    [("eos_token", "<|endoftext|>"), ("unk_token", "<unk>"), ("pad_token", "<pad>"), ("bos_token", "<s>")];

/// Maximum growth of the text under NFC.
pub(crate) const GROWTH: f64 = 3.0;
/// Memory in bytes per byte of NFC output: two strings, three offset lists and their spare capacity.
pub(crate) const BYTES_PER_BYTE: f64 = 96.0;
/// Inclusive ranges of characters to remove.
const REMOVED: [(char, char); 5] =
    [('\0', '\x08'), ('\x0b', '\x1f'), ('\x7f', '\u{a0}'), ('\u{ad}', '\u{ad}'), ('\u{200b}', '\u{200b}')];
/// Ranges of characters that become spaces.
const SPACES: [(char, char); 6] = [
    ('\u{2002}', '\u{2003}'),
    ('\u{2005}', '\u{2005}'),
    ('\u{2008}', '\u{200a}'),
    ('\u{202f}', '\u{202f}'),
    ('\u{3000}', '\u{3000}'),
    ('\u{fffc}', '\u{fffc}'),
];
/// First character that NFC may change.
const FIRST_MARK: char = '\u{300}';

/// Returns the tokenizers library's normalizers that clean text.
pub(crate) fn normalizers() -> [Value; 3] {
    let replace = |ranges: &[(char, char)], content: &str| {
        let range = |(from, to): &(char, char)| format!("\\x{{{:X}}}-\\x{{{:X}}}", *from as u32, *to as u32);
        let expression = format!("[{}]", ranges.iter().map(range).collect::<String>());
        json!({ "type": "Replace", "pattern": { "Regex": expression }, "content": content })
    };
    [replace(&REMOVED, ""), replace(&SPACES, " "), json!({ "type": "NFC" })]
}

/// Returns the cleaned text and, for each of its bytes, the source offset in `text`.
///
/// The last offset is the length of `text`.
pub(crate) fn clean(text: &str) -> (String, Vec<usize>) {
    let mut kept = String::with_capacity(text.len());
    let mut offsets = Vec::with_capacity(text.len() + 1);
    for (offset, one) in text.char_indices() {
        let is_in = |ranges: &[(char, char)]| ranges.iter().any(|(from, to)| (*from..=*to).contains(&one));
        if is_in(&REMOVED) {
            continue;
        }
        let one = if is_in(&SPACES) { ' ' } else { one };
        kept.push(one);
        offsets.extend(repeat_n(offset, one.len_utf8()));
    }
    offsets.push(text.len());
    if kept.chars().all(|one| one < FIRST_MARK) {
        return (kept, offsets);
    }
    let mut composed = NormalizedString::from(kept);
    composed.nfc();
    let offset = |byte: usize| {
        let source = composed.convert_offsets(Range::Normalized(byte..byte + 1));
        source.and_then(|source| offsets.get(source.start)).copied().unwrap_or(text.len())
    };
    let offsets = (0..=composed.len()).map(offset).collect();
    (composed.get().to_owned(), offsets)
}
