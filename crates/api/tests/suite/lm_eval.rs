//! Requests from lm-evaluation-harness 0.4 (`local-completions`), and its parsing of responses.
//!
//! Source: `lm_eval/models/openai_completions.py`, `parse_logprobs`.

use candle_gpt2_api::Endpoint;
use candle_gpt2_generation::score;
use serde_json::{Value, json};

use crate::common::{SCORE_TOLERANCE, reply, tiny};

/// Summed log-probability of the continuation, and whether it is greedy, following `parse_logprobs`.
fn parsed(response: &Value, context_lengths: &[usize]) -> Vec<(f64, bool)> {
    let mut choices = response["choices"].as_array().unwrap().clone();
    choices.sort_by_key(|choice| choice["index"].as_u64().unwrap());
    assert_eq!(choices.len(), context_lengths.len());
    let parse_choice = |(choice, length): (&Value, &usize)| {
        let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        let end = logprobs.len() - 1;
        let sum = logprobs[*length..end].iter().map(|logprob| logprob.as_f64().unwrap()).sum();
        let tops = &choice["logprobs"]["top_logprobs"].as_array().unwrap()[*length..end];
        let is_greedy = logprobs[*length..end].iter().zip(tops).all(|(logprob, top)| {
            let best = top.as_object().unwrap().values().map(|value| value.as_f64().unwrap());
            logprob.as_f64().unwrap() == best.fold(f64::NEG_INFINITY, f64::max)
        });
        (sum, is_greedy)
    };
    choices.iter().zip(context_lengths).map(parse_choice).collect()
}

#[test]
fn log_likelihoods_match_score() {
    let model = tiny().model.model();
    let contexts = [vec![0, 87, 104], vec![0], vec![0, 5, 6, 7, 8]];
    let endings = [vec![40, 41], vec![70, 71, 72, 73], vec![9]];
    let prompts: Vec<Vec<u32>> =
        contexts.iter().zip(&endings).map(|(context, ending)| [&context[..], ending].concat()).collect();
    let body = json!({ "model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1,
                       "seed": 1234, "echo": true });
    let response = tiny().complete(&body);
    let lengths: Vec<usize> = contexts.iter().map(Vec::len).collect();
    for (choice, prompt) in response["choices"].as_array().unwrap().iter().zip(&prompts) {
        let listed = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        assert_eq!(listed.len(), prompt.len() + 1, "the prompt tokens and one generated token");
        assert!(listed[0].is_null() && listed[1..].iter().all(Value::is_number));
        assert!(choice["logprobs"]["top_logprobs"].as_array().unwrap()[1..].iter().all(Value::is_object));
    }
    for ((sum, is_greedy), (prompt, length)) in
        parsed(&response, &lengths).into_iter().zip(prompts.iter().zip(&lengths))
    {
        let scored = score(model, prompt, 48, 1, &|_| ()).unwrap();
        let expected: f64 = scored.logprobs[*length..].iter().flatten().sum();
        assert!((sum - expected).abs() < SCORE_TOLERANCE * prompt.len() as f64, "{sum} and {expected}");
        let best = scored.alternatives[*length..].iter().zip(&prompt[*length..]);
        assert_eq!(is_greedy, best.into_iter().all(|(best, id)| best[0].0 == *id));
    }
}

#[test]
fn greedy_completion_is_recognized_as_greedy() {
    let generated = tiny()
        .complete(&json!({ "prompt": [0, 87], "temperature": 0, "max_tokens": 6, "return_token_ids": true }));
    let generated: Vec<u32> = serde_json::from_value(generated["choices"][0]["token_ids"].clone()).unwrap();
    let prompt = [&[0, 87], &generated[..]].concat();
    let body = json!({ "prompt": [prompt], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": true });
    assert!(parsed(&tiny().complete(&body), &[2])[0].1);
}

#[test]
fn prompt_that_fills_the_context_is_scored() {
    let prompt: Vec<u32> = (0..47).map(|index| index * 5 % 300).collect();
    let body = json!({ "prompt": [prompt], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": true });
    let response = tiny().complete(&body);
    assert_eq!(response["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().len(), 48);
}

#[test]
fn completions_end_at_the_stop_strings() {
    let body = json!({ "model": "tiny", "prompt": [[0, 87, 104]], "max_tokens": 20, "temperature": 0,
                       "stop": ["e", "<|endoftext|>"], "seed": 1234, "do_sample_unknown": false, "until": ["x"] });
    let response = tiny().complete(&body);
    let text = response["choices"][0]["text"].as_str().unwrap();
    assert!(!text.contains('e') && !text.contains("<|endoftext|>"), "{text}");
}

#[test]
fn recorded_bodies_are_accepted() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/bodies");
    let mut read = 0;
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let body = std::fs::read(&path).unwrap();
        let name = path.file_stem().unwrap().to_str().unwrap();
        match name {
            "chat" => drop(candle_gpt2_api::ChatRequest::parse(&body).unwrap()),
            "tokenize" => drop(reply(Endpoint::Tokenize, &body).unwrap()),
            _ => drop(
                candle_gpt2_api::CompletionRequest::parse(&body)
                    .unwrap_or_else(|error| panic!("{name}: {error}")),
            ),
        }
        read += 1;
    }
    assert_eq!(read, 9);
}
