//! Classifiers over HTTP.
//!
//! `scripts/reference/heads.py` generated the checkpoints and the expected values with transformers.

use std::thread;
use std::time::Instant;

use candle_gpt2_engine::{Classifier, ModelOptions, Silent};
use candle_gpt2_testing::{CheckpointFolder, fixture_path, json_fixture, pattern};
use serde_json::{Value, json};

use super::common::{LONG, PATIENCE, Running, json_request, start, start_model};

/// Tolerance for f32 sums over three blocks, which PyTorch adds up in a different order.
const TOLERANCE: f64 = 1e-4;

fn load(folder: &std::path::Path) -> Classifier {
    let options = ModelOptions { model: folder.to_owned(), ..ModelOptions::default() };
    options.open_classifier(&Silent).unwrap().load_classifier(&Silent).unwrap()
}

fn fixture(name: &str) -> Classifier {
    load(&fixture_path("heads").join(name))
}

/// Sequence classifier with a context so long that classifying a text takes a while.
fn long() -> Classifier {
    let sizes = json!({"n_positions": LONG});
    let folder = CheckpointFolder::of("heads/sequence").with_config(sizes).with_tensors(|tensors| {
        tensors.insert("transformer.wpe.weight".into(), pattern(&[LONG, 24], 0.1, 5));
    });
    load(folder.path())
}

fn expected(name: &str) -> Value {
    json_fixture("heads/expected")[name].clone()
}

fn classify(server: &Running, body: &Value) -> Value {
    let reply = server.post("/v1/classify", body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}

#[test]
fn labels_do_not_depend_on_the_batch() {
    let (texts, expected) = (expected("texts"), expected("sequence"));
    // Five texts make three batches of at most two texts.
    let server = start_model(fixture("sequence"), "colours", |options| options.parallel = 2);
    let body = json!({"model": "colours", "input": texts});
    let answer = classify(&server, &body);
    assert_eq!(answer["model"], "colours");
    for (index, entry) in answer["data"].as_array().unwrap().iter().enumerate() {
        let best = &expected["pipeline"][index][0];
        assert_eq!((&entry["index"], &entry["label"]), (&json!(index), &best["label"]));
        let difference = entry["labels"][0]["score"].as_f64().unwrap() - best["score"].as_f64().unwrap();
        assert!(difference.abs() <= TOLERANCE, "{difference}");
        let alone = classify(&server, &json!({"input": texts[index]}));
        let difference = alone["data"][0]["probs"][0].as_f64().unwrap() - entry["probs"][0].as_f64().unwrap();
        assert!(difference.abs() <= TOLERANCE, "{difference}");
    }
    // Several concurrent clients use vLLM's path.
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(server.post("/classify", &body).json()["data"], answer["data"]));
        }
    });
    assert!(server.metric("gpt2_prompt_tokens_total") > 0.0);
    let token_classifier = start_model(fixture("token"), "kinds", |_| ());
    let answer = classify(&token_classifier, &json!({"input": texts[0]}));
    assert_eq!(answer["data"][0]["tokens"][0]["start"], 0);
}

#[test]
fn classifiers_and_language_models_reject_each_others_routes() {
    let server = start_model(fixture("sequence"), "colours", |_| ());
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "a"})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "a"}]})),
        ("/look/attention", json!({"prompt": "a"})),
        ("/look/next", json!({"prompt": "a"})),
    ] {
        let message = server.post(path, &body).refusal(400);
        assert!(message.contains("a classifier (GPT2ForSequenceClassification)"), "{path}: {message}");
    }
    server.get("/").refusal(404);
    for path in
        ["/health", "/v1/models", "/v1/models/colours", "/version", "/props", "/tokenizer_info", "/metrics"]
    {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    assert_eq!(server.post("/tokenize", &json!({"content": "a"})).status, 200);
    server.post("/v1/classify", &json!({"input": "a", "model": "other"})).refusal(404);
    assert!(server.post("/v1/classify", &json!({})).refusal(400).contains("input"));

    let message = start().post("/v1/classify", &json!({"input": "a"})).refusal(400);
    assert!(message.contains("a language model (GPT2LMHeadModel)"), "{message}");
    // A double-heads model is served as a language model.
    let options = ModelOptions { model: fixture_path("heads/double"), ..ModelOptions::default() };
    let double = start_model(options.open(&Silent).unwrap().load(&Silent).unwrap(), "double", |_| ());
    let body = json!({"prompt": [5, 6], "max_tokens": 2, "temperature": 0});
    assert_eq!(double.post("/v1/completions", &body).status, 200);
    double.post("/v1/classify", &json!({"input": "a"})).refusal(400);
}

#[test]
fn excess_texts_are_rejected_and_disconnects_block_no_one() {
    let server = start_model(long(), "long", |options| (options.parallel, options.queue) = (1, 1));
    let ids: Vec<u32> = (0..6000).map(|index| 1 + index % 299).collect();
    let body = json!({"input": [ids]});
    // One text is being computed and one waits, so the third is rejected.
    let mut codes = thread::scope(|scope| {
        let ask = || scope.spawn(|| server.post("/v1/classify", &body).status);
        [ask(), ask(), ask()].map(|handle| handle.join().unwrap())
    });
    codes.sort_unstable();
    assert_eq!(codes, [200, 200, 429]);
    let refused = server.post("/v1/classify", &json!({"input": ["a", "b"]})).refusal(400);
    assert!(refused.contains("at most 1 texts"), "{refused}");
    let start = Instant::now();
    let mut disconnected = server.connect();
    disconnected.send(&json_request("/v1/classify", &body));
    drop(disconnected);
    classify(&server, &json!({"input": "a"}));
    assert!(start.elapsed() < PATIENCE);
}

#[test]
fn shutdown_answers_running_requests() {
    let server = start_model(long(), "long", |options| options.parallel = 1);
    let ids: Vec<u32> = (0..3000).map(|index| 1 + index % 299).collect();
    let mut client = server.connect();
    client.send(&json_request("/v1/classify", &json!({"input": [ids, ids]})));
    // The tokens are counted before the first batch is computed.
    server.wait_for_metric("gpt2_prompt_tokens_total", 6000.0);
    server.handle.stop();
    let reply = client.reply();
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.json()["data"].as_array().unwrap().len(), 2);
    server.join().unwrap();
}
