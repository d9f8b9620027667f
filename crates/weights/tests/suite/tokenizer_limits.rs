//! Limits on tokenizers that could multiply the size of a text.
//!
//! The error names the field in `tokenizer.json`. Every kind of tokenizer still loads.

use candle_gpt2_testing::{CheckpointFolder, fixture_path};
use candle_gpt2_weights::{TextEncoder, Tokenizer, encode, encode_piece, load_tokenizer};
use serde_json::{Value, json};

/// Tiny checkpoint with a modified `tokenizer.json`.
fn changed(change: impl FnOnce(&mut Value)) -> CheckpointFolder {
    let bytes = std::fs::read(fixture_path("tiny-checkpoint").join("tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_slice(&bytes).unwrap();
    change(&mut json);
    CheckpointFolder::tiny().with("tokenizer.json", json.to_string())
}

fn with(field: &str, value: Value) -> CheckpointFolder {
    changed(|json| json[field] = value)
}

fn load(folder: &CheckpointFolder) -> Result<Tokenizer, String> {
    load_tokenizer(folder.path()).map_err(|error| error.to_string())
}

#[track_caller]
fn assert_rejected(folder: &CheckpointFolder, parts: &[&str]) {
    let error = load(folder).expect_err("this tokenizer should not load");
    assert!(parts.iter().all(|part| error.contains(part)), "{error}\nlacks one of {parts:?}");
    assert!(error.len() < 700, "the message has {} bytes", error.len());
}

#[track_caller]
fn assert_loads(folder: &CheckpointFolder) -> Tokenizer {
    load(folder).unwrap()
}

fn replace(pattern: Value, bytes: usize) -> Value {
    json!({"type": "Replace", "pattern": pattern, "content": "a".repeat(bytes)})
}

fn dot(bytes: usize) -> Value {
    replace(json!({"Regex": "."}), bytes)
}

fn sequence(list: &str, parts: &[Value]) -> Value {
    json!({"type": "Sequence", list: parts})
}

fn normalizers(parts: &[Value]) -> Value {
    sequence("normalizers", parts)
}

#[test]
fn expanding_normalizers_are_rejected() {
    let field = "normalizer.normalizers[1]: Replace with \"aaa";
    let advice = "can turn one byte of text into 64 bytes, more than 32; shorten or remove it";
    assert_rejected(&with("normalizer", normalizers(&[dot(8), dot(8), dot(8)])), &[field, advice]);
    assert_rejected(&with("normalizer", dot(33)), &["normalizer: Replace with", "into 33 bytes,"]);
    assert_loads(&with("normalizer", dot(32)));
    let nested = normalizers(&[normalizers(&[dot(8), normalizers(&[dot(8)])])]);
    assert_rejected(
        &with("normalizer", nested),
        &["normalizer.normalizers[0].normalizers[1].normalizers[0]:"],
    );
    let nfkc = json!({"type": "NFKC"});
    let rejected = [
        replace(json!({"String": ""}), 32),
        replace(json!({"Regex": "a*"}), 32),
        replace(json!({"Regex": "(?=a)"}), 32),
        replace(json!({"Regex": "a?b?"}), 40),
        json!({"type": "Prepend", "prepend": "a".repeat(32)}),
        // The library also accepts this normalizer without a type.
        json!({"prepend": "a".repeat(32)}),
        json!({"type": "Unknown", "prepend": "a".repeat(32)}),
        normalizers(&vec![json!({"type": "ByteLevel"}); 6]),
        normalizers(&[nfkc.clone(), dot(4)]),
        normalizers(&[json!({"prepend": "aaa"}), json!({"prepend": "a".repeat(30)})]),
    ];
    for normalizer in rejected {
        let folder = with("normalizer", normalizer.clone());
        assert_rejected(&folder, &["normalizer", "bytes, more than 32"]);
    }
    let space = json!({"String": " "});
    let accepted = [
        nfkc.clone(),
        json!({"type": "NFKD"}),
        normalizers(&[nfkc.clone(), json!({"type": "Lowercase"}), nfkc.clone(), json!({"type": "NFC"})]),
        normalizers(&[json!({"type": "Prepend", "prepend": "▁"}), replace(space.clone(), 3)]),
        normalizers(&[nfkc.clone(), json!({"type": "Lowercase"}), replace(space, 3)]),
        json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true}),
        json!({"type": "Strip", "strip_left": true, "strip_right": false}),
        replace(json!({"Regex": " {2,}"}), 60),
        replace(json!({"String": "``"}), 2),
        json!({"type": "Nmt"}),
    ];
    for normalizer in accepted {
        assert_loads(&with("normalizer", normalizer));
    }
}

#[test]
fn expanding_pre_tokenizers_are_rejected() {
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let six = sequence("pretokenizers", &vec![byte_level.clone(); 6]);
    assert_rejected(&with("pre_tokenizer", six), &["pre_tokenizer.pretokenizers[5]: ByteLevel", "into 64"]);
    assert_rejected(
        &with("pre_tokenizer", json!({"type": "FixedLength", "length": 0})),
        &["pre_tokenizer.length: found 0"],
    );
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true});
    assert_loads(&with("pre_tokenizer", metaspace.clone()));
    assert_loads(&with("pre_tokenizer", sequence("pretokenizers", &[metaspace, byte_level])));
}

#[test]
fn expanding_decoders_are_rejected() {
    let eight = sequence("decoders", &vec![dot(16); 8]);
    assert_rejected(&with("decoder", eight), &["decoder.decoders[1]: Replace", "into 256"]);
    let suffix = json!({"type": "BPEDecoder", "suffix": ""});
    assert_rejected(&with("decoder", sequence("decoders", &vec![suffix; 5])), &["decoder.decoders["]);
    let strip = json!({"type": "Strip", "content": "a", "start": 0, "stop": 1});
    assert_rejected(&with("decoder", strip), &["decoder.stop: found 1", "set it to 0"]);
    let llama = [
        replace(json!({"String": "▁"}), 1),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
        json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}),
    ];
    let accepted = [
        sequence("decoders", &llama),
        json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        json!({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true}),
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
        dot(32),
    ];
    for decoder in accepted {
        let tokenizer = assert_loads(&with("decoder", decoder));
        let ids: Vec<u32> = (0..300).cycle().take(3000).collect();
        let bytes: usize =
            ids.iter().filter_map(|id| tokenizer.id_to_token(*id)).map(|token| token.len() + 1).sum();
        let text = tokenizer.decode(&ids, false).unwrap();
        assert!(text.len() <= 32 * bytes, "{} bytes from {bytes}", text.len());
    }
}

/// Template that adds a special token with `ids` ids.
fn template(single: &[Value], ids: usize) -> Value {
    json!({
        "type": "TemplateProcessing", "single": single, "pair": [],
        "special_tokens": {"zz": {"id": "zz", "ids": vec![5; ids], "tokens": vec!["%"; ids]}},
    })
}

#[test]
fn repeating_post_processors_are_rejected() {
    let special = json!({"SpecialToken": {"id": "zz", "type_id": 0}});
    let text = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
    let field = "post_processor.single[1]";
    let with = |single: &[Value], ids| with("post_processor", template(single, ids));
    assert_rejected(&with(&[text("A"), text("A")], 1), &[field, "sequence A is repeated"]);
    assert_rejected(
        &with(&[text("A"), text("B")], 1),
        &[field, "sequence B is not available in this template"],
    );
    assert_rejected(
        &with(&[text("A"), special.clone()], 17),
        &[field, "adds 17 or more ids", "more than 16"],
    );
    assert_rejected(&with(&vec![special.clone(); 17], 1), &["post_processor.single[16]"]);
    assert_rejected(&with(&vec![special.clone(); 100_000], 1000), &["post_processor.single[0]"]);
    let unknown = json!({"SpecialToken": {"id": "other", "type_id": 0}});
    assert_rejected(&with(&[unknown], 1), &["post_processor.single[0]", "special_tokens has no \"other\""]);
    let template = template(&[text("A"), special.clone()], 2);
    let two = sequence("processors", &[template.clone(), template.clone()]);
    assert_rejected(&changed(|json| json["post_processor"] = two), &["post_processor.processors["]);
    let uneven = changed(|json| {
        json["post_processor"] = template.clone();
        json["post_processor"]["special_tokens"]["zz"]["tokens"] = json!([]);
    });
    assert_rejected(&uneven, &["post_processor.special_tokens", "2 ids and 0 tokens"]);

    let tokenizer = assert_loads(&with(&[special.clone(), text("A"), special], 8));
    let plain = encode_piece(&tokenizer, "One day").unwrap();
    assert_eq!(encode(&tokenizer, "One day").unwrap(), [&[5; 8], plain.as_slice(), &[5; 8]].concat());
}

#[test]
fn long_tokens_are_rejected() {
    let long = "a".repeat(1025);
    let entry = |entry: &str| changed(|json| json["model"]["vocab"][entry] = json!(4000));
    assert_rejected(&entry(&long), &["model.vocab: \"aaa", "has 1025 characters, more than 1024"]);
    assert_loads(&entry(&long[1..]));
    let token = |content: &str, normalized: bool, strip: bool| {
        json!({
            "id": 300, "content": content, "single_word": false, "lstrip": false, "rstrip": strip,
            "normalized": normalized, "special": false,
        })
    };
    let added = |token: Value| changed(|json| json["added_tokens"].as_array_mut().unwrap().push(token));
    assert_rejected(&added(token(&long, false, false)), &["added_tokens[1].content: ", "1025 characters"]);
    assert_rejected(&added(token(" ", false, true)), &["added_tokens[1]: \" \" is whitespace", "rstrip"]);
    let normalized = changed(|json| {
        json["added_tokens"].as_array_mut().unwrap().push(token("x", true, true));
        json["normalizer"] = json!({"type": "Replace", "pattern": {"String": "x"}, "content": " "});
    });
    assert_rejected(&normalized, &["added_tokens: the token with id", "is whitespace"]);
    // The library would decode only one of the two entries.
    for entry in ["qqqq", &long[1..]] {
        let shared = changed(|json| json["model"]["vocab"][entry] = json["model"]["vocab"]["a"].clone());
        assert_rejected(&shared, &["model.vocab: \"a\" and \"", "share the id"]);
    }
    assert_rejected(
        &changed(|json| json["model"]["unk_token"] = json!(long)),
        &["model.unk_token: ", "has 1025 bytes, more than 64"],
    );
    assert_rejected(
        &changed(|json| json["model"]["continuing_subword_prefix"] = json!(long)),
        &["model.continuing_subword_prefix: ", "more than 32"],
    );
    let vocabulary = CheckpointFolder::tiny()
        .without("tokenizer.json")
        .with("vocab.json", json!({ (long.as_str()): 0 }).to_string())
        .with("merges.txt", "#version: 0.2\n");
    assert_rejected(&vocabulary, &["vocab.json and merges.txt: vocabulary: ", "1025 characters"]);
}

#[test]
fn merges_that_panic_in_the_library_are_rejected() {
    let model = |prefix: Value, merge: Value| {
        let vocab = json!({"a": 0, "abc": 1, "é": 2});
        let model =
            json!({"type": "BPE", "vocab": vocab, "merges": [merge], "continuing_subword_prefix": prefix});
        changed(|json| {
            json["model"] = model;
            json["added_tokens"] = json!([]);
        })
    };
    let field = "model.merges[0]: ";
    for merge in [json!(["abc", "abc"]), json!("abc abc")] {
        assert_rejected(&model(Value::Null, merge), &[field, "do not join"]);
    }
    assert_rejected(&model(json!("##"), json!(["a", "a"])), &[field]);
    assert_rejected(&model(json!("c"), json!(["a", "é"])), &[field]);
}

/// Checks that settings that would change a text's ids are ignored.
#[test]
fn truncation_padding_and_dropout_are_ignored() {
    let folder = changed(|json| {
        json["padding"] = json!({
            "strategy": {"Fixed": 1_000_000_000}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "x",
        });
        json["truncation"] =
            json!({"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0});
        json["model"]["dropout"] = json!(0.99);
    });
    let tokenizer = assert_loads(&folder);
    let plain = assert_loads(&CheckpointFolder::tiny());
    let text = "One day, Mia went to the park.";
    assert_eq!(encode(&tokenizer, text).unwrap(), encode(&plain, text).unwrap());
}

/// One tokenizer model of each kind, all with the same lowercase vocabulary.
fn models() -> [(&'static str, Value); 4] {
    let words = ["<unk>", "a", "b", "c", "ab", "abc", "##a", "##b", "##c", "##bc", "▁", "▁a", "▁ab"];
    let ids: Value = words
        .iter()
        .zip(0..)
        .map(|(word, id)| ((*word).to_owned(), json!(id)))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let scores: Vec<(&str, f64)> =
        words.iter().zip(0_u8..).map(|(word, id)| (*word, -f64::from(id))).collect();
    [
        (
            "BPE",
            json!({"type": "BPE", "vocab": ids, "merges": [["a", "b"], ["ab", "c"]], "unk_token": "<unk>"}),
        ),
        (
            "WordPiece",
            json!({
                "type": "WordPiece", "vocab": ids, "unk_token": "<unk>", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
            }),
        ),
        ("Unigram", json!({"type": "Unigram", "vocab": scores, "unk_id": 0, "byte_fallback": false})),
        ("WordLevel", json!({"type": "WordLevel", "vocab": ids, "unk_token": "<unk>"})),
    ]
}

fn with_model(model: &Value, pre_tokenizer: &Value, normalizer: &Value) -> CheckpointFolder {
    changed(|json| {
        json["model"] = model.clone();
        json["added_tokens"] = json!([]);
        json["pre_tokenizer"] = pre_tokenizer.clone();
        json["normalizer"] = normalizer.clone();
        json["post_processor"] = template(
            &[
                json!({"SpecialToken": {"id": "zz", "type_id": 0}}),
                json!({"Sequence": {"id": "A", "type_id": 0}}),
            ],
            1,
        );
    })
}

#[test]
fn every_tokenizer_model_encodes_long_texts_like_the_library() {
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
    let splits = [
        json!({"type": "Whitespace"}),
        json!({"type": "WhitespaceSplit"}),
        json!({"type": "BertPreTokenizer"}),
        metaspace("always"),
        metaspace("first"),
        sequence(
            "pretokenizers",
            &[json!({"type": "WhitespaceSplit"}), json!({"type": "Digits", "individual_digits": true})],
        ),
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}),
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        Value::Null,
    ];
    let normalizer = normalizers(&[json!({"type": "NFKC"}), json!({"type": "Lowercase"})]);
    let text = "Abc  ab cab\u{301} \u{fdfa} b. A1b c\n abcabc ▁ab bb ".repeat(800);
    for (kind, model) in models() {
        for split in &splits {
            // The library's lattice is slow for a single word of the full length.
            let text = if split.is_null() { &text[..1 << 12] } else { &text };
            let tokenizer = assert_loads(&with_model(&model, split, &normalizer));
            let expected = tokenizer.encode(text, true).unwrap();
            let encoder = TextEncoder::new(&tokenizer);
            let found = encoder.encode(text, true).unwrap();
            assert!(found == expected.get_ids(), "{kind} with {split}");
            assert!(encoder.encode(text, false).unwrap() == found[1..], "{kind} with {split}");
        }
    }
}

#[test]
fn long_text_memory_is_bounded_if_the_text_can_be_split() {
    let [_, (_, word_piece), ..] = models();
    let text = "ab abc ".repeat(150_000);
    let memory = |pre_tokenizer: Value| {
        let tokenizer = assert_loads(&with_model(&word_piece, &pre_tokenizer, &Value::Null));
        TextEncoder::new(&tokenizer).memory(&text)
    };
    let (cut, whole) = (memory(json!({"type": "Whitespace"})), memory(Value::Null));
    assert!(cut < 30 << 20, "{cut}");
    assert!(whole > 400 << 20, "{whole}");
}

#[test]
fn word_piece_word_length_is_limited() {
    let [_, (_, mut model), ..] = models();
    model["max_input_chars_per_word"] = json!(1_000_000_000);
    let folder = with_model(&model, &Value::Null, &Value::Null);
    assert_rejected(&folder, &["model.max_input_chars_per_word: expected at most 1024, found 1000000000"]);
    model["max_input_chars_per_word"] = json!(1024);
    assert_loads(&with_model(&model, &Value::Null, &Value::Null));
}

/// Checks the time limit on quadratic models: without it, this text would take minutes.
#[test]
fn quadratic_encoding_stops_in_seconds() {
    let [_, (_, mut word_piece), (_, mut unigram), _] = models();
    word_piece["max_input_chars_per_word"] = json!(1024);
    let words = format!("{} ", "a".repeat(1000)).repeat(1000);
    let scores: Vec<(String, f64)> = std::iter::once(("<unk>".to_owned(), 0.0))
        .chain((1..1024).map(|length| ("a".repeat(length), -1.0)))
        .collect();
    unigram["vocab"] = json!(scores);
    for model in [word_piece, unigram] {
        let tokenizer = assert_loads(&with_model(&model, &json!({"type": "Whitespace"}), &Value::Null));
        let error = encode(&tokenizer, &words).unwrap_err().to_string();
        assert!(error.contains("split the text or its words"), "{error}");
        assert!(!encode(&tokenizer, &words[..3000]).unwrap().is_empty());
    }
}

/// Checks the stack depth of dropping the library's trie, which recurses once per level.
#[test]
fn longest_unigram_pieces_do_not_overflow_the_stack() {
    let [_, _, (_, mut model), _] = models();
    model["vocab"] = json!([["<unk>", 0.0], ["🙂".repeat(1024), -1.0]]);
    let folder = with_model(&model, &Value::Null, &Value::Null);
    std::thread::Builder::new()
        .stack_size(2 << 20)
        .spawn(move || drop(assert_loads(&folder)))
        .unwrap()
        .join()
        .unwrap();
}

#[test]
fn part_and_regex_counts_are_limited() {
    let parts = normalizers(&vec![json!({"type": "NFC"}); 70]);
    assert_rejected(&with("normalizer", parts), &["normalizer.normalizers[", "more than 64 parts"]);
    let split = json!({
        "type": "Split", "pattern": {"Regex": "\\w{20}"}, "behavior": "Isolated", "invert": false,
    });
    let splits = sequence("pretokenizers", &vec![split; 17]);
    assert_rejected(&with("pre_tokenizer", splits), &["more than 16 regular expressions"]);
}

#[test]
fn damaged_precompiled_normalizers_are_rejected() {
    let charsmap = json!({"precompiled_charsmap": "AAAA"});
    let typed = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
    for normalizer in [charsmap.clone(), typed, normalizers(&[charsmap])] {
        assert_rejected(
            &with("normalizer", normalizer),
            &["normalizer", "precompiled_charsmap ends before the size of its trie"],
        );
    }
}

#[cfg(unix)]
#[test]
fn special_file_in_place_of_a_tokenizer_is_rejected() {
    let error = load_tokenizer("/dev/null").unwrap_err().to_string();
    assert_eq!(
        error,
        "/dev/null: not a usable tokenizer: not a regular file; save the content to a file and pass that file"
    );
}
