//! Clients who take places and give nothing: they keep nobody out, and cost no more than they may.

use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use candle_gpt2_server::ServerOptions;
use serde_json::json;

use super::{FOREVER, JSON, start_long};
use crate::common::{
    Client, LONG, PATIENCE, Running, json_request, long, long_stream, request, start, start_model, start_with,
};

/// Clients who connect and say so much.
fn crowd(server: &Running, count: usize, bytes: &[u8]) -> Vec<Client<TcpStream>> {
    let connect = |_| {
        let mut client = server.connect();
        client.send(bytes);
        client
    };
    (0..count).map(connect).collect()
}

/// Clients with nothing to say are given as long as they like, so a response comes before theirs or never.
fn patient(options: &mut ServerOptions) {
    let timeouts = &mut options.timeouts;
    (timeouts.header, timeouts.body, timeouts.idle) = (FOREVER, FOREVER, FOREVER);
}

#[track_caller]
fn assert_healthy(server: &Running) {
    assert_eq!(server.get("/health").status, 200);
}

/// A request of 80 kB.
#[track_caller]
fn assert_honest_is_served(server: &Running) {
    let reply = server.post("/tokenize", &json!({"prompt": "a".repeat(80_000)}));
    assert_eq!(reply.status, 200, "{}", reply.text());
}

/// The head of a request with a body of so many bytes, and its beginning.
fn begun_body(announced: usize, sent: usize) -> Vec<u8> {
    let length = format!("Content-Length: {announced}");
    let body = [&b"{\"prompt\":\""[..], &vec![b'a'; sent]].concat();
    request("POST", "/tokenize", &[JSON, &length], &body)
}

/// Sends a byte of each now and then while `work` runs.
fn dripping<R>(clients: &mut [Client<TcpStream>], work: impl FnOnce() -> R) -> R {
    let is_over = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(std::sync::atomic::Ordering::Acquire) {
                clients.iter_mut().for_each(|client| client.send(b"a"));
                thread::sleep(Duration::from_millis(50));
            }
        });
        // Also where the work panics.
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

/// Some say nothing, some begin a head, and some have had an answer: the server has room for 64.
#[test]
fn clients_who_say_nothing_keep_nobody_out() {
    let server = start_with(|options| {
        patient(options);
        options.max_connections = Some(64);
    });
    let mut answered = crowd(&server, 100, &request("GET", "/health", &[], b""));
    assert!(answered[99].reply().status == 200);
    let _silent = crowd(&server, 100, b"");
    let _begun = crowd(&server, 100, b"GET /health HTTP/1.1\r\nHost: lo");
    assert_healthy(&server);
    assert_honest_is_served(&server);
    let reply = server.post("/v1/completions", &json!({"prompt": "a", "max_tokens": 1}));
    assert_eq!(reply.status, 200, "{}", reply.text());
    // Those that came first are closed.
    answered[0].reply();
    answered[0].assert_closed();
}

#[test]
fn the_connection_that_has_been_idle_longest_makes_room() {
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
    // One more connection, and no other after it that could take the place of `first`.
    assert_eq!(server.get("/health").status, 200);
    second.assert_closed();
    first.send(&health);
    assert_eq!(first.reply().status, 200);
}

/// Where no connection is idle, the server's health is told, and to all else that it is busy.
#[test]
fn a_server_whose_connections_all_work_says_so() {
    let server = start_long(|options| {
        patient(options);
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
        "all connections of this server are in use; retry after the time in the Retry-After header"
    );
    assert_eq!((reply.header("retry-after"), reply.header("connection")), (Some("1"), Some("close")));
    assert_eq!(server.metric("gpt2_rejected_total{reason=\"connections_full\"}"), 1.0);
    streams.pop();
    server.wait_for_metric("gpt2_batch_rows", 1.0);
    let until = Instant::now() + PATIENCE;
    while server.post("/v1/completions", &json!({"prompt": [5], "max_tokens": 1})).status != 200 {
        assert!(Instant::now() < until, "its place is not free");
    }
}

#[test]
fn uploads_that_drip_hold_up_nobody() {
    for count in [4, 40] {
        let server = start_with(patient);
        let mut drips = crowd(&server, count, &begun_body(200_000, 70_000));
        // They have come so far.
        thread::sleep(Duration::from_millis(300));
        dripping(&mut drips, || {
            assert_honest_is_served(&server);
            assert_healthy(&server);
        });
    }
}

/// They announce more than there is memory for: the slowest lose theirs, and are told so.
#[test]
fn uploads_that_drip_lose_their_memory_to_those_that_come() {
    let server = start_with(patient);
    let mut drips = crowd(&server, 16, &begun_body(2_000_000, 1_500_000));
    thread::sleep(Duration::from_millis(500));
    dripping(&mut drips, || {
        assert_honest_is_served(&server);
        assert_honest_is_served(&server);
    });
    let until = Instant::now() + PATIENCE;
    let lost = drips.iter_mut().find_map(|client| {
        client.stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let is_there = client.stream.peek(&mut [0]).is_ok_and(|count| count > 0);
        assert!(Instant::now() < until);
        is_there.then(|| client.reply())
    });
    let reply = lost.expect("one that has lost its memory");
    assert!(reply.refusal(503).starts_with("there is no memory for this request body"));
    assert_eq!((reply.header("retry-after"), reply.header("connection")), (Some("1"), Some("close")));
}

/// Honest uploads that together want more than there is memory for come to their ends. (They are no JSON: what is in them takes no
/// time.)
#[test]
fn uploads_that_wait_for_memory_come_to_their_ends() {
    let server = start();
    let body = begun_body(4_000_000, 4_000_000 - 13);
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

/// A look at so long a text that it takes a while.
fn long_look(tokens: usize) -> Vec<u8> {
    let ids: Vec<usize> = (0..tokens).map(|place| 1 + place % 299).collect();
    json_request("/look/next", &json!({ "prompt": ids }))
}

/// One is made and eight wait: more are told so at once. Those whose clients go make room.
#[test]
fn analyses_wait_in_a_queue_with_an_end() {
    let server = start_model(long(), "long", |options| options.kv_tokens = Some(LONG));
    let mut clients = crowd(&server, 40, &long_look(4000));
    let last = clients.last_mut().expect("a client").reply();
    let told = "the queue of analyses is full; retry after the time in the Retry-After header";
    assert_eq!((last.refusal(503).as_str(), last.header("retry-after")), (told, Some("1")));
    assert!(server.metric("gpt2_rejected_total{reason=\"looks_full\"}") >= 1.0);
    drop(clients);
    // The turn is free once what was being computed is.
    let until = Instant::now() + PATIENCE;
    while server.post("/look/next", &json!({"prompt": [5]})).status != 200 {
        assert!(Instant::now() < until, "those that are gone hold their places");
    }
}

#[test]
fn an_analysis_that_waits_too_long_is_told_so() {
    let server = start_model(long(), "long", |options| {
        options.kv_tokens = Some(LONG);
        options.timeouts.queue = Duration::from_millis(50);
    });
    let _first = crowd(&server, 1, &long_look(12_000));
    // The first may not have its turn yet.
    let until = Instant::now() + PATIENCE;
    let reply = loop {
        let reply = server.post("/look/next", &json!({"prompt": [5]}));
        if reply.status != 200 {
            break reply;
        }
        assert!(Instant::now() < until, "the first never had its turn");
    };
    reply.refusal(503);
    assert_eq!(
        (&reply.json()["error"]["code"], reply.header("retry-after")),
        (&json!("queue_timeout"), Some("1"))
    );
    // Each server has a turn of its own.
    let other = start();
    assert_eq!(other.post("/look/next", &json!({"prompt": [5]})).status, 200);
}
