//! Conversions keep the tokenizer and the settings next to the weights.
//!
//! Settings that the target format cannot hold are reported.

use std::collections::BTreeMap;
use std::path::Path;

use candle_gpt2_testing::{CheckpointFolder, fixture_path, temporary_folder};
use candle_gpt2_weights::{
    Checkpoint, WeightsError, WrittenDType, encode, token_bytes, write_gguf, write_hugging_face,
};
use serde_json::{Value, json};

const GENERATION: &str =
    "{\n \"repetition_penalty\": 1.90,\n \"do_sample\":false, \"eos_token_id\": [5, 3], \"my_key\": 1 }";
const TEMPLATE: &str = "{% for message in messages %}<{{ message.content }}>{% endfor %}";

fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(path).unwrap()
}

/// Writes a GGUF file if the name has an extension, otherwise a folder, and returns the notes.
fn write(from: &Path, to: &Path) -> Result<Vec<String>, WeightsError> {
    let checkpoint = open(from);
    let companions = checkpoint.companions(None)?;
    match to.extension() {
        Some(_) => write_gguf(&checkpoint, &companions, to, WrittenDType::F32, &|_| ()),
        None => write_hugging_face(&checkpoint, &companions, to, WrittenDType::F32, &|_| ()),
    }
}

/// Valid checkpoint with settings of every kind.
fn with_settings() -> CheckpointFolder {
    CheckpointFolder::tiny()
        .with_config(json!({"task_specific_params": {"x": 1}, "use_cache": true, "attn_pdrop": 0.07}))
        .with("generation_config.json", GENERATION.as_bytes())
        .with(
            "tokenizer_config.json",
            json!({"pad_token": "<|endoftext|>", "my_option": [1, 2]}).to_string().as_bytes(),
        )
        .with("special_tokens_map.json", br#"{"pad_token": "<|endoftext|>"}"#)
        .with("chat_template.jinja", TEMPLATE.as_bytes())
}

/// Tiny checkpoint with a modified `tokenizer.json`.
fn with_tokenizer(change: impl FnOnce(&mut Value)) -> CheckpointFolder {
    let text = std::fs::read(fixture_path("tiny-checkpoint").join("tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_slice(&text).unwrap();
    change(&mut json);
    CheckpointFolder::tiny().with("tokenizer.json", json.to_string().as_bytes())
}

#[test]
fn folder_copies_companion_files_byte_for_byte() {
    let (source, folder) = (with_settings(), temporary_folder());
    let copy = folder.path().join("copy");
    assert_eq!(write(source.path(), &copy).unwrap(), Vec::<String>::new());
    for name in [
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "tokenizer.json",
    ] {
        let read = |folder: &Path| std::fs::read(folder.join(name)).unwrap();
        assert!(read(source.path()) == read(&copy), "{name}");
    }
    let config = std::fs::read_to_string(copy.join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!((&config["task_specific_params"]["x"], &config["use_cache"]), (&json!(1), &json!(true)));
    assert_eq!(open(&copy).config(), open(source.path()).config());
}

/// Checks that numbers beyond the precision of a float are not rounded.
#[test]
fn unknown_config_fields_keep_their_text() {
    let text = std::fs::read_to_string(fixture_path("tiny-checkpoint").join("config.json")).unwrap();
    let text =
        text.trim_end().strip_suffix('}').unwrap().to_owned() + ",\"mine\": 12345678901234567890123.50}";
    let source = CheckpointFolder::tiny().with("config.json", text.as_bytes());
    let folder = temporary_folder();
    write(source.path(), &folder.path().join("copy")).unwrap();
    let written = std::fs::read_to_string(folder.path().join("copy/config.json")).unwrap();
    assert!(written.contains("12345678901234567890123.50"), "{written}");
}

#[test]
fn gguf_stores_known_settings_and_reports_dropped_ones() {
    let (source, folder) = (with_settings(), temporary_folder());
    let file = folder.path().join("copy.gguf");
    let notes = write(source.path(), &file).unwrap().join("\n");
    for part in [
        "one end token: 5 is written, 3 dropped",
        "repetition_penalty, do_sample, my_key",
        "my_option",
        "task_specific_params",
    ] {
        assert!(notes.contains(part), "`{part}` is not in: {notes}");
    }
    let copy = open(&file);
    assert_eq!(copy.config().eos_token_id, [5], "generation_config.json is in force");
    assert_eq!(copy.config().attn_pdrop, 0.07);
    assert_eq!(
        copy.config().pad_token_id,
        open(source.path()).tokenizer(None).unwrap().token_to_id("<|endoftext|>")
    );
    assert_eq!(copy.chat_template().unwrap().as_deref(), Some(TEMPLATE));

    // Converts the GGUF file to a second GGUF file, and back to a folder.
    let again = folder.path().join("again.gguf");
    assert_eq!(write(&file, &again).unwrap(), Vec::<String>::new());
    assert!(std::fs::read(&file).unwrap() == std::fs::read(&again).unwrap());
    let back = folder.path().join("back");
    write(&file, &back).unwrap();
    let read = |name: &str| std::fs::read_to_string(back.join(name)).unwrap();
    assert_eq!(read("chat_template.jinja"), TEMPLATE);
    let config: Value = serde_json::from_str(&read("tokenizer_config.json")).unwrap();
    assert_eq!((&config["pad_token"], &config["add_bos_token"]), (&json!("<|endoftext|>"), &json!(false)));
    let config: Value = serde_json::from_str(&read("config.json")).unwrap();
    assert_eq!(config["eos_token_id"], 5);
}

#[test]
fn named_chat_templates_survive_a_round_trip() {
    let templates = json!([{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]);
    let source = CheckpointFolder::tiny()
        .with("tokenizer_config.json", json!({"chat_template": templates}).to_string().as_bytes());
    let folder = temporary_folder();
    let file = folder.path().join("copy.gguf");
    write(source.path(), &file).unwrap();
    assert_eq!(open(&file).chat_template().unwrap().as_deref(), Some("a"));
    let back = folder.path().join("back");
    write(&file, &back).unwrap();
    let config = std::fs::read(back.join("tokenizer_config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    assert_eq!(config["chat_template"], templates);
}

#[test]
fn tokenizers_unsupported_by_gguf_are_rejected() {
    let byte_level = |json: &mut Value| json["pre_tokenizer"].take();
    type Change<'a> = Box<dyn FnOnce(&mut Value) + 'a>;
    let changes: BTreeMap<&str, Change> = BTreeMap::from([
        (
            "normalizer Lowercase",
            Box::new(|json: &mut Value| json["normalizer"] = json!({"type": "Lowercase"})) as Change,
        ),
        (
            "normalizer NFC",
            Box::new(|json: &mut Value| {
                json["normalizer"] = json!({"type": "Sequence", "normalizers": [{"type": "NFC"}]});
            }),
        ),
        (
            "`add_prefix_space`",
            Box::new(|json: &mut Value| json["pre_tokenizer"]["add_prefix_space"] = true.into()),
        ),
        ("no `use_regex`", Box::new(|json: &mut Value| json["pre_tokenizer"]["use_regex"] = false.into())),
        (
            "pre_tokenizer is Digits and ByteLevel",
            Box::new(|json: &mut Value| {
                let inner = byte_level(json);
                let digits = json!({"type": "Digits", "individual_digits": true});
                json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [digits, inner]});
            }),
        ),
        ("no pre_tokenizer", Box::new(|json: &mut Value| json["pre_tokenizer"] = Value::Null)),
        ("decoder is Fuse", Box::new(|json: &mut Value| json["decoder"] = json!({"type": "Fuse"}))),
        (
            "more than one token before or after",
            Box::new(|json: &mut Value| {
                json["post_processor"] = template(json!([special(), special(), text()]));
            }),
        ),
        (
            "post_processor RobertaProcessing",
            Box::new(|json: &mut Value| {
                json["post_processor"] = json!({"type": "RobertaProcessing", "sep": ["<|endoftext|>", 0],
                "cls": ["<|endoftext|>", 0], "trim_offsets": true, "add_prefix_space": false});
            }),
        ),
        (
            "`end_of_word_suffix`",
            Box::new(|json: &mut Value| json["model"]["end_of_word_suffix"] = "</w>".into()),
        ),
        ("`lstrip`", Box::new(|json: &mut Value| json["added_tokens"][0]["lstrip"] = true.into())),
    ]);
    for (part, change) in changes {
        let (source, folder) = (with_tokenizer(change), temporary_folder());
        let message = write(source.path(), &folder.path().join("x.gguf")).unwrap_err().to_string();
        assert!(
            message.contains(part) && message.contains("write a folder"),
            "`{part}` is not in: {message}"
        );
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

fn text() -> Value {
    json!({"Sequence": {"id": "A", "type_id": 0}})
}

fn special() -> Value {
    json!({"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}})
}

fn template(single: Value) -> Value {
    let id = open(&fixture_path("tiny-checkpoint")).tokenizer(None).unwrap().token_to_id("<|endoftext|>");
    json!({"type": "TemplateProcessing", "single": single, "pair": single,
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [id], "tokens": ["<|endoftext|>"]}}})
}

/// Checks that tokens are the same before and after a conversion to GGUF and back.
fn assert_same_tokens(source: &CheckpointFolder, around: (bool, bool)) {
    let folder = temporary_folder();
    let file = folder.path().join("copy.gguf");
    write(source.path(), &file).unwrap();
    let copies = [file.clone(), folder.path().join("back")];
    write(&file, &copies[1]).unwrap();
    let original = open(source.path()).tokenizer(None).unwrap();
    for sample in ["The first citizen 🤗", "", "für <x> <|endoftext|>a", "  two  spaces\n"] {
        let expected = encode(&original, sample).unwrap();
        if sample.starts_with("The") {
            assert_eq!((expected.first() == end().as_ref(), expected.last() == end().as_ref()), around);
        }
        for copy in &copies {
            let tokenizer = open(copy).tokenizer(None).unwrap();
            let found = encode(&tokenizer, sample).unwrap();
            assert_eq!(found, expected, "{sample:?} in {}", copy.display());
            let bytes = |tokenizer| -> Vec<u8> {
                found.iter().flat_map(|id| token_bytes(tokenizer, *id).unwrap()).collect()
            };
            assert_eq!(bytes(&tokenizer), bytes(&original));
            assert_eq!(tokenizer.decode(&found, true).unwrap(), original.decode(&expected, true).unwrap());
        }
    }
}

#[test]
fn post_processor_tokens_survive_a_round_trip() {
    for (single, around) in [
        (json!([text()]), (false, false)),
        (json!([special(), text()]), (true, false)),
        (json!([text(), special()]), (false, true)),
        (json!([special(), text(), special()]), (true, true)),
    ] {
        let source = with_tokenizer(|json| json["post_processor"] = template(single))
            .with_config(json!({"eos_token_id": end()}));
        assert_same_tokens(&source, around);
    }
}

fn end() -> Option<u32> {
    open(&fixture_path("tiny-checkpoint")).tokenizer(None).unwrap().token_to_id("<|endoftext|>")
}

/// transformers' `GPT2Tokenizer` prepends a BOS token if `tokenizer_config.json` sets `add_bos_token`.
#[test]
fn add_bos_token_survives_conversion_from_vocab_and_merges() {
    let text = std::fs::read(fixture_path("tiny-checkpoint").join("tokenizer.json")).unwrap();
    let json: Value = serde_json::from_slice(&text).unwrap();
    let merges = json["model"]["merges"].as_array().unwrap().iter().map(|merge| match merge {
        Value::String(text) => text.clone() + "\n",
        pair => format!("{} {}\n", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
    });
    let merges: String = merges.collect();
    let source = CheckpointFolder::tiny()
        .without("tokenizer.json")
        .with("vocab.json", json["model"]["vocab"].to_string().as_bytes())
        .with("merges.txt", merges.as_bytes())
        .with("tokenizer_config.json", br#"{"add_bos_token": true}"#)
        .with_config(json!({"eos_token_id": end()}));
    assert_same_tokens(&source, (true, false));
}

/// Added tokens that are not special still match literally, and decoding keeps them.
#[test]
fn added_tokens_survive_a_round_trip() {
    let source = with_tokenizer(|json| {
        let id = json["model"]["vocab"].as_object().unwrap().len();
        let added = json["added_tokens"].as_array_mut().unwrap();
        let next =
            added.iter().filter_map(|token| token["id"].as_u64()).max().unwrap_or(0).max(id as u64 - 1) + 1;
        for (index, (content, special)) in [("für", false), ("<x>", true)].into_iter().enumerate() {
            added.push(
                json!({"id": next + index as u64, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": special}),
            );
        }
    });
    let rows = open(source.path()).tokenizer(None).unwrap().get_vocab_size(true);
    let config = open(source.path()).config().vocab_size;
    let source = source.with_tensors(|tensors| {
        let table = tensors.remove("transformer.wte.weight").unwrap();
        let more = table.narrow(0, 0, rows.saturating_sub(config)).unwrap();
        tensors.insert("transformer.wte.weight".into(), candle_core::Tensor::cat(&[table, more], 0).unwrap());
    });
    let source = source.with_config(json!({"vocab_size": rows.max(config)}));
    assert_same_tokens(&source, (false, false));
}
