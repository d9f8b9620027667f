//! Requests that take long to read do not block short requests, health checks or shutdown.

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

/// Maximum number of long requests read concurrently.
const MAX_LONG_REQUESTS: usize = 10;

/// Gate that blocks the first threads to reach it.
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

    /// Blocks the first [`MAX_LONG_REQUESTS`] threads; later threads pass.
    fn pass(&self) {
        if self.reached.fetch_add(1, Ordering::SeqCst) < MAX_LONG_REQUESTS {
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
            assert!(Instant::now() < until, "{} threads are blocked", self.reached.load(Ordering::SeqCst));
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Clock that the server calls when it has read a request; a closed gate blocks this call.
fn gated_clock<const GATE: usize>() -> u64 {
    GATES[GATE].pass();
    0
}

/// Starts a server whose chat requests block at a gate.
fn start_gated<const GATE: usize>(change: impl FnOnce(&mut ServerOptions)) -> Running {
    start_with(|options| {
        options.api.chat_template = ChatTemplateChoice::Jinja("{{ messages[0].content }}".into());
        options.api.now = gated_clock::<GATE>;
        change(options);
    })
}

fn chat(server: &Running) -> Client<TcpStream> {
    let mut client = server.connect();
    let body = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1});
    client.send(&json_request("/v1/chat/completions", &body));
    client
}

/// Whether a client is still without a response.
fn waits(client: &Client<TcpStream>) -> bool {
    client.stream.set_nonblocking(true).unwrap();
    let peeked = client.stream.peek(&mut [0]);
    client.stream.set_nonblocking(false).unwrap();
    peeked.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

#[test]
fn short_requests_are_served_while_long_ones_are_blocked() {
    let gate = &GATES[0];
    let server = start_gated::<0>(|_| ());
    let mut stuck: Vec<_> = (0..MAX_LONG_REQUESTS).map(|_| chat(&server)).collect();
    gate.wait_for(MAX_LONG_REQUESTS);
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
    // A disconnected client's thread stays busy, but a stopping server waits for no thread.
    drop(stuck.pop());
    drop(stuck.remove(0));
    server.handle.stop();
    for client in &mut stuck {
        let reply = client.reply();
        reply.refusal(503);
        assert_eq!(reply.json()["error"]["code"], "server_draining");
    }
    server.join().unwrap();
    assert_eq!(
        gate.reached.load(Ordering::SeqCst),
        MAX_LONG_REQUESTS + 1,
        "the waiting requests were never read"
    );
    gate.open();
}

#[test]
fn queued_long_requests_time_out() {
    let gate = &GATES[1];
    let server = start_gated::<1>(|options| options.timeouts.queue = Duration::from_millis(100));
    let mut stuck: Vec<_> = (0..MAX_LONG_REQUESTS).map(|_| chat(&server)).collect();
    gate.wait_for(MAX_LONG_REQUESTS);
    let reply = chat(&server).reply();
    reply.refusal(503);
    assert_eq!(reply.json()["error"]["code"], "queue_timeout");
    assert_eq!(server.metric("gpt2_rejected_total{reason=\"queue_timeout\"}"), 1.0);
    // A body that is slow to tokenize has to wait too, and so does a grammar.
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
fn blocked_thread_does_not_delay_shutdown() {
    let gate = &GATES[2];
    let drain = Duration::from_millis(100);
    let classifier = candle_gpt2_engine::ModelOptions {
        model: fixture_path("heads/sequence"),
        ..candle_gpt2_engine::ModelOptions::default()
    };
    let silent = &candle_gpt2_engine::Silent;
    let classifier = classifier.open_classifier(silent).unwrap().load_classifier(silent).unwrap();
    let server = start_model(classifier, "labels", |options| {
        options.api.now = gated_clock::<2>;
        options.timeouts.drain = drain;
    });
    let mut client = server.connect();
    client.send(&json_request("/v1/classify", &json!({"input": [[1, 2, 3]]})));
    gate.wait_for(1);
    server.handle.stop();
    client.reply().refusal(503);
    let error = server.join().unwrap_err();
    assert!(matches!(error, ServerError::CutOff { calls: 1, after } if after == drain), "{error}");
    gate.open();
}
