//! Compares streamed and whole decoding with the `tokenizers` library for all vocabulary types.

use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_generation::{TextStream, decode, is_fallback_byte};
use candle_gpt2_testing::{fixture_path, json_fixture, tokenizer_json};
use candle_gpt2_weights::{Tokenizer, encode, load_tokenizer, token_bytes};
use serde_json::{Value, json};

/// Words to add to a vocabulary.
///
/// Each contains a space, or a letter that GPT-2's byte alphabet uses for another byte.
const ADDED: [&str; 8] = ["für", "kuća", "đem", "Začnimo", "ĠĠ", "日本", "¿qué?", " two words"];

fn tokenizer(decoder: &Value, tokens: &[String], added: &[&str]) -> Tokenizer {
    tokenizer_json(decoder, tokens, added).parse().unwrap()
}

fn strings(tokens: &[&str]) -> Vec<String> {
    tokens.iter().map(ToString::to_string).collect()
}

fn byte_level(added: &[&str]) -> Tokenizer {
    // Every letter of the byte alphabet, and a few merged tokens: a whole character, and parts of two
    // characters.
    let alphabet = (0..=0x143).filter_map(char::from_u32).filter(|letter| !letter.is_control());
    let mut tokens = strings(&["</s>", "Ġthe", "ing", "ä¸Ń", "Ńä¸"]);
    tokens.extend(alphabet.map(String::from));
    let decoder =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    tokenizer(&decoder, &tokens, added)
}

/// Creates vocabularies that the library decodes correctly: fixtures, and one per decoder type.
fn vocabularies() -> Vec<(String, Tokenizer)> {
    let folders = [
        "tiny-checkpoint",
        "heads/sequence",
        "heads/token",
        "heads/double",
        "heads/multi_label",
        "cross-attention",
    ];
    let mut found: Vec<(String, Tokenizer)> =
        folders.map(|name| (name.to_owned(), load_tokenizer(fixture_path(name)).unwrap())).into();
    for name in ["unigram.model", "unigram_bytes.model", "bpe.model", "bpe_bytes.model", "lowercase"] {
        let path = fixture_path("tokenizers").join(name);
        found.push((name.to_owned(), load_tokenizer(path).unwrap()));
    }
    found.push(("built-in".into(), Tokenizer::from_bytes(candle_gpt2_stories::TOKENIZER).unwrap()));
    let words = strings(&[
        "</s>", "▁", "▁the", "ing", "▁é", "x", "##ing", "##s", "'", "n't", ".", "low</w>", "er</w>", "e", "�",
    ]);
    let bytes = [0x41, 0xe2, 0x82, 0xac, 0xff, 0xc3, 0xa9, 0xf0, 0x9f, 0x98, 0x80];
    let fallback: Vec<String> =
        words.iter().cloned().chain(bytes.map(|byte: u8| format!("<0x{byte:02X}>"))).collect();
    let metaspace = |scheme: &str| json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true });
    let llama = json!({ "type": "Sequence", "decoders": [
        { "type": "Replace", "pattern": { "String": "▁" }, "content": " " }, { "type": "ByteFallback" }, { "type": "Fuse" },
        { "type": "Strip", "content": " ", "start": 1, "stop": 0 } ] });
    for (decoder, tokens) in [
        (metaspace("always"), &words),
        (metaspace("never"), &words),
        (json!({ "type": "WordPiece", "prefix": "##", "cleanup": true }), &words),
        (json!({ "type": "WordPiece", "prefix": "##", "cleanup": false }), &words),
        (json!({ "type": "BPEDecoder", "suffix": "</w>" }), &words),
        (json!({ "type": "Fuse" }), &words),
        (json!({ "type": "ByteFallback" }), &fallback),
        (llama, &fallback),
        (json!(null), &words),
    ] {
        found.push((decoder.to_string(), tokenizer(&decoder, tokens, &ADDED)));
    }
    found
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut stream = TextStream::new(tokenizer);
    let pieces: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    pieces + &stream.finish().unwrap()
}

/// Creates 9,900 short id sequences, and 100 long ones that move a stream's window several times.
///
/// Some of the ids have no token.
fn sequences(tokenizer: &Tokenizer) -> impl Iterator<Item = Vec<u32>> {
    let end = u64::try_from(tokenizer.get_vocab_size(true)).unwrap() + 2;
    let mut random = RandomStream::with_stream(66, 0);
    (0..10_000).map(move |number| {
        let length = if number % 100 == 0 { 120 } else { 1 + random.below(10) };
        // Few distinct ids give runs of bytes and of equal tokens.
        let kinds: Vec<u64> = (0..1 + random.below(12)).map(|_| random.below(end)).collect();
        let mut id = || kinds[usize::try_from(random.below(kinds.len() as u64)).unwrap()];
        (0..length).map(|_| u32::try_from(id()).unwrap()).collect()
    })
}

#[test]
fn streamed_text_equals_whole_and_library_decoding() {
    for (name, tokenizer) in vocabularies() {
        for ids in sequences(&tokenizer) {
            let whole = decode(&tokenizer, &ids, true).unwrap();
            assert_eq!(streamed(&tokenizer, &ids), whole, "{name}: {ids:?}");
            // The library panics if its `BPEDecoder` gets no tokens. It also replaces valid characters
            // between invalid SentencePiece bytes.
            let has_own_bytes =
                name.ends_with("_bytes.model") && ids.iter().any(|id| is_fallback_byte(&tokenizer, *id));
            if !whole.is_empty() && !has_own_bytes {
                assert_eq!(tokenizer.decode(&ids, true).unwrap(), whole, "{name}: {ids:?}");
            }
        }
    }
}

/// The library reads the letters of an added token as bytes; see huggingface/tokenizers#1996.
#[test]
fn added_tokens_decode_verbatim_in_byte_level_vocabularies() {
    let tokenizer = byte_level(&ADDED);
    for word in ADDED {
        let id = tokenizer.token_to_id(word).unwrap();
        assert_eq!(decode(&tokenizer, &[id], true).unwrap(), word);
        assert_eq!(encode(&tokenizer, word).unwrap(), [id]);
    }
    for ids in sequences(&tokenizer) {
        let is_shown = |id: &&u32| **id != 0;
        let bytes = ids.iter().filter(is_shown).filter_map(|id| token_bytes(&tokenizer, *id)).flatten();
        let expected = String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned();
        assert_eq!(decode(&tokenizer, &ids, true).unwrap(), expected, "{ids:?}");
        assert_eq!(streamed(&tokenizer, &ids), expected, "{ids:?}");
    }
}

#[test]
fn completion_finishes_a_character_split_by_the_prompt() {
    let tokenizer = byte_level(&[]);
    let ids = |text: &str| -> Vec<u32> {
        let spelled = text
            .bytes()
            .map(|byte| (0..400).find(|id| token_bytes(&tokenizer, *id).as_deref() == Some(&[byte])));
        spelled.map(Option::unwrap).collect()
    };
    let whole = ids("</s>a ⁄ 🤗!");
    for cut in 0..=whole.len() {
        let (prompt, rest) = whole.split_at(cut);
        let mut stream = TextStream::new(&tokenizer);
        let mut text = stream.follow(prompt).unwrap();
        assert!(!text.contains('\u{FFFD}'), "{text:?}");
        rest.iter().for_each(|id| text += &stream.push(*id).unwrap());
        assert_eq!(text + &stream.finish().unwrap(), "</s>a ⁄ 🤗!", "cut at {cut}");
    }
}

/// Compares decoded text with the `sentencepiece` package and transformers.
///
/// `scripts/reference/vocabularies.py` wrote the expected texts.
#[test]
fn decoded_text_equals_sentencepiece_and_transformers() {
    let expected = json_fixture("tokenizers/expected");
    for (name, cases) in expected.as_object().unwrap() {
        let tokenizer = load_tokenizer(fixture_path("tokenizers").join(name)).unwrap();
        for case in cases.as_array().unwrap() {
            let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            assert_eq!(decode(&tokenizer, &ids, false).unwrap(), case["decoded"], "{name}: {ids:?}");
        }
    }
}

/// SentencePiece keeps the valid characters in a run of bytes that contains invalid ones.
#[test]
fn sentencepiece_keeps_valid_characters_among_invalid_bytes() {
    let tokenizer = load_tokenizer(fixture_path("tokenizers").join("unigram_bytes.model")).unwrap();
    let text = |bytes: &[u8]| {
        let ids: Vec<u32> =
            bytes.iter().map(|byte| tokenizer.token_to_id(&format!("<0x{byte:02X}>")).unwrap()).collect();
        assert_eq!(streamed(&tokenizer, &ids), decode(&tokenizer, &ids, true).unwrap());
        decode(&tokenizer, &ids, true).unwrap()
    };
    assert_eq!(text(&[0x29, 0xff, 0xe2]), ")\u{FFFD}\u{FFFD}");
    assert_eq!(text(&[0xe2, 0x82, 0xac, 0xe2, 0x82, 0x41]), "€\u{FFFD}\u{FFFD}A");
    assert_eq!(text("▁".as_bytes()), "▁", "a space marker that is not part of a piece");
    assert_eq!(text(&[0x20, 0xf0, 0x9f, 0x98, 0x80]), " 😀");
}
