//! `/v1/activations`, and completions that show and change what is inside the model, over the wire.

use candle_core::Device;
use serde_json::json;

use super::common::{json_request, start, start_with};

#[test]
fn activations_come_as_json_or_as_a_file() {
    let server = start_with(|options| options.api.activations = true);
    let body = json!({ "prompt": [5, 6, 7], "sites": ["resid_post", "pattern0"], "positions": "all" });
    let reply = server.post("/v1/activations", &body);
    assert_eq!(
        (reply.status, reply.header("content-type")),
        (200, Some("application/json")),
        "{}",
        reply.text()
    );
    let answer = reply.json();
    let entries = answer["data"][0]["activations"].as_array().unwrap();
    assert_eq!(entries.len(), 4, "three blocks, and a pattern");
    let text = body.to_string();
    let lines = ["Content-Type: application/json", "Accept: application/octet-stream"];
    let file = server.request("POST", "/v1/activations", &lines, text.as_bytes());
    assert_eq!((file.status, file.header("content-type")), (200, Some("application/octet-stream")));
    let tensors = candle_core::safetensors::load_buffer(&file.body, &Device::Cpu).unwrap();
    for entry in entries {
        assert_eq!(json!(tensors[entry["site"].as_str().unwrap()].dims()), entry["shape"]);
    }
    // What is wrong is JSON, whatever was wanted.
    let refused = server.request("POST", "/v1/activations", &lines, br#"{"sites": ["z9"]}"#);
    assert!(refused.refusal(400).starts_with("sites[0]: `z9`: there is no block 9"));
    // Other routes have no files.
    let plain = server.request("POST", "/v1/completions", &lines, br#"{"prompt": [5], "max_tokens": 1}"#);
    assert_eq!((plain.status, plain.header("content-type")), (200, Some("application/json")));
    assert!(server.metric("gpt2_prompt_tokens_total") >= 7.0);
    server.wait_for_metric("gpt2_batch_rows", 0.0);
}

#[test]
fn a_server_without_the_option_looks_nowhere() {
    let server = start();
    let refusal = server.post("/v1/activations", &json!({ "sites": ["resid_post0"] })).refusal(400);
    assert!(refusal.ends_with("start it with --activations"), "{refusal}");
    let body = json!({ "prompt": "a", "activations": { "sites": ["resid_post0"] } });
    assert!(server.post("/v1/completions", &body).refusal(400).starts_with("activations: "));
}

/// A client that goes away in the middle of a steered text frees its place.
#[test]
fn a_steered_text_ends_with_its_client() {
    let server = start_with(|options| options.api.activations = true);
    let body = json!({
        "prompt": [5], "max_tokens": 40, "n": 4, "stream": true, "ignore_eos": true,
        "steering": [{ "site": "resid_pre1", "vector": vec![1.0; 28] }],
    });
    for _ in 0..5 {
        let mut client = server.connect();
        client.send(&json_request("/v1/completions", &body));
        drop(client);
    }
    server.wait_for_metric("gpt2_batch_rows", 0.0);
    assert_eq!(server.metric("gpt2_engine_panics_total"), 0.0);
    assert_eq!(server.post("/v1/completions", &json!({ "prompt": [5], "max_tokens": 2 })).status, 200);
}
