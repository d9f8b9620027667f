//! `/v1/activations`, and completions with activations or steering, over HTTP.

use std::time::Instant;

use candle_core::Device;
use serde_json::json;

use super::common::{LONG, PATIENCE, json_request, long_stream, start, start_with};
use super::limits::start_long;

#[test]
fn activations_are_sent_as_json_or_safetensors() {
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
    // The server never sends a media type with weight 0.
    let unwanted = ["Content-Type: application/json", "Accept: application/octet-stream;q=0, */*"];
    let plain = server.request("POST", "/v1/activations", &unwanted, text.as_bytes());
    assert_eq!((plain.status, plain.header("content-type")), (200, Some("application/json")));
    // Errors are JSON regardless of the requested type.
    let refused = server.request("POST", "/v1/activations", &lines, br#"{"sites": ["z9"]}"#);
    assert!(refused.refusal(400).starts_with("sites[0]: `z9`: block 9 is out of range"));
    // Other routes never send files.
    let plain = server.request("POST", "/v1/completions", &lines, br#"{"prompt": [5], "max_tokens": 1}"#);
    assert_eq!((plain.status, plain.header("content-type")), (200, Some("application/json")));
    assert!(server.metric("gpt2_prompt_tokens_total") >= 7.0);
    server.wait_for_metric("gpt2_batch_rows", 0.0);
}

#[test]
fn activations_are_rejected_without_the_option() {
    let server = start();
    let refusal = server.post("/v1/activations", &json!({ "sites": ["resid_post0"] })).refusal(400);
    assert!(refusal.ends_with("start it with --activations"), "{refusal}");
    let body = json!({ "prompt": "a", "activations": { "sites": ["resid_post0"] } });
    assert!(server.post("/v1/completions", &body).refusal(400).starts_with("activations: "));
}

/// The memory budget admits four maximum-size requests at a time; further requests are rejected.
#[test]
fn concurrent_requests_share_the_activation_memory() {
    const NUMBER: usize = 4;
    let server = start_long(|options| {
        options.api.activations = true;
        options.api.limits.max_activation_bytes = NUMBER;
        options.kv_tokens = Some(6 * LONG);
    });
    let mut recorded = long_stream();
    recorded["activations"] = json!({ "sites": ["ln_final.hook_scale"] });
    let client = |_| {
        let mut client = server.connect();
        client.send(&json_request("/v1/completions", &recorded));
        client
    };
    let mut running: Vec<_> = (0..4).map(client).collect();
    server.wait_for_metric("gpt2_batch_rows", 4.0);
    for (path, body) in [
        ("/v1/completions", &recorded),
        ("/v1/activations", &json!({ "prompt": [5], "sites": ["ln_final.hook_scale"] })),
    ] {
        let reply = server.post(path, body);
        assert!(reply.refusal(503).starts_with("not enough free memory for the activations"));
        assert_eq!(reply.json()["error"]["code"], "server_overloaded");
        assert_eq!(reply.header("retry-after"), Some("1"));
    }
    assert_eq!(server.metric("gpt2_rejected_total{reason=\"activations_full\"}"), 2.0);
    // Requests without activations need no memory from this budget.
    assert_eq!(server.post("/v1/completions", &json!({ "prompt": [5], "max_tokens": 2 })).status, 200);
    drop(running.pop());
    // The canceled request and each sent response soon free their memory.
    let body = json!({ "prompt": [5], "sites": ["ln_final.hook_scale"] });
    for _ in 0..2 {
        let started = Instant::now();
        while server.post("/v1/activations", &body).status != 200 {
            assert!(started.elapsed() < PATIENCE);
        }
    }
}

/// A disconnect frees a steered completion's slot long before the completion would end.
#[test]
fn disconnect_cancels_a_steered_completion() {
    let server = start_long(|options| {
        options.api.activations = true;
        options.parallel = 1;
    });
    let mut body = long_stream();
    body["steering"] = json!([{ "site": "resid_pre1", "vector": vec![1.0; 28] }]);
    for _ in 0..2 {
        drop(server.occupy(&body));
        let next = server.post("/v1/completions", &json!({ "prompt": [5], "max_tokens": 2 }));
        assert_eq!(next.status, 200, "{}", next.text());
    }
    assert_eq!(server.metric("gpt2_engine_panics_total"), 0.0);
    let generated = server.metric("gpt2_generated_tokens_total");
    assert!(
        generated < LONG as f64 / 2.0,
        "{generated} tokens; two full completions would have {}",
        2 * LONG
    );
}
