//! Invalid fields, one per request.

use super::super::JSON;
use super::{Case, case};
use crate::common::request;

/// Completion requests with invalid fields.
pub(super) fn completion_cases() -> Vec<Case> {
    let invalid = [
        (r#""prompt":1"#, "prompt"),
        (r#""prompt":{}"#, "prompt"),
        (r#""prompt":true"#, "prompt"),
        (r#""prompt":[]"#, "prompt"),
        (r#""prompt":[[]]"#, "prompt[0]"),
        (r#""prompt":["a",1]"#, "prompt[1]"),
        (r#""prompt":[1,"a"]"#, "prompt[1]"),
        (r#""prompt":[[1],[1,"a"]]"#, "prompt[1][1]"),
        (r#""prompt":[-1]"#, "prompt[0]"),
        (r#""prompt":[1.5]"#, "prompt[0]"),
        (r#""prompt":[300]"#, "prompt[0]"),
        (r#""prompt":[[1],[1,4294967296]]"#, "prompt[1][1]"),
        (r#""prompt":[99999999999999999999]"#, "prompt[0]"),
        (r#""prompt":[[[1]]]"#, "prompt[0][0]"),
        (r#""prompt":[null]"#, "prompt[0]"),
        (r#""max_tokens":-1"#, "max_tokens"),
        (r#""max_tokens":1.5"#, "max_tokens"),
        (r#""max_tokens":"1""#, "max_tokens"),
        (r#""max_tokens":1e999"#, "max_tokens"),
        (r#""max_tokens":99999999999999999999"#, "max_tokens"),
        (r#""max_tokens":1000"#, "prompt"),
        (r#""max_tokens":4294967295"#, "max_tokens"),
        (r#""temperature":-0.1"#, "temperature"),
        (r#""temperature":2.1"#, "temperature"),
        (r#""temperature":"hot""#, "temperature"),
        (r#""temperature":[]"#, "temperature"),
        (r#""temperature":NaN"#, ""),
        (r#""temperature":1e999"#, "temperature"),
        (r#""temperature":Infinity"#, ""),
        (r#""top_p":-1"#, "top_p"),
        (r#""top_p":1.01"#, "top_p"),
        (r#""top_k":-2"#, "top_k"),
        (r#""top_k":1.5"#, "top_k"),
        (r#""min_p":2"#, "min_p"),
        (r#""n":0"#, "n"),
        (r#""n":-1"#, "n"),
        (r#""n":17"#, "n"),
        (r#""n":129"#, "n"),
        (r#""n":1000000000"#, "n"),
        (r#""n":"2""#, "n"),
        (r#""best_of":21"#, "best_of"),
        (r#""best_of":1000000000"#, "best_of"),
        (r#""best_of":2,"n":3"#, "best_of"),
        (r#""best_of":2,"stream":true"#, "best_of"),
        (r#""logprobs":21"#, "logprobs"),
        (r#""logprobs":-1"#, "logprobs"),
        (r#""logprobs":true"#, "logprobs"),
        (r#""echo":1"#, "echo"),
        (r#""echo":"yes""#, "echo"),
        (r#""stream":"true""#, "stream"),
        (r#""stream_options":{"include_usage":true}"#, "stream_options"),
        (r#""stop":"""#, "stop"),
        (r#""stop":[""]"#, "stop[0]"),
        (r#""stop":[1]"#, "stop[0]"),
        (r#""stop":1"#, "stop"),
        (r#""stop":{}"#, "stop"),
        (r#""suffix":"x""#, "suffix"),
        (r#""seed":1.5"#, "seed"),
        (r#""seed":18446744073709551616"#, "seed"),
        (r#""seed":"1""#, "seed"),
        (r#""logit_bias":{"a":1}"#, "logit_bias"),
        (r#""logit_bias":{"-1":1}"#, "logit_bias"),
        (r#""logit_bias":{"1":101}"#, "logit_bias"),
        (r#""logit_bias":{"300":1}"#, "logit_bias"),
        (r#""logit_bias":{"1":"x"}"#, "logit_bias"),
        (r#""logit_bias":[1]"#, "logit_bias"),
        (r#""presence_penalty":3"#, "presence_penalty"),
        (r#""frequency_penalty":-2.5"#, "frequency_penalty"),
        (r#""repetition_penalty":0"#, "repetition_penalty"),
        (r#""repetition_penalty":-1e308"#, "repetition_penalty"),
        (r#""min_tokens":48"#, ""),
        (r#""stop_token_ids":[-1]"#, "stop_token_ids"),
        (r#""stop_token_ids":[300]"#, "stop_token_ids"),
        (r#""bad_words":[""]"#, "bad_words"),
        (r#""allowed_token_ids":[-5]"#, "allowed_token_ids"),
        (r#""truncate_prompt_tokens":0"#, "truncate_prompt_tokens"),
        (r#""use_beam_search":true"#, "use_beam_search"),
        (r#""prompt_logprobs":5"#, "prompt_logprobs"),
        (r#""tools":[{"type":"function"}]"#, "tools"),
        (r#""response_format":{"type":"xml"}"#, "response_format"),
        (r#""guided_regex":"(""#, "guided_regex"),
        (r#""guided_json":"{""#, "guided_json"),
        (r#""temperature":0,"temperature":1"#, "temperature"),
        (r#""prompt":"a","prompt":"b""#, "prompt"),
    ];
    let post = |body: &str| request("POST", "/v1/completions", &[JSON], body.as_bytes());
    let mut cases: Vec<Case> =
        invalid.iter().map(|(field, param)| case(post(&format!("{{{field}}}")), 400, param)).collect();
    // Cases with long lists and large values.
    let list = |item: &str, count: usize| vec![item; count].join(",");
    cases.push(case(post(&format!(r#"{{"prompt":[{}]}}"#, list("\"a\"", 65))), 400, "prompt"));
    cases.push(case(post(&format!(r#"{{"prompt":[{}]}}"#, list("1", 100_000))), 400, "prompt"));
    cases.push(case(post(&format!(r#"{{"prompt":"{}"}}"#, "a".repeat(1_000_000))), 400, "prompt"));
    cases.push(case(post(&format!(r#"{{"stop":[{}]}}"#, list("\"a\"", 33))), 400, "stop"));
    cases.push(case(
        post(&format!(r#"{{"guided_regex":"{}"}}"#, "(a|b)*".repeat(20_000))),
        400,
        "guided_regex",
    ));
    let biases: Vec<String> = (0..1025).map(|id| format!("\"{id}\":1")).collect();
    cases.push(case(post(&format!(r#"{{"logit_bias":{{{}}}}}"#, biases.join(","))), 400, "logit_bias"));
    for name in ["other", "../tiny", "/etc/passwd", "http://evil.example/model", "TINY", "tiny\\u0000"] {
        cases.push(case(post(&format!(r#"{{"model":"{name}"}}"#)), 404, "model"));
    }
    cases.push(case(post(r#"{"model":5}"#), 400, "model"));
    cases
}

/// Invalid bodies for the other routes.
pub(super) fn other_cases() -> Vec<Case> {
    let post = |path: &str, body: &str| request("POST", path, &[JSON], body.as_bytes());
    vec![
        case(post("/v1/chat/completions", "{}"), 400, "messages"),
        case(
            post("/v1/chat/completions", r#"{"messages":[{"role":"user","content":"a"}]}"#),
            400,
            "--chat-template",
        ),
        case(post("/v1/chat/completions", r#"{"messages":5}"#), 400, "messages"),
        case(post("/tokenize", r#"{"prompt":5}"#), 400, "prompt"),
        case(post("/tokenize", "{}"), 400, "prompt"),
        case(post("/detokenize", r#"{"tokens":[300]}"#), 400, "tokens[0]"),
        case(post("/detokenize", r#"{"tokens":[-1]}"#), 400, "tokens[0]"),
        case(post("/detokenize", r#"{"tokens":"a"}"#), 400, "tokens"),
        case(post("/detokenize", "{}"), 400, "tokens"),
        case(post("/look/attention", "{}"), 400, ""),
        case(post("/look/lens", r#"{"prompt":5}"#), 400, ""),
        case(post("/look/lens", "[]"), 400, ""),
    ]
}
