//! BERT's `BasicTokenizer`: lowercases, strips accents, and splits at whitespace and punctuation.

use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{
    NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
};

/// Splits text into words and punctuation marks.
pub(crate) fn words(text: &str) -> Vec<String> {
    let mut text = NormalizedString::from(text);
    // Neither step should fail on any text. If one does, the text has no words.
    if BertNormalizer::new(true, true, Some(true), true).normalize(&mut text).is_err() {
        return Vec::new();
    }
    let mut pieces = PreTokenizedString::from(text);
    if BertPreTokenizer.pre_tokenize(&mut pieces).is_err() {
        return Vec::new();
    }
    let splits = pieces.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
    splits.into_iter().map(|(word, ..)| word.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::words;

    /// Expected values come from transformers' `BasicTokenizer(do_lower_case=True)`.
    #[test]
    fn words_match_berts_basic_tokenizer() {
        let cases: &[(&str, &[&str])] = &[
            ("", &[]),
            ("She didn't go, did she?", &["she", "didn", "'", "t", "go", ",", "did", "she", "?"]),
            ("\"Yes,\" said Zoë Ångström.", &["\"", "yes", ",", "\"", "said", "zoe", "angstrom", "."]),
            ("e-mail: a_b@c.d", &["e", "-", "mail", ":", "a", "_", "b", "@", "c", ".", "d"]),
            ("naïve café—résumé…", &["naive", "cafe", "—", "resume", "…"]),
            ("中文字 and", &["中", "文", "字", "and"]),
            ("tab\tnew\nline\u{a0}nbsp", &["tab", "new", "line", "nbsp"]),
            ("\0zero\u{fffd}\u{7}bell", &["zerobell"]),
            ("Wi-Fi 3.14 $5 ~x^y", &["wi", "-", "fi", "3", ".", "14", "$", "5", "~", "x", "^", "y"]),
            ("“curly” ‘quotes’", &["“", "curly", "”", "‘", "quotes", "’"]),
            ("word\u{200b}word", &["wordword"]),
        ];
        for (text, expected) in cases {
            assert_eq!(words(text), *expected, "{text:?}");
        }
    }
}
