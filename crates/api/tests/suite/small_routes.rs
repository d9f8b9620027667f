//! Tokenizer and model routes, and routes that describe the server.

use candle_gpt2_api::{Endpoint, model};
use serde_json::{Value, json};

use crate::common::{reply, tiny};

fn tokens(body: &Value) -> Value {
    serde_json::from_str(&reply(Endpoint::Tokenize, body.to_string().as_bytes()).unwrap()).unwrap()
}

#[test]
fn tokenize_accepts_every_dialect() {
    let ids = tiny().ids("the é word");
    let plain = json!({ "count": ids.len(), "max_model_len": 48, "tokens": ids, "token_strs": null });
    assert_eq!(tokens(&json!({ "content": "the é word" })), plain);
    assert_eq!(tokens(&json!({ "prompt": "the é word", "add_special_tokens": false })), plain);
    assert_eq!(tokens(&json!({ "model": "tiny", "prompt": "the é word", "unknown": null })), plain);
    // lm-evaluation-harness reads the first token of this response.
    assert_eq!(
        tokens(&json!({ "prompt": "<|endoftext|>", "add_special_tokens": false }))["tokens"],
        json!([0])
    );
    assert_eq!(tokens(&json!({ "prompt": "" }))["tokens"], json!([]));
    let strings = tokens(&json!({ "prompt": "é中", "return_token_strs": true }));
    assert_eq!(
        strings["token_strs"],
        json!(["bytes:\\xc3", "bytes:\\xa9", "bytes:\\xe4", "bytes:\\xb8", "bytes:\\xad"])
    );
    let pieces = tokens(&json!({ "content": "the", "with_pieces": true }));
    assert_eq!(pieces["tokens"], json!([{ "id": tiny().ids("the")[0], "piece": "the" }]));
}

#[test]
fn detokenize_returns_the_text() {
    let text = |tokens: Value| {
        let body = json!({ "tokens": tokens }).to_string();
        serde_json::from_str::<Value>(&reply(Endpoint::Detokenize, body.as_bytes()).unwrap()).unwrap()
    };
    let ids = tiny().ids("the é word<|endoftext|>");
    assert_eq!(
        text(json!(ids)),
        json!({ "content": "the é word<|endoftext|>", "prompt": "the é word<|endoftext|>" })
    );
    assert_eq!(text(json!([])), json!({ "content": "", "prompt": "" }));
    let error = reply(Endpoint::Detokenize, b"{\"tokens\": [1, 300]}").unwrap_err();
    assert_eq!(
        error.to_string(),
        "tokens[1]: expected a token id below the vocabulary size of 300, found 300"
    );
    let error = reply(Endpoint::Detokenize, b"{}").unwrap_err();
    assert_eq!(error.to_string(), "tokens: expected a list of token ids, found nothing");
    let error = reply(Endpoint::Tokenize, b"{\"content\": \"a\", \"parse_special\": false}").unwrap_err();
    assert_eq!(
        error.to_string(),
        "parse_special: expected true, because names of special tokens are always parsed, found false"
    );
}

#[test]
fn tokenizer_info_lists_the_special_tokens() {
    let info: Value = serde_json::from_str(&reply(Endpoint::TokenizerInfo, b"").unwrap()).unwrap();
    assert_eq!(
        info,
        json!({ "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "pad_token": null, "chat_template": null,
                "tokenizer_class": "GPT2Tokenizer" })
    );
}

#[test]
fn model_is_listed_under_its_name_and_aliases() {
    let list: Value = serde_json::from_str(&reply(Endpoint::Models, b"").unwrap()).unwrap();
    assert_eq!(list["object"], "list");
    let ids: Vec<&Value> = list["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(ids, ["tiny", "owner/tiny"]);
    let parameters = tiny().model.model().parameter_count();
    let expected = json!({
        "id": "owner/tiny", "object": "model", "created": 1_700_000_000, "owned_by": "gpt2", "root": "tiny",
        "max_model_len": 48, "meta": { "n_vocab": 300, "n_ctx_train": 48, "n_embd": 28, "n_params": parameters },
    });
    assert_eq!(list["data"][1], expected);
    for id in ["owner/tiny", "owner%2Ftiny"] {
        assert_eq!(serde_json::from_str::<Value>(&model(id, &tiny().served).unwrap()).unwrap(), expected);
    }
    let error = model("other", &tiny().served).unwrap_err();
    assert_eq!((error.status(), error.code()), (404, Some("model_not_found")));
}

#[test]
fn health_version_and_props_describe_the_server() {
    assert_eq!(reply(Endpoint::Health, b"").unwrap(), "{\"status\":\"ok\"}");
    assert_eq!(
        reply(Endpoint::Version, b"").unwrap(),
        format!("{{\"version\":\"{}\"}}", env!("CARGO_PKG_VERSION"))
    );
    let props: Value = serde_json::from_str(&reply(Endpoint::Props, b"").unwrap()).unwrap();
    assert_eq!((&props["total_slots"], &props["model_path"]), (&json!(4), &json!("tiny")));
    assert_eq!(props["default_generation_settings"]["n_ctx"], 48);
    assert_eq!(props["default_generation_settings"]["params"]["n_predict"], 100);
}
