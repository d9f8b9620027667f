//! Limits on sizes, times and counts.

mod hostile;
mod idle_clients;

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

/// Starts a server with the long-context model.
pub(crate) fn start_long(change: impl FnOnce(&mut ServerOptions)) -> Running {
    start_model(long(), "long", |options| {
        options.kv_tokens = Some(40_000);
        change(options);
    })
}

#[test]
fn health_works_on_a_keep_alive_connection() {
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

/// Health checks are answered while the engine computes a long completion and others wait.
#[test]
fn health_is_reported_while_the_engine_is_busy() {
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
fn slow_request_heads_time_out() {
    let server = start_with(|options| options.timeouts.header = SHORT);
    let mut client = server.connect();
    client.send(b"GET /health HTTP/1.1\r\nHost: loc");
    let reply = client.reply();
    assert_eq!(reply.refusal(408), "timed out waiting for the request head");
    assert_eq!(reply.header("connection"), Some("close"));
    client.assert_closed();
    // A client that sends nothing is disconnected without a response.
    server.connect().assert_closed();
    // The second request has the same time limit as the first. The pause before it has its own limit.
    let mut client = server.connect();
    client.send(&request("GET", "/health", &[], b""));
    assert_eq!(client.reply().status, 200);
    thread::sleep(2 * SHORT);
    client.send(b"GET /health HTTP/1.1\r\nHost: loc");
    client.reply().refusal(408);
}

#[test]
fn slow_request_bodies_time_out() {
    let server = start_with(|options| options.timeouts.body = SHORT);
    let mut client = server.connect();
    client.send(&request("POST", "/tokenize", &[JSON, "Content-Length: 100"], b"{\"prompt\":"));
    let reply = client.reply();
    assert_eq!(reply.refusal(408), "timed out after 0.1 s waiting for the request body");
    assert_eq!(reply.header("connection"), Some("close"));
    client.assert_closed();
}

#[test]
fn idle_connections_are_closed() {
    let server = start_with(|options| options.timeouts.idle = SHORT);
    let mut client = server.connect();
    client.send(&request("GET", "/health", &[], b""));
    assert_eq!(client.reply().status, 200);
    client.assert_closed();
}

/// Sends a response larger than the socket buffers to a client that does not read it.
#[test]
fn client_that_does_not_read_is_disconnected() {
    let server = start_long(|options| options.timeouts.write = SHORT);
    let mut body = long_stream();
    body["logprobs"] = 20.into();
    let _client = server.occupy(&body);
    server.wait_for_metric("gpt2_batch_rows", 0.0);
    assert_eq!(server.metric("gpt2_cancelled_total"), 1.0);
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn oversized_bodies_are_rejected_before_reading() {
    let server = start_with(|options| options.max_body = 1000);
    let prompt = |bytes: usize| {
        let body = json!({"prompt": "a".repeat(bytes - 13)}).to_string();
        assert_eq!(body.len(), bytes);
        body
    };
    assert_eq!(server.request("POST", "/tokenize", &[JSON], prompt(1000).as_bytes()).status, 200);
    // If the announced length is too large, the request is rejected before any byte of the body arrives.
    let mut client = server.connect();
    client.send(&request("POST", "/tokenize", &[JSON, "Content-Length: 1001"], b""));
    let expected = "the body exceeds the server's limit of 1000 bytes (`--max-body`)";
    let reply = client.reply();
    assert_eq!(reply.refusal(413), expected);
    assert_eq!(reply.header("connection"), Some("close"));
    // A chunked body does not announce its length.
    let chunks = format!("3e9\r\n{}\r\n0\r\n\r\n", prompt(1001));
    let reply = server.request("POST", "/tokenize", &[JSON, "Transfer-Encoding: chunked"], chunks.as_bytes());
    assert_eq!(reply.refusal(413), expected);
    // A client that sends the whole body before it reads also receives its response.
    let reply = server.request("POST", "/tokenize", &[JSON], prompt(3 << 20).as_bytes());
    assert_eq!(reply.refusal(413), expected);
    // These lengths overflow.
    for length in ["18446744073709551614", "18446744073709551615", "99999999999999999999"] {
        let length = format!("Content-Length: {length}");
        let reply = server.request("POST", "/tokenize", &[JSON, &length], b"");
        assert_eq!(reply.refusal(413), expected);
    }
}

#[test]
fn expect_100_continue_is_supported() {
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

/// While one completion runs, four of eight other clients wait, and four are rejected.
#[test]
fn full_queue_rejects_requests_immediately() {
    let server = start_long(|options| (options.parallel, options.queue) = (1, 4));
    let running = server.occupy(&long_stream());
    let ask = |_| {
        let mut client = server.connect();
        client.send(&json_request("/v1/completions", &json!({"prompt": [5], "max_tokens": 2})));
        client
    };
    let mut clients: Vec<Client<_>> = (0..8).map(ask).collect();
    server.wait_for_metric("gpt2_rejected_total{reason=\"queue_full\"}", 4.0);
    // A request with four prompts is rejected as well, because the queue is full.
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
fn queued_requests_time_out() {
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

/// A queued stream receives its head and keep-alive comments, then its chunks.
#[test]
fn queued_streams_send_keep_alive_comments() {
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
fn errors_after_the_head_are_sent_in_the_stream() {
    let server = start_long(|options| {
        options.parallel = 1;
        (options.timeouts.head, options.timeouts.queue) = (SHORT / 5, SHORT);
        options.timeouts.ping = FOREVER;
    });
    let _running = server.occupy(&long_stream());
    let received = server.stream("/v1/completions", &json!({"prompt": [5], "max_tokens": 2, "stream": true}));
    assert_eq!(received.len(), 1);
    assert_eq!(received[0]["error"]["code"], "queue_timeout");
    assert_eq!(received[0]["error"]["type"], "unavailable_error");
}

#[test]
fn max_time_ends_a_completion() {
    let server = start_long(|options| options.max_time = Some(SHORT));
    let reply = server.post("/v1/completions", &long_request());
    assert_eq!(reply.status, 200, "{}", reply.text());
    let choice = &reply.json()["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["stop_reason"], "max_time");
}
