//! Clients that occupy capacity without using it; they must not lock out others or exceed limits.

use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use candle_gpt2_server::ServerOptions;
use serde_json::json;

use super::{FOREVER, JSON, start_long};
use crate::common::{
    Client, LONG, PATIENCE, Running, json_request, long, long_stream, request, start, start_model, start_with,
};

/// Connects `count` clients and sends `bytes` from each.
fn crowd(server: &Running, count: usize, bytes: &[u8]) -> Vec<Client<TcpStream>> {
    let connect = |_| {
        let mut client = server.connect();
        client.send(bytes);
        client
    };
    (0..count).map(connect).collect()
}

/// Disables the timeouts for idle clients, so that no test passes only because a timeout expires.
fn without_timeouts(options: &mut ServerOptions) {
    let timeouts = &mut options.timeouts;
    (timeouts.header, timeouts.body, timeouts.idle) = (FOREVER, FOREVER, FOREVER);
}

#[track_caller]
fn assert_healthy(server: &Running) {
    assert_eq!(server.get("/health").status, 200);
}

/// Sends a request with an 80 kB body and checks that the server serves it.
#[track_caller]
fn assert_large_request_is_served(server: &Running) {
    let reply = server.post("/tokenize", &json!({"prompt": "a".repeat(80_000)}));
    assert_eq!(reply.status, 200, "{}", reply.text());
}

/// Request head that announces `announced` bytes, followed by the beginning of the body.
fn partial_body(announced: usize, sent: usize) -> Vec<u8> {
    let length = format!("Content-Length: {announced}");
    let body = [&b"{\"prompt\":\""[..], &vec![b'a'; sent]].concat();
    request("POST", "/tokenize", &[JSON, &length], &body)
}

/// Periodically sends one byte from each client while `work` runs.
fn dripping<R>(clients: &mut [Client<TcpStream>], work: impl FnOnce() -> R) -> R {
    let is_over = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(std::sync::atomic::Ordering::Acquire) {
                clients.iter_mut().for_each(|client| client.send(b"a"));
                thread::sleep(Duration::from_millis(50));
            }
        });
        // The guard also stops the clients if `work` panics.
        struct End<'a>(&'a std::sync::atomic::AtomicBool);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                self.0.store(true, std::sync::atomic::Ordering::Release);
            }
        }
        let _end = End(&is_over);
        work()
    })
}

/// Clients that are silent, have sent half a head or have been served do not keep the 64 slots.
#[test]
fn idle_clients_do_not_lock_out_others() {
    let server = start_with(|options| {
        without_timeouts(options);
        options.max_connections = Some(64);
    });
    let mut answered = crowd(&server, 100, &request("GET", "/health", &[], b""));
    assert!(answered[99].reply().status == 200);
    let _silent = crowd(&server, 100, b"");
    let _begun = crowd(&server, 100, b"GET /health HTTP/1.1\r\nHost: lo");
    assert_healthy(&server);
    assert_large_request_is_served(&server);
    let reply = server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1}));
    assert_eq!(reply.status, 200, "{}", reply.text());
    // The server has closed the oldest connections.
    answered[0].reply();
    answered[0].assert_closed();
}

#[test]
fn longest_idle_connection_is_evicted() {
    let server = start_with(|options| options.max_connections = Some(2));
    let health = request("GET", "/health", &[], b"");
    let [mut first, mut second] = [(); 2].map(|()| server.connect());
    let ask = |client: &mut Client<_>| {
        client.send(&health);
        assert_eq!(client.reply().status, 200);
    };
    ask(&mut first);
    ask(&mut second);
    ask(&mut first);
    // Connects exactly once, because another connection would evict `first`.
    assert_eq!(server.get("/health").status, 200);
    second.assert_closed();
    first.send(&health);
    assert_eq!(first.reply().status, 200);
}

/// If no connection is idle, the server answers health checks and returns 503 for other requests.
#[test]
fn server_with_all_connections_busy_returns_503() {
    let server = start_long(|options| {
        without_timeouts(options);
        options.max_connections = Some(2);
    });
    let mut streams: Vec<_> = (0..2)
        .map(|_| {
            let mut client = server.connect();
            client.send(&json_request("/v1/completions", &long_stream()));
            assert_eq!(client.head().status, 200);
            client
        })
        .collect();
    assert_healthy(&server);
    let reply = server.post("/v1/completions", &json!({"prompt": [5], "max_tokens": 1}));
    assert_eq!(
        reply.refusal(503),
        "all connections to this server are in use; retry after the delay in the Retry-After header"
    );
    assert_eq!((reply.header("retry-after"), reply.header("connection")), (Some("1"), Some("close")));
    assert_eq!(server.metric("gpt2_rejected_total{reason=\"connections_full\"}"), 1.0);
    streams.pop();
    server.wait_for_metric("gpt2_batch_rows", 1.0);
    let until = Instant::now() + PATIENCE;
    while server.post("/v1/completions", &json!({"prompt": [5], "max_tokens": 1})).status != 200 {
        assert!(Instant::now() < until, "the slot was not released");
    }
}

#[test]
fn slow_uploads_do_not_block_other_requests() {
    for count in [4, 40] {
        let server = start_with(without_timeouts);
        let mut uploads = crowd(&server, count, &partial_body(200_000, 70_000));
        // Wait until the bytes have arrived.
        thread::sleep(Duration::from_millis(300));
        dripping(&mut uploads, || {
            assert_large_request_is_served(&server);
            assert_healthy(&server);
        });
    }
}

/// If uploads exceed the memory budget, the slowest are evicted and receive an error.
#[test]
fn slow_uploads_lose_their_memory_to_new_requests() {
    let server = start_with(without_timeouts);
    let mut uploads = crowd(&server, 16, &partial_body(2_000_000, 1_500_000));
    thread::sleep(Duration::from_millis(500));
    dripping(&mut uploads, || {
        assert_large_request_is_served(&server);
        assert_large_request_is_served(&server);
    });
    let until = Instant::now() + PATIENCE;
    let evicted = uploads.iter_mut().find_map(|client| {
        client.stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let has_reply = client.stream.peek(&mut [0]).is_ok_and(|count| count > 0);
        assert!(Instant::now() < until);
        has_reply.then(|| client.reply())
    });
    let reply = evicted.expect("an evicted upload");
    assert!(reply.refusal(503).starts_with("not enough free memory for this request body"));
    assert_eq!((reply.header("retry-after"), reply.header("connection")), (Some("1"), Some("close")));
}

/// Fast uploads all complete, even if together they exceed the memory budget.
///
/// The bodies are invalid JSON, so that parsing takes no time.
#[test]
fn uploads_waiting_for_memory_complete() {
    let server = start();
    let body = partial_body(4_000_000, 4_000_000 - 13);
    thread::scope(|scope| {
        let send = |_| {
            let (server, body) = (&server, &body);
            scope.spawn(move || {
                let mut client = server.connect();
                client.send(body);
                client.send(b"]]");
                client.reply().status
            })
        };
        let statuses: Vec<_> = (0..10).map(send).collect();
        for status in statuses {
            assert_eq!(status.join().unwrap(), 400);
        }
    });
}

/// Request that analyzes a long text, which takes a while.
fn long_analysis(tokens: usize) -> Vec<u8> {
    let ids: Vec<usize> = (0..tokens).map(|index| 1 + index % 299).collect();
    json_request("/look/next", &json!({ "prompt": ids }))
}

/// One analysis runs and eight wait; further analyses are rejected until clients disconnect.
#[test]
fn analysis_queue_is_bounded() {
    let server = start_model(long(), "long", |options| options.kv_tokens = Some(LONG));
    let mut clients = crowd(&server, 40, &long_analysis(4000));
    let last = clients.last_mut().expect("a client").reply();
    let expected = "the analysis queue is full; retry after the delay in the Retry-After header";
    assert_eq!((last.refusal(503).as_str(), last.header("retry-after")), (expected, Some("1")));
    assert!(server.metric("gpt2_rejected_total{reason=\"looks_full\"}") >= 1.0);
    drop(clients);
    // The permit is free once the running computation ends.
    let until = Instant::now() + PATIENCE;
    while server.post("/look/next", &json!({"prompt": [5]})).status != 200 {
        assert!(Instant::now() < until, "disconnected clients still occupy their slots");
    }
}

#[test]
fn queued_analyses_time_out() {
    let server = start_model(long(), "long", |options| {
        options.kv_tokens = Some(LONG);
        options.timeouts.queue = Duration::from_millis(50);
    });
    let _first = crowd(&server, 1, &long_analysis(12_000));
    // The first analysis may not be running yet.
    let until = Instant::now() + PATIENCE;
    let reply = loop {
        let reply = server.post("/look/next", &json!({"prompt": [5]}));
        if reply.status != 200 {
            break reply;
        }
        assert!(Instant::now() < until, "the first client was never served");
    };
    reply.refusal(503);
    assert_eq!(
        (&reply.json()["error"]["code"], reply.header("retry-after")),
        (&json!("queue_timeout"), Some("1"))
    );
    // Each server has its own queue.
    let other = start();
    assert_eq!(other.post("/look/next", &json!({"prompt": [5]})).status, 200);
}
