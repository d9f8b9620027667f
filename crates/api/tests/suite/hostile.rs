//! Malicious bodies, which must be rejected or harmless.

use candle_gpt2_api::{
    ApiError, Call, ChatRequest, ChatTemplateChoice, CompletionRequest, Endpoint, ServedModel, Work,
};
use candle_gpt2_testing::{CheckpointFolder, tokenizer_json};
use serde_json::{Value, json};

use crate::common::{load, options, reply, tiny, tiny_with};

fn refused(body: &[u8]) -> ApiError {
    let request =
        CompletionRequest::parse(body).and_then(|request| Call::of_completion(request, &tiny().served, None));
    match request {
        Ok(_) => panic!("{} was not rejected", String::from_utf8_lossy(body)),
        Err(error) => error,
    }
}

fn message(body: &str) -> String {
    let error = refused(body.as_bytes());
    assert_eq!((error.status(), error.kind()), (400, "invalid_request_error"));
    error.to_string()
}

#[test]
fn bodies_other_than_one_json_object_are_rejected() {
    assert_eq!(message(""), "the body: expected a JSON object, found nothing");
    assert_eq!(message(" \n "), "the body: expected a JSON object, found nothing");
    assert_eq!(message("[]"), "the body: expected a JSON object, found []");
    assert_eq!(message("null"), "the body: expected a JSON object, found null");
    assert_eq!(message("\"prompt\""), "the body: expected a JSON object, found \"prompt\"");
    assert_eq!(message("5"), "the body: expected a JSON object, found 5");
    assert_eq!(message("{"), "the body is not valid JSON: EOF while parsing an object at line 1 column 1");
    assert_eq!(
        message("{\"prompt\": \"a\""),
        "the body is not valid JSON: EOF while parsing an object at line 1 column 14"
    );
    assert_eq!(message("{} {}"), "the body is not valid JSON: trailing characters at line 1 column 4");
    assert_eq!(message("{\"n\": 1,}"), "the body is not valid JSON: trailing comma at line 1 column 9");
    assert_eq!(message("{\"n\": 01}"), "the body is not valid JSON: invalid number at line 1 column 8");
    assert_eq!(message("{\"n\": NaN}"), "the body is not valid JSON: expected value at line 1 column 7");
    assert_eq!(message("{'n': 1}"), "the body is not valid JSON: key must be a string at line 1 column 2");
    assert_eq!(message("\u{FEFF}{}"), "the body is not valid JSON: expected value at line 1 column 1");
}

#[test]
fn invalid_unicode_is_rejected() {
    assert_eq!(
        refused(b"{\"prompt\": \"\xff\"}").to_string(),
        "the body: expected UTF-8, found an invalid byte at offset 12"
    );
    assert_eq!(refused(b"\x00\x01").status(), 400);
    assert_eq!(refused(b"{\"unknown\": \"\xc3\"}").status(), 400, "even in unknown fields");
    assert_eq!(
        message(r#"{"prompt": "\ud83d"}"#),
        "prompt: expected a string of Unicode characters, found unexpected end of hex escape"
    );
    assert_eq!(
        message(r#"{"stop": ["a", "\ude00"]}"#),
        "stop[1]: expected a string of Unicode characters, found lone leading surrogate in hex escape"
    );
    // A surrogate pair is one character.
    CompletionRequest::parse(br#"{"prompt": "\ud83d\ude00"}"#).unwrap();
    assert_eq!(
        message("{\"prompt\": \"a\nb\"}"),
        "the body is not valid JSON: control character (\\u0000-\\u001F) found while parsing a string at line 1 column 13"
    );
}

#[test]
fn out_of_range_numbers_are_rejected() {
    assert_eq!(
        message("{\"temperature\": 1e999}"),
        "temperature: expected a number from 0 to 2, found 1e999"
    );
    assert_eq!(
        message("{\"temperature\": -1e999}"),
        "temperature: expected a number from 0 to 2, found -1e999"
    );
    assert_eq!(
        message("{\"max_tokens\": 1e3000}"),
        "max_tokens: expected a whole number from 0 to 4294967295, found 1e3000"
    );
    assert_eq!(message("{\"n\": -0.5}"), "n: expected a whole number from 1 to 128, found -0.5");
    assert_eq!(message("{\"n\": -1}"), "n: expected a whole number from 1 to 128, found -1");
    assert_eq!(
        message("{\"n\": 18446744073709551617}"),
        "n: expected a whole number from 1 to 128, found 18446744073709551617"
    );
    let digits = "9".repeat(100_000);
    let expected = format!("n: expected a whole number from 1 to 128, found {}…", "9".repeat(40));
    assert_eq!(message(&format!("{{\"n\": {digits}}}")), expected);
    assert_eq!(
        message(&format!("{{\"temperature\": {digits}}}")).len(),
        "temperature: expected a number from 0 to 2, found …".len() + 40
    );
    assert_eq!(
        message("{\"logit_bias\": {\"5\": 1e999}}"),
        "logit_bias.5: expected a number from -100 to 100, found 1e999"
    );
    assert_eq!(message("{\"prompt\": [1e999]}"), "prompt[0]: expected a token id, found 1e999");
    assert_eq!(
        message("{\"prompt\": [99999999999999999999999]}"),
        "prompt[0]: expected a token id, found 99999999999999999999999"
    );
    assert_eq!(
        message("{\"best_of\": 1e100}"),
        "best_of: expected a whole number from 0 to 128, found 1e100"
    );
}

#[test]
fn duplicate_fields_are_rejected() {
    assert_eq!(message("{\"n\": 1, \"n\": 2}"), "n: expected one value, found two");
    assert_eq!(message("{\"n\": null, \"n\": 2}"), "n: expected one value, found two");
    assert_eq!(
        message(
            "{\"stream\": true, \"stream_options\": {\"include_usage\": true, \"include_usage\": false}}"
        ),
        "stream_options: duplicate field `include_usage`"
    );
    // Duplicates of unknown and ignored fields are allowed.
    CompletionRequest::parse(b"{\"x\": 1, \"x\": 2, \"user\": 1, \"user\": 2}").unwrap();
}

#[test]
fn deeply_nested_json_is_harmless() {
    let depth = 1_000_000;
    let nested = |open: &str, close: &str| format!("{}{}", open.repeat(depth), close.repeat(depth));
    let lists = nested("[", "]");
    for field in [
        "prompt",
        "stop",
        "logit_bias",
        "guided_json",
        "response_format",
        "messages",
        "logprobs",
        "model",
        "tools",
    ] {
        let found = message_from_either_route(&format!("{{\"{field}\": {lists}}}"));
        assert!(found.len() < 300, "{field}: a message of {} bytes", found.len());
    }
    CompletionRequest::parse(format!("{{\"unknown\": {lists}}}").as_bytes()).unwrap();
    CompletionRequest::parse(
        format!("{{\"unknown\": {}}}", nested("{\"a\":", "}").replace(":}", ":1}")).as_bytes(),
    )
    .unwrap();
    assert!(message(&"[".repeat(depth)).starts_with("the body is not valid JSON"));
    let schema = format!("{{\"guided_json\": {}1{}}}", "{\"a\":".repeat(200), "}".repeat(200));
    assert_eq!(message(&schema), "guided_json: expected JSON, found recursion limit exceeded");
}

/// Error message from the route that accepts the field.
fn message_from_either_route(body: &str) -> String {
    let completion = CompletionRequest::parse(body.as_bytes()).err();
    completion.or_else(|| ChatRequest::parse(body.as_bytes()).err()).unwrap().to_string()
}

#[test]
fn list_and_schema_sizes_are_limited() {
    let many = |item: &str, count: usize| format!("[{}]", vec![item; count].join(","));
    let cases = [
        (
            format!("{{\"prompt\": {}}}", many("\"\"", 300_000)),
            "prompt: expected at most 2048 items, found more",
        ),
        (
            format!("{{\"prompt\": {}}}", many("[1]", 300_000)),
            "prompt: expected at most 2048 items, found more",
        ),
        (
            format!("{{\"prompt\": {}}}", many("1", 1_500_000)),
            "prompt: expected at most 1048576 items, found more",
        ),
        (format!("{{\"stop\": {}}}", many("\"a\"", 100_000)), "stop: expected at most 32 items, found more"),
        (
            format!("{{\"bad_words\": {}}}", many("\"a\"", 129)),
            "bad_words: expected at most 128 items, found more",
        ),
        (
            format!("{{\"stop_token_ids\": {}}}", many("1", 129)),
            "stop_token_ids: expected at most 128 items, found more",
        ),
    ];
    for (body, expected) in cases {
        assert_eq!(message(&body), expected);
    }
    let biases: Vec<String> = (0..1025).map(|id| format!("\"{id}\": 1")).collect();
    let found = message(&format!("{{\"logit_bias\": {{{}}}}}", biases.join(",")));
    assert_eq!(found, "logit_bias: expected at most 1024 biases, found more");
    let schema = format!("{{\"guided_json\": {{\"description\": \"{}\"}}}}", "a".repeat(300_000));
    assert_eq!(message(&schema), "guided_json: expected JSON of at most 262144 bytes, found 300019 bytes");
}

#[test]
fn oversized_prompts_are_rejected_before_tokenization() {
    let long = "a".repeat((1 << 20) + 1);
    let found = reply(Endpoint::Tokenize, format!("{{\"prompt\": \"{long}\"}}").as_bytes()).unwrap_err();
    assert_eq!(found.to_string(), "prompt: expected a string of at most 1048576 bytes, found 1048577 bytes");
    let found = refused(format!("{{\"prompt\": \"{long}\"}}").as_bytes());
    assert_eq!(found.code(), Some("context_length_exceeded"));
}

/// GPT-2's tokenizer can encode word by word, which bounds its memory.
///
/// A tokenizer that adds a space before each text cannot, so long texts are rejected.
#[test]
fn long_texts_need_a_tokenizer_with_bounded_memory() {
    let text = "to be or not to be, \u{e9} ".repeat(41_000);
    let body = serde_json::json!({ "prompt": text }).to_string();
    let found = reply(Endpoint::Tokenize, body.as_bytes()).unwrap();
    let found: Value = serde_json::from_str(&found).unwrap();
    let expected = tiny().model.vocabulary().tokenizer().unwrap().encode_fast(text.as_str(), true).unwrap();
    assert!(found["tokens"] == serde_json::json!(expected.get_ids()));

    let json =
        std::fs::read(candle_gpt2_testing::fixture_path("tiny-checkpoint").join("tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_slice(&json).unwrap();
    json["pre_tokenizer"]["add_prefix_space"] = true.into();
    let other = tiny_with("tokenizer.json", &json.to_string(), ChatTemplateChoice::Checkpoint);
    let error = other.served.read(Endpoint::Tokenize, body.as_bytes(), None).unwrap_err();
    assert_eq!((error.status(), error.code()), (400, Some("text_too_long")), "{error}");
    assert!(error.to_string().contains("prompt: this model's tokenizer may need"), "{error}");
    let body = serde_json::json!({ "prompt": &text[..100_000] }).to_string();
    assert!(other.served.read(Endpoint::Tokenize, body.as_bytes(), None).is_ok());
}

#[test]
fn detokenized_text_size_is_limited() {
    let body = |tokens: usize| serde_json::json!({ "tokens": vec![0; tokens] }).to_string();
    let error = reply(Endpoint::Detokenize, body(700_000).as_bytes()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "tokens: expected at most 8388608 bytes of decoded text, found 9100000 bytes"
    );
    assert!(reply(Endpoint::Detokenize, body(600_000).as_bytes()).is_ok());
}

#[test]
fn error_messages_truncate_long_names() {
    let name = "a".repeat(100_000);
    let found = message(&format!("{{\"logit_bias\": {{\"{name}\": 1}}}}"));
    assert_eq!(found, format!("logit_bias: expected token ids as keys, found \"{}…\"", "a".repeat(40)));
    let error = refused(format!("{{\"model\": \"{}\"}}", "a".repeat(200)).as_bytes());
    assert_eq!(error.status(), 404);
    assert!(error.to_json().len() < 300);
}

#[test]
fn other_routes_reject_malformed_bodies() {
    for body in [
        "",
        "[]",
        "{",
        "{\"content\": 5}",
        "{\"content\": \"\\ud800\"}",
        "{\"content\": \"a\", \"prompt\": \"b\"}",
        "{}",
    ] {
        assert_eq!(reply(Endpoint::Tokenize, body.as_bytes()).unwrap_err().status(), 400, "{body}");
    }
    for body in [
        "",
        "{\"tokens\": \"a\"}",
        "{\"tokens\": [300]}",
        "{\"tokens\": [-1]}",
        "{\"tokens\": [[1]]}",
        "{\"tokens\": null}",
    ] {
        assert_eq!(reply(Endpoint::Detokenize, body.as_bytes()).unwrap_err().status(), 400, "{body}");
    }
    for body in [
        "",
        "{}",
        "{\"messages\": []}",
        "{\"messages\": [5]}",
        "{\"messages\": [{}]}",
        "{\"messages\": {\"role\": 1}}",
    ] {
        assert_eq!(ChatRequest::parse(body.as_bytes()).unwrap_err().status(), 400, "{body}");
    }
}

/// Token ids beyond the model's vocabulary are reported as a checkpoint error, not a server error.
#[test]
fn tokenizer_ids_beyond_the_vocabulary_are_rejected() {
    let folder = CheckpointFolder::tiny();
    let json = std::fs::read(folder.file("tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_slice(&json).unwrap();
    json["added_tokens"].as_array_mut().unwrap().push(json!({ "id": 300, "content": "<x>", "special": false,
        "single_word": false, "lstrip": false, "rstrip": false, "normalized": false }));
    let folder = folder.with("tokenizer.json", json.to_string());
    let model = load(folder.path());
    let served = ServedModel::new(&model, options()).unwrap();
    for (endpoint, body) in [
        (Endpoint::Completions, json!({ "prompt": "a <x>" })),
        (Endpoint::Completions, json!({ "prompt": "a", "bad_words": ["<x>"] })),
        (Endpoint::Tokenize, json!({ "content": "a <x>" })),
        (Endpoint::Embeddings, json!({ "input": "a <x>" })),
        (Endpoint::LookLens, json!({ "prompt": "a <x>" })),
    ] {
        let error = served.read(endpoint, body.to_string().as_bytes(), None).unwrap_err();
        assert_eq!(error.status(), 400, "{body}: {error}");
        assert!(error.to_string().contains("the tokenizer does not match this checkpoint"), "{error}");
    }
}

/// huggingface/tokenizers drops characters that have no token; the response contains a warning.
#[test]
fn characters_without_a_token_cause_a_warning() {
    let json = tokenizer_json(&json!({ "type": "Fuse" }), &["</s>", "a", "b", " "], &[]);
    let folder = CheckpointFolder::tiny().with("tokenizer.json", json);
    let model = load(folder.path());
    let served = ServedModel::new(&model, options()).unwrap();
    let warnings = |endpoint, body: &Value| match served.read(endpoint, body.to_string().as_bytes(), None) {
        Ok(Work::Reply(reply)) => reply.warnings.iter().collect::<Vec<_>>(),
        Ok(Work::Texts(call)) => call.answer.warnings().iter().collect(),
        other => panic!("{other:?}"),
    };
    for (endpoint, field) in [(Endpoint::Completions, "prompt"), (Endpoint::Tokenize, "content")] {
        let found = warnings(endpoint, &json!({ field: "ab b1a" }));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].starts_with(&format!("{field}: the tokenizer has no token for '1' (line 1, column 5)")),
            "{found:?}"
        );
        assert_eq!(warnings(endpoint, &json!({ field: "ab ba" })), Vec::<String>::new());
    }
}
