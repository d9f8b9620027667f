//! Error messages for field values of the wrong type or out of range.

use serde_json::json;

use crate::common::error;
use crate::fields::with;

#[test]
fn invalid_values_report_the_field_and_the_expectation() {
    let long = "x".repeat(1025);
    let cases = [
        ("model", json!(7), "model: expected a string, found 7", "model"),
        ("model", json!(""), "model: expected a string of 1 to 256 bytes, found an empty string", "model"),
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
            "prompt[1]: expected a token id below the vocabulary size of 300, found 300",
            "prompt[1]",
        ),
        (
            "prompt",
            json!([[5], [5, 6, 301]]),
            "prompt[1][2]: expected a token id below the vocabulary size of 300, found 301",
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
        (
            "n",
            json!(17),
            "n: this server accepts at most 16 completions per prompt (n, best_of), found 17",
            "n",
        ),
        (
            "best_of",
            json!(17),
            "best_of: this server accepts at most 16 completions per prompt (n, best_of), found 17",
            "best_of",
        ),
        ("best_of", json!(21), "best_of: expected a whole number from 0 to 20, found 21", "best_of"),
        ("stop", json!(""), "stop: expected a string of 1 to 1024 bytes, found an empty string", "stop"),
        (
            "stop",
            json!(["a", ""]),
            "stop[1]: expected a string of 1 to 1024 bytes, found an empty string",
            "stop[1]",
        ),
        ("stop", json!(["a", 5]), "stop[1]: expected a string, found 5", "stop[1]"),
        ("stop", json!(long), "stop: expected a string of 1 to 1024 bytes, found 1025 bytes", "stop"),
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
            "stream_options: expected no value unless stream is true, found {\"include_usage\":true}",
            "stream_options",
        ),
        (
            "seed",
            json!(1.5),
            "seed: expected a whole number from -9223372036854775808 to 18446744073709551615, found 1.5",
            "seed",
        ),
        (
            "logit_bias",
            json!([]),
            "logit_bias: expected an object that maps token ids to biases, found []",
            "logit_bias",
        ),
        (
            "logit_bias",
            json!({ "a": 1 }),
            "logit_bias: expected token ids as keys, found \"a\"",
            "logit_bias",
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
            "logit_bias: expected one bias for token 5, found two",
            "logit_bias",
        ),
        (
            "logit_bias",
            json!({ "300": 1 }),
            "logit_bias.300: expected a token id below the vocabulary size of 300, found 300",
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
            "repetition_penalty: expected a number above 0 and at most 1000, found 0",
            "repetition_penalty",
        ),
        (
            "repeat_penalty",
            json!(0),
            "repeat_penalty: expected a number above 0 and at most 1000, found 0",
            "repeat_penalty",
        ),
        (
            "repetition_penalty",
            json!(1e300),
            "repetition_penalty: expected a number above 0 and at most 1000, found 1e+300",
            "repetition_penalty",
        ),
        (
            "suffix",
            json!("end"),
            "suffix: this server does not support this field; GPT-2 cannot insert text; send only a prompt",
            "suffix",
        ),
        ("min_tokens", json!(5), "min_tokens: expected at most max_tokens, found 5", "min_tokens"),
        ("ignore_eos", json!(0), "ignore_eos: expected true or false, found 0", "ignore_eos"),
        (
            "stop_token_ids",
            json!([1, 300]),
            "stop_token_ids[1]: expected a token id below the vocabulary size of 300, found 300",
            "stop_token_ids[1]",
        ),
        (
            "allowed_token_ids",
            json!([300]),
            "allowed_token_ids[0]: expected a token id below the vocabulary size of 300, found 300",
            "allowed_token_ids[0]",
        ),
        (
            "bad_words",
            json!(["a", ""]),
            "bad_words[1]: expected a string of 1 to 256 bytes, found an empty string",
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
            "cache_salt: expected a string of 1 to 256 bytes, found an empty string",
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
            "use_beam_search: this server does not support this field; remove it, or use `gpt2 generate --num-beams`",
            "use_beam_search",
        ),
        (
            "prompt_logprobs",
            json!(0),
            "prompt_logprobs: this server does not support this field; use echo and logprobs at /v1/completions",
            "prompt_logprobs",
        ),
        (
            "tools",
            json!([1]),
            "tools: this server does not support this field; remove it, because the model does not support tool calls",
            "tools",
        ),
        (
            "grammar",
            json!("root ::= \"a\""),
            "grammar: this server does not support this field; use guided_grammar with Lark's syntax",
            "grammar",
        ),
        (
            "guided_choice",
            json!(["a", ""]),
            "guided_choice[1]: expected a string of 1 to 8192 bytes, found an empty string",
            "guided_choice[1]",
        ),
        (
            "guided_choice",
            json!([]),
            "guided_choice: expected a list of non-empty strings, found []",
            "guided_choice",
        ),
        (
            "guided_regex",
            json!(""),
            "guided_regex: expected a string of 1 to 8192 bytes, found an empty string",
            "guided_regex",
        ),
        (
            "guided_grammar",
            json!(""),
            "guided_grammar: expected a string of 1 to 262144 bytes, found an empty string",
            "guided_grammar",
        ),
        (
            "guided_json",
            json!(false),
            "guided_json: expected a JSON schema object, found false",
            "guided_json",
        ),
        (
            "guided_json",
            json!(""),
            "guided_json: expected a string of 1 to 262144 bytes, found an empty string",
            "guided_json",
        ),
        ("json_schema", json!([]), "json_schema: expected a JSON schema object, found []", "json_schema"),
        (
            "response_format",
            json!({}),
            "response_format: expected an object with type `text`, `json_object` or `json_schema`, found {}",
            "response_format",
        ),
        (
            "structured_outputs",
            json!({}),
            "structured_outputs: expected exactly one of json, regex, grammar, choice and json_object, found {}",
            "structured_outputs",
        ),
        (
            "structured_outputs",
            json!({ "json_object": false }),
            "structured_outputs: expected exactly one of json, regex, grammar, choice and json_object, found {\"json_object\":false}",
            "structured_outputs",
        ),
        (
            "seed",
            json!(18_446_744_073_709_551_616_f64),
            "seed: expected a whole number from -9223372036854775808 to 18446744073709551615, found 1.8446744073709552e+19",
            "seed",
        ),
        (
            "response_format",
            json!({ "type": "xml" }),
            "response_format.type: expected `text`, `json_object` or `json_schema`, found \"xml\"",
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
            "response_format: expected an object with json_schema.schema, found an object",
            "response_format",
        ),
        (
            "guided_json",
            json!("nothing"),
            "guided_json: expected a JSON schema, found \"nothing\"",
            "guided_json",
        ),
        ("guided_json", json!([5]), "guided_json: expected a JSON schema object, found [5]", "guided_json"),
        (
            "structured_outputs",
            json!({ "regex": "a", "grammar": "b" }),
            "structured_outputs: expected exactly one of json, regex, grammar, choice and json_object, found {\"regex\":\"a\",\"grammar\":\"b\"}",
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
fn second_output_constraint_is_rejected_even_if_empty() {
    for (name, value) in
        [("guided_choice", json!([])), ("guided_json", json!({})), ("response_format", json!({}))]
    {
        let mut body = with(name, value);
        body["guided_regex"] = json!("a");
        let error = error(&body);
        assert_eq!(error.status(), 400, "{name}");
        assert!(error.to_string().contains(name) || error.param() == Some("guided_regex"), "{name}: {error}");
    }
}
