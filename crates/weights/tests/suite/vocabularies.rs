//! SentencePiece models and `vocab.txt`: reference ids, and damaged files.
//!
//! The ids must match the `sentencepiece` package and transformers. `scripts/reference/vocabularies.py`
//! writes the fixtures and the expected values.

use std::path::PathBuf;

use candle_gpt2_arithmetic::RandomStream;
use candle_gpt2_testing::{CheckpointFolder, fixture_path, json_fixture};
use candle_gpt2_weights::{
    Checkpoint, Companions, TextEncoder, Tokenizer, WeightsError, WrittenDType, encode, encode_piece,
    encode_with_places, load_tokenizer, write_gguf, write_hugging_face,
};
use serde_json::Value;

const MODELS: [&str; 5] = ["unigram.model", "unigram_bytes.model", "bpe.model", "bpe_bytes.model", "sw3"];
const VOCABULARIES: [&str; 4] = ["lowercase", "cased", "accents", "unspaced"];

fn fixture(name: &str) -> PathBuf {
    fixture_path("tokenizers").join(name)
}

fn tokenizer(name: &str) -> Tokenizer {
    load_tokenizer(fixture(name)).unwrap()
}

/// Returns the texts of a fixture with their reference ids.
fn cases(name: &str) -> Vec<(String, Vec<u32>)> {
    let expected = json_fixture("tokenizers/expected");
    let case = |case: &Value| {
        let ids =
            case["ids"].as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap());
        (case["text"].as_str().unwrap().to_owned(), ids.collect())
    };
    expected[name].as_array().unwrap().iter().map(case).collect()
}

#[test]
fn ids_match_sentencepiece_and_transformers() {
    for name in MODELS.into_iter().chain(VOCABULARIES) {
        let tokenizer = tokenizer(name);
        let encoder = TextEncoder::new(&tokenizer);
        let all = cases(name);
        assert!(all.len() > 200, "{name}");
        for (text, expected) in &all {
            assert_eq!(encoder.encode(text, false).unwrap(), *expected, "{name}: {text:?}");
            let (ids, ranges) = encoder.encode_with_places(text).unwrap();
            assert_eq!(ids, *expected, "{name}: {text:?}");
            let end = text.chars().count();
            assert!(
                ranges.iter().all(|range| range.start <= range.end && range.end <= end),
                "{name}: {text:?}"
            );
        }
        let (text, expected) = &all[12];
        assert_eq!(encode(&tokenizer, text).unwrap(), *expected, "{name}");
        assert_eq!(encode_piece(&tokenizer, text).unwrap(), *expected, "{name}");
        assert_eq!(encode_with_places(&tokenizer, text).unwrap().0, *expected, "{name}");
    }
}

#[test]
fn saved_tokenizer_gives_the_same_ids() {
    for name in MODELS {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        tokenizer(name).save(&path, true).unwrap();
        let saved = load_tokenizer(&path).unwrap();
        let encoder = TextEncoder::new(&saved);
        for (text, expected) in cases(name) {
            assert_eq!(encoder.encode(&text, false).unwrap(), expected, "{name}: {text:?}");
        }
    }
}

#[test]
fn token_offsets_match_the_text() {
    let tokenizer = tokenizer("unigram.model");
    let text = "the  river 🤗 <u>…";
    let (ids, ranges) = encode_with_places(&tokenizer, text).unwrap();
    let characters: Vec<char> = text.chars().collect();
    let part = |token: &str| {
        let id = tokenizer.token_to_id(token).unwrap();
        let index = ids.iter().position(|found| *found == id).unwrap();
        characters[ranges[index].clone()].iter().collect::<String>()
    };
    assert_eq!(part("<u>"), "<u>");
    assert_eq!(part("<unk>"), "🤗");
    assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start), "{ranges:?}");
}

#[test]
fn special_tokens_come_from_the_model_and_adjacent_files() {
    let model = std::fs::read(fixture("bpe.model")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    write("spiece.model", &model);
    let plain = load_tokenizer(folder.path()).unwrap();
    let id = |token: &str| plain.token_to_id(token).unwrap();
    assert_eq!(encode(&plain, "</s>").unwrap(), [id("</s>")]);
    let size = plain.get_vocab_size(true);
    write(
        "tokenizer_config.json",
        br#"{"eos_token": "</s>", "bos_token": {"content": "<s>"}, "pad_token": "[PAD]", "add_bos_token": true}"#,
    );
    write("special_tokens_map.json", br#"{"additional_special_tokens": ["<sep>"]}"#);
    let named = load_tokenizer(folder.path()).unwrap();
    assert_eq!(named.get_vocab_size(true), size + 2);
    assert_eq!(named.token_to_id("[PAD]"), u32::try_from(size).ok());
    let sep = named.token_to_id("<sep>").unwrap();
    let ids = encode(&named, "the<sep>river").unwrap();
    assert_eq!(ids.first(), Some(&id("<s>")));
    assert!(ids.contains(&sep), "{ids:?}");
}

#[test]
fn tokenizer_files_have_a_fixed_precedence() {
    let size = |folder: &std::path::Path| load_tokenizer(folder).unwrap().get_vocab_size(false);
    let folder = tempfile::tempdir().unwrap();
    let copy = |from: &str, to: &str| std::fs::copy(fixture(from), folder.path().join(to)).unwrap();
    copy("lowercase/vocab.txt", "vocab.txt");
    let words = size(folder.path());
    copy("bpe.model", "x.model");
    assert_eq!(size(folder.path()), words, "vocab.txt takes precedence over an unusual name");
    copy("unigram.model", "tokenizer.model");
    let unigram = size(folder.path());
    assert_ne!(unigram, words);
    copy("bpe.model", "spiece.model");
    let bpe = size(folder.path());
    assert_ne!(bpe, unigram);
    std::fs::write(folder.path().join("vocab.json"), r#"{"a": 0, "b": 1}"#).unwrap();
    std::fs::write(folder.path().join("merges.txt"), "#version: 0.2\n").unwrap();
    assert_eq!(size(folder.path()), 2);
    std::fs::write(folder.path().join("tokenizer.json"), candle_gpt2_stories::TOKENIZER).unwrap();
    assert!(size(folder.path()) > 1000);

    let two = tempfile::tempdir().unwrap();
    for name in ["a.model", "b.model"] {
        std::fs::copy(fixture("bpe.model"), two.path().join(name)).unwrap();
    }
    let error = load_tokenizer(two.path()).unwrap_err().to_string();
    assert!(error.contains("several files may be the tokenizer: a.model, b.model"), "{error}");
}

#[test]
fn folder_conversion_copies_the_file_but_gguf_rejects_it() {
    for (name, written) in [("unigram.model", "spiece.model"), ("cased/vocab.txt", "vocab.txt")] {
        let contents = std::fs::read(fixture(name)).unwrap();
        let source = CheckpointFolder::tiny().without("tokenizer.json");
        std::fs::write(source.path().join(written), &contents).unwrap();
        for pair in ["vocab.json", "merges.txt"] {
            let _ = std::fs::remove_file(source.path().join(pair));
        }
        let checkpoint = Checkpoint::open(source.path()).unwrap();
        let companions: Companions = checkpoint.companions(None).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("out");
        write_hugging_face(&checkpoint, &companions, &out, WrittenDType::F32, &|_| ()).unwrap();
        assert!(std::fs::read(out.join(written)).unwrap() == contents, "{name}");
        assert!(!out.join("tokenizer.json").exists(), "{name}");
        let gguf = folder.path().join("out.gguf");
        let error = write_gguf(&checkpoint, &companions, &gguf, WrittenDType::F32, &|_| ()).unwrap_err();
        assert!(error.to_string().contains("not a byte-level BPE"), "{error}");
    }
}

fn load_error(name: &str, contents: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, contents).unwrap();
    let error = load_tokenizer(&path).unwrap_err();
    assert!(matches!(error, WeightsError::Tokenizer { .. }), "{error}");
    error.to_string()
}

#[test]
fn vocab_txt_is_split_into_lines_like_python() {
    let folder = tempfile::tempdir().unwrap();
    let load = |contents: &[u8]| {
        let path = folder.path().join("vocab.txt");
        std::fs::write(&path, contents).unwrap();
        load_tokenizer(&path).unwrap()
    };
    for contents in
        ["[UNK]\nx\ny\nx\n\nz", "[UNK]\r\nx\r\ny\r\nx\r\n\r\nz\r\n", "\u{feff}[UNK]\rx\ry\rx\r\rz\r"]
    {
        let tokenizer = load(contents.as_bytes());
        assert_eq!(encode(&tokenizer, "x y z q").unwrap(), [3, 2, 5, 0], "{contents:?}");
    }
    assert!(load_error("vocab.txt", b"a\n\xff\n").contains("line 2 is not UTF-8"));
    assert!(load_error("vocab.txt", b"a\n").contains("the unknown token `[UNK]` is missing"));
    assert!(
        load_error("merges.txt", b"#version: 0.2\na b\n").contains("the unknown token `[UNK]` is missing")
    );
    std::fs::write(folder.path().join("tokenizer_config.json"), r#"{"do_lower_case": "no"}"#).unwrap();
    let error = load_tokenizer(folder.path().join("vocab.txt")).unwrap_err().to_string();
    assert!(error.contains("do_lower_case is \"no\"; expected true, false or null"), "{error}");
    let class = r#"{"tokenizer_class": "BertJapaneseTokenizer"}"#;
    std::fs::write(folder.path().join("tokenizer_config.json"), class).unwrap();
    let error = load_tokenizer(folder.path().join("vocab.txt")).unwrap_err().to_string();
    assert!(error.contains("tokenizer_class `BertJapaneseTokenizer`"), "{error}");
}

/// Encodes a field of a message: the number with the wire type, the length and the bytes.
fn field(number: u8, contents: &[u8]) -> Vec<u8> {
    let mut bytes = vec![number << 3 | 2];
    let mut length = contents.len();
    while length >= 0x80 {
        bytes.push(u8::try_from(length & 0x7f).unwrap() | 0x80);
        length >>= 7;
    }
    bytes.push(u8::try_from(length).unwrap());
    [bytes, contents.to_vec()].concat()
}

fn piece(text: &str, score: f32, kind: u8) -> Vec<u8> {
    let score = [&[0x15], &score.to_le_bytes()[..]].concat();
    field(1, &[field(1, text.as_bytes()), score, vec![0x18, kind]].concat())
}

fn model(pieces: &[(&str, f32, u8)], more: &[u8]) -> Vec<u8> {
    let pieces = pieces.iter().flat_map(|(text, score, kind)| piece(text, *score, *kind));
    pieces.chain(more.iter().copied()).collect()
}

#[test]
fn invalid_models_are_reported_by_field() {
    let unknown = ("<unk>", 0.0, 2);
    for (contents, expected) in [
        (vec![0x1a, 0], "contains no pieces"),
        (b"hello".to_vec(), "wire type"),
        (model(&[("a", -1.0, 1)], &[]), "no unknown piece"),
        (model(&[unknown, ("<unk2>", 0.0, 2)], &[]), "pieces[1]: a second unknown piece, after pieces[0]"),
        (model(&[unknown, ("a", 0.0, 1), ("a", 0.0, 1)], &[]), "pieces[2]: duplicate piece \"a\""),
        (model(&[unknown, ("", 0.0, 1)], &[]), "pieces[1]: the piece is empty"),
        (model(&[unknown, ("a", f32::NAN, 1)], &[]), "the score of \"a\" is NaN"),
        (model(&[unknown, ("a", f32::INFINITY, 1)], &[]), "the score of \"a\" is inf"),
        (model(&[unknown, ("a", 0.0, 5)], &[]), "pieces[1]: the type 5 is unsupported"),
        (model(&[unknown, ("<0x00>", 0.0, 6)], &[]), "trainer_spec.byte_fallback is false"),
        (model(&[unknown, ("<0x00>", 0.0, 6)], &field(2, &[0x98, 0x02, 1])), "1 of 256 bytes"),
        (model(&[unknown], &field(2, &[0x18, 4])), "trainer_spec.model_type: 4 (CHAR)"),
        (model(&[unknown], &field(2, &[0xc0, 0x01, 1])), "treat_whitespace_as_suffix"),
        (model(&[unknown], &field(3, &field(2, b"abc"))), "precompiled_charsmap ends before the size"),
        (
            model(&[unknown], &field(3, &field(2, &[9, 0, 0, 0]))),
            "precompiled_charsmap declares a trie of 9 bytes",
        ),
        (model(&[unknown], &field(3, &field(2, &[4, 0, 0, 0, 0, 4, 0, 0]))), "outside its 1 units"),
        (model(&[unknown], &[0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f]), "truncated or damaged"),
        (model(&[unknown], &[0xff; 12]), "truncated or damaged"),
        (model(&[unknown], &[0x08, 1]), "pieces[1]: expected length-delimited bytes, found a number"),
        (field(1, &[0x0a, 2, 0xff, 0xfe]), "pieces[0].piece: invalid utf-8"),
    ] {
        let error = load_error("x.model", &contents);
        assert!(
            error.contains("x.model: not a usable tokenizer") && error.contains(expected),
            "{expected}: {error}"
        );
    }
    let surface = "x".repeat(100_000);
    let surface = model(
        &[unknown],
        &field(2, &[vec![0xe2, 0x02], field(0, surface.as_bytes())[1..].to_vec()].concat()),
    );
    let start = std::time::Instant::now();
    let error = load_error("x.model", &surface);
    assert!(error.contains("can turn one byte of text into"), "{error}");
    assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
    let huge = field(1, &field(1, "a".repeat(1025).as_bytes()));
    let error = load_error("x.model", &[model(&[unknown], &[]), huge].concat());
    assert!(error.contains("1025 characters, more than 1024"), "{error}");
}

/// Damaged bytes and truncated files yield an error or a working tokenizer.
#[test]
fn damaged_models_fail_or_still_encode() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("spiece.model");
    let mut random = RandomStream::with_stream(67, 0);
    for name in ["bpe.model", "unigram.model"] {
        let contents = std::fs::read(fixture(name)).unwrap();
        let half = contents.len() / 2;
        for round in 0..150_u64 {
            let mut damaged = contents.clone();
            match round % 3 {
                0 => damaged.truncate(usize::try_from(random.below(contents.len() as u64)).unwrap()),
                1 => {
                    let offset = usize::try_from(random.below(contents.len() as u64)).unwrap();
                    damaged[offset] = u8::try_from(random.below(256)).unwrap();
                }
                _ => {
                    for _ in 0..4 {
                        let offset = half + usize::try_from(random.below(half as u64)).unwrap();
                        damaged[offset] ^= 1 << random.below(8);
                    }
                }
            }
            std::fs::write(&path, &damaged).unwrap();
            if let Ok(tokenizer) = load_tokenizer(&path) {
                let text = "Le café ﬁn か\u{3099} … ① <u> e\u{302}\u{301} 🤗";
                TextEncoder::new(&tokenizer).encode(text, false).unwrap();
            }
        }
    }
}
