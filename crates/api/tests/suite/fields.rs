//! Every field: what it takes, what it means, and what is said of what it does not take.

use gpt2_api::{ChatRequest, CompletionRequest};
use gpt2_generation::GenerationConfig;
use serde_json::{Value, json};

use crate::common::{call, error, tiny};

/// A body with one more field.
fn with(name: &str, value: Value) -> Value {
    let mut body = json!({ "prompt": "Wh", "max_tokens": 4 });
    body[name] = value;
    body
}

/// The configuration that a body leads to.
fn config(body: &Value) -> GenerationConfig {
    (*call(body).unwrap().requests[0].config).clone()
}

#[test]
fn without_anything_a_text_is_drawn_as_openai_draws_it() {
    let call = call(&json!({})).unwrap();
    let request = &call.requests[0];
    assert_eq!((request.prompt.as_slice(), call.requests.len(), call.stream), (&[0][..], 1, false));
    let expected = GenerationConfig {
        max_new_tokens: 16,
        do_sample: true,
        top_k: 0,
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

#[test]
fn null_is_as_good_as_nothing_everywhere() {
    let names: Vec<&str> = CompletionRequest::fields().collect();
    let mut body = json!({});
    for name in &names {
        body[*name] = Value::Null;
    }
    for name in ["suffix", "use_beam_search", "prompt_logprobs", "tools", "grammar", "unknown"] {
        body[name] = Value::Null;
    }
    let (nothing, nulls) = (call(&json!({})).unwrap(), call(&body).unwrap());
    let without_seed =
        |call: &gpt2_api::Call| GenerationConfig { seed: 0, ..(*call.requests[0].config).clone() };
    assert_eq!(without_seed(&nulls), without_seed(&nothing));
    let mut chat = json!({});
    for name in ChatRequest::fields() {
        chat[name] = Value::Null;
    }
    chat["messages"] = json!([{ "role": "user", "content": null, "name": null }]);
    ChatRequest::parse(chat.to_string().as_bytes()).unwrap();
}

#[test]
fn a_value_that_is_wrong_is_named_with_what_was_expected() {
    let long = "x".repeat(1025);
    let cases = [
        ("model", json!(7), "model: expected a string, found 7", "model"),
        ("model", json!(""), "model: expected a string of 1 to 256 bytes, found an empty one", "model"),
        (
            "prompt",
            json!(true),
            "prompt: expected a string, strings, token ids, or lists of token ids, found true",
            "prompt",
        ),
        ("prompt", json!([]), "prompt: expected at least one prompt, found []", "prompt"),
        ("prompt", json!([[]]), "prompt[0]: expected at least one token id, found []", "prompt[0]"),
        ("prompt", json!([[1], [2, -1]]), "prompt[1][1]: expected a token id, found -1", "prompt[1][1]"),
        ("prompt", json!([[1], "a"]), "prompt[1]: expected a list of token ids, found \"a\"", "prompt[1]"),
        ("prompt", json!(["a", 5]), "prompt[1]: expected a string, found 5", "prompt[1]"),
        ("prompt", json!([1, "a"]), "prompt[1]: expected a token id, found \"a\"", "prompt[1]"),
        (
            "prompt",
            json!([1, 4_294_967_296_u64]),
            "prompt[1]: expected a token id, found 4294967296",
            "prompt[1]",
        ),
        ("prompt", json!([1, 2.5]), "prompt[1]: expected a token id, found 2.5", "prompt[1]"),
        ("prompt", json!([{}]), "prompt[0]: expected a token id, found {}", "prompt[0]"),
        (
            "prompt",
            json!([5, 300]),
            "prompt[1]: expected a token id below the vocabulary's size of 300, found 300",
            "prompt[1]",
        ),
        (
            "prompt",
            json!([[5], [5, 6, 301]]),
            "prompt[1][2]: expected a token id below the vocabulary's size of 300, found 301",
            "prompt[1][2]",
        ),
        (
            "max_tokens",
            json!(-1),
            "max_tokens: expected a whole number from 0 to 4294967295, found -1",
            "max_tokens",
        ),
        (
            "max_tokens",
            json!("5"),
            "max_tokens: expected a whole number from 0 to 4294967295, found \"5\"",
            "max_tokens",
        ),
        (
            "max_tokens",
            json!(1.5),
            "max_tokens: expected a whole number from 0 to 4294967295, found 1.5",
            "max_tokens",
        ),
        ("temperature", json!(2.1), "temperature: expected a number from 0 to 2, found 2.1", "temperature"),
        ("temperature", json!(-0.1), "temperature: expected a number from 0 to 2, found -0.1", "temperature"),
        ("temperature", json!("0"), "temperature: expected a number from 0 to 2, found \"0\"", "temperature"),
        ("top_p", json!(1.01), "top_p: expected a number from 0 to 1, found 1.01", "top_p"),
        ("top_k", json!(-2), "top_k: expected a whole number from -1 to 4294967295, found -2", "top_k"),
        ("min_p", json!(2), "min_p: expected a number from 0 to 1, found 2", "min_p"),
        ("typical_p", json!(0), "typical_p: expected a number above 0 and at most 1, found 0", "typical_p"),
        ("typical", json!(0), "typical: expected a number above 0 and at most 1, found 0", "typical"),
        ("n", json!(0), "n: expected a whole number from 1 to 128, found 0", "n"),
        ("n", json!(129), "n: expected a whole number from 1 to 128, found 129", "n"),
        ("n", json!(17), "n: this server takes at most 16 texts of a prompt (n, best_of), found 17", "n"),
        ("best_of", json!(21), "best_of: expected a whole number from 0 to 20, found 21", "best_of"),
        ("stop", json!(""), "stop: expected a string of 1 to 1024 bytes, found an empty one", "stop"),
        (
            "stop",
            json!(["a", ""]),
            "stop[1]: expected a string of 1 to 1024 bytes, found an empty one",
            "stop[1]",
        ),
        ("stop", json!(["a", 5]), "stop[1]: expected a string, found 5", "stop[1]"),
        ("stop", json!(long), "stop: expected a string of 1 to 1024 bytes, found one of 1025 bytes", "stop"),
        ("stop", json!(vec!["a"; 33]), "stop: expected at most 32 items, found more", "stop"),
        ("stop", json!({}), "stop: expected a string or a list of strings, found {}", "stop"),
        ("stream", json!("yes"), "stream: expected true or false, found \"yes\"", "stream"),
        ("echo", json!(1), "echo: expected true or false, found 1", "echo"),
        ("logprobs", json!(21), "logprobs: expected a whole number from 0 to 20, found 21", "logprobs"),
        ("logprobs", json!(true), "logprobs: expected a whole number from 0 to 20, found true", "logprobs"),
        ("n_probs", json!(21), "n_probs: expected a whole number from 0 to 20, found 21", "n_probs"),
        (
            "stream_options",
            json!({ "include_usage": true }),
            "stream_options: expected nothing where stream is false, found {\"include_usage\":true}",
            "stream_options",
        ),
        (
            "seed",
            json!(9_223_372_036_854_775_808_u64),
            "seed: expected a whole number, found 9223372036854775808",
            "seed",
        ),
        ("seed", json!(1.5), "seed: expected a whole number, found 1.5", "seed"),
        (
            "logit_bias",
            json!([]),
            "logit_bias: expected an object of token ids and biases, found []",
            "logit_bias",
        ),
        (
            "logit_bias",
            json!({ "a": 1 }),
            "logit_bias.a: expected a token id as its name, found another",
            "logit_bias.a",
        ),
        (
            "logit_bias",
            json!({ "5": 101 }),
            "logit_bias.5: expected a number from -100 to 100, found 101",
            "logit_bias.5",
        ),
        (
            "logit_bias",
            json!({ "5": 1, "05": 1 }),
            "logit_bias.05: expected one bias for a token, found a second one",
            "logit_bias.05",
        ),
        (
            "logit_bias",
            json!({ "300": 1 }),
            "logit_bias.300: expected a token id below the vocabulary's size of 300, found 300",
            "logit_bias.300",
        ),
        (
            "presence_penalty",
            json!(2.5),
            "presence_penalty: expected a number from -2 to 2, found 2.5",
            "presence_penalty",
        ),
        (
            "frequency_penalty",
            json!(-2.5),
            "frequency_penalty: expected a number from -2 to 2, found -2.5",
            "frequency_penalty",
        ),
        (
            "repetition_penalty",
            json!(0),
            "repetition_penalty: expected a number above 0, found 0",
            "repetition_penalty",
        ),
        ("repeat_penalty", json!(0), "repeat_penalty: expected a number above 0, found 0", "repeat_penalty"),
        (
            "repetition_penalty",
            json!(1e300),
            "repetition_penalty: expected greater than 0, and finite in f32, found 1000000000000000052504760255204420248704468581108159154915854115111802457988908195786371375080447854045104185740400000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000",
            "repetition_penalty",
        ),
        (
            "suffix",
            json!("end"),
            "suffix: this server does not serve this field; GPT-2 cannot fill in; give a prompt alone",
            "suffix",
        ),
        ("min_tokens", json!(5), "min_tokens: expected at most max_tokens, found 5", "min_tokens"),
        ("ignore_eos", json!(0), "ignore_eos: expected true or false, found 0", "ignore_eos"),
        (
            "stop_token_ids",
            json!([1, 300]),
            "stop_token_ids[1]: expected a token id below the vocabulary's size of 300, found 300",
            "stop_token_ids[1]",
        ),
        (
            "allowed_token_ids",
            json!([300]),
            "allowed_token_ids[0]: expected a token id below the vocabulary's size of 300, found 300",
            "allowed_token_ids[0]",
        ),
        (
            "bad_words",
            json!(["a", ""]),
            "bad_words[1]: expected a string of 1 to 256 bytes, found an empty one",
            "bad_words[1]",
        ),
        (
            "truncate_prompt_tokens",
            json!(0),
            "truncate_prompt_tokens: expected -1, or a whole number of at least 1, found 0",
            "truncate_prompt_tokens",
        ),
        (
            "cache_salt",
            json!(""),
            "cache_salt: expected a string of 1 to 256 bytes, found an empty one",
            "cache_salt",
        ),
        (
            "request_id",
            json!("a\nb"),
            "request_id: expected visible ASCII characters, found \"a\\nb\"",
            "request_id",
        ),
        (
            "use_beam_search",
            json!(true),
            "use_beam_search: this server does not serve this field; leave it out, or use `gpt2 generate --num-beams`",
            "use_beam_search",
        ),
        (
            "prompt_logprobs",
            json!(0),
            "prompt_logprobs: this server does not serve this field; ask for echo and logprobs at /v1/completions",
            "prompt_logprobs",
        ),
        (
            "tools",
            json!([1]),
            "tools: this server does not serve this field; the model calls no tools; leave it out",
            "tools",
        ),
        (
            "grammar",
            json!("root ::= \"a\""),
            "grammar: this server does not serve this field; write it in Lark's syntax as guided_grammar",
            "grammar",
        ),
        (
            "guided_choice",
            json!(["a"]),
            "guided_choice: this server does not serve this field; write the choices as guided_regex: (first|second)",
            "guided_choice",
        ),
        (
            "response_format",
            json!({ "type": "xml" }),
            "response_format.type: expected \"text\", \"json_object\" or \"json_schema\", found \"xml\"",
            "response_format.type",
        ),
        (
            "response_format",
            json!({ "type": "json_schema" }),
            "response_format: expected an object with json_schema, found {\"type\":\"json_schema\"}",
            "response_format",
        ),
        (
            "response_format",
            json!({ "type": "json_schema", "json_schema": { "name": "a" } }),
            "response_format.json_schema: expected an object with a schema, found {\"name\":\"a\"}",
            "response_format.json_schema",
        ),
        (
            "guided_json",
            json!("nothing"),
            "guided_json: expected a JSON schema, found \"nothing\"",
            "guided_json",
        ),
        (
            "guided_json",
            json!([5]),
            "guided_json: expected a JSON schema, which is an object, found [5]",
            "guided_json",
        ),
        (
            "structured_outputs",
            json!({ "regex": "a", "grammar": "b" }),
            "structured_outputs: expected one of json, regex, grammar and json_object, found {\"regex\":\"a\",\"grammar\":\"b\"}",
            "structured_outputs",
        ),
    ];
    for (name, value, message, param) in cases {
        let error = error(&with(name, value));
        assert_eq!(error.to_string(), message);
        assert_eq!(
            (error.status(), error.param(), error.kind()),
            (400, Some(param), "invalid_request_error"),
            "{message}"
        );
    }
}

#[test]
fn numbers_may_stand_at_the_ends_of_their_ranges() {
    let kept = |name: &str, value: Value| config(&with(name, value));
    assert_eq!(kept("max_tokens", json!(0)).max_new_tokens, 0);
    assert_eq!(kept("max_tokens", json!(46)).max_new_tokens, 46);
    assert_eq!(kept("max_tokens", json!(16.0)).max_new_tokens, 16);
    assert_eq!(kept("n_predict", json!(4)).max_new_tokens, 4);
    assert_eq!(kept("temperature", json!(2)).temperature, 2.0);
    assert_eq!(kept("top_p", json!(1)).top_p, 1.0);
    assert_eq!(
        (kept("top_k", json!(-1)).top_k, kept("top_k", json!(0)).top_k, kept("top_k", json!(7)).top_k),
        (0, 0, 7)
    );
    assert_eq!((kept("min_p", json!(0)).min_p, kept("min_p", json!(1)).min_p), (None, Some(1.0)));
    assert_eq!(kept("typical_p", json!(1)).typical_p, 1.0);
    assert_eq!(kept("presence_penalty", json!(-2)).presence_penalty, -2.0);
    assert_eq!(kept("frequency_penalty", json!(2)).frequency_penalty, 2.0);
    assert_eq!(kept("repeat_penalty", json!(1.3)).repetition_penalty, 1.3);
    assert_eq!(kept("no_repeat_ngram_size", json!(3)).no_repeat_ngram_size, 3);
    assert_eq!(kept("seed", json!(i64::MIN)).seed, 1 << 63);
    assert_eq!(kept("seed", json!(-1)).seed, u64::MAX);
    assert_eq!(kept("seed", json!(9_007_199_254_740_993_i64)).seed, 9_007_199_254_740_993);
    assert_eq!(kept("min_tokens", json!(4)).min_new_tokens, 4);
    assert_eq!(
        kept("logit_bias", json!({ "5": -100, "6": 0.5 })).sequence_bias,
        [(vec![5], -100.0), (vec![6], 0.5)]
    );
    assert_eq!(kept("stop", json!([])).stop_strings, Vec::<String>::new());
    assert_eq!(kept("stop", json!("a")).stop_strings, ["a"]);
    assert_eq!(kept("best_of", json!(0)).num_return_sequences, 1);
    assert_eq!(kept("best_of", json!(16)).num_return_sequences, 16);
    assert_eq!(kept("n", json!(16)).num_return_sequences, 16);
}

#[test]
fn what_takes_the_most_probable_token_is_greedy() {
    for (name, value) in [("temperature", json!(0)), ("temperature", json!(1e-9)), ("top_p", json!(0))] {
        let found = config(&with(name, value));
        assert!(!found.do_sample, "{name}");
        // All its texts are the same: one is made.
        let mut body = with(name, json!(0));
        body["n"] = json!(3);
        assert_eq!(config(&body).num_return_sequences, 1, "{name}");
    }
}

#[test]
fn ends_of_texts_are_those_of_the_model_and_the_request() {
    assert_eq!(config(&with("ignore_eos", json!(true))).eos_token_id, Vec::<u32>::new());
    assert_eq!(config(&with("stop_token_ids", json!([7, 8]))).eos_token_id, [0, 7, 8]);
    let special = config(&with("stop", json!(["\n", "<|endoftext|>"])));
    assert_eq!((special.eos_token_id, special.stop_strings), (vec![0, 0], vec!["\n".to_owned()]));
    let mut body = with("stop", json!("<|endoftext|>"));
    body["ignore_eos"] = json!(true);
    assert_eq!(
        config(&body).eos_token_id,
        [0],
        "a stop string that is a token ends the text whatever else is ignored"
    );
}

#[test]
fn words_are_left_out_at_the_beginning_and_within() {
    let ids = |text: &str| tiny().ids(text);
    assert_eq!(
        config(&with("bad_words", json!(["the", " word"]))).bad_words_ids,
        [ids("the"), ids(" the"), ids("word"), ids(" word"),]
    );
}

#[test]
fn what_is_not_served_passes_where_it_asks_for_nothing() {
    for name in
        ["suffix", "use_beam_search", "prompt_logprobs", "guided_choice", "tools", "functions", "grammar"]
    {
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
fn two_names_of_a_field_may_not_contradict_each_other() {
    let error = error(&json!({ "prompt": "a", "max_tokens": 3, "n_predict": 4 }));
    assert_eq!(
        error.to_string(),
        "n_predict and max_tokens are the same and have different values; give one of them"
    );
    assert_eq!(config(&json!({ "prompt": "a", "max_tokens": 3, "n_predict": 3 })).max_new_tokens, 3);
    assert_eq!(config(&json!({ "prompt": "a", "max_tokens": 3, "n_predict": null })).max_new_tokens, 3);
}

#[test]
fn best_of_is_at_least_n_and_no_more_in_a_stream() {
    let message = error(&json!({ "n": 3, "best_of": 2 })).to_string();
    assert_eq!(message, "best_of: expected at least n, which is 3, found 2");
    let message = error(&json!({ "n": 2, "best_of": 3, "stream": true })).to_string();
    assert_eq!(message, "best_of: expected n where the texts are streamed, found 3");
    for body in [
        json!({ "n": 2, "best_of": 2, "stream": true }),
        json!({ "best_of": 1 }),
        json!({ "n": 3, "best_of": null }),
    ] {
        call(&body).unwrap();
    }
}

#[test]
fn the_whole_of_what_is_asked_for_is_bounded() {
    let message = error(&json!({ "prompt": vec!["a"; 65], "max_tokens": 1 })).to_string();
    assert_eq!(message, "prompt: this server takes at most 64 prompts, found 65");
    let message = error(&json!({ "prompt": vec!["a"; 64], "n": 16, "max_tokens": 65 })).to_string();
    assert_eq!(
        message,
        "max_tokens: this server takes at most 65536 new tokens (prompts × texts × max_tokens), found 66560"
    );
    let message = error(&json!({ "prompt": vec!["a"; 2049] })).to_string();
    assert_eq!(message, "prompt: expected at most 2048 items, found more");
}

#[test]
fn prompt_and_new_tokens_fit_into_the_context_or_are_refused_with_the_numbers() {
    assert_eq!(
        call(&json!({ "prompt": vec![5; 47], "max_tokens": 1 })).unwrap().requests[0].prompt.len(),
        47
    );
    let found = error(&json!({ "prompt": [[5], vec![5; 48]], "max_tokens": 1 }));
    assert_eq!((found.code(), found.param()), (Some("context_length_exceeded"), Some("prompt[1]")));
    let expected = json!({ "error": {
        "message": "prompt[1]: this model's context is 48 tokens, and 49 were asked for: 48 of the prompt and 1 new ones \
                    (max_tokens); shorten the prompt, or ask for fewer",
        "type": "invalid_request_error", "param": "prompt[1]", "code": "context_length_exceeded",
        "n_prompt_tokens": 48, "n_ctx": 48,
    } });
    assert_eq!(serde_json::from_str::<Value>(&found.to_json()).unwrap(), expected);
    // A text of a million characters is refused by its length alone.
    let found = error(&json!({ "prompt": "a".repeat(1_000_000), "max_tokens": 1 }));
    assert_eq!(found.code(), Some("context_length_exceeded"));
    assert!(
        found
            .to_string()
            .starts_with("prompt: this model's context is 48 tokens, and the prompt alone has at least")
    );
}

#[test]
fn the_end_of_a_long_prompt_can_be_kept() {
    let prompt = |body: &Value| call(body).unwrap().requests[0].prompt.clone();
    let long: Vec<u32> = (1..100).collect();
    let body = json!({ "prompt": long, "max_tokens": 8, "truncate_prompt_tokens": 3 });
    assert_eq!(prompt(&body), [97, 98, 99]);
    let body = json!({ "prompt": long, "max_tokens": 8, "truncate_prompt_tokens": -1 });
    assert_eq!(prompt(&body), (60..100).collect::<Vec<u32>>());
    let message =
        error(&json!({ "prompt": long, "max_tokens": 8, "truncate_prompt_tokens": 41 })).to_string();
    assert!(message.contains("41 of the prompt and 8 new ones"), "{message}");
    let text = "word ".repeat(100);
    let ids = tiny().ids(&text);
    let body = json!({ "prompt": text, "truncate_prompt_tokens": 5 });
    assert_eq!(prompt(&body), ids[ids.len() - 5..]);
}

#[test]
fn models_are_known_by_their_names() {
    for name in ["tiny", "owner/tiny"] {
        call(&json!({ "model": name })).unwrap();
    }
    let found = error(&json!({ "model": "../../etc/passwd" }));
    assert_eq!((found.status(), found.code(), found.param()), (404, Some("model_not_found"), Some("model")));
    assert_eq!(found.to_string(), "there is no such model here; this server has `tiny`");
}

#[test]
fn texts_draw_from_streams_of_their_own_and_share_as_they_were_told() {
    let body =
        json!({ "prompt": ["a", "b", "c"], "n": 2, "best_of": 3, "seed": 7, "logprobs": 2, "echo": true });
    let found = call(&body).unwrap();
    let streams: Vec<u64> = found.requests.iter().map(|request| request.stream).collect();
    assert_eq!(streams, [0, 3, 6]);
    for request in &found.requests {
        assert_eq!((request.logprobs, request.prompt_logprobs), (Some(2), Some(2)));
        assert_eq!((request.config.seed, request.config.num_return_sequences), (7, 3));
    }
    // The best are found by their log-probabilities, whether or not they are told.
    assert_eq!(call(&json!({ "n": 2, "best_of": 3 })).unwrap().requests[0].logprobs, Some(0));
    let reuse = |body: &Value, caller| {
        let request = CompletionRequest::parse(body.to_string().as_bytes()).unwrap();
        gpt2_api::Call::of_completion(request, &tiny().served, caller).unwrap().requests[0].reuse
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
fn a_seed_that_is_not_given_is_fresh_and_can_be_sent_back() {
    let seed = |body: &Value| config(body).seed;
    let (first, second) = (seed(&json!({})), seed(&json!({})));
    assert_ne!(first, second);
    assert!(first < 1 << 53 && second < 1 << 53, "{first}, {second}");
    assert_eq!(seed(&json!({ "temperature": 0 })), 0);
}
