//! The cleaning of texts by transformers' `GPTSw3Tokenizer`, before SentencePiece: `preprocess_text` in `tokenization_gpt_sw3.py`.

use std::iter::repeat_n;

use serde_json::{Value, json};
use tokenizers::NormalizedString;
use tokenizers::normalizer::Range;

/// The class of transformers, as `tokenizer_config.json` names it.
pub(crate) const CLASS: &str = "GPTSw3Tokenizer";
/// Special tokens of the class if the files name no others.
pub(crate) const SPECIAL: [(&str, &str); 4] =
    [("eos_token", "<|endoftext|>"), ("unk_token", "<unk>"), ("pad_token", "<pad>"), ("bos_token", "<s>")];

/// Largest growth of a text in NFC.
pub(crate) const GROWTH: f64 = 3.0;
/// Memory for each byte that NFC makes: two texts, three lists of places, and room for them to grow.
pub(crate) const BYTES_PER_BYTE: f64 = 96.0;
/// Characters that are left out, from the first to the last of each range.
const REMOVED: [(char, char); 5] =
    [('\0', '\x08'), ('\x0b', '\x1f'), ('\x7f', '\u{a0}'), ('\u{ad}', '\u{ad}'), ('\u{200b}', '\u{200b}')];
/// Characters that become spaces.
const SPACES: [(char, char); 6] = [
    ('\u{2002}', '\u{2003}'),
    ('\u{2005}', '\u{2005}'),
    ('\u{2008}', '\u{200a}'),
    ('\u{202f}', '\u{202f}'),
    ('\u{3000}', '\u{3000}'),
    ('\u{fffc}', '\u{fffc}'),
];
/// The first character that NFC may change.
const FIRST_MARK: char = '\u{300}';

/// Normalizers of the tokenizers library that clean a text.
pub(crate) fn normalizers() -> [Value; 3] {
    let replace = |ranges: &[(char, char)], content: &str| {
        let range = |(from, to): &(char, char)| format!("\\x{{{:X}}}-\\x{{{:X}}}", *from as u32, *to as u32);
        let expression = format!("[{}]", ranges.iter().map(range).collect::<String>());
        json!({ "type": "Replace", "pattern": { "Regex": expression }, "content": content })
    };
    [replace(&REMOVED, ""), replace(&SPACES, " "), json!({ "type": "NFC" })]
}

/// Returns the cleaned text with the place in `text` that each of its bytes comes from, and the end of `text`.
pub(crate) fn clean(text: &str) -> (String, Vec<usize>) {
    let mut kept = String::with_capacity(text.len());
    let mut places = Vec::with_capacity(text.len() + 1);
    for (place, one) in text.char_indices() {
        let is_in = |ranges: &[(char, char)]| ranges.iter().any(|(from, to)| (*from..=*to).contains(&one));
        if is_in(&REMOVED) {
            continue;
        }
        let one = if is_in(&SPACES) { ' ' } else { one };
        kept.push(one);
        places.extend(repeat_n(place, one.len_utf8()));
    }
    places.push(text.len());
    if kept.chars().all(|one| one < FIRST_MARK) {
        return (kept, places);
    }
    let mut composed = NormalizedString::from(kept);
    composed.nfc();
    let place = |byte: usize| {
        let source = composed.convert_offsets(Range::Normalized(byte..byte + 1));
        source.and_then(|source| places.get(source.start)).copied().unwrap_or(text.len())
    };
    let places = (0..=composed.len()).map(place).collect();
    (composed.get().to_owned(), places)
}
