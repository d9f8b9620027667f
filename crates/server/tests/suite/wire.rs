//! Responses over HTTP equal the library's output.

use candle_gpt2_generation::{GenerationConfig, score};
use serde_json::{Value, json};

use super::common::{built_in, built_in_f32, start_model};

/// With the same seed, completions over HTTP equal the library's.
///
/// Completion `j` of prompt `i` samples from stream `i · n + j`.
#[test]
fn completions_match_the_library() {
    let model = built_in();
    let prompts = ["One day", "My lord, the é"];
    let body =
        json!({"prompt": prompts, "n": 2, "seed": 5, "temperature": 0.9, "top_p": 0.95, "max_tokens": 20});
    let server = start_model(model.clone(), "built-in", |_| ());
    let reply = server.post("/v1/completions", &body).json();
    let defaults = model.defaults().unwrap();
    for (prompt, text) in prompts.iter().enumerate() {
        let config = GenerationConfig {
            do_sample: true,
            temperature: 0.9,
            top_p: 0.95,
            seed: 5,
            max_new_tokens: 20,
            num_return_sequences: 4,
            ..defaults.config().clone()
        };
        let config = defaults.complete(config).unwrap();
        let ids = model.vocabulary().encode(text).unwrap();
        let request = candle_gpt2_generation::Request::new(ids, config);
        let tokenizer = model.vocabulary().tokenizer().cloned();
        let tokens =
            candle_gpt2_generation::BatchGenerator::new(model.model(), vec![request], 4, tokenizer).unwrap();
        let mut texts = vec![String::new(); 4];
        tokens.map(Result::unwrap).for_each(|token| texts[token.sequence].push_str(&token.text));
        for sample in 0..2 {
            let index = prompt * 2 + sample;
            let choice = &reply["choices"][index];
            assert_eq!((&choice["index"], &choice["text"]), (&json!(index), &json!(texts[index])));
        }
    }
}

/// A request may have more prompts than fit in a batch; the completions stay in order.
#[test]
fn request_may_have_more_prompts_than_batch_rows() {
    let server = start_model(built_in(), "built-in", |options| options.parallel = 3);
    let one = |prompt: &str| {
        let body = json!({"prompt": prompt, "temperature": 0, "max_tokens": 6});
        server.post("/v1/completions", &body).json()["choices"][0]["text"].clone()
    };
    let prompts: Vec<String> = (0..17).map(|number| format!("Act {number}:")).collect();
    let alone: Vec<Value> = prompts.iter().map(|prompt| one(prompt)).collect();
    let body = json!({"prompt": prompts, "temperature": 0, "max_tokens": 6});
    let reply = server.post("/v1/completions", &body).json();
    let choices = reply["choices"].as_array().unwrap();
    assert_eq!(
        choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect::<Vec<_>>(),
        (0..17).collect::<Vec<_>>()
    );
    assert_eq!(choices.iter().map(|choice| choice["text"].clone()).collect::<Vec<_>>(), alone);
}

/// An echo returns the same log-probabilities as `score`.
///
/// The server sums f32 values in a different order, because it uses a KV cache. The rounding differences
/// accumulate through all blocks.
#[test]
fn echo_logprobs_match_score() {
    const TOLERANCE: f64 = 1e-4;
    let model = built_in_f32();
    let ids = model.vocabulary().encode("To be, or not to be, that is the question: 日本").unwrap();
    let expected = score(model.model(), &ids, model.config().n_positions, 0, &|_| ()).unwrap();
    let server = start_model(model, "built-in", |_| ());
    let body = json!({"prompt": [ids], "echo": true, "logprobs": 1, "max_tokens": 1, "temperature": 0});
    for _ in ["computed", "cached"] {
        let reply = server.post("/v1/completions", &body).json();
        let logprobs = &reply["choices"][0]["logprobs"];
        let found = logprobs["token_logprobs"].as_array().unwrap();
        assert_eq!((found.len(), &found[0]), (ids.len() + 1, &Value::Null));
        for (found, expected) in found.iter().zip(&expected.logprobs).skip(1) {
            assert!((found.as_f64().unwrap() - expected.unwrap()).abs() < TOLERANCE, "{found}, {expected:?}");
        }
        let is_in_top_logprobs = |(own, top): (&Value, &Value)| {
            top.as_object().unwrap().values().any(|other| other.as_f64() == own.as_f64())
        };
        let tops = logprobs["top_logprobs"].as_array().unwrap();
        assert!(found.iter().zip(tops).skip(1).all(is_in_top_logprobs), "{logprobs}");
    }
    assert!(server.metric("gpt2_cached_tokens_total") > 0.0);
}
