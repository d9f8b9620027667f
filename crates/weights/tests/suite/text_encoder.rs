//! Long texts yield the same tokens as the tokenizers library, wherever they are split.

use std::borrow::Cow;
use std::str::FromStr;

use candle_gpt2_testing::CheckpointFolder;
use candle_gpt2_weights::{
    END_OF_TEXT, TextEncoder, Tokenizer, encode_piece, load_tokenizer, train_tokenizer,
};
use serde_json::{Value, json};

/// Fragments for random texts, which cover each case of the word pattern and word boundaries.
const PARTS: [&str; 46] = [
    " ",
    " ",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    "\u{b}",
    "\u{85}",
    "\u{a0}",
    "\u{2028}",
    "\u{3000}",
    "\u{200b}",
    "a",
    "be",
    "the",
    " The",
    "ing",
    "É",
    "ß",
    "я",
    "字",
    "ก",
    "e\u{301}",
    "ⅷ",
    "²",
    "١",
    "7",
    "42",
    "'s",
    "'t",
    "'re",
    "'ve",
    "'m",
    "'ll",
    "'d",
    "'S",
    "'",
    "’s",
    ".",
    "。",
    "，",
    "🙂",
    "<|endoftext|>",
    "<|endof",
];

/// Pseudorandom numbers (xorshift).
struct Xorshift(u64);

impl Xorshift {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 11).unwrap() % bound
    }

    fn text(&mut self, parts: usize) -> String {
        (0..parts).map(|_| PARTS[self.below(PARTS.len())]).collect()
    }
}

fn trained() -> Tokenizer {
    let mut random = Xorshift(7);
    let texts: Vec<String> = (0..400).map(|_| random.text(60)).chain(["aaaa bebebe ".repeat(50)]).collect();
    train_tokenizer(texts.into_iter().map(Cow::Owned), 700).unwrap()
}

fn native_tokens(encoder: &TextEncoder, text: &str) -> Vec<u32> {
    let mut tokens = Vec::new();
    encoder.session().encode(text, &mut tokens).unwrap();
    tokens
}

#[test]
fn random_texts_encode_like_the_library_at_every_cut() {
    for (seed, tokenizer) in [(1, trained()), (2, load_tokenizer(CheckpointFolder::tiny().path()).unwrap())] {
        let encoder = TextEncoder::new(&tokenizer);
        assert!(encoder.is_own());
        // All texts share a session, so that some words come from its cache.
        let mut session = encoder.session();
        let mut random = Xorshift(seed);
        let mut cuts = 0;
        for _ in 0..300 {
            let parts = 1 + random.below(60);
            let text = random.text(parts);
            let expected = encode_piece(&tokenizer, &text).unwrap();
            let mut found = Vec::new();
            session.encode(&text, &mut found).unwrap();
            assert_eq!(found, expected, "{text:?}");
            let mut from = 1;
            while let Some(cut) = encoder.cut(text.as_bytes(), from) {
                found.clear();
                session.encode(&text[..cut], &mut found).unwrap();
                session.encode(&text[cut..], &mut found).unwrap();
                assert_eq!(found, expected, "{text:?} cut at {cut}");
                from = cut + 1;
                cuts += 1;
            }
        }
        assert!(cuts > 500, "{cuts}");
    }
}

/// Checks characters where the standard library's classes change, and some in between.
#[test]
fn every_character_class_encodes_like_the_library() {
    let tokenizer = trained();
    let encoder = TextEncoder::new(&tokenizer);
    let class = |c: char| (c.is_alphabetic(), c.is_numeric(), c.is_whitespace(), c.is_lowercase());
    let mut text = String::new();
    let mut before = class('\0');
    for (index, c) in ('\0'..=char::MAX).enumerate() {
        if class(c) != before || index % 997 == 0 {
            text.extend(['x', c, c, ' ', c, '1', c, '\'', c, ' ']);
        }
        before = class(c);
        if text.len() > 4000 {
            assert_eq!(
                native_tokens(&encoder, &text),
                encode_piece(&tokenizer, &text).unwrap(),
                "up to {c:?}"
            );
            text.clear();
        }
    }
}

#[test]
fn long_words_encode_like_the_library() {
    let tokenizer = trained();
    let encoder = TextEncoder::new(&tokenizer);
    for part in ["a", "be", "thebea", "字", ".'", "42", "  ", "aaab"] {
        for count in [1, 15, 16, 17, 40, 60, 500, 3000] {
            let text = format!("{} end", part.repeat(count));
            assert_eq!(
                native_tokens(&encoder, &text),
                encode_piece(&tokenizer, &text).unwrap(),
                "{count} of {part:?}"
            );
        }
    }
}

/// Trained tokenizer with different settings, loaded from modified JSON.
fn changed(change: impl FnOnce(&mut Value)) -> Tokenizer {
    let mut json: Value = serde_json::to_value(trained()).unwrap();
    change(&mut json);
    Tokenizer::from_str(&json.to_string()).unwrap()
}

fn added(id: u32, content: &str, normalized: bool) -> Value {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": normalized, "special": !normalized,
    })
}

#[test]
fn added_tokens_match_the_library() {
    let tokens = ["<|endoftext|>", "<a", "<a>", "<a><b>", ">>", "><", "[SEP]"];
    let parts = ["<", "a", ">", "<a>", "<b>", "><", "x", " y", "[SEP]", " ", "<|endoftext|>"];
    for normalized in [false, true] {
        let tokenizer = changed(|json| {
            let list = tokens.iter().zip(0..).map(|(content, index)| {
                let id = if *content == END_OF_TEXT { 0 } else { 700 + index };
                added(id, content, normalized)
            });
            json["added_tokens"] = list.collect();
        });
        let encoder = TextEncoder::new(&tokenizer);
        assert!(encoder.is_own());
        let mut random = Xorshift(3);
        for _ in 0..300 {
            let text: String = (0..12).map(|_| parts[random.below(parts.len())]).collect();
            assert_eq!(native_tokens(&encoder, &text), encode_piece(&tokenizer, &text).unwrap(), "{text:?}");
        }
    }
}

#[test]
fn unsupported_tokenizers_fall_back_to_the_library() {
    let stripping = |json: &mut Value| {
        let mut token = added(700, "<x>", false);
        token["lstrip"] = json!(true);
        json["added_tokens"] = json!([added(0, "<|endoftext|>", false), token]);
    };
    type Change<'a> = &'a dyn Fn(&mut Value);
    let changes: [(&str, Change); 9] = [
        ("add_prefix_space", &|json| json["pre_tokenizer"]["add_prefix_space"] = json!(true)),
        ("another pre-tokenizer", &|json| json["pre_tokenizer"] = json!({"type": "Whitespace"})),
        ("no regex split", &|json| json["pre_tokenizer"]["use_regex"] = json!(false)),
        ("a normalizer", &|json| json["normalizer"] = json!({"type": "Lowercase"})),
        ("ignore_merges", &|json| json["model"]["ignore_merges"] = json!(true)),
        ("end_of_word_suffix", &|json| json["model"]["end_of_word_suffix"] = json!("a")),
        ("an added token with lstrip", &stripping),
        ("an added token inside words", &|json| json["added_tokens"] = json!([added(700, "theme", false)])),
        ("special and normalized added tokens", &|json| {
            json["added_tokens"] = json!([added(700, "<a>", false), added(701, "<b>", true)]);
        }),
    ];
    for (label, change) in changes {
        let tokenizer = changed(change);
        let encoder = TextEncoder::new(&tokenizer);
        assert!(!encoder.is_own(), "{label}");
        let text = "The theme's <x> <a> THE be\n\nbe 42.";
        assert_eq!(native_tokens(&encoder, text), encode_piece(&tokenizer, text).unwrap(), "{label}");
    }
    let empty = changed(|json| json["model"]["end_of_word_suffix"] = json!(""));
    assert!(TextEncoder::new(&empty).is_own(), "an empty suffix has no effect");
}
