//! Complete responses.

use candle_gpt2_api::{Call, ChatTemplateChoice, CompletionRequest};
use candle_gpt2_generation::{Event, GenerationError, RequestId, StopReason, score};
use serde_json::{Value, json};

use crate::common::{SCORE_TOLERANCE, call, logprobs, tiny, tiny_with, tiny_with_token, token_of};

#[test]
fn response_has_the_openai_shape() {
    let response = tiny().complete(&json!({ "prompt": "Wh", "max_tokens": 3, "temperature": 0 }));
    let keys: Vec<&String> = response.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"]);
    assert!(response["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(response["object"], "text_completion");
    assert!(response["created"].as_u64().unwrap() > 1_700_000_000);
    assert_eq!(response["model"], "tiny");
    assert_eq!(response["usage"], json!({ "prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4 }));
    let choice = response["choices"][0].as_object().unwrap();
    let keys: Vec<&String> = choice.keys().collect();
    assert_eq!(keys, ["index", "text", "logprobs", "finish_reason", "stop_reason"]);
    assert_eq!(
        (&choice["index"], &choice["logprobs"], &choice["finish_reason"]),
        (&json!(0), &Value::Null, &json!("length"))
    );
    let named = tiny().complete(&json!({ "request_id": "mine-1", "max_tokens": 0, "seed": 5 }));
    assert_eq!((&named["id"], &named["seed"]), (&json!("cmpl-mine-1"), &json!(5)));
}

#[test]
fn seed_reproduces_the_completions() {
    let body = json!({ "prompt": "Wh", "max_tokens": 12, "n": 3, "temperature": 1.2 });
    let first = tiny().complete(&body);
    let mut again = body.clone();
    again["seed"] = first["seed"].clone();
    assert_eq!(tiny().complete(&again)["choices"], first["choices"]);
    assert_ne!(first["choices"][0]["text"], first["choices"][1]["text"]);
    assert_ne!(tiny().complete(&body)["choices"], first["choices"]);
}

#[test]
fn choice_indices_continue_across_prompts() {
    let body =
        json!({ "prompt": ["Wh", "the"], "max_tokens": 5, "n": 2, "seed": 3, "return_token_ids": true });
    let response = tiny().complete(&body);
    let choices = response["choices"].as_array().unwrap();
    let indices: Vec<&Value> = choices.iter().map(|choice| &choice["index"]).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["prompt_token_ids"], json!(tiny().ids(["Wh", "the"][index / 2])));
    }
    // Each completion samples from its own random stream, so other prompts do not change its text.
    assert_ne!(choices[0]["token_ids"], choices[1]["token_ids"]);
    let alone = tiny().complete(&json!({ "prompt": "Wh", "max_tokens": 5, "n": 2, "seed": 3 }));
    assert_eq!(alone["choices"][1]["text"], choices[1]["text"]);
    assert_eq!(response["usage"]["prompt_tokens"], tiny().ids("Wh").len() + tiny().ids("the").len());
    let generated: usize = choices.iter().map(|choice| choice["token_ids"].as_array().unwrap().len()).sum();
    assert_eq!(response["usage"]["completion_tokens"], generated);
}

#[test]
fn greedy_choices_are_identical() {
    let body = json!({ "prompt": "Wh", "max_tokens": 5, "n": 3, "temperature": 0, "logprobs": 1 });
    let response = tiny().complete(&body);
    let choices = response["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 3);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!((&choice["index"], &choice["text"]), (&json!(index), &choices[0]["text"]));
        assert_eq!(choice["logprobs"], choices[0]["logprobs"]);
    }
    assert_eq!(response["usage"]["completion_tokens"], 15);
}

#[test]
fn best_of_returns_the_completions_with_the_highest_mean() {
    let call = call(&json!({ "prompt": "x", "n": 2, "best_of": 4 })).unwrap();
    let mut answer = call.answer;
    // The means are -2, -1, -3 and -1.5. If sums were compared, the second would tie for last.
    let texts = [("a", vec![-2.0]), ("b", vec![-1.0, -1.0, -1.0]), ("c", vec![-3.0]), ("d", vec![-1.5])];
    for (sequence, (text, numbers)) in texts.iter().enumerate() {
        for (index, number) in numbers.iter().enumerate() {
            let reason = (index + 1 == numbers.len()).then_some(StopReason::MaxNewTokens);
            answer.handle_event(0, token_of(sequence, 7, text, logprobs(*number, &[]), reason)).unwrap();
        }
    }
    let response: Value = serde_json::from_str(&answer.into_response()).unwrap();
    let returned: Vec<(&Value, &Value)> = response["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|choice| (&choice["index"], &choice["text"]))
        .collect();
    assert_eq!(returned, [(&json!(0), &json!("bbb")), (&json!(1), &json!("d"))]);
    assert_eq!(response["choices"][0]["logprobs"], Value::Null, "log-probabilities were not requested");
    assert_eq!(response["usage"]["completion_tokens"], 6, "tokens of dropped completions count too");
}

#[test]
fn echo_without_new_tokens_scores_the_prompt() {
    let text = "The citizen of the word; ";
    let ids = tiny().ids(text);
    let body = json!({ "prompt": text, "max_tokens": 0, "echo": true, "logprobs": 3 });
    let response = tiny().complete(&body);
    let choice = &response["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(text), &json!("length")));
    let scored = score(tiny().model.model(), &ids, 48, 3, &|_| ()).unwrap();
    let listed = choice["logprobs"]["token_logprobs"].as_array().unwrap();
    for (found, expected) in listed.iter().zip(&scored.logprobs) {
        let difference =
            found.as_f64().zip(*expected).map_or(0.0, |(found, expected)| (found - expected).abs());
        assert_eq!(found.is_null(), expected.is_none());
        assert!(difference < SCORE_TOLERANCE, "{found} and {expected:?}");
    }
    let tokens: Vec<&str> = choice["logprobs"]["tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|token| token.as_str().unwrap())
        .collect();
    assert_eq!(tokens.concat(), text);
    let offsets: Vec<usize> = tokens
        .iter()
        .scan(0, |offset, token| {
            let before = *offset;
            *offset += token.chars().count();
            Some(before)
        })
        .collect();
    assert_eq!(choice["logprobs"]["text_offset"], json!(offsets));
    for (top, own) in choice["logprobs"]["top_logprobs"].as_array().unwrap().iter().zip(&tokens).skip(1) {
        let names = top.as_object().unwrap();
        assert!((3..=4).contains(&names.len()) && names.contains_key(*own), "{top}");
    }
    assert_eq!(
        response["usage"],
        json!({
            "prompt_tokens": ids.len(), "completion_tokens": 0, "total_tokens": ids.len(),
        })
    );
    // A prompt of token ids is echoed as text.
    let by_ids = tiny().complete(&json!({ "prompt": ids, "max_tokens": 0, "echo": true, "logprobs": 3 }));
    assert_eq!(by_ids["choices"], response["choices"]);
}

#[test]
fn empty_prompt_becomes_a_bos_token_that_is_not_echoed() {
    for prompt in [json!(""), json!(null), json!([""])] {
        let body =
            json!({ "prompt": prompt, "max_tokens": 2, "temperature": 0, "echo": true, "logprobs": 0 });
        let response = tiny().complete(&body);
        let choice = &response["choices"][0];
        assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), 2, "{prompt}");
        assert_eq!(choice["logprobs"]["text_offset"][0], 0);
        assert_eq!(response["usage"]["prompt_tokens"], 1);
        // A BOS token that the prompt spells out is echoed like any other token.
        let named = json!({ "prompt": "<|endoftext|>", "max_tokens": 2, "temperature": 0, "echo": true, "logprobs": 0 });
        let named = &tiny().complete(&named)["choices"][0];
        assert_eq!(
            named["text"].as_str().unwrap(),
            format!("<|endoftext|>{}", choice["text"].as_str().unwrap())
        );
        assert_eq!(named["logprobs"]["tokens"].as_array().unwrap().len(), 3);
        assert_eq!(named["logprobs"]["text_offset"][1], 13);
    }
}

#[test]
fn completions_conform_to_the_output_constraint() {
    let regex = json!({ "prompt": "Wh", "max_tokens": 20, "guided_regex": "[0-9]{3}", "seed": 1 });
    let response = tiny().complete(&regex);
    let choice = &response["choices"][0];
    let text = choice["text"].as_str().unwrap();
    assert!(text.len() == 3 && text.bytes().all(|byte| byte.is_ascii_digit()), "{text}");
    assert_eq!(choice["finish_reason"], "stop");
    let schema = json!({ "type": "object", "properties": { "a": { "enum": ["x", "y"] } }, "required": ["a"],
                         "additionalProperties": false });
    for body in [
        json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "n", "schema": schema } } }),
        json!({ "guided_json": schema }),
        json!({ "guided_json": schema.to_string() }),
        json!({ "structured_outputs": { "json": schema } }),
    ] {
        let mut body = body;
        (body["prompt"], body["max_tokens"], body["temperature"]) = (json!("Wh"), json!(30), json!(0));
        let response = tiny().complete(&body);
        let text = response["choices"][0]["text"].as_str().unwrap();
        let parsed: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert!(["x", "y"].contains(&parsed["a"].as_str().unwrap()), "{text}");
    }
    // An empty schema allows any JSON, but nothing that is not JSON.
    for body in [
        json!({ "guided_json": {} }),
        json!({ "json_schema": {} }),
        json!({ "structured_outputs": { "json": {} } }),
    ] {
        let mut body = body;
        (body["prompt"], body["max_tokens"], body["temperature"]) = (json!("Wh"), json!(1), json!(0));
        let response = tiny().complete(&body);
        let text = response["choices"][0]["text"].as_str().unwrap();
        assert!(
            text.starts_with(|first: char| "{[\"-ntf".contains(first) || first.is_ascii_digit()),
            "{text}"
        );
    }
    let choices = ["a (b", "What."];
    for body in [json!({ "guided_choice": choices }), json!({ "structured_outputs": { "choice": choices } })]
    {
        let mut body = body;
        (body["prompt"], body["max_tokens"]) = (json!("Wh"), json!(30));
        let response = tiny().complete(&body);
        let choice = &response["choices"][0];
        assert!(choices.contains(&choice["text"].as_str().unwrap()), "{choice}");
        assert_eq!(choice["finish_reason"], "stop");
    }
    let Err(error) = call(&json!({ "guided_regex": "(" })) else { panic!("the invalid regex was accepted") };
    assert_eq!((error.status(), error.param()), (400, Some("guided_regex")));
    assert!(error.to_string().starts_with("guided_regex: regular expression: "), "{error}");
}

#[test]
fn allowed_token_ids_restrict_the_completion() {
    let body =
        json!({ "prompt": "Wh", "max_tokens": 6, "allowed_token_ids": [70, 80], "return_token_ids": true });
    let response = tiny().complete(&body);
    let ids = response["choices"][0]["token_ids"].as_array().unwrap();
    assert!(ids.len() == 6 && ids.iter().all(|id| *id == 70 || *id == 80), "{ids:?}");
}

#[test]
fn generation_failures_hide_internal_causes() {
    let fail = |error| {
        let mut answer = call(&json!({})).unwrap().answer;
        answer.handle_event(0, Event::Failed { request: RequestId(0), error }).unwrap_err()
    };
    let error = fail(GenerationError::NotFinite);
    assert_eq!((error.status(), error.kind()), (500, "server_error"));
    assert_eq!(error.to_string(), "internal error; see the server's log for the cause");
    assert_eq!(
        fail(GenerationError::NoTokenLeft { options: vec!["min_new_tokens"] }).param(),
        Some("min_tokens")
    );
    assert_eq!(fail(GenerationError::Constraint { what: "no".into() }).to_string(), "no");
}

#[test]
fn rejected_prompts_are_named_by_their_request_path() {
    let named = |call: Call, prompt| {
        let refusal = call.answer.refused(prompt, &GenerationError::EmptyPrompt);
        refusal.param().map(str::to_owned)
    };
    for (prompt, index, path) in [(json!("a"), 0, "prompt"), (json!(["a", "b"]), 1, "prompt[1]")] {
        assert_eq!(named(call(&json!({ "prompt": prompt })).unwrap(), index).as_deref(), Some(path));
    }
    let chat = tiny_with("notes.txt", "", ChatTemplateChoice::EosJoin);
    let call = chat.chat(&json!({ "messages": [{ "role": "user", "content": "a" }] })).unwrap();
    assert_eq!(named(call, 0).as_deref(), Some("messages"));
}

/// huggingface/tokenizers#1996: an added token has the same text in every response field.
#[test]
fn added_token_has_the_same_text_in_every_field() {
    for token in ["für", "kuća", "ĠĠ", "中文"] {
        let tested = tiny_with_token(token);
        let body = json!({ "prompt": [65], "max_tokens": 2, "logit_bias": { "299": 100 }, "temperature": 0, "echo": true,
            "logprobs": 0 });
        let choice = &tested.complete(&body)["choices"][0];
        assert_eq!(choice["text"], json!(format!("a{token}{token}")), "{choice}");
        assert_eq!(choice["logprobs"]["tokens"], json!(["a", token, token]));
        let chunks = tested.stream(&body);
        let streamed: String =
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
        assert_eq!(streamed, format!("a{token}{token}"));
        let stopped = json!({ "prompt": "a", "max_tokens": 9, "logit_bias": { "299": 100 }, "temperature": 0, "stop": token });
        assert_eq!(tested.complete(&stopped)["choices"][0]["text"], "");
        let by_regex = json!({ "prompt": "a", "max_tokens": 9, "logit_bias": { "299": 100 }, "temperature": 0,
            "guided_regex": format!("({token}){{2}}") });
        assert_eq!(tested.complete(&by_regex)["choices"][0]["text"], json!(format!("{token}{token}")));
    }
}

/// A character that starts in the prompt and ends in the completion is echoed whole.
#[test]
fn echo_joins_a_character_split_between_prompt_and_text() {
    // Tokens 159, 224 and 227 are the three bytes of `⁄`.
    for (prompt, next, text, offset) in [
        (json!([65, 159, 224]), json!([227]), "a⁄", 1),
        (json!([65, 159]), json!([224]), "a\u{FFFD}", 1),
        (json!([65, 159]), json!([66]), "a\u{FFFD}b", 2),
        (json!([65]), json!([66]), "ab", 1),
    ] {
        let body = json!({ "prompt": prompt, "max_tokens": 1, "allowed_token_ids": next, "echo": true, "logprobs": 0 });
        let choice = &tiny().complete(&body)["choices"][0];
        assert_eq!((&choice["text"], choice["finish_reason"].as_str()), (&json!(text), Some("length")));
        let offsets = choice["logprobs"]["text_offset"].as_array().unwrap();
        assert_eq!(offsets.last(), Some(&json!(offset)), "{choice}");
        let chunks = tiny().stream(&body);
        let streamed: String =
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
        assert_eq!(streamed, text);
    }
    let no_new_tokens = json!({ "prompt": [65, 159], "max_tokens": 0, "echo": true });
    assert_eq!(tiny().complete(&no_new_tokens)["choices"][0]["text"], "a\u{FFFD}");
}

/// Several options exclude tokens together; if none remains, the error names these options.
#[test]
fn conflicting_options_are_rejected() {
    for (options, named) in [
        (json!({ "allowed_token_ids": [66], "bad_words": ["b"] }), vec!["bad_words", "allowed_token_ids"]),
        (json!({ "guided_regex": "a", "bad_words": ["a"] }), vec!["bad_words", "the regular expression"]),
        (
            json!({ "guided_regex": "a+", "allowed_token_ids": [67] }),
            vec!["allowed_token_ids", "the regular expression"],
        ),
        (
            json!({ "guided_json": { "enum": ["a"] }, "bad_words": ["\"", "\"a"] }),
            vec!["bad_words", "the JSON schema"],
        ),
        (json!({ "allowed_token_ids": [0], "min_tokens": 3 }), vec!["min_tokens", "allowed_token_ids"]),
        (json!({ "guided_regex": "a", "min_tokens": 3 }), vec!["min_tokens", "the regular expression"]),
    ] {
        let mut body = options;
        (body["prompt"], body["max_tokens"], body["temperature"]) = (json!("Wh"), json!(6), json!(0));
        let request = CompletionRequest::parse(body.to_string().as_bytes()).unwrap();
        let call = Call::of_completion(request, &tiny().served, None).unwrap();
        let error = tiny().run(call).unwrap_err();
        assert_eq!((error.status(), error.param()), (400, Some(named[0])), "{body}: {error}");
        assert!(named.iter().all(|name| error.to_string().contains(name)), "{body}: {error}");
    }
}
