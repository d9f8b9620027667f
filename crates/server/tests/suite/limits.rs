//! Limits of size, time and number.

mod crowd;
mod hostile;

use std::thread;
use std::time::Duration;

use candle_gpt2_server::ServerOptions;
use serde_json::json;

use super::common::{
    Client, Running, events, json_request, long, long_request, long_stream, request, start, start_model,
    start_with,
};

const JSON: &str = "Content-Type: application/json";
const SHORT: Duration = Duration::from_millis(100);
const FOREVER: Duration = Duration::from_secs(3600);

/// A server of the model with long texts.
pub(crate) fn start_long(change: impl FnOnce(&mut ServerOptions)) -> Running {
    start_model(long(), "long", |options| {
        options.kv_tokens = Some(40_000);
        change(options);
    })
}

#[test]
fn health_is_told_on_a_connection_that_stays() {
    let server = start();
    let mut client = server.connect();
    for path in ["/health", "/v1/health"] {
        client.send(&request("GET", path, &[], b""));
        let reply = client.reply();
        assert_eq!((reply.status, reply.json()), (200, json!({"status": "ok"})));
        assert_eq!(reply.header("server"), Some("gpt2"));
        assert_eq!(reply.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(reply.header("connection"), None);
        assert!(reply.header("x-request-id").is_some_and(|id| id.starts_with("req-")));
    }
    client.send(&request("HEAD", "/health", &[], b""));
    let reply = client.head();
    assert_eq!((reply.status, reply.header("content-length")), (200, Some("15")));
    client.send(&request("GET", "/health", &[], b""));
    assert_eq!(client.reply().status, 200, "HEAD has no body");
}

/// The engine is asked nothing: a long prompt is being computed, and others wait.
#[test]
fn health_is_told_while_the_engine_works() {
    let server = start_long(|options| options.parallel = 1);
    let _running = server.occupy(&long_stream());
    let _waiting: Vec<_> = (0..3)
        .map(|_| {
            let mut client = server.connect();
            client.send(&json_request("/v1/completions", &long_request()));
            client
        })
        .collect();
    server.wait_for_metric("gpt2_requests_waiting", 3.0);
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.metric("gpt2_batch_rows"), 1.0);
}

#[test]
fn a_head_that_is_too_slow_is_told_so() {
    let server = start_with(|options| options.timeouts.header = SHORT);
    let mut client = server.connect();
    client.send(b"GET /health HTTP/1.1\r\nHost: loc");
    let reply = client.reply();
    assert_eq!(reply.refusal(408), "the head was not complete in time");
    assert_eq!(reply.header("connection"), Some("close"));
    client.assert_closed();
    // Who sends nothing gets nothing.
    server.connect().assert_closed();
    // The second request of a connection has as much time as the first, and the pause between them another.
    let mut client = server.connect();
    client.send(&request("GET", "/health", &[], b""));
    assert_eq!(client.reply().status, 200);
    thread::sleep(2 * SHORT);
    client.send(b"GET /health HTTP/1.1\r\nHost: loc");
    client.reply().refusal(408);
}

#[test]
fn a_body_that_is_too_slow_is_told_so() {
    let server = start_with(|options| options.timeouts.body = SHORT);
    let mut client = server.connect();
    client.send(&request("POST", "/tokenize", &[JSON, "Content-Length: 100"], b"{\"prompt\":"));
    let reply = client.reply();
    assert_eq!(reply.refusal(408), "the body was not complete after 0.1 s");
    assert_eq!(reply.header("connection"), Some("close"));
    client.assert_closed();
}

#[test]
fn a_connection_that_says_nothing_more_is_closed() {
    let server = start_with(|options| options.timeouts.idle = SHORT);
    let mut client = server.connect();
    client.send(&request("GET", "/health", &[], b""));
    assert_eq!(client.reply().status, 200);
    client.assert_closed();
}

/// What it does not read is more than the system keeps for it.
#[test]
fn a_client_that_does_not_read_is_cut_off() {
    let server = start_long(|options| options.timeouts.write = SHORT);
    let mut body = long_stream();
    body["logprobs"] = 20.into();
    let _client = server.occupy(&body);
    server.wait_for_metric("gpt2_batch_rows", 0.0);
    assert_eq!(server.metric("gpt2_cancelled_total"), 1.0);
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn a_body_that_is_too_large_is_refused_before_it_is_read() {
    let server = start_with(|options| options.max_body = 1000);
    let prompt = |bytes: usize| {
        let body = json!({"prompt": "a".repeat(bytes - 13)}).to_string();
        assert_eq!(body.len(), bytes);
        body
    };
    assert_eq!(server.request("POST", "/tokenize", &[JSON], prompt(1000).as_bytes()).status, 200);
    // Announced: no byte of it is needed.
    let mut client = server.connect();
    client.send(&request("POST", "/tokenize", &[JSON, "Content-Length: 1001"], b""));
    let expected = "the body is larger than 1000 bytes, which --max-body raises";
    let reply = client.reply();
    assert_eq!(reply.refusal(413), expected);
    assert_eq!(reply.header("connection"), Some("close"));
    // Not announced.
    let chunks = format!("3e9\r\n{}\r\n0\r\n\r\n", prompt(1001));
    let reply = server.request("POST", "/tokenize", &[JSON, "Transfer-Encoding: chunked"], chunks.as_bytes());
    assert_eq!(reply.refusal(413), expected);
    // A client that sends all of it before it reads gets its answer too.
    let reply = server.request("POST", "/tokenize", &[JSON], prompt(3 << 20).as_bytes());
    assert_eq!(reply.refusal(413), expected);
    // Lengths that overflow.
    for length in ["18446744073709551614", "18446744073709551615", "99999999999999999999"] {
        let length = format!("Content-Length: {length}");
        let reply = server.request("POST", "/tokenize", &[JSON, &length], b"");
        assert_eq!(reply.refusal(413), expected);
    }
}

#[test]
fn a_client_may_ask_before_it_sends() {
    let server = start();
    let body = br#"{"prompt":"a"}"#;
    let mut client = server.connect();
    client.send(&request("POST", "/tokenize", &[JSON, "Content-Length: 14", "Expect: 100-continue"], b""));
    assert_eq!(client.head().status, 100);
    client.send(body);
    assert_eq!(client.reply().status, 200);
    client.send(&request("POST", "/tokenize", &["Content-Length: 14", "Expect: 100-continue"], b""));
    client.reply().refusal(415);
}

/// One runs, four wait, and of twice as many clients the others are told to come again.
#[test]
fn what_the_queue_has_no_room_for_is_refused_at_once() {
    let server = start_long(|options| (options.parallel, options.queue) = (1, 4));
    let running = server.occupy(&long_stream());
    let ask = |_| {
        let mut client = server.connect();
        client.send(&json_request("/v1/completions", &json!({"prompt": [5], "max_tokens": 2})));
        client
    };
    let mut clients: Vec<Client<_>> = (0..8).map(ask).collect();
    server.wait_for_metric("gpt2_rejected_total{reason=\"queue_full\"}", 4.0);
    // Four prompts of one request find no room either, though one would.
    let four = server.post("/v1/completions", &json!({"prompt": ["a", "b", "c", "d"], "max_tokens": 2}));
    four.refusal(429);
    drop(running);
    let replies: Vec<_> = clients.iter_mut().map(Client::reply).collect();
    let (served, refused): (Vec<_>, Vec<_>) = replies.iter().partition(|reply| reply.status == 200);
    assert_eq!((served.len(), refused.len()), (4, 4));
    for reply in refused {
        reply.refusal(429);
        assert_eq!(reply.json()["error"]["code"], "server_overloaded");
        let seconds: u64 = reply.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=60).contains(&seconds), "{seconds}");
    }
}

#[test]
fn who_waits_too_long_is_told_so() {
    let server = start_long(|options| {
        options.parallel = 1;
        options.timeouts.queue = SHORT;
    });
    let _running = server.occupy(&long_stream());
    let reply = server.post("/v1/completions", &json!({"prompt": [5], "max_tokens": 2}));
    reply.refusal(503);
    assert_eq!(reply.json()["error"]["code"], "queue_timeout");
    assert!(reply.header("retry-after").is_some());
}

/// A stream that waits gets its head and signs of life, and what goes wrong after that is told within.
#[test]
fn a_stream_that_waits_shows_signs_of_life() {
    let server = start_long(|options| {
        options.parallel = 1;
        (options.timeouts.head, options.timeouts.ping) = (SHORT / 5, SHORT / 5);
    });
    let running = server.occupy(&long_stream());
    let mut client = server.connect();
    let body = json!({"prompt": [5], "max_tokens": 2, "stream": true, "temperature": 0, "ignore_eos": true});
    client.send(&json_request("/v1/completions", &body));
    let head = client.head();
    assert_eq!((head.status, head.header("content-type")), (200, Some("text/event-stream")));
    assert_eq!(head.header("cache-control"), Some("no-cache"));
    assert_eq!(head.header("x-accel-buffering"), Some("no"));
    for _ in 0..3 {
        assert_eq!(client.chunk().as_deref(), Some(&b":\n\n"[..]));
    }
    drop(running);
    let mut text = Vec::new();
    while let Some(chunk) = client.chunk() {
        text.extend(chunk);
    }
    let finish = |event: &serde_json::Value| event["choices"][0]["finish_reason"].clone();
    assert_eq!(events(&String::from_utf8(text).unwrap()).last().map(finish), Some("length".into()));
}

#[test]
fn what_goes_wrong_after_the_head_is_told_in_the_stream() {
    let server = start_long(|options| {
        options.parallel = 1;
        (options.timeouts.head, options.timeouts.queue) = (SHORT / 5, SHORT);
        options.timeouts.ping = FOREVER;
    });
    let _running = server.occupy(&long_stream());
    let told = server.stream("/v1/completions", &json!({"prompt": [5], "max_tokens": 2, "stream": true}));
    assert_eq!(told.len(), 1);
    assert_eq!(told[0]["error"]["code"], "queue_timeout");
    assert_eq!(told[0]["error"]["type"], "unavailable_error");
}

#[test]
fn a_text_that_takes_too_long_ends_there() {
    let server = start_long(|options| options.max_time = Some(SHORT));
    let reply = server.post("/v1/completions", &long_request());
    assert_eq!(reply.status, 200, "{}", reply.text());
    let choice = &reply.json()["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["stop_reason"], "max_time");
}
