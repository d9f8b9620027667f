//! Client disconnects and server shutdown.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use candle_gpt2_server::ServerError;
use serde_json::json;

use super::common::{Client, Running, events, json_request, long_request, long_stream, request};
use super::limits::start_long;

#[test]
fn disconnect_cancels_a_stream() {
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
fn disconnect_cancels_an_unstreamed_request() {
    let server = start_long(|_| ());
    // Some clients leave unread bytes behind. Windows does not report such a disconnect.
    let leftovers = [&b""[..], b"\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"];
    let reported = if cfg!(windows) { &leftovers[..1] } else { &leftovers };
    for more in reported {
        let mut client = server.occupy(&long_request());
        client.send(more);
        drop(client);
        server.wait_for_metric("gpt2_batch_rows", 0.0);
    }
    assert_eq!(server.metric("gpt2_cancelled_total"), reported.len() as f64);
}

/// A half-close is treated as a disconnect.
///
/// The server cannot tell whether the client has disconnected. It cancels the request but still sends an
/// error, in case the client reads it.
#[test]
fn half_close_cancels_the_request_with_an_error() {
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
    let received = events(&String::from_utf8(text).unwrap());
    assert_eq!(received.last().unwrap()["error"]["code"], "client_closed_request");
    server.wait_for_metric("gpt2_batch_rows", 0.0);
    assert_eq!(server.metric("gpt2_cancelled_total"), 2.0);
}

#[test]
fn disconnected_clients_leave_the_queue() {
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

/// Reads the remaining events of a stream.
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
        assert!(Instant::now() < until, "the server still accepts connections");
    }
}

#[test]
fn shutdown_finishes_running_requests_and_rejects_new_ones() {
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

    let received = rest(running);
    assert_eq!(received.last().unwrap()["usage"]["completion_tokens"], 3000);
    server.join().unwrap();
}

#[test]
fn idle_server_stops_immediately() {
    let server = start_long(|_| ());
    let mut idle = server.connect();
    idle.send(&request("GET", "/health", &[], b""));
    assert_eq!(idle.reply().status, 200);
    server.handle.stop();
    server.join().unwrap();
    idle.assert_closed();
}

#[test]
fn drain_timeout_cuts_off_requests_with_an_error() {
    let drain = Duration::from_millis(100);
    let server = start_long(|options| options.timeouts.drain = drain);
    let stream = server.occupy(&long_stream());
    let mut whole = server.connect();
    whole.send(&json_request("/v1/completions", &long_request()));
    server.wait_for_metric("gpt2_batch_rows", 2.0);
    server.handle.stop();
    let received = rest(stream);
    assert_eq!(received.last().unwrap()["error"]["code"], "server_draining");
    whole.reply().refusal(503);
    let error = server.join().unwrap_err();
    assert!(matches!(error, ServerError::CutOff { calls: 2, after } if after == drain), "{error}");
}

#[test]
fn second_stop_interrupts_running_requests() {
    let server = start_long(|options| options.timeouts.drain = Duration::from_secs(3600));
    let stream = server.occupy(&long_stream());
    server.handle.stop();
    wait_until_closed(&server);
    assert!(server.is_running());
    server.handle.stop();
    assert_eq!(rest(stream).last().unwrap()["error"]["code"], "server_draining");
    let error = server.join().unwrap_err();
    assert!(matches!(error, ServerError::Interrupted { calls: 1 }), "{error}");
}
