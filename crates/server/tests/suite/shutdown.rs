//! Clients that go, and the end of the server.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use candle_gpt2_server::ServerError;
use serde_json::json;

use super::common::{Client, Running, events, json_request, long_request, long_stream, request};
use super::limits::start_long;

#[test]
fn a_stream_whose_client_is_gone_is_cancelled() {
    let server = start_long(|_| ());
    let mut client = server.occupy(&long_stream());
    assert_eq!(client.head().status, 200);
    assert!(client.chunk().is_some());
    drop(client);
    server.wait_for_metric("gpt2_batch_rows", 0.0);
    assert_eq!(server.metric("gpt2_cancelled_total"), 1.0);
    server.wait_for_metric("gpt2_requests_total{route=\"/v1/completions\",code=\"499\"}", 1.0);
}

#[test]
fn a_whole_answer_whose_client_is_gone_is_cancelled() {
    let server = start_long(|_| ());
    // Some have sent more than the request, which nobody has read when they go. Windows does not tell then.
    let more = [&b""[..], b"\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"];
    let told = if cfg!(windows) { &more[..1] } else { &more };
    for more in told {
        let mut client = server.occupy(&long_request());
        client.send(more);
        drop(client);
        server.wait_for_metric("gpt2_batch_rows", 0.0);
    }
    assert_eq!(server.metric("gpt2_cancelled_total"), told.len() as f64);
}

/// Whether it is gone or only sends nothing more cannot be told apart: it is cancelled, and told so in case it listens.
#[test]
fn a_client_that_closes_its_side_is_told_that_it_is_cancelled() {
    let server = start_long(|_| ());
    let mut client = server.occupy(&long_request());
    client.close_sending();
    let reply = client.reply();
    reply.refusal(499);
    assert_eq!(reply.json()["error"]["code"], "client_closed_request");
    client.assert_closed();
    server.wait_for_metric("gpt2_batch_rows", 0.0);

    let mut client = server.occupy(&long_stream());
    assert_eq!(client.head().status, 200);
    client.close_sending();
    let mut text = Vec::new();
    while let Some(chunk) = client.chunk() {
        text.extend(chunk);
    }
    let told = events(&String::from_utf8(text).unwrap());
    assert_eq!(told.last().unwrap()["error"]["code"], "client_closed_request");
    server.wait_for_metric("gpt2_batch_rows", 0.0);
    assert_eq!(server.metric("gpt2_cancelled_total"), 2.0);
}

#[test]
fn a_client_that_goes_while_it_waits_leaves_the_queue() {
    let server = start_long(|options| (options.parallel, options.queue) = (1, 1));
    let _running = server.occupy(&long_stream());
    let mut client = server.connect();
    client.send(&json_request("/v1/completions", &long_request()));
    server.wait_for_metric("gpt2_requests_waiting", 1.0);
    server.post("/v1/completions", &json!({"prompt": [5]})).refusal(429);
    drop(client);
    server.wait_for_metric("gpt2_requests_waiting", 0.0);
    let mut client = server.connect();
    client.send(&json_request("/v1/completions", &long_request()));
    server.wait_for_metric("gpt2_requests_waiting", 1.0);
}

/// The text of a stream to its end.
fn rest(mut client: Client<TcpStream>) -> Vec<serde_json::Value> {
    assert_eq!(client.head().status, 200);
    let mut text = Vec::new();
    while let Some(chunk) = client.chunk() {
        text.extend(chunk);
    }
    client.assert_closed();
    events(&String::from_utf8(text).unwrap())
}

fn wait_until_closed(server: &Running) {
    let until = Instant::now() + Duration::from_secs(20);
    while TcpStream::connect(server.address).is_ok() {
        assert!(Instant::now() < until, "it goes on accepting");
    }
}

#[test]
fn what_has_begun_is_finished_and_nothing_else_begins() {
    let server = start_long(|options| options.parallel = 1);
    let mut idle = server.connect();
    idle.send(&request("GET", "/health", &[], b""));
    assert_eq!(idle.reply().status, 200);
    let mut late = server.connect();
    late.send(&request("GET", "/health", &[], b""));
    assert_eq!(late.reply().status, 200);

    let mut body = long_stream();
    body["max_tokens"] = 3000.into();
    body["stream_options"] = json!({"include_usage": true});
    let running = server.occupy(&body);
    let mut waiting = server.connect();
    waiting.send(&json_request("/v1/completions", &long_request()));
    server.wait_for_metric("gpt2_requests_waiting", 1.0);

    server.handle.stop();
    wait_until_closed(&server);
    let reply = waiting.reply();
    reply.refusal(503);
    assert_eq!(reply.json()["error"]["code"], "server_draining");
    assert_eq!(reply.header("connection"), Some("close"));
    idle.send(&request("GET", "/health", &[], b""));
    let reply = idle.reply();
    reply.refusal(503);
    assert_eq!(reply.header("connection"), Some("close"));
    idle.assert_closed();
    late.send(&json_request("/v1/completions", &long_request()));
    late.reply().refusal(503);

    let told = rest(running);
    assert_eq!(told.last().unwrap()["usage"]["completion_tokens"], 3000);
    server.ended().unwrap();
}

#[test]
fn a_server_with_nothing_to_do_ends_at_once() {
    let server = start_long(|_| ());
    let mut idle = server.connect();
    idle.send(&request("GET", "/health", &[], b""));
    assert_eq!(idle.reply().status, 200);
    server.handle.stop();
    server.ended().unwrap();
    idle.assert_closed();
}

#[test]
fn what_takes_too_long_is_cut_off_with_a_word() {
    let drain = Duration::from_millis(100);
    let server = start_long(|options| options.timeouts.drain = drain);
    let stream = server.occupy(&long_stream());
    let mut whole = server.connect();
    whole.send(&json_request("/v1/completions", &long_request()));
    server.wait_for_metric("gpt2_batch_rows", 2.0);
    server.handle.stop();
    let told = rest(stream);
    assert_eq!(told.last().unwrap()["error"]["code"], "server_draining");
    whole.reply().refusal(503);
    let error = server.ended().unwrap_err();
    assert!(matches!(error, ServerError::CutOff { calls: 2, after } if after == drain), "{error}");
}

#[test]
fn told_twice_it_ends_at_once() {
    let server = start_long(|options| options.timeouts.drain = Duration::from_secs(3600));
    let stream = server.occupy(&long_stream());
    server.handle.stop();
    wait_until_closed(&server);
    assert!(server.is_running());
    server.handle.stop();
    assert_eq!(rest(stream).last().unwrap()["error"]["code"], "server_draining");
    let error = server.ended().unwrap_err();
    assert!(matches!(error, ServerError::Interrupted { calls: 1 }), "{error}");
}
