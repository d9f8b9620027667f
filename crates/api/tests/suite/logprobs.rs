//! Log-probabilities in responses: token names, values and offsets.

use candle_gpt2_generation::StopReason;
use serde_json::{Value, json};

use crate::common::{begun, call, logprobs, tiny, token};

/// Token ids for a text's bytes, one token per byte.
fn bytes(text: &str) -> Vec<u32> {
    let tokenizer = tiny().model.vocabulary().tokenizer().unwrap();
    let single_byte_token = |byte: u8| {
        let ids = 0..=256_u32;
        let mut found = ids.filter(|id| tiny().model.vocabulary().token_bytes(*id) == [byte]);
        found.next().unwrap_or_else(|| panic!("no token for byte {byte} in {tokenizer:?}"))
    };
    text.bytes().map(single_byte_token).collect()
}

/// First choice of the response if the model generates these tokens and the texts they complete.
fn first_choice(body: &Value, prompt: usize, tokens: &[(u32, &str)]) -> Value {
    let call = call(body).unwrap();
    let mut answer = call.answer;
    let scores = (0..prompt).map(|index| logprobs(-1.0, &[]).filter(|_| index > 0)).collect();
    answer.handle_event(0, begun(scores)).unwrap();
    for (index, (id, text)) in tokens.iter().enumerate() {
        let stop_reason = (index + 1 == tokens.len()).then_some(StopReason::MaxNewTokens);
        answer.handle_event(0, token(*id, text, logprobs(-0.5, &[(*id, -0.5)]), stop_reason)).unwrap();
    }
    serde_json::from_str::<Value>(&answer.into_response()).unwrap()["choices"][0].take()
}

#[test]
fn partial_characters_are_shown_as_bytes_at_one_offset() {
    // Each token is one byte: é has two bytes, 中 three and 😀 four.
    let text = "aé中😀b";
    let ids = bytes(text);
    let shown = ["a", "", "é", "", "", "中", "", "", "", "😀", "b"];
    let tokens: Vec<(u32, &str)> = ids.iter().copied().zip(shown).collect();
    let choice = first_choice(&json!({ "prompt": [5], "logprobs": 1, "max_tokens": 11 }), 1, &tokens);
    assert_eq!(choice["text"], text);
    let listed = &choice["logprobs"];
    assert_eq!(
        listed["tokens"],
        json!([
            "a",
            "bytes:\\xc3",
            "bytes:\\xa9",
            "bytes:\\xe4",
            "bytes:\\xb8",
            "bytes:\\xad",
            "bytes:\\xf0",
            "bytes:\\x9f",
            "bytes:\\x98",
            "bytes:\\x80",
            "b"
        ])
    );
    // Offsets start at 1, because the prompt has one character.
    assert_eq!(listed["text_offset"], json!([1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5]));
    assert_eq!(listed["top_logprobs"][1], json!({ "bytes:\\xc3": -0.5 }));
}

/// Mirrors a recorded OpenAI reply: five prompt characters, a token, a two-token character, a token.
#[test]
fn text_offsets_count_the_prompt_characters() {
    let (x, parts, y) = (bytes("x")[0], bytes("é"), bytes("y")[0]);
    let prompt: Vec<u32> = bytes("ab中de");
    let tokens = [(x, "x"), (parts[0], ""), (parts[1], "é"), (y, "y")];
    let choice = first_choice(&json!({ "prompt": prompt, "logprobs": 0, "max_tokens": 4 }), 0, &tokens);
    assert_eq!(choice["logprobs"]["text_offset"], json!([5, 6, 6, 7]));
    let echoed =
        first_choice(&json!({ "prompt": prompt, "logprobs": 0, "max_tokens": 4, "echo": true }), 7, &tokens);
    assert_eq!(echoed["text"], "ab中dexéy");
    assert_eq!(echoed["logprobs"]["text_offset"], json!([0, 1, 2, 2, 2, 3, 4, 5, 6, 6, 7]));
    assert_eq!(echoed["logprobs"]["token_logprobs"][0], Value::Null);
    assert_eq!(echoed["logprobs"]["top_logprobs"][0], Value::Null);
    assert_eq!(echoed["logprobs"]["token_logprobs"][1], json!(-1.0));
}

#[test]
fn top_logprobs_include_the_sampled_token() {
    let (a, b, c) = (bytes("a")[0], bytes("b")[0], bytes("c")[0]);
    let (best, second, own) = (-0.123_456_789_012_345_68, -2.5, -7.000_000_000_000_001);
    let mut answer = call(&json!({ "prompt": "x", "logprobs": 2 })).unwrap().answer;
    answer.handle_event(0, token(a, "a", logprobs(best, &[(a, best), (b, second)]), None)).unwrap();
    answer
        .handle_event(0, token(c, "c", logprobs(own, &[(a, best), (b, second)]), Some(StopReason::Context)))
        .unwrap();
    let response = answer.into_response();
    // Numbers are written with all digits.
    assert!(response.contains("\"token_logprobs\":[-0.12345678901234568,-7.000000000000001]"), "{response}");
    let top = "\"top_logprobs\":[{\"a\":-0.12345678901234568,\"b\":-2.5},\
               {\"a\":-0.12345678901234568,\"b\":-2.5,\"c\":-7.000000000000001}]";
    assert!(response.contains(top), "{response}");
    assert!(response.contains("\"finish_reason\":\"length\""), "{response}");
}

#[test]
fn negative_infinity_becomes_minus_9999_and_nan_is_an_error() {
    let a = bytes("a")[0];
    let mut answer = call(&json!({ "prompt": "x", "logprobs": 1 })).unwrap().answer;
    answer
        .handle_event(0, token(a, "a", logprobs(f64::NEG_INFINITY, &[(a, f64::NEG_INFINITY)]), None))
        .unwrap();
    let failed = answer.handle_event(0, token(a, "a", logprobs(f64::NAN, &[]), None)).unwrap_err();
    assert_eq!((failed.status(), failed.kind()), (500, "server_error"));
    let failed = answer.handle_event(0, begun(vec![None, logprobs(-1.0, &[(a, f64::NAN)])])).unwrap_err();
    assert_eq!(failed.status(), 500);
    let response: Value = serde_json::from_str(&answer.into_response()).unwrap();
    assert_eq!(response["choices"][0]["logprobs"]["token_logprobs"], json!([-9999.0]));
    assert_eq!(response["choices"][0]["logprobs"]["top_logprobs"], json!([{ "a": -9999.0 }]));
}

#[test]
fn top_logprobs_keys_are_unique() {
    // Every partial character has a unique name.
    let halves = bytes("é中😀");
    let alternatives: Vec<(u32, f64)> = halves.iter().map(|id| (*id, -1.0)).collect();
    let mut answer = call(&json!({ "prompt": "x", "logprobs": 9 })).unwrap().answer;
    let (end, a) = (0, bytes("a")[0]);
    answer.handle_event(0, token(a, "a", logprobs(-3.0, &alternatives), None)).unwrap();
    // The EOS token has an empty name when generated and its own name as an alternative.
    answer.handle_event(0, token(a, "a", logprobs(-1.0, &[(a, -1.0), (end, -2.0)]), None)).unwrap();
    answer
        .handle_event(0, token(end, "", logprobs(-2.0, &[(a, -1.0), (end, -2.0)]), Some(StopReason::Eos)))
        .unwrap();
    let response: Value = serde_json::from_str(&answer.into_response()).unwrap();
    let choice = &response["choices"][0];
    let top = &choice["logprobs"]["top_logprobs"];
    assert_eq!(top[0].as_object().unwrap().len(), 10);
    assert_eq!(top[1], json!({ "a": -1.0, "<|endoftext|>": -2.0 }));
    assert_eq!(top[2], json!({ "a": -1.0, "": -2.0 }));
    assert_eq!(choice["logprobs"]["tokens"], json!(["a", "a", ""]));
    assert_eq!(choice["logprobs"]["text_offset"], json!([1, 2, 3]));
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &Value::Null));
    assert_eq!(response["usage"]["completion_tokens"], 3);
}

#[test]
fn tokens_can_be_returned_as_token_ids() {
    let a = bytes("a")[0];
    let body = json!({ "prompt": "x", "logprobs": 1, "return_tokens_as_token_ids": true });
    let mut answer = call(&body).unwrap().answer;
    answer
        .handle_event(0, token(a, "a", logprobs(-3.0, &[(7, -1.0)]), Some(StopReason::MaxNewTokens)))
        .unwrap();
    let response: Value = serde_json::from_str(&answer.into_response()).unwrap();
    let listed = &response["choices"][0]["logprobs"];
    assert_eq!(listed["tokens"], json!([format!("token_id:{a}")]));
    assert_eq!(listed["top_logprobs"], json!([{ "token_id:7": -1.0, (format!("token_id:{a}")): -3.0 }]));
}

#[test]
fn stop_string_is_omitted_unless_requested() {
    let ids = bytes("abc.!");
    let body = json!({ "prompt": "x", "logprobs": 0, "stop": ["zz", "c.", "."], "return_token_ids": true });
    let finish = |body: &Value| {
        let mut answer = call(body).unwrap().answer;
        for (id, (text, reason)) in
            ids.iter().zip([("a", None), ("b", None), ("", None), ("", Some(StopReason::StopString))])
        {
            answer.handle_event(0, token(*id, text, logprobs(-1.0, &[]), reason)).unwrap();
        }
        serde_json::from_str::<Value>(&answer.into_response()).unwrap()
    };
    let response = finish(&body);
    let choice = &response["choices"][0];
    assert_eq!((&choice["text"], &choice["stop_reason"]), (&json!("ab"), &json!("c.")));
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(choice["logprobs"]["tokens"], json!(["a", "b"]));
    assert_eq!(choice["token_ids"], json!(ids[..4]));
    assert_eq!(response["usage"]["completion_tokens"], 4);
    let mut with_stop = body.clone();
    with_stop["include_stop_str_in_output"] = json!(true);
    let choice = &finish(&with_stop)["choices"][0];
    assert_eq!(
        (&choice["text"], &choice["logprobs"]["tokens"]),
        (&json!("abc."), &json!(["a", "b", "c", "."]))
    );
}

#[test]
fn stop_reason_reports_the_requested_stop() {
    let reason = |body: Value, id: u32| {
        let mut answer = call(&body).unwrap().answer;
        answer.handle_event(0, token(id, "", None, Some(StopReason::Eos))).unwrap();
        serde_json::from_str::<Value>(&answer.into_response()).unwrap()["choices"][0]["stop_reason"].take()
    };
    assert_eq!(reason(json!({ "stop_token_ids": [7] }), 7), json!(7));
    assert_eq!(reason(json!({ "stop_token_ids": [7] }), 0), Value::Null);
    assert_eq!(reason(json!({ "stop": ["a", "<|endoftext|>"] }), 0), json!("<|endoftext|>"));
    let ended = |reason| {
        let mut answer = call(&json!({})).unwrap().answer;
        answer.handle_event(0, token(7, "x", None, Some(reason))).unwrap();
        let response: Value = serde_json::from_str(&answer.into_response()).unwrap();
        json!([response["choices"][0]["finish_reason"], response["choices"][0]["stop_reason"]])
    };
    assert_eq!(ended(StopReason::MaxNewTokens), json!(["length", null]));
    assert_eq!(ended(StopReason::Context), json!(["length", null]));
    assert_eq!(ended(StopReason::MaxTime), json!(["length", "max_time"]));
    assert_eq!(ended(StopReason::Complete), json!(["stop", null]));
}
