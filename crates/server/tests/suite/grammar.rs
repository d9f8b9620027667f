//! Structured output, streamed or not and with several completions, and invalid grammars.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use serde_json::{Value, json};

use super::common::{Running, built_in, start_model};

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": { "who": { "enum": ["Romeo", "Juliet"] }, "age": { "type": "integer", "minimum": 10, "maximum": 99 } },
        "required": ["who", "age"],
        "additionalProperties": false,
    })
}

fn is_by_schema(text: &str) -> bool {
    let Ok(value) = serde_json::from_str::<Value>(text) else { return false };
    let who = value["who"] == "Romeo" || value["who"] == "Juliet";
    who && value["age"].as_u64().is_some_and(|age| (10..100).contains(&age))
        && value.as_object().unwrap().len() == 2
}

fn is_any_object(text: &str) -> bool {
    text.starts_with('{') && serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
}

fn is_digits(text: &str) -> bool {
    text.len() == 6 && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_nested(text: &str) -> bool {
    let depth = text.bytes().take_while(|byte| *byte == b'(').count();
    text == format!("{}x{}", "(".repeat(depth), ")".repeat(depth))
}

type Check = fn(&str) -> bool;

/// Every way to request structured output, each with a check for its completions.
fn constraints() -> Vec<(Value, Check)> {
    let grammar = "start: \"(\" start \")\" | \"x\"";
    let digits = "[0-9]{6}";
    let named = json!({ "name": "person", "schema": schema(), "strict": true });
    vec![
        (json!({ "response_format": { "type": "json_schema", "json_schema": named } }), is_by_schema),
        (json!({ "response_format": { "type": "json_object" } }), is_any_object),
        (json!({ "guided_json": schema() }), is_by_schema),
        (json!({ "guided_json": schema().to_string() }), is_by_schema),
        (json!({ "guided_regex": digits }), is_digits),
        (json!({ "guided_grammar": grammar }), is_nested),
        (json!({ "structured_outputs": { "json": schema() } }), is_by_schema),
        (json!({ "structured_outputs": { "regex": digits } }), is_digits),
        (json!({ "structured_outputs": { "grammar": grammar } }), is_nested),
    ]
}

fn request(constraint: &Value, more: Value) -> Value {
    // The model tells stories; the bias toward `}` and the quotation mark helps it end its JSON.
    let mut body = json!({
        "prompt": "Once there was", "max_tokens": 60, "temperature": 2, "min_p": 0, "seed": 3, "logit_bias": { "93": 12, "2": 6 },
    });
    for part in [constraint, &more] {
        body.as_object_mut().unwrap().extend(part.as_object().unwrap().clone());
    }
    body
}

fn server() -> Running {
    start_model(built_in(), "stories", |_| ())
}

/// Requests completions; returns each text with its finish reason, in order.
fn texts(server: &Running, body: &Value) -> Vec<(String, String)> {
    let reply = server.post("/v1/completions", body);
    assert_eq!(reply.status, 200, "{body}: {}", reply.text());
    let reply = reply.json();
    let choices = reply["choices"].as_array().unwrap().iter();
    choices
        .map(|choice| (choice["text"].as_str().unwrap().into(), choice["finish_reason"].to_string()))
        .collect()
}

/// Checks a completion; returns whether it ended before the token limit.
#[track_caller]
fn check(constraint: &Value, is_whole: Check, (text, reason): &(String, String)) -> bool {
    let has_ended = reason == "\"stop\"";
    assert!(has_ended || reason == "\"length\"", "{reason}");
    assert!(!has_ended || is_whole(text), "{constraint}: {text:?}");
    has_ended
}

#[test]
fn constraints_hold_streamed_or_not_and_for_every_choice() {
    let server = server();
    for (constraint, is_whole) in constraints() {
        let mut ended = 0;
        for seed in 0..4 {
            let whole = texts(&server, &request(&constraint, json!({ "seed": seed }))).swap_remove(0);
            ended += usize::from(check(&constraint, is_whole, &whole));
            let pieces = server
                .stream("/v1/completions", &request(&constraint, json!({ "seed": seed, "stream": true })));
            let streamed: String =
                pieces.iter().filter_map(|piece| piece["choices"][0]["text"].as_str()).collect();
            assert_eq!(streamed, whole.0, "{constraint}");
        }
        let greedy = texts(&server, &request(&constraint, json!({ "temperature": 0 })));
        ended += usize::from(check(&constraint, is_whole, &greedy[0]));
        let several = json!({ "n": 3, "best_of": 4, "prompt": ["One day", "A", ""], "logprobs": 2, "presence_penalty": 0.5 });
        let several = texts(&server, &request(&constraint, several));
        assert_eq!(several.len(), 9);
        ended += several.iter().filter(|text| check(&constraint, is_whole, text)).count();
        assert!(ended > 3, "{constraint}: {ended}");
    }
}

#[test]
fn constrained_completions_do_not_depend_on_the_batch() {
    let server = server();
    let requests: Vec<Value> =
        constraints().iter().map(|(constraint, _)| request(constraint, json!({ "n": 2 }))).collect();
    let alone: Vec<_> = requests.iter().map(|body| texts(&server, body)).collect();
    let together: Vec<_> = thread::scope(|scope| {
        let started: Vec<_> = requests.iter().map(|body| scope.spawn(|| texts(&server, body))).collect();
        started.into_iter().map(|handle| handle.join().unwrap()).collect()
    });
    assert_eq!(alone, together);
}

#[test]
fn invalid_constraints_report_the_error_and_its_location() {
    let server = server();
    let nested = json!({ "properties": { "a": { "type": "strin" } } });
    let cases = [
        (
            json!({ "guided_json": nested }),
            "guided_json",
            "JSON schema: at /properties/a: Invalid type: strin",
        ),
        (
            json!({ "guided_json": { "$ref": "http://127.0.0.1:1/s.json" } }),
            "guided_json",
            "no schema is fetched from elsewhere",
        ),
        (json!({ "guided_regex": "a(b" }), "guided_regex", "unclosed group"),
        (json!({ "guided_regex": "(".repeat(5_000) }), "guided_regex", ""),
        (json!({ "guided_grammar": "start: \"a\" (" }), "guided_grammar", "1(13): Expected token ')'"),
        (json!({ "guided_grammar": "root ::= \"a\"" }), "guided_grammar", "this looks like GBNF"),
        (json!({ "guided_grammar": "start: <[0]>" }), "guided_grammar", "special tokens and token ids"),
        (json!({ "structured_outputs": { "regex": "a(b" } }), "structured_outputs", "unclosed group"),
        (json!({ "response_format": { "type": "xml" } }), "response_format", "`json_schema`"),
    ];
    for (constraint, param, expected) in cases {
        let reply = server.post("/v1/completions", &request(&constraint, json!({})));
        let message = reply.refusal(400);
        assert!(message.contains(expected), "{constraint}: {message}");
        let named = reply.json()["error"]["param"].as_str().unwrap_or_default().to_owned();
        assert!(named.starts_with(param), "{constraint}: {named}");
        assert!(message.chars().count() < 2_000, "{message}");
    }
    // The server still serves requests.
    assert_eq!(texts(&server, &request(&json!({ "guided_regex": "[0-9]{6}" }), json!({}))).len(), 1);
}

/// Several clients continually compile an expensive grammar, yet other requests need not wait.
///
/// If the other requests had to wait, at least one compilation would finish before each of them.
#[test]
fn expensive_constraints_do_not_block_other_requests() {
    const CLIENTS: usize = 3;
    const OTHERS: usize = 30;
    let server = server();
    let hard = json!({ "guided_grammar": "start: A\nA: /.*a.{15}/ & /.*b.{14}/ & ~/.*c.{13}/\n" });
    let (is_over, compiled) = (AtomicBool::new(false), AtomicUsize::new(0));
    let compile = || {
        while !is_over.load(Ordering::Acquire) && compiled.load(Ordering::Acquire) < OTHERS {
            let message = server.post("/v1/completions", &request(&hard, json!({}))).refusal(400);
            assert!(message.starts_with("guided_grammar: grammar: too complex"), "{message}");
            compiled.fetch_add(1, Ordering::AcqRel);
        }
    };
    let (statuses, compiled_meanwhile) = thread::scope(|scope| {
        (0..CLIENTS).for_each(|_| _ = scope.spawn(compile));
        let other = |_| {
            let tokenized = server.post("/tokenize", &json!({ "prompt": "One day" }));
            [server.get("/health").status, tokenized.status]
        };
        let statuses: Vec<_> = (0..OTHERS).map(other).collect();
        is_over.store(true, Ordering::Release);
        (statuses, compiled.load(Ordering::Acquire))
    });
    assert_eq!(statuses, [[200; 2]; OTHERS]);
    assert!(compiled_meanwhile < OTHERS, "{compiled_meanwhile}");
}
