//! Requests that take long to read: they hold up neither short ones, nor the server's health, nor its end.

use std::io::ErrorKind;
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use candle_gpt2_server::{ChatTemplateChoice, ServerError, ServerOptions};
use candle_gpt2_testing::fixture_path;
use serde_json::json;

use super::common::{Client, PATIENCE, Running, json_request, start_model, start_with};

/// Long requests that are read at a time.
const LONG_AT_ONCE: usize = 10;

/// A gate that holds the threads that reach it first.
struct Gate {
    reached: AtomicUsize,
    is_open: Mutex<bool>,
    opened: Condvar,
}

static GATES: [Gate; 3] = [const { Gate::new() }; 3];

impl Gate {
    const fn new() -> Self {
        Self { reached: AtomicUsize::new(0), is_open: Mutex::new(false), opened: Condvar::new() }
    }

    /// Holds as many threads as read long requests; later ones pass.
    fn pass(&self) {
        if self.reached.fetch_add(1, Ordering::SeqCst) < LONG_AT_ONCE {
            let is_open = self.is_open.lock().unwrap();
            drop(self.opened.wait_while(is_open, |is_open| !*is_open).unwrap());
        }
    }

    fn open(&self) {
        *self.is_open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    #[track_caller]
    fn wait_for(&self, reached: usize) {
        let until = Instant::now() + PATIENCE;
        while self.reached.load(Ordering::SeqCst) < reached {
            assert!(Instant::now() < until, "{} are held", self.reached.load(Ordering::SeqCst));
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A clock that requests read last: while the gate is closed, they are never read to their end.
fn stopped<const GATE: usize>() -> u64 {
    GATES[GATE].pass();
    0
}

/// A server whose conversations stop at a gate.
fn start_gated<const GATE: usize>(change: impl FnOnce(&mut ServerOptions)) -> Running {
    start_with(|options| {
        options.api.chat_template = ChatTemplateChoice::Jinja("{{ messages[0].content }}".into());
        options.api.now = stopped::<GATE>;
        change(options);
    })
}

fn chat(server: &Running) -> Client<TcpStream> {
    let mut client = server.connect();
    let body = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1});
    client.send(&json_request("/v1/chat/completions", &body));
    client
}

/// Whether a client has no response yet.
fn waits(client: &Client<TcpStream>) -> bool {
    client.stream.set_nonblocking(true).unwrap();
    let peeked = client.stream.peek(&mut [0]);
    client.stream.set_nonblocking(false).unwrap();
    peeked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

#[test]
fn short_requests_are_served_while_all_long_ones_are_stuck() {
    let gate = &GATES[0];
    let server = start_gated::<0>(|_| ());
    let mut stuck: Vec<_> = (0..LONG_AT_ONCE).map(|_| chat(&server)).collect();
    gate.wait_for(LONG_AT_ONCE);
    stuck.extend((0..2).map(|_| chat(&server)));
    for path in ["/health", "/metrics", "/v1/models", "/tokenizer_info", "/props"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    for path in ["/v1/completions", "/tokenize", "/v1/embeddings", "/look/next"] {
        let field = if path == "/v1/embeddings" { "input" } else { "prompt" };
        let reply = server.post(path, &json!({field: "a"}));
        assert_eq!(reply.status, 200, "{path}: {}", reply.text());
    }
    assert!(stuck.iter().all(waits));
    // A client that leaves keeps its thread busy, and a server that ends waits for neither.
    drop(stuck.pop());
    drop(stuck.remove(0));
    server.handle.stop();
    for client in &mut stuck {
        let reply = client.reply();
        reply.refusal(503);
        assert_eq!(reply.json()["error"]["code"], "server_draining");
    }
    server.ended().unwrap();
    assert_eq!(gate.reached.load(Ordering::SeqCst), LONG_AT_ONCE + 1, "those that waited were never read");
    gate.open();
}

#[test]
fn a_long_request_that_waits_too_long_is_refused() {
    let gate = &GATES[1];
    let server = start_gated::<1>(|options| options.timeouts.queue = Duration::from_millis(100));
    let mut stuck: Vec<_> = (0..LONG_AT_ONCE).map(|_| chat(&server)).collect();
    gate.wait_for(LONG_AT_ONCE);
    let reply = chat(&server).reply();
    reply.refusal(503);
    assert_eq!(reply.json()["error"]["code"], "queue_timeout");
    assert_eq!(server.metric("gpt2_rejected_total{reason=\"queue_timeout\"}"), 1.0);
    // A body that is long to tokenize, and a grammar, wait as well.
    for body in [json!({"prompt": "a".repeat(20_000)}), json!({"prompt": "a", "guided_regex": "a+"})] {
        server.post("/v1/completions", &body).refusal(503);
    }
    gate.open();
    for client in &mut stuck {
        assert_eq!(client.reply().status, 200);
    }
    assert_eq!(chat(&server).reply().status, 200);
}

#[test]
fn a_thread_that_never_returns_does_not_hold_up_the_end() {
    let gate = &GATES[2];
    let drain = Duration::from_millis(100);
    let classifier = candle_gpt2_engine::ModelOptions {
        model: fixture_path("heads/sequence"),
        ..candle_gpt2_engine::ModelOptions::default()
    };
    let silent = &candle_gpt2_engine::Silent;
    let classifier = classifier.open_classifier(silent).unwrap().load_classifier(silent).unwrap();
    let server = start_model(classifier, "labels", |options| {
        options.api.now = stopped::<2>;
        options.timeouts.drain = drain;
    });
    let mut client = server.connect();
    client.send(&json_request("/v1/classify", &json!({"input": [[1, 2, 3]]})));
    gate.wait_for(1);
    server.handle.stop();
    client.reply().refusal(503);
    let error = server.ended().unwrap_err();
    assert!(matches!(error, ServerError::CutOff { calls: 1, after } if after == drain), "{error}");
    gate.open();
}
