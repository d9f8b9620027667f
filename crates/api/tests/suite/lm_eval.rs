//! What lm-evaluation-harness sends, read as it reads it: `local-completions` of its 0.4.
//!
//! Source: `lm_eval/models/openai_completions.py`, `parse_logprobs`.

use candle_gpt2_api::Endpoint;
use candle_gpt2_generation::score;
use serde_json::{Value, json};

use crate::common::{SCORE_TOLERANCE, reply, tiny};

/// The sum of what follows the context, and whether it is all the most probable: as `parse_logprobs` computes them.
fn parsed(response: &Value, context_lengths: &[usize]) -> Vec<(f64, bool)> {
    let mut choices = response["choices"].as_array().unwrap().clone();
    choices.sort_by_key(|choice| choice["index"].as_u64().unwrap());
    assert_eq!(choices.len(), context_lengths.len());
    let of = |(choice, length): (&Value, &usize)| {
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
    choices.iter().zip(context_lengths).map(of).collect()
}

#[test]
fn log_likelihoods_are_those_of_score() {
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
        assert_eq!(listed.len(), prompt.len() + 1, "the prompt's, and one that was generated");
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
fn what_greedy_search_writes_is_greedy() {
    let written = tiny()
        .complete(&json!({ "prompt": [0, 87], "temperature": 0, "max_tokens": 6, "return_token_ids": true }));
    let written: Vec<u32> = serde_json::from_value(written["choices"][0]["token_ids"].clone()).unwrap();
    let prompt = [&[0, 87], &written[..]].concat();
    let body = json!({ "prompt": [prompt], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": true });
    assert!(parsed(&tiny().complete(&body), &[2])[0].1);
}

#[test]
fn the_whole_context_is_scored() {
    let prompt: Vec<u32> = (0..47).map(|place| place * 5 % 300).collect();
    let body = json!({ "prompt": [prompt], "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": true });
    let response = tiny().complete(&body);
    assert_eq!(response["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().len(), 48);
}

#[test]
fn texts_end_at_what_a_task_names() {
    let body = json!({ "model": "tiny", "prompt": [[0, 87, 104]], "max_tokens": 20, "temperature": 0,
                       "stop": ["e", "<|endoftext|>"], "seed": 1234, "do_sample_unknown": false, "until": ["x"] });
    let response = tiny().complete(&body);
    let text = response["choices"][0]["text"].as_str().unwrap();
    assert!(!text.contains('e') && !text.contains("<|endoftext|>"), "{text}");
}

#[test]
fn recorded_bodies_are_read() {
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
