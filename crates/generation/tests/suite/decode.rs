//! Text of ids: streamed, whole and as the `tokenizers` library decodes it, for vocabularies of every kind.

use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_generation::{TextStream, decode, is_fallback_byte};
use candle_gpt2_testing::{fixture_path, json_fixture, tokenizer_json};
use candle_gpt2_weights::{Tokenizer, encode, load_tokenizer, token_bytes};
use serde_json::{Value, json};

/// Words that people add to a vocabulary. Each has a letter that GPT-2's alphabet of bytes uses for another byte, or a space.
const ADDED: [&str; 8] = ["für", "kuća", "đem", "Začnimo", "ĠĠ", "日本", "¿qué?", " two words"];

fn tokenizer(decoder: &Value, tokens: &[String], added: &[&str]) -> Tokenizer {
    tokenizer_json(decoder, tokens, added).parse().unwrap()
}

fn strings(tokens: &[&str]) -> Vec<String> {
    tokens.iter().map(ToString::to_string).collect()
}

fn byte_level(added: &[&str]) -> Tokenizer {
    // Every letter of the alphabet, and a few merged tokens: a whole character, and parts of two.
    let alphabet = (0..=0x143).filter_map(char::from_u32).filter(|letter| !letter.is_control());
    let mut tokens = strings(&["</s>", "Ġthe", "ing", "ä¸Ń", "Ńä¸"]);
    tokens.extend(alphabet.map(String::from));
    let decoder =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    tokenizer(&decoder, &tokens, added)
}

/// Vocabularies that the library decodes as they should be: those of the fixtures, and one for each kind of decoder.
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
        folders.map(|name| (name.to_owned(), load_tokenizer(&fixture_path(name)).unwrap())).into();
    for name in ["unigram.model", "unigram_bytes.model", "bpe.model", "bpe_bytes.model", "lowercase"] {
        let path = fixture_path("tokenizers").join(name);
        found.push((name.to_owned(), load_tokenizer(&path).unwrap()));
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

/// Sequences of ids, some of which have no token: 9,900 short ones, and 100 that move the window of a stream several times.
fn sequences(tokenizer: &Tokenizer) -> impl Iterator<Item = Vec<u32>> {
    let end = u64::try_from(tokenizer.get_vocab_size(true)).unwrap() + 2;
    let mut random = RandomStream::with_stream(66, 0);
    (0..10_000).map(move |number| {
        let length = if number % 100 == 0 { 120 } else { 1 + random.below(10) };
        // Few different ids make runs of bytes and of equal tokens.
        let kinds: Vec<u64> = (0..1 + random.below(12)).map(|_| random.below(end)).collect();
        let mut id = || kinds[usize::try_from(random.below(kinds.len() as u64)).unwrap()];
        (0..length).map(|_| u32::try_from(id()).unwrap()).collect()
    })
}

#[test]
fn streamed_text_is_the_whole_text_and_that_of_the_library() {
    for (name, tokenizer) in vocabularies() {
        for ids in sequences(&tokenizer) {
            let whole = decode(&tokenizer, &ids, true).unwrap();
            assert_eq!(streamed(&tokenizer, &ids), whole, "{name}: {ids:?}");
            // The library panics where its `BPEDecoder` gets no token, and replaces valid characters among SentencePiece's bytes.
            let has_own_bytes =
                name.ends_with("_bytes.model") && ids.iter().any(|id| is_fallback_byte(&tokenizer, *id));
            if !whole.is_empty() && !has_own_bytes {
                assert_eq!(tokenizer.decode(&ids, true).unwrap(), whole, "{name}: {ids:?}");
            }
        }
    }
}

/// huggingface/tokenizers#1996: the library reads the letters of an added token as bytes.
#[test]
fn added_tokens_of_a_byte_level_vocabulary_stand_for_themselves() {
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
fn a_text_completes_the_character_that_its_prompt_begins() {
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

/// Texts of the `sentencepiece` package and of transformers, which `scripts/reference/vocabularies.py` wrote.
#[test]
fn texts_are_those_of_sentencepiece_and_transformers() {
    let expected = json_fixture("tokenizers/expected");
    for (name, cases) in expected.as_object().unwrap() {
        let tokenizer = load_tokenizer(&fixture_path("tokenizers").join(name)).unwrap();
        for case in cases.as_array().unwrap() {
            let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            assert_eq!(decode(&tokenizer, &ids, false).unwrap(), case["decoded"], "{name}: {ids:?}");
        }
    }
}

/// SentencePiece keeps the characters of a run of bytes in which others are invalid.
#[test]
fn bytes_of_sentencepiece_become_characters_one_by_one() {
    let tokenizer = load_tokenizer(&fixture_path("tokenizers").join("unigram_bytes.model")).unwrap();
    let text = |bytes: &[u8]| {
        let ids: Vec<u32> =
            bytes.iter().map(|byte| tokenizer.token_to_id(&format!("<0x{byte:02X}>")).unwrap()).collect();
        assert_eq!(streamed(&tokenizer, &ids), decode(&tokenizer, &ids, true).unwrap());
        decode(&tokenizer, &ids, true).unwrap()
    };
    assert_eq!(text(&[0x29, 0xff, 0xe2]), ")\u{FFFD}\u{FFFD}");
    assert_eq!(text(&[0xe2, 0x82, 0xac, 0xe2, 0x82, 0x41]), "€\u{FFFD}\u{FFFD}A");
    assert_eq!(text("▁".as_bytes()), "▁", "a sign of a space that no piece has");
    assert_eq!(text(&[0x20, 0xf0, 0x9f, 0x98, 0x80]), " 😀");
}
