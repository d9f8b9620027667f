//! Accepted values for every request field, and the effects of each field.

use candle_gpt2_api::{ApiOptions, Call, ChatRequest, ChatTemplateChoice, CompletionRequest, ServedModel};
use candle_gpt2_generation::GenerationConfig;
use serde_json::{Value, json};

use crate::common::{Tested, call, error, options, tiny, tiny_with};

/// Body with one additional field.
pub(crate) fn with(name: &str, value: Value) -> Value {
    let mut body = json!({ "prompt": "Wh", "max_tokens": 4 });
    body[name] = value;
    body
}

/// Generation configuration that results from a body.
fn config(body: &Value) -> GenerationConfig {
    (*call(body).unwrap().requests[0].config).clone()
}

#[test]
fn empty_request_uses_the_default_config() {
    let call = call(&json!({})).unwrap();
    let request = &call.requests[0];
    assert_eq!((request.prompt.as_slice(), call.requests.len(), call.stream), (&[0][..], 1, false));
    let expected = GenerationConfig {
        max_new_tokens: 47, // 100 is capped by the context of 48
        do_sample: true,
        eos_token_id: vec![0],
        seed: request.config.seed,
        ..GenerationConfig::default()
    };
    assert_eq!(*request.config, expected);
    assert_eq!(
        (request.logprobs, request.prompt_logprobs, request.reuse, request.stream),
        (None, None, None, 0)
    );
}

/// Omitted fields default to the values in the checkpoint's file, as in `gpt2 generate`.
///
/// With `use_generation_config: false`, the file has no effect.
#[test]
fn generation_config_fills_omitted_fields() {
    let file = json!({
        "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5, "max_new_tokens": 3,
        "num_beams": 4, "no_repeat_ngram_size": 2, "seed": 4, "num_return_sequences": 4,
    });
    let mut tested = tiny_with("generation_config.json", &file.to_string(), ChatTemplateChoice::Checkpoint);
    let config = |tested: &Tested, body: &Value| {
        let request = CompletionRequest::parse(body.to_string().as_bytes()).unwrap();
        let call = Call::of_completion(request, &tested.served, None).unwrap();
        GenerationConfig { seed: 0, ..(*call.requests[0].config).clone() }
    };
    let defaults = GenerationConfig {
        do_sample: true,
        eos_token_id: config(&tested, &json!({})).eos_token_id,
        max_new_tokens: 47,
        ..GenerationConfig::default()
    };
    let stated = GenerationConfig {
        temperature: 0.5,
        top_k: 7,
        top_p: 0.9,
        min_p: Some(0.1),
        repetition_penalty: 1.5,
        no_repeat_ngram_size: 2,
        max_new_tokens: 3,
        ..defaults.clone()
    };
    assert_eq!(config(&tested, &json!({})), stated);
    let body = json!({
        "temperature": 1, "top_k": 50, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "no_repeat_ngram_size": 0, "max_tokens": 47,
    });
    assert_eq!(config(&tested, &body), defaults);
    let greedy = config(&tested, &json!({ "temperature": 0 }));
    assert_eq!((greedy.do_sample, greedy.top_k), (false, 7));
    let without_file = ApiOptions { use_generation_config: false, ..options() };
    tested.served = ServedModel::new(&tested.model, without_file).unwrap();
    assert_eq!(config(&tested, &json!({})), defaults);
}

#[test]
fn greedy_checkpoint_samples_only_on_request() {
    let file = json!({ "do_sample": false, "repetition_penalty": 1.2 }).to_string();
    let tested = tiny_with("generation_config.json", &file, ChatTemplateChoice::Checkpoint);
    for (body, samples) in [
        (json!({}), false),
        (json!({ "seed": 3 }), false),
        (json!({ "temperature": 0.7 }), true),
        (json!({ "temperature": 0 }), false),
        (json!({ "top_k": 5 }), true),
        (json!({ "top_p": 0.9 }), true),
        (json!({ "top_p": 0 }), false),
        (json!({ "repetition_penalty": 1 }), false),
    ] {
        let request = CompletionRequest::parse(body.to_string().as_bytes()).unwrap();
        let call = Call::of_completion(request, &tested.served, None).unwrap();
        assert_eq!(call.requests[0].config.do_sample, samples, "{body}");
    }
}

#[test]
fn null_counts_as_omitted_in_every_field() {
    let names: Vec<&str> = CompletionRequest::fields().collect();
    let mut body = json!({});
    for name in &names {
        body[*name] = Value::Null;
    }
    for name in ["suffix", "use_beam_search", "prompt_logprobs", "tools", "grammar", "unknown"] {
        body[name] = Value::Null;
    }
    let (omitted, nulls) = (call(&json!({})).unwrap(), call(&body).unwrap());
    let without_seed = |call: &Call| GenerationConfig { seed: 0, ..(*call.requests[0].config).clone() };
    assert_eq!(without_seed(&nulls), without_seed(&omitted));
    let mut chat = json!({});
    for name in ChatRequest::fields() {
        chat[name] = Value::Null;
    }
    chat["messages"] = json!([{ "role": "user", "content": null, "name": null }]);
    ChatRequest::parse(chat.to_string().as_bytes()).unwrap();
}

#[test]
fn boundary_values_are_accepted() {
    let parsed = |name: &str, value: Value| config(&with(name, value));
    assert_eq!(parsed("max_tokens", json!(0)).max_new_tokens, 0);
    assert_eq!(parsed("max_tokens", json!(46)).max_new_tokens, 46);
    assert_eq!(parsed("max_tokens", json!(16.0)).max_new_tokens, 16);
    assert_eq!(parsed("n_predict", json!(4)).max_new_tokens, 4);
    assert_eq!(parsed("temperature", json!(2)).temperature, 2.0);
    assert_eq!(parsed("top_p", json!(1)).top_p, 1.0);
    assert_eq!(
        (parsed("top_k", json!(-1)).top_k, parsed("top_k", json!(0)).top_k, parsed("top_k", json!(7)).top_k),
        (0, 0, 7)
    );
    assert_eq!((parsed("min_p", json!(0)).min_p, parsed("min_p", json!(1)).min_p), (None, Some(1.0)));
    assert_eq!(parsed("typical_p", json!(1)).typical_p, 1.0);
    assert_eq!(parsed("presence_penalty", json!(-2)).presence_penalty, -2.0);
    assert_eq!(parsed("frequency_penalty", json!(2)).frequency_penalty, 2.0);
    assert_eq!(parsed("repeat_penalty", json!(1.3)).repetition_penalty, 1.3);
    assert_eq!(parsed("no_repeat_ngram_size", json!(3)).no_repeat_ngram_size, 3);
    // Fields that only the option table defines.
    assert_eq!(parsed("encoder_no_repeat_ngram_size", json!(2)).encoder_no_repeat_ngram_size, 2);
    assert_eq!(parsed("encoder_repetition_penalty", json!(1.5)).encoder_repetition_penalty, 1.5);
    assert_eq!(parsed("seed", json!(i64::MIN)).seed, 1 << 63);
    assert_eq!(parsed("seed", json!(-1)).seed, u64::MAX);
    assert_eq!(parsed("seed", json!(9_007_199_254_740_993_i64)).seed, 9_007_199_254_740_993);
    assert_eq!(parsed("min_tokens", json!(4)).min_new_tokens, 4);
    assert_eq!(
        parsed("logit_bias", json!({ "5": -100, "6": 0.5 })).sequence_bias,
        [(vec![5], -100.0), (vec![6], 0.5)]
    );
    assert_eq!(parsed("stop", json!([])).stop_strings, Vec::<String>::new());
    assert_eq!(parsed("stop", json!("a")).stop_strings, ["a"]);
    assert_eq!(parsed("best_of", json!(0)).num_return_sequences, 1);
    assert_eq!(parsed("best_of", json!(16)).num_return_sequences, 16);
    assert_eq!(parsed("n", json!(16)).num_return_sequences, 16);
}

#[test]
fn zero_temperature_or_top_p_is_greedy() {
    for (name, value) in [("temperature", json!(0)), ("temperature", json!(1e-9)), ("top_p", json!(0))] {
        let found = config(&with(name, value));
        assert!(!found.do_sample, "{name}");
        // All completions would be identical, so only one is generated.
        let mut body = with(name, json!(0));
        body["n"] = json!(3);
        assert_eq!(config(&body).num_return_sequences, 1, "{name}");
    }
}

#[test]
fn stop_tokens_combine_the_model_and_the_request() {
    assert_eq!(config(&with("ignore_eos", json!(true))).eos_token_id, Vec::<u32>::new());
    assert_eq!(config(&with("stop_token_ids", json!([7, 8]))).eos_token_id, [0, 7, 8]);
    let special = config(&with("stop", json!(["\n", "<|endoftext|>"])));
    assert_eq!((special.eos_token_id, special.stop_strings), (vec![0, 0], vec!["\n".to_owned()]));
    let mut body = with("stop", json!("<|endoftext|>"));
    body["ignore_eos"] = json!(true);
    assert_eq!(
        config(&body).eos_token_id,
        [0],
        "a stop string that is a token ends the completion despite ignore_eos"
    );
}

#[test]
fn bad_words_are_banned_with_and_without_a_leading_space() {
    let ids = |text: &str| tiny().ids(text);
    assert_eq!(
        config(&with("bad_words", json!(["the", " word", "word"]))).bad_words_ids,
        [ids("the"), ids(" the"), ids("word"), ids(" word"),]
    );
}

#[test]
fn unsupported_fields_with_empty_values_are_accepted() {
    for name in ["suffix", "use_beam_search", "prompt_logprobs", "tools", "functions", "grammar"] {
        for value in [json!(null), json!(false), json!(""), json!([]), json!({})] {
            call(&with(name, value)).unwrap();
        }
    }
    for (name, value) in [
        ("user", json!({ "any": ["thing"] })),
        ("metadata", json!(5)),
        ("store", json!(true)),
        ("service_tier", json!("auto")),
        ("priority", json!(-7)),
        ("add_special_tokens", json!(false)),
        ("skip_special_tokens", json!(true)),
        ("what_nobody_knows", json!([[[]]])),
        ("response_format", json!({ "type": "text" })),
    ] {
        call(&with(name, value)).unwrap();
    }
}

#[test]
fn aliases_must_not_have_different_values() {
    let error = error(&json!({ "prompt": "a", "max_tokens": 3, "n_predict": 4 }));
    assert_eq!(
        error.to_string(),
        "n_predict and max_tokens are aliases with different values; set only one of them"
    );
    assert_eq!(config(&json!({ "prompt": "a", "max_tokens": 3, "n_predict": 3 })).max_new_tokens, 3);
    assert_eq!(config(&json!({ "prompt": "a", "max_tokens": 3, "n_predict": null })).max_new_tokens, 3);
}

#[test]
fn best_of_is_at_least_n_and_equals_n_in_a_stream() {
    let message = error(&json!({ "n": 3, "best_of": 2 })).to_string();
    assert_eq!(message, "best_of: expected at least n, which is 3, found 2");
    let message = error(&json!({ "n": 2, "best_of": 3, "stream": true })).to_string();
    assert_eq!(message, "best_of: expected the value of n when stream is true, found 3");
    for body in [
        json!({ "n": 2, "best_of": 2, "stream": true }),
        json!({ "best_of": 1 }),
        json!({ "n": 3, "best_of": null }),
    ] {
        call(&body).unwrap();
    }
}

#[test]
fn total_request_size_is_limited() {
    let message = error(&json!({ "prompt": vec!["a"; 65], "max_tokens": 1 })).to_string();
    assert_eq!(message, "prompt: this server accepts at most 64 prompts, found 65");
    let message = error(&json!({ "prompt": vec!["a"; 64], "n": 16, "max_tokens": 40 })).to_string();
    assert_eq!(
        message,
        "max_tokens: this server accepts at most 40000 new tokens (prompts × completions × max_tokens), found 40960"
    );
    let found = error(&json!({ "prompt": "a", "max_tokens": 10_000_000 }));
    assert_eq!(found.code(), Some("context_length_exceeded"), "{found}");
    let message = error(&json!({ "prompt": vec!["a"; 2049] })).to_string();
    assert_eq!(message, "prompt: expected at most 2048 items, found more");
}

#[test]
fn context_overflow_is_rejected_with_token_counts() {
    assert_eq!(
        call(&json!({ "prompt": vec![5; 47], "max_tokens": 1 })).unwrap().requests[0].prompt.len(),
        47
    );
    let found = error(&json!({ "prompt": [[5], vec![5; 48]], "max_tokens": 1 }));
    assert_eq!((found.code(), found.param()), (Some("context_length_exceeded"), Some("prompt[1]")));
    let expected = json!({ "error": {
        "message": "prompt[1]: this model's context is 48 tokens, but 49 were requested: 48 in the prompt and 1 for the \
                    completion (max_tokens); shorten the prompt, or request fewer",
        "type": "invalid_request_error", "param": "prompt[1]", "code": "context_length_exceeded",
    } });
    assert_eq!(serde_json::from_str::<Value>(&found.to_json()).unwrap(), expected);
    // A text of a million characters is rejected for its length, before it is tokenized.
    let found = error(&json!({ "prompt": "a".repeat(1_000_000), "max_tokens": 1 }));
    assert_eq!(found.code(), Some("context_length_exceeded"));
    assert!(
        found
            .to_string()
            .starts_with("prompt: this model's context is 48 tokens, but the prompt alone has at least")
    );
}

#[test]
fn truncation_keeps_the_end_of_the_prompt() {
    let prompt = |body: &Value| call(body).unwrap().requests[0].prompt.clone();
    let long: Vec<u32> = (1..100).collect();
    let body = json!({ "prompt": long, "max_tokens": 8, "truncate_prompt_tokens": 3 });
    assert_eq!(prompt(&body), [97, 98, 99]);
    let body = json!({ "prompt": long, "max_tokens": 8, "truncate_prompt_tokens": -1 });
    assert_eq!(prompt(&body), (60..100).collect::<Vec<u32>>());
    let message =
        error(&json!({ "prompt": long, "max_tokens": 8, "truncate_prompt_tokens": 41 })).to_string();
    assert!(message.contains("41 in the prompt and 8 for the completion"), "{message}");
    let text = "word ".repeat(100);
    let ids = tiny().ids(&text);
    let body = json!({ "prompt": text, "truncate_prompt_tokens": 5 });
    assert_eq!(prompt(&body), ids[ids.len() - 5..]);
}

/// Only the end of a long text is encoded; if the text has words, the last tokens stay the same.
#[test]
fn truncation_handles_prompts_of_any_length() {
    let prompt = |body: &Value| call(body).unwrap().requests[0].prompt.clone();
    // The multi-byte characters and offsets make the last MiB begin inside a character.
    for (number, word) in ["wörd ", "the sea ", "中\n"].into_iter().enumerate() {
        let text = format!("{}{}, the end.", "x".repeat(number), word.repeat(1_200_000 / word.len()));
        let ids = tiny().ids(&text);
        let body = json!({ "prompt": text, "truncate_prompt_tokens": 10, "max_tokens": 2 });
        assert_eq!(prompt(&body), ids[ids.len() - 10..], "{word}");
        let body = json!({ "prompt": [text, text], "truncate_prompt_tokens": -1, "max_tokens": 8 });
        assert_eq!(prompt(&body), ids[ids.len() - 40..], "{word}");
    }
    let long = "a".repeat(2_000_000);
    assert_eq!(prompt(&json!({ "prompt": long, "truncate_prompt_tokens": 10 })).len(), 10);
    let found = error(&json!({ "prompt": long, "truncate_prompt_tokens": 47, "max_tokens": 2 }));
    assert_eq!(found.code(), Some("context_length_exceeded"));
    assert_eq!(error(&json!({ "prompt": long })).code(), Some("context_length_exceeded"));
}

#[test]
fn model_field_accepts_only_known_names() {
    for name in ["tiny", "owner/tiny"] {
        call(&json!({ "model": name })).unwrap();
    }
    let found = error(&json!({ "model": "../../etc/passwd" }));
    assert_eq!((found.status(), found.code(), found.param()), (404, Some("model_not_found"), Some("model")));
    assert_eq!(found.to_string(), "model not found; this server serves `tiny`");
}

#[test]
fn seed_streams_and_cache_reuse_follow_the_request() {
    let body =
        json!({ "prompt": ["a", "b", "c"], "n": 2, "best_of": 3, "seed": 7, "logprobs": 2, "echo": true });
    let found = call(&body).unwrap();
    let streams: Vec<u64> = found.requests.iter().map(|request| request.stream).collect();
    assert_eq!(streams, [0, 3, 6]);
    for request in &found.requests {
        assert_eq!((request.logprobs, request.prompt_logprobs), (Some(2), Some(2)));
        assert_eq!((request.config.seed, request.config.num_return_sequences), (7, 3));
    }
    // Ranking `best_of` candidates needs log-probabilities, even if the response omits them.
    assert_eq!(call(&json!({ "n": 2, "best_of": 3 })).unwrap().requests[0].logprobs, Some(0));
    let reuse = |body: &Value, caller| {
        let request = CompletionRequest::parse(body.to_string().as_bytes()).unwrap();
        Call::of_completion(request, &tiny().served, caller).unwrap().requests[0].reuse
    };
    assert_eq!(reuse(&json!({}), Some(5)), Some(5));
    assert_eq!(reuse(&json!({ "cache_prompt": false }), Some(5)), None);
    assert_eq!(reuse(&json!({ "cache_salt": "a" }), None), None);
    let salted = reuse(&json!({ "cache_salt": "a" }), Some(5));
    assert_eq!(salted, reuse(&json!({ "cache_salt": "a" }), Some(5)));
    assert_ne!(salted, reuse(&json!({ "cache_salt": "b" }), Some(5)));
    assert_ne!(salted, reuse(&json!({ "cache_salt": "a" }), Some(6)));
    assert_ne!(salted, Some(5));
}

#[test]
fn omitted_seed_is_random_and_fits_a_json_number() {
    let seed = |body: &Value| config(body).seed;
    let (first, second) = (seed(&json!({})), seed(&json!({})));
    assert_ne!(first, second);
    assert!(first < 1 << 53 && second < 1 << 53, "{first}, {second}");
    assert_eq!(seed(&json!({ "temperature": 0 })), 0);
}
