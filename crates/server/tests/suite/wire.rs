//! What goes over the wire is what the library makes.

use candle_gpt2_generation::{GenerationConfig, score};
use serde_json::{Value, json};

use super::common::{built_in, start_model};

/// A seed gives the text that the library draws from it; text `j` of prompt `i` is drawn from stream `i · n + j`.
#[test]
fn texts_are_those_of_the_library() {
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
        for of_prompt in 0..2 {
            let index = prompt * 2 + of_prompt;
            let choice = &reply["choices"][index];
            assert_eq!((&choice["index"], &choice["text"]), (&json!(index), &json!(texts[index])));
        }
    }
}

/// The prompts of a call that are more than texts are made at once, in their order.
#[test]
fn a_call_may_have_more_prompts_than_there_are_rows() {
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

/// An echo tells what scoring the text tells. Scoring adds in another order than a server, whose rows have a cache: a few
/// roundings of f32 through all blocks.
#[test]
fn an_echo_scores_the_prompt() {
    const TOLERANCE: f64 = 1e-4;
    let model = built_in();
    let ids = model.vocabulary().encode("To be, or not to be, that is the question: 日本").unwrap();
    let expected = score(model.model(), &ids, model.config().n_positions, 0, &|_| ()).unwrap();
    let server = start_model(model, "built-in", |_| ());
    let body = json!({"prompt": [ids], "echo": true, "logprobs": 1, "max_tokens": 1, "temperature": 0});
    for _ in ["computed", "from what was kept"] {
        let reply = server.post("/v1/completions", &body).json();
        let logprobs = &reply["choices"][0]["logprobs"];
        let found = logprobs["token_logprobs"].as_array().unwrap();
        assert_eq!((found.len(), &found[0]), (ids.len() + 1, &Value::Null));
        for (found, expected) in found.iter().zip(&expected.logprobs).skip(1) {
            assert!((found.as_f64().unwrap() - expected.unwrap()).abs() < TOLERANCE, "{found}, {expected:?}");
        }
        let is_told_twice = |(own, top): (&Value, &Value)| {
            top.as_object().unwrap().values().any(|other| other.as_f64() == own.as_f64())
        };
        let tops = logprobs["top_logprobs"].as_array().unwrap();
        assert!(found.iter().zip(tops).skip(1).all(is_told_twice), "{logprobs}");
    }
    assert!(server.metric("gpt2_cached_tokens_total") > 0.0);
}
