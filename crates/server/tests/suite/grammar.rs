//! Texts that conform to something: whatever is drawn, whole and in pieces, several at once; and descriptions that are wrong.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::common::{PATIENCE, Running, built_in, start_model};

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

/// Every way to say what a text must conform to, with a check of such texts.
fn descriptions() -> Vec<(Value, Check)> {
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

fn request(description: &Value, more: Value) -> Value {
    let mut body = json!({ "prompt": "Once there was", "max_tokens": 60, "temperature": 2, "seed": 3 });
    for part in [description, &more] {
        body.as_object_mut().unwrap().extend(part.as_object().unwrap().clone());
    }
    body
}

fn server() -> Running {
    start_model(built_in(), "stories", |_| ())
}

/// The texts of an answer with why each has ended, in their order.
fn texts(server: &Running, body: &Value) -> Vec<(String, String)> {
    let reply = server.post("/v1/completions", body);
    assert_eq!(reply.status, 200, "{body}: {}", reply.text());
    let reply = reply.json();
    let choices = reply["choices"].as_array().unwrap().iter();
    choices
        .map(|choice| (choice["text"].as_str().unwrap().into(), choice["finish_reason"].to_string()))
        .collect()
}

/// Returns whether the text has ended by itself.
#[track_caller]
fn check(description: &Value, is_whole: Check, (text, reason): &(String, String)) -> bool {
    let has_ended = reason == "\"stop\"";
    assert!(has_ended || reason == "\"length\"", "{reason}");
    assert!(!has_ended || is_whole(text), "{description}: {text:?}");
    has_ended
}

#[test]
fn texts_conform_in_every_field_whole_in_pieces_and_several_at_once() {
    let server = server();
    for (description, is_whole) in descriptions() {
        let mut ended = 0;
        for seed in 0..4 {
            let whole = texts(&server, &request(&description, json!({ "seed": seed }))).swap_remove(0);
            ended += usize::from(check(&description, is_whole, &whole));
            let pieces = server
                .stream("/v1/completions", &request(&description, json!({ "seed": seed, "stream": true })));
            let said: String =
                pieces.iter().filter_map(|piece| piece["choices"][0]["text"].as_str()).collect();
            assert_eq!(said, whole.0, "{description}");
        }
        let greedy = texts(&server, &request(&description, json!({ "temperature": 0 })));
        ended += usize::from(check(&description, is_whole, &greedy[0]));
        let several = json!({ "n": 3, "best_of": 4, "prompt": ["One day", "A", ""], "logprobs": 2, "presence_penalty": 0.5 });
        let several = texts(&server, &request(&description, several));
        assert_eq!(several.len(), 9);
        ended += several.iter().filter(|text| check(&description, is_whole, text)).count();
        assert!(ended > 3, "{description}: {ended}");
    }
}

#[test]
fn texts_that_conform_are_the_same_alone_and_together() {
    let server = server();
    let requests: Vec<Value> =
        descriptions().iter().map(|(description, _)| request(description, json!({ "n": 2 }))).collect();
    let alone: Vec<_> = requests.iter().map(|body| texts(&server, body)).collect();
    let together: Vec<_> = thread::scope(|scope| {
        let started: Vec<_> = requests.iter().map(|body| scope.spawn(|| texts(&server, body))).collect();
        started.into_iter().map(|made| made.join().unwrap()).collect()
    });
    assert_eq!(alone, together);
}

#[test]
fn descriptions_that_are_wrong_are_refused_with_what_and_where() {
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
        (
            json!({ "guided_grammar": "start: <[0]>" }),
            "guided_grammar",
            "special tokens and tokens by number",
        ),
        (json!({ "structured_outputs": { "regex": "a(b" } }), "structured_outputs", "unclosed group"),
        (json!({ "response_format": { "type": "xml" } }), "response_format", "`json_schema`"),
    ];
    for (description, param, expected) in cases {
        let reply = server.post("/v1/completions", &request(&description, json!({})));
        let message = reply.refusal(400);
        assert!(message.contains(expected), "{description}: {message}");
        let named = reply.json()["error"]["param"].as_str().unwrap_or_default().to_owned();
        assert!(named.starts_with(param), "{description}: {named}");
        assert!(message.chars().count() < 2_000, "{message}");
    }
    // The server goes on.
    assert_eq!(texts(&server, &request(&json!({ "guided_regex": "[0-9]{6}" }), json!({}))).len(), 1);
}

#[test]
fn a_description_that_is_hard_to_read_keeps_nobody_waiting() {
    /// What others wait at most, on a busy machine.
    const LONGEST: Duration = Duration::from_secs(2);
    let server = server();
    let hard = [
        json!({ "guided_grammar": "start: A\nA: /.*a.{15}/ & /.*b.{14}/ & ~/.*c.{13}/\n" }),
        json!({ "guided_regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}" }),
        json!({ "guided_json": { "type": "array", "minItems": 1_000_000_000 } }),
    ];
    thread::scope(|scope| {
        let asked: Vec<_> = hard
            .iter()
            .map(|description| {
                let server = &server;
                scope.spawn(move || server.post("/v1/completions", &request(description, json!({}))).status)
            })
            .collect();
        let started = Instant::now();
        while asked.iter().any(|asked| !asked.is_finished()) {
            assert!(started.elapsed() < PATIENCE, "they never end");
            let asking = Instant::now();
            assert_eq!(server.get("/health").status, 200);
            assert!(asking.elapsed() < LONGEST, "{:?}", asking.elapsed());
            thread::sleep(Duration::from_millis(20));
        }
        asked.into_iter().for_each(|asked| assert!([200, 400, 500].contains(&asked.join().unwrap())));
    });
}
