//! More than 200 hostile requests; each must get its status and message without harming the server.

mod fields;

use std::thread;
use std::time::Duration;

use serde_json::json;

use super::JSON;
use crate::common::{Reply, Running, request, start, start_with};

/// Bytes to send and the expected response.
struct Case {
    bytes: Vec<u8>,
    status: u16,
    /// Field that the error names, or part of the error message.
    names: String,
    closes_sending: bool,
}

fn case(bytes: impl Into<Vec<u8>>, status: u16, names: &str) -> Case {
    Case { bytes: bytes.into(), status, names: names.into(), closes_sending: false }
}

/// Describes what is wrong with the response; returns `None` if the response is right.
fn fault(server: &Running, case: &Case) -> Option<String> {
    let mut client = server.connect();
    client.send(&case.bytes);
    if case.closes_sending {
        client.close_sending();
    }
    let shown: String = String::from_utf8_lossy(&case.bytes).chars().take(300).collect();
    let Some(reply) = client.try_reply() else { return Some(format!("no answer to {shown:?}")) };
    let is_named = |reply: &Reply| {
        let is_param = reply.json()["error"]["param"] == *case.names;
        reply.refusal(case.status).contains(&case.names) || is_param
    };
    let is_right = reply.status == case.status && (case.status == 200 || is_named(&reply));
    (!is_right).then(|| {
        format!("{shown:?}: expected {} {:?}, got {} {}", case.status, case.names, reply.status, reply.text())
    })
}

/// Sends each case on its own connection.
fn check(server: &Running, cases: &[Case]) -> usize {
    let faults: Vec<String> = cases.iter().filter_map(|case| fault(server, case)).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.metric("gpt2_engine_panics_total"), 0.0);
    server.wait_for_metric("gpt2_batch_rows", 0.0);
    let served = server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1}));
    assert_eq!(served.status, 200, "{}", served.text());
    cases.len()
}

/// Requests with an invalid request line or invalid headers.
fn heads() -> Vec<Case> {
    let plain = "unencrypted HTTP/1.1";
    let mut cases: Vec<Case> = [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\0\0\0\0\0\0\0\0",
        b"\r\n\r\n\x80\x81\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET  /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n",
        b"GET /health HTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /hea\x01lth HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"G\x00T /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\n: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: local\x00host\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nA b: c\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: b\r\n folded\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: b\rc: d\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: +2\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: two\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0x2\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n{}",
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked, gzip\r\n\r\n{}",
        b"POST /tokenize HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ]
    .into_iter()
    .map(|bytes| case(bytes, 400, plain))
    .collect();
    for length in [u128::from(u64::MAX), u128::from(u64::MAX) + 1] {
        let head =
            format!("POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n{{}}");
        cases.push(case(head.into_bytes(), 413, "the body exceeds"));
    }
    let many: Vec<String> = (0..101).map(|index| format!("X-{index}: 1")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    cases.push(case(request("GET", "/health", &many, b""), 431, "the request head is larger"));
    let wide = format!("X: {}", "a".repeat(70_000));
    cases.push(case(request("GET", "/health", &[&wide], b""), 431, "the request head is larger"));
    cases.push(case(
        request("GET", &format!("/{}", "a".repeat(70_000)), &[], b""),
        431,
        "the request head is larger",
    ));
    cases.push(case(vec![b'A'; 200_000], 431, "the request head is larger"));
    // These heads end too early.
    for bytes in [&b"GET /heal"[..], b"GET /health HTTP/1.1\r\nHost: localhost\r\n"] {
        cases.push(Case { closes_sending: true, ..case(bytes, 400, "the request head is incomplete") });
    }
    cases
}

/// Requests with invalid host names, origins, methods and paths.
fn targets() -> Vec<Case> {
    let get = |path: &str, lines: &[&str]| request("GET", path, lines, b"");
    let mut cases = vec![
        case("GET /health HTTP/1.1\r\n\r\n", 400, "missing Host header"),
        case("GET /health HTTP/1.1\r\nHost:\r\n\r\n", 400, "invalid Host header"),
        case(get("/health", &["Host: localhost", "Host: localhost"]), 400, "more than one Host header"),
        case(get("/health", &["Host: a/b"]), 400, "invalid Host header"),
        case(get("/health", &["Host: evil.example"]), 403, "host not allowed"),
        case(get("/health", &["Host: localhost.evil.example"]), 403, "host not allowed"),
        case(get("http://evil.example/health", &[]), 403, "host not allowed"),
        case(get("/health", &["Origin: http://evil.example"]), 403, "origin not allowed"),
        case(get("/health", &["Origin: null"]), 403, "origin not allowed"),
        case(
            get("/health", &["Origin: http://localhost", "Origin: http://localhost"]),
            403,
            "origin not allowed",
        ),
        case("GET /health HTTP/1.0\r\n\r\n", 200, ""),
        case(get("http://localhost/health", &[]), 200, ""),
        case(get("localhost:80", &[]), 400, "invalid request target"),
        case(request("CONNECT", "localhost:80", &[], b""), 400, "invalid request target"),
        case(get("/health?x=1&y=%zz", &[]), 200, ""),
        case(get("/health", &["Origin: http://localhost"]), 200, ""),
    ];
    let unknown = [
        "//health",
        "/health/",
        "/./health",
        "/x/../health",
        "/%68ealth",
        "/health%00",
        "/health;a=b",
        "/HEALTH",
        "/v1",
        "/v1/",
        "/v1//models",
        "/v2/models",
        "/v1/completions/",
        "/../../etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/page.js/..",
        "/index.html",
        "/.env",
        "/api/pull",
        "/api/generate",
        "/load",
        "/v1/load_lora_adapter",
        "/slots",
        "/admin",
        "/models/apply",
        "/v1/files",
        "*",
        "/v1/models/../../../etc/passwd",
        "/v1/models/%2e%2e%2fsecret",
        "/v1/models/other",
        "/v1/models/tiny%00",
        "/v1/models/%zz",
        "/v1/models/%ff%fe",
    ];
    cases.extend(unknown.map(|path| case(get(path, &[]), 404, "not found")));
    for (method, path) in [
        ("POST", "/health"),
        ("DELETE", "/v1/models"),
        ("PUT", "/tokenize"),
        ("GET", "/v1/completions"),
        ("get", "/health"),
        ("PATCH", "/metrics"),
        ("TRACE", "/health"),
        ("BREW", "/version"),
        ("OPTIONS", "/v1/completions"),
        ("POST", "/"),
        ("PURGE", "/page.js"),
    ] {
        cases.push(case(request(method, path, &[], b""), 405, "accepts only"));
    }
    cases
}

/// Requests whose bodies are not JSON objects or violate HTTP.
fn bodies() -> Vec<Case> {
    let post = |lines: &[&str], body: &[u8]| request("POST", "/tokenize", lines, body);
    let body = br#"{"prompt":"a"}"#;
    let mut cases = vec![case(post(&[JSON], b""), 400, "the body is empty")];
    let kinds = [
        "",
        "Content-Type: text/plain",
        "Content-Type: application/x-www-form-urlencoded",
        "Content-Type: multipart/form-data; boundary=x",
        "Content-Type: application/jsonp",
        "Content-Type: json",
        "Content-Type:",
        "Content-Type: text/plain; application/json",
        "Content-Type: application/json, text/plain",
        "Content-Type: application/json\r\nContent-Type: text/plain",
        "Content-Type: \u{ff}",
    ];
    for kind in kinds {
        let lines: &[&str] = if kind.is_empty() { &[] } else { &[kind] };
        cases.push(case(post(lines, body), 415, "unsupported content type"));
    }
    for kind in [
        "Content-Type: application/json; charset=utf-8",
        "content-type: Application/JSON",
        "Content-Type:application/json ;x",
    ] {
        cases.push(case(post(&[kind], body), 200, ""));
    }
    for encoding in ["gzip", "deflate", "br", "zstd", "gzip, gzip", "x", ""] {
        cases.push(case(
            post(&[JSON, &format!("Content-Encoding: {encoding}")], body),
            415,
            "unsupported Content-Encoding",
        ));
    }
    cases.push(case(post(&[JSON, "Content-Encoding: identity"], body), 200, ""));
    let chunked = |chunks: &[u8]| post(&[JSON, "Transfer-Encoding: chunked"], chunks);
    cases.push(case(chunked(b"e;x=y\r\n{\"prompt\":\"a\"}\r\n0\r\nTrailer: x\r\n\r\n"), 200, ""));
    for chunks in [
        &b"zz\r\n{}\r\n0\r\n\r\n"[..],
        b"-1\r\n{}\r\n0\r\n\r\n",
        b"2\r\n{}xx0\r\n\r\n",
        b"fffffffffffffffff\r\n{}\r\n",
        b"\r\n\r\n",
    ] {
        cases.push(case(chunked(chunks), 400, "invalid chunked encoding"));
    }
    for (lines, part) in [
        (&[JSON, "Content-Length: 50"][..], &br#"{"prompt":"#[..]),
        (&[JSON, "Transfer-Encoding: chunked"], b"e\r\n{\"pro"),
        (&[JSON, "Transfer-Encoding: chunked"], b"e\r\n{\"prompt\":\"a\"}\r\n"),
    ] {
        let cut = case(post(lines, part), 400, "the body ended early");
        cases.push(Case { closes_sending: true, ..cut });
    }
    let deep = "[".repeat(100_000);
    let deep_object = "{\"a\":".repeat(50_000);
    let texts: [&[u8]; 22] = [
        b"{",
        b"}",
        b"[]",
        b"null",
        b"1",
        b"\"a\"",
        b"{}{}",
        b"{\"prompt\":\"a\"} x",
        b"{\"prompt\":'a'}",
        b"{prompt:\"a\"}",
        b"{\"prompt\":\"a\",}",
        b"{\"prompt\":\"a\" /* x */}",
        b"\xef\xbb\xbf{\"prompt\":\"a\"}",
        b"{\x00\"\x00p\x00",
        b"{\"prompt\":\"\xff\xfe\"}",
        b"{\"prompt\":\"a\nb\"}",
        b"{\"prompt\":\"\\ud800\"}",
        b"{\"prompt\":\"\\x\"}",
        b"\x1f\x8b\x08\x00\x00",
        b"   ",
        deep.as_bytes(),
        deep_object.as_bytes(),
    ];
    cases.extend(texts.map(|text| case(post(&[JSON], text), 400, "")));
    cases
}

#[test]
fn hostile_requests_get_the_right_status_and_message() {
    let server = start();
    let cases: Vec<Case> = [heads(), targets(), bodies(), fields::completion_cases(), fields::other_cases()]
        .into_iter()
        .flatten()
        .collect();
    let count = check(&server, &cases);
    assert!(count >= 200, "{count} requests");
}

/// Clients that drip single bytes are served within the timeouts and rejected beyond them.
#[test]
fn slow_senders_are_bounded_by_the_timeouts() {
    let server = start();
    let bytes = request("POST", "/tokenize", &[JSON], br#"{"prompt":"a"}"#);
    let mut client = server.connect();
    for byte in &bytes {
        client.send(&[*byte]);
        thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(client.reply().status, 200);

    let limit = Duration::from_millis(100);
    let server = start_with(|options| (options.timeouts.header, options.timeouts.body) = (limit, limit));
    // The timeouts bound the whole head or body, regardless of how often bytes arrive.
    let drip = |begin: &[u8]| {
        let mut client = server.connect();
        client.send(begin);
        for _ in 0..20 {
            client.send(b"a");
            thread::sleep(limit / 10);
        }
        client.reply()
    };
    drip(b"GET /").refusal(408);
    drip(&request("POST", "/tokenize", &[JSON, "Content-Length: 1000"], b"")).refusal(408);
    assert_eq!(server.get("/health").status, 200);
}

/// Prevents request smuggling, in which a proxy and a server trust different body lengths.
///
/// This server uses the chunks and never treats the bytes that follow as another request.
#[test]
fn body_with_two_lengths_closes_the_connection() {
    let server = start();
    let mut client = server.connect();
    let lines = [JSON, "Content-Length: 4", "Transfer-Encoding: chunked"];
    let hidden = request("GET", "/metrics", &[], b"");
    client.send(
        &[request("POST", "/tokenize", &lines, b"e\r\n{\"prompt\":\"a\"}\r\n0\r\n\r\n"), hidden].concat(),
    );
    let reply = client.reply();
    assert_eq!((reply.status, reply.header("connection")), (200, Some("close")));
    client.assert_closed();
}

/// Responses to pipelined requests arrive in order.
#[test]
fn pipelined_requests_are_answered_in_order() {
    let server = start();
    let mut client = server.connect();
    let body = br#"{"prompt":"a"}"#;
    let requests = [
        request("GET", "/health", &[], b""),
        request("POST", "/tokenize", &[JSON], body),
        request("GET", "/nothing", &[], b""),
        b"GARBAGE\r\n\r\n".to_vec(),
    ];
    client.send(&requests.concat());
    let statuses: Vec<u16> = (0..4).map(|_| client.reply().status).collect();
    assert_eq!(statuses, [200, 200, 404, 400]);
    client.assert_closed();
}
