//! Responses are the same under load as alone, byte for byte.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::common::{Running, built_in, events, json_request, start_model};

/// Requests of all kinds.
///
/// The requests are greedy or seeded, streamed or not, and steered or recorded. They have log-probabilities,
/// an echo or several completions, and their prefixes are shared or different.
fn requests() -> Vec<Value> {
    let beginning = "KING RICHARD III: Now is the winter of our discontent made glorious summer by this sun of York; and all the \
                     clouds that lour'd upon our house in the deep bosom of the ocean buried.";
    let prompts = ["One day", "O, ", beginning, "The é and the 日本語 😀", "<|endoftext|>"];
    let kind = |index: u64| {
        let mut body = match index % 5 {
            0 => json!({"temperature": 0}),
            1 => json!({"seed": index, "top_p": 0.9}),
            2 => json!({"seed": -1 - i64::try_from(index).unwrap(), "logprobs": 5, "temperature": 1.3}),
            3 => json!({"temperature": 0, "logprobs": 2, "echo": true, "max_tokens": 3}),
            _ => {
                json!({"seed": 7, "n": 2, "best_of": 2, "top_k": 40, "frequency_penalty": 0.5, "logprobs": 0})
            }
        };
        let number = usize::try_from(index).unwrap();
        body["prompt"] = match index % 7 {
            6 => json!([prompts[number % 5], format!("{beginning} {index}")]),
            _ => format!("{} {}", prompts[number % 5], index / 3).into(),
        };
        if body["max_tokens"].is_null() {
            body["max_tokens"] = (8 + index % 9).into();
        }
        if index % 8 == 5 {
            let vector: Vec<u64> = (0..256).map(|channel| channel * index % 7).collect();
            body["steering"] =
                json!([{ "site": "blocks.2.hook_resid_pre", "vector": vector, "scale": 0.05 }]);
        }
        if index % 8 >= 5 {
            body["activations"] =
                json!({ "sites": ["resid_post5", "mlp_post0"], "positions": "all", "of": "both" });
        }
        body["stream"] = (index % 2 == 1).into();
        body
    };
    (0..100).map(kind).collect()
}

/// Sends a request and returns the response without the id and the creation time.
///
/// The chunks of a stream are grouped by choice, because their order across choices depends on load.
fn answer(server: &Running, request: &Value) -> String {
    let reply = server.post("/v1/completions", request);
    assert_eq!(reply.status, 200, "{request}: {}", reply.text());
    let mut objects = if request["stream"] == true { events(&reply.text()) } else { vec![reply.json()] };
    objects.sort_by_key(|object| object["choices"][0]["index"].as_u64());
    let plain = |mut object: Value| {
        let fields = object.as_object_mut().unwrap();
        assert!(fields.remove("id").is_some() && fields.remove("created").is_some());
        // Keys keep their order, so the rest equals the text that the server sent.
        object.to_string()
    };
    objects.into_iter().map(plain).collect::<Vec<_>>().join("\n")
}

/// Connects, sends a request and disconnects before the response is complete.
fn disturb(server: &Running, number: u64) {
    let mut client = server.connect();
    let stream = !number.is_multiple_of(3);
    let prompt = format!("{} stranger {number}", "ROMEO: O, ".repeat(usize::try_from(number % 12).unwrap()));
    let body = json!({"prompt": prompt, "max_tokens": 100, "stream": stream, "n": 1 + number % 2});
    client.send(&json_request("/v1/completions", &body));
    thread::sleep(Duration::from_millis(number * 7 % 60));
}

#[test]
fn answers_do_not_depend_on_concurrent_requests() {
    let requests = requests();
    let alone: Vec<String> = {
        let server = start_model(built_in(), "built-in", |options| options.api.activations = true);
        requests.iter().map(|request| answer(&server, request)).collect()
    };
    // Only the chunk size stays the same; cache contents, queue and batch vary.
    let server = start_model(built_in(), "built-in", |options| {
        (options.parallel, options.api.activations) = (8, true)
    });
    let (next, is_done) = (AtomicUsize::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        for thread_index in 0..3_u64 {
            let (server, is_done) = (&server, &is_done);
            scope.spawn(move || {
                let numbers = (thread_index..).step_by(3).take_while(|_| !is_done.load(Ordering::Relaxed));
                numbers.for_each(|number| disturb(server, number));
            });
        }
        let ask = || {
            while let Some(request) = requests.get(next.fetch_add(1, Ordering::Relaxed)) {
                let index = requests.iter().position(|other| std::ptr::eq(other, request)).unwrap();
                let (found, expected) = (answer(&server, request), &alone[index]);
                let difference =
                    || found.lines().zip(expected.lines()).find(|(found, expected)| found != expected);
                assert!(found == *expected, "{request}: {:#?}", difference());
            }
        };
        let clients: Vec<_> = (0..16).map(|_| scope.spawn(ask)).collect();
        let failed = clients.into_iter().filter_map(|client| client.join().err()).count();
        is_done.store(true, Ordering::Relaxed);
        assert_eq!(failed, 0, "clients that got a different answer");
    });
    assert!(server.metric("gpt2_cancelled_total") > 0.0, "other requests were canceled");
    assert_eq!(server.metric("gpt2_engine_panics_total"), 0.0);
    server.wait_for_metric("gpt2_batch_rows", 0.0);
}
