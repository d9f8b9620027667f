//! Streamed responses, whose joined chunks must equal the complete response.

use candle_gpt2_generation::StopReason;
use serde_json::{Map, Value, json};

use crate::common::{call, logprobs, tiny, token};

/// Joins the choices of chunks the way clients do.
fn join_chunks(chunks: &[Value]) -> Vec<Value> {
    let mut choices: Vec<Value> = Vec::new();
    for piece in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()) {
        let index = usize::try_from(piece["index"].as_u64().unwrap()).unwrap();
        if choices.len() <= index {
            choices.resize(index + 1, Value::Null);
        }
        let Some(choice) = choices[index].as_object_mut() else {
            choices[index] = piece.clone();
            continue;
        };
        assert!(choice["finish_reason"].is_null(), "chunk after the finish reason: {piece}");
        join(choice, piece);
    }
    choices
}

fn join(choice: &mut Map<String, Value>, piece: &Value) {
    choice["text"] = json!(choice["text"].as_str().unwrap().to_owned() + piece["text"].as_str().unwrap());
    for name in ["finish_reason", "stop_reason"] {
        choice[name] = piece[name].clone();
    }
    let lists = ["tokens", "token_logprobs", "top_logprobs", "text_offset"];
    for name in lists {
        if let (Some(list), Some(more)) = (choice["logprobs"].get_mut(name), piece["logprobs"].get(name)) {
            list.as_array_mut().unwrap().extend(more.as_array().unwrap().iter().cloned());
        }
    }
    if let Some(more) = piece.get("token_ids") {
        choice["token_ids"].as_array_mut().unwrap().extend(more.as_array().unwrap().iter().cloned());
        assert!(piece["prompt_token_ids"].is_null(), "prompt_token_ids appears once");
    }
}

#[test]
fn joined_chunks_equal_the_response() {
    let prompts = [json!("Wh"), json!(["The", "", "a😀é"]), json!([[5, 6], [0, 7, 130, 200]])];
    let mut compared = 0;
    for prompt in &prompts {
        for n in [1, 3] {
            for (temperature, echo) in [(0.0, false), (1.6, false), (1.6, true)] {
                for logprobs in [json!(null), json!(0), json!(4)] {
                    for stop in [json!(null), json!(["e", "\u{FFFD}", "ou"])] {
                        for max_tokens in [0, 1, 24] {
                            let body = json!({
                                "prompt": prompt, "n": n, "temperature": temperature, "echo": echo,
                                "logprobs": logprobs, "stop": stop, "max_tokens": max_tokens, "seed": 11,
                                "return_token_ids": true, "include_stop_str_in_output": max_tokens == 24 && n == 3,
                            });
                            let whole = tiny().complete(&body);
                            let chunks = tiny().stream(&body);
                            assert_eq!(json!(join_chunks(&chunks)), whole["choices"], "{body}");
                            assert!(
                                chunks
                                    .iter()
                                    .all(|chunk| chunk.get("usage").is_none() && chunk["seed"] == 11)
                            );
                            check_no_chunk_is_empty(&chunks);
                            compared += 1;
                        }
                    }
                }
            }
        }
    }
    assert_eq!(compared, 324);
}

/// Checks that each chunk contains text, log-probabilities or a finish reason.
fn check_no_chunk_is_empty(chunks: &[Value]) {
    for choice in chunks.iter().map(|chunk| &chunk["choices"][0]) {
        let has_entries = choice["logprobs"]["tokens"].as_array().is_some_and(|tokens| !tokens.is_empty());
        let has_content = choice["text"] != "" || has_entries || !choice["finish_reason"].is_null();
        assert!(has_content, "{choice}");
    }
}

#[test]
fn usage_is_the_last_chunk_if_requested() {
    let body = json!({ "prompt": ["Wh", "The"], "n": 2, "max_tokens": 4, "seed": 2, "stream_options": { "include_usage": true } });
    let mut chunks = tiny().stream(&body);
    let last = chunks.pop().unwrap();
    assert_eq!(last["choices"], json!([]));
    let mut whole = body.clone();
    whole.as_object_mut().unwrap().remove("stream_options");
    assert_eq!(last["usage"], tiny().complete(&whole)["usage"]);
    assert!(
        !chunks.is_empty()
            && chunks.iter().all(|chunk| chunk["usage"].is_null() && chunk.get("usage").is_some())
    );
    assert!(chunks.iter().all(|chunk| chunk["id"] == last["id"] && chunk["object"] == "text_completion"));
}

#[test]
fn echo_is_the_first_chunk_with_the_prompt_logprobs() {
    let body =
        json!({ "prompt": "The citizen", "max_tokens": 3, "echo": true, "logprobs": 1, "n": 2, "seed": 4 });
    let chunks = tiny().stream(&body);
    for (index, chunk) in chunks.iter().take(2).enumerate() {
        let choice = &chunk["choices"][0];
        assert_eq!((&choice["index"], &choice["text"]), (&json!(index), &json!("The citizen")));
        let listed = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        assert_eq!(listed.len(), tiny().ids("The citizen").len());
        assert!(listed[0].is_null() && listed[1].is_number());
    }
}

#[test]
fn partial_characters_are_held_back_with_their_tokens() {
    let mut answer =
        call(&json!({ "prompt": "x", "stream": true, "logprobs": 0, "stop": "zz" })).unwrap().answer;
    let (first, second) = (130, 131);
    let half = |reason| token(first, "", logprobs(-1.0, &[]), reason);
    assert_eq!(answer.handle_event(0, half(None)).unwrap(), Vec::<String>::new());
    let chunks = answer.handle_event(0, token(second, "\u{FFFD}", logprobs(-2.0, &[]), None)).unwrap();
    let chunk: Value = serde_json::from_str(&chunks[0]).unwrap();
    assert_eq!(chunk["choices"][0]["text"], "\u{FFFD}");
    let chunks = answer.handle_event(0, half(Some(StopReason::MaxNewTokens))).unwrap();
    let last: Value = serde_json::from_str(&chunks[0]).unwrap();
    let lengths = [&chunk, &last]
        .map(|chunk| chunk["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().len());
    assert_eq!((chunks.len(), lengths.iter().sum::<usize>()), (1, 3), "each token once");
    // If no log-probabilities are requested, half a character produces no chunk.
    let mut answer = call(&json!({ "prompt": "x", "stream": true })).unwrap().answer;
    assert_eq!(answer.handle_event(0, token(first, "", None, None)).unwrap(), Vec::<String>::new());
    assert_eq!(answer.last_chunks(), Vec::<String>::new());
}
