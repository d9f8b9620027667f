//! Unknown fields: responses warn about them, and strict servers reject them.

use std::fs;
use std::sync::Arc;

use candle_gpt2_api::{ApiError, ApiOptions, Call, ChatRequest, Endpoint, ServedModel, Session, Warnings};
use candle_gpt2_engine::{ModelOptions, Silent};
use candle_gpt2_generation::SchedulerOptions;
use candle_gpt2_testing::fixture_path;
use serde_json::{Value, json};

use crate::common::{call, options, tiny};

const MAX_TOKEN: &str = "unknown field `max_token` was ignored; did you mean `max_tokens`?";

fn messages(warnings: &Warnings) -> Vec<String> {
    warnings.iter().collect()
}

fn warnings(body: &Value) -> Vec<String> {
    messages(call(body).unwrap().answer.warnings())
}

fn chat_warnings(body: &Value) -> Vec<String> {
    let template = candle_gpt2_api::ChatTemplateChoice::EosJoin;
    let served =
        ServedModel::new(&tiny().model, ApiOptions { chat_template: template, ..options() }).unwrap();
    let request = ChatRequest::parse(body.to_string().as_bytes()).unwrap();
    messages(Call::of_chat(request, &served, None).unwrap().answer.warnings())
}

#[test]
fn unknown_fields_suggest_the_nearest_known_field() {
    assert_eq!(warnings(&json!({ "prompt": "a", "max_token": 30 })), [MAX_TOKEN]);
    for (name, nearest) in [
        ("temprature", Some("temperature")),
        ("temp", Some("temperature")),
        ("tem", None),
        ("max_new_tokens", Some("max_tokens")),
        ("maxTokens", Some("max_tokens")),
        ("num_predict", Some("n_predict")),
        ("mirostat", None),
        ("length_penalty", None),
        ("what_nobody_knows", None),
        // Unsupported fields are never suggested.
        ("sufix", None),
    ] {
        let mut body = json!({ "prompt": "a", "max_tokens": 1 });
        body[name] = json!(3);
        let hint = nearest.map_or(String::new(), |nearest| format!("; did you mean `{nearest}`?"));
        assert_eq!(warnings(&body), [format!("unknown field `{name}` was ignored{hint}")]);
    }
    assert_eq!(warnings(&json!({ "max_token": null })), Vec::<String>::new(), "null counts as absent");
}

#[test]
fn unknown_nested_fields_are_reported_by_path() {
    let body = json!({
        "prompt": "a", "stream": true, "stream_options": { "include_usge": true },
        "response_format": { "type": "json_schema", "json_schema": { "schema": {}, "name": "x", "stric": true } },
    });
    assert_eq!(
        warnings(&body),
        [
            "unknown field `stream_options.include_usge` was ignored; did you mean `include_usage`?",
            "unknown field `response_format.json_schema.stric` was ignored; did you mean `strict`?",
        ]
    );
    let part = json!({ "type": "text", "text": "a", "cache_control": {} });
    let body = json!({ "messages": [{ "role": "user", "content": "a" }, { "rol": 1, "role": "user", "content": [part] }] });
    let expected = [
        "unknown field `messages[1].rol` was ignored; did you mean `role`?",
        "unknown field `messages[1].content[0].cache_control` was ignored",
    ];
    let mut found = chat_warnings(&body);
    found.sort_by_key(|warning| warning.contains("content"));
    assert_eq!(found, expected);
}

/// OpenAI clients send these fields by themselves, so users could not avoid a warning.
#[test]
fn fields_of_openai_clients_cause_no_warning() {
    for name in [
        "user",
        "store",
        "metadata",
        "service_tier",
        "parallel_tool_calls",
        "tool_choice",
        "prompt_cache_key",
    ] {
        let body = json!({ "prompt": "a", name: "auto" });
        assert_eq!(warnings(&body), Vec::<String>::new(), "{name}");
    }
    let assistant_message = json!({
        "role": "assistant", "content": "b", "refusal": null, "annotations": [], "audio": null, "type": "text",
    });
    let body = json!({ "messages": [{ "role": "user", "content": "a" }, assistant_message], "max_completion_tokens": 1 });
    assert_eq!(chat_warnings(&body), Vec::<String>::new());
    let mut bodies = 0;
    for file in fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/bodies")).unwrap() {
        let body = fs::read(file.unwrap().path()).unwrap();
        let value: Value = serde_json::from_slice(&body).unwrap();
        let found = if value.get("messages").is_some() {
            chat_warnings(&json!({ "messages": value["messages"], "stream_options": null }))
        } else if value.get("prompt").is_some() {
            let mut value = value;
            // The test checkpoint has a different name and a shorter context.
            (value["model"], value["max_tokens"]) = (Value::Null, json!(2));
            value["n_predict"] = Value::Null;
            warnings(&value)
        } else {
            continue;
        };
        assert_eq!(found, Vec::<String>::new(), "{}", String::from_utf8_lossy(&body));
        bodies += 1;
    }
    assert!(bodies >= 8, "{bodies}");
}

#[test]
fn answers_contain_warnings_once_if_any() {
    let body = json!({ "prompt": "a", "max_tokens": 2, "temperature": 0, "n": 2 });
    assert!(tiny().complete(&body).get("warnings").is_none());
    assert!(tiny().stream(&body).iter().all(|chunk| chunk.get("warnings").is_none()));
    let mut body = body;
    body["max_token"] = json!(30);
    body["stream_options"] = json!({ "include_usage": true });
    let streamed = tiny().stream(&body);
    assert_eq!(streamed[0]["warnings"], json!([MAX_TOKEN]));
    assert!(streamed.len() > 2 && streamed[1..].iter().all(|chunk| chunk.get("warnings").is_none()));
    body["stream_options"] = Value::Null;
    let whole = tiny().complete(&body);
    assert_eq!(whole["warnings"], json!([MAX_TOKEN]));
    assert_eq!(whole["usage"]["completion_tokens"], 4, "everything else is unchanged");
}

#[test]
fn every_route_warns_or_rejects_in_strict_mode() {
    let model = &tiny().model;
    let language_model =
        |strict| Arc::new(ServedModel::new(model, ApiOptions { strict, ..options() }).unwrap());
    let folder = fixture_path("heads/sequence");
    let labels = ModelOptions { model: folder, ..ModelOptions::default() };
    let classifier = || labels.open_classifier(&Silent).unwrap().load_classifier(&Silent).unwrap();
    let served_classifier =
        |strict| Arc::new(ServedModel::of_classifier(&classifier(), ApiOptions { strict, ..options() }));
    let read = |endpoint: Endpoint, body: &str, is_strict: bool| -> Result<Warnings, ApiError> {
        let is_classifier = endpoint == Endpoint::Classify;
        let served = if is_classifier { served_classifier(is_strict) } else { language_model(is_strict) };
        let work = served.read(endpoint, body.as_bytes(), None)?;
        let options = SchedulerOptions { max_texts: 1, kv_tokens: 64, chunk_tokens: 16 };
        let mut session = match is_classifier {
            true => Session::of_classifier(classifier(), served),
            false => Session::new(model.clone(), served, model.scheduler(options).unwrap()),
        };
        Ok(session.answer(work, || true)?.unwrap().warnings)
    };
    for (endpoint, fields) in [
        (Endpoint::Completions, r#""prompt": "a""#),
        (Endpoint::Classify, r#""input": "a""#),
        (Endpoint::Embeddings, r#""input": "a""#),
        (Endpoint::Tokenize, r#""content": "a""#),
        (Endpoint::Detokenize, r#""tokens": [1]"#),
        (Endpoint::LookAttention, r#""prompt": "a""#),
        (Endpoint::LookLens, r#""prompt": "a""#),
        (Endpoint::LookHead, r#""prompt": "a", "layer": 0, "head": 0"#),
        (Endpoint::LookNext, r#""prompt": "a", "at": -1, "temperature": 0.5"#),
        (Endpoint::LookFeatures, r#""prompt": "a""#),
        (Endpoint::LookFeature, r#""prompt": "a", "layer": 0, "feature": 0"#),
        (Endpoint::LookGraph, r#""prompt": "a""#),
    ] {
        let valid = format!("{{{fields}}}");
        assert!(read(endpoint, &valid, true).unwrap().is_empty(), "{valid}");
        let invalid = format!("{{{fields}, \"modle\": \"x\"}}");
        let found = messages(&read(endpoint, &invalid, false).unwrap());
        assert_eq!(found.len(), 1, "{invalid}");
        assert!(found[0].starts_with("unknown field `modle` was ignored"), "{found:?}");
        let error = read(endpoint, &invalid, true).unwrap_err();
        assert_eq!(
            (error.status(), error.param(), error.code()),
            (400, Some("modle"), Some("unknown_parameter"))
        );
    }
    let body = r#"{"prompt": "a", "max_token": 5}"#;
    let error = read(Endpoint::Completions, body, true).unwrap_err();
    assert_eq!(error.to_string(), "unknown field `max_token`; did you mean `max_tokens`?");
    let conversation = br#"{"messages": [{"role": "user", "content": "a", "nam": "b"}]}"#;
    let error =
        Call::of_chat(ChatRequest::parse(conversation).unwrap(), &language_model(true), None).unwrap_err();
    assert_eq!(error.param(), Some("messages[0].nam"));
}

/// Warnings stay short and on one line, whatever the body contains.
#[test]
fn warnings_for_a_hostile_body_are_bounded() {
    let mut body = json!({ "prompt": "a" });
    for number in 0..5000 {
        body[format!("{number}{}", "x".repeat(100))] = json!(1);
    }
    body["a\n\u{1b}[31m\"b"] = json!(1);
    let found = call(&body).unwrap();
    let found = found.answer.warnings();
    assert!(found.iter().count() <= 17);
    assert!(found.iter().last().unwrap().ends_with(" more unknown fields were ignored"), "{found}");
    assert!(found.to_string().len() < 2000, "{}", found.to_string().len());
    let body = json!({ "prompt": "a", "a\n\u{1b}[31m\"b": 1 });
    assert_eq!(warnings(&body), ["unknown field `a\\n\\u{1b}[31m\\\"b` was ignored"]);
}
