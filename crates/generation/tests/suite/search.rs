//! Compares beam, diverse beam and contrastive search with transformers, on a tiny checkpoint.

use std::ops::ControlFlow;

use candle_core::Device;
use candle_gpt2::Gpt2LMHeadModel;
use candle_gpt2_generation::{
    AllowedTokens, GenerationConfig, GenerationError, LogitsProcessor, StopReason, TokenGenerator,
    beam_search, contrastive_search,
};
use candle_gpt2_testing::{fixture_path, json_fixture};
use candle_gpt2_weights::{Checkpoint, LoadOptions};
use serde_json::{Value, json};

/// Tolerance between scores from two f32 computations.
const SCORE: f64 = 1e-4;

fn tiny() -> Gpt2LMHeadModel {
    Checkpoint::open(fixture_path("tiny-checkpoint")).unwrap().load(&LoadOptions::default(), &|_| ()).unwrap()
}

fn config(options: &Value) -> GenerationConfig {
    GenerationConfig::default().with_json(&options.to_string()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

#[track_caller]
fn assert_beams_equal(cases: &Value, at_least: usize) {
    let model = tiny();
    let cases = cases.as_array().unwrap();
    assert!(cases.len() >= at_least);
    for case in cases {
        let config = config(&case["options"]);
        let processors = LogitsProcessor::of_config(&config);
        let found = beam_search(&model, &ids(&case["prompt"]), &config, &processors, None, &|| {
            ControlFlow::Continue(())
        })
        .unwrap();
        let expected: Vec<Vec<u32>> = serde_json::from_value(case["ids"].clone()).unwrap();
        let found_ids: Vec<Vec<u32>> = found.iter().map(|text| shown_ids(&text.ids, &config)).collect();
        assert_eq!(found_ids, expected, "{} {}", case["prompt"], case["options"]);
        let scores: Vec<f64> = serde_json::from_value(case["scores"].clone()).unwrap();
        for (text, score) in found.iter().zip(&scores) {
            let difference = (text.score - score).abs();
            assert!(difference < SCORE * score.abs().max(1.0), "expected {score}, found {}", text.score);
            let is_end = text.ids.last().is_some_and(|id| config.eos_token_id.contains(id));
            let reason = if is_end { StopReason::Eos } else { StopReason::MaxNewTokens };
            assert_eq!(text.stop_reason, reason);
        }
    }
}

/// Returns the ids in the form that the reference uses.
///
/// With groups, the reference replaces every final end-of-text token with the first configured one. This
/// crate keeps the token.
fn shown_ids(ids: &[u32], config: &GenerationConfig) -> Vec<u32> {
    let mut ids = ids.to_vec();
    if config.num_beam_groups > 1
        && let Some(last) = ids.last_mut().filter(|id| config.eos_token_id.contains(id))
    {
        *last = config.eos_token_id[0];
    }
    ids
}

/// Compares 36 searches with length penalties, stop conditions, end-of-text tokens and processors.
#[test]
fn beam_search_equals_transformers() {
    assert_beams_equal(&json_fixture("generation")["beams"], 36);
}

#[test]
fn diverse_beam_search_equals_transformers() {
    assert_beams_equal(&json_fixture("generation_4_49")["groups"], 18);
}

#[test]
fn contrastive_search_equals_transformers() {
    let model = tiny();
    let fixture = json_fixture("generation_4_49");
    let cases = fixture["contrastive"].as_array().unwrap();
    assert!(cases.len() >= 12);
    for case in cases {
        let config = config(&case["options"]);
        let processors = LogitsProcessor::of_config(&config);
        let (found, _) =
            contrastive_search(&model, &ids(&case["prompt"]), &config, &processors, None, &|| {
                ControlFlow::Continue(())
            })
            .unwrap();
        let expected: Vec<Vec<u32>> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(vec![found], expected, "{} {}", case["prompt"], case["options"]);
    }
}

/// With a beam for every prefix, the search is exhaustive and finds the most probable completion.
#[test]
fn exhaustive_beams_find_the_most_probable_completion() {
    let model = tiny();
    let allowed = [10u32, 20, 30];
    let only = LogitsProcessor::AllowedTokens(AllowedTokens::new(move |_| allowed.to_vec()));
    let config = config(&json!({"num_beams": 9, "max_new_tokens": 3, "renormalize_logits": true}));
    let mut processors = LogitsProcessor::of_config(&config);
    only.add_to(&mut processors);
    let found =
        beam_search(&model, &[1, 2], &config, &processors, None, &|| ControlFlow::Continue(())).unwrap();
    let mut best = (f64::NEG_INFINITY, Vec::new());
    for first in allowed {
        for second in allowed {
            for third in allowed {
                let score = probability_among(&model, &allowed, &[first, second, third]);
                if score > best.0 {
                    best = (score, vec![first, second, third]);
                }
            }
        }
    }
    assert_eq!(found[0].ids, best.1);
    assert!((found[0].score - best.0 / 3.0).abs() < SCORE, "{} {}", found[0].score, best.0 / 3.0);
}

/// Computes the log-probability of a completion of `[1, 2]` from allowed tokens, without a search.
fn probability_among(model: &Gpt2LMHeadModel, allowed: &[u32], text: &[u32]) -> f64 {
    let mut sum = 0.0;
    for count in 0..text.len() {
        let ids = [&[1, 2], &text[..count]].concat();
        let ids = candle_core::Tensor::from_slice(&ids, (1, ids.len()), &Device::Cpu).unwrap();
        let pass = &mut candle_gpt2::Pass::inference();
        let logits = model.forward_with(&ids, candle_gpt2::LogitsFor::LastToken, None, pass).unwrap();
        let logits = logits.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let logit = |id: u32| f64::from(logits[id as usize]);
        let normalizer: f64 = allowed.iter().map(|id| logit(*id).exp()).sum();
        sum += logit(text[count]) - normalizer.ln();
    }
    sum
}

#[test]
fn searches_stop_at_the_context_limit() {
    let model = tiny();
    let prompt = [7u32; 46];
    let beams = config(&json!({"num_beams": 2, "max_new_tokens": 9}));
    let found = beam_search(&model, &prompt, &beams, &[], None, &|| ControlFlow::Continue(())).unwrap();
    // The prompt takes 46 of the 48 positions, and the last two hold new tokens that are read. One more
    // token is generated but not read.
    assert_eq!((found[0].ids.len(), found[0].stop_reason), (3, StopReason::Context));
    let contrastive = config(&json!({"penalty_alpha": 0.5, "top_k": 3, "max_new_tokens": 9}));
    let (found, reason) =
        contrastive_search(&model, &prompt, &contrastive, &[], None, &|| ControlFlow::Continue(())).unwrap();
    assert_eq!((found.len(), reason), (2, StopReason::Context));
}

#[test]
fn searches_reject_the_options_of_other_methods() {
    let model = tiny();
    let (beams, contrastive) = (json!({"num_beams": 2}), json!({"penalty_alpha": 0.5}));
    let is_conflict = |error: GenerationError| matches!(error, GenerationError::Conflict { .. });
    for options in [&json!({}), &contrastive] {
        let error = beam_search(&model, &[1], &config(options), &[], None, &|| ControlFlow::Continue(()))
            .unwrap_err();
        assert!(is_conflict(error));
    }
    for options in [&json!({}), &beams] {
        let error =
            contrastive_search(&model, &[1], &config(options), &[], None, &|| ControlFlow::Continue(()))
                .unwrap_err();
        assert!(is_conflict(error));
    }
    for options in [&beams, &contrastive] {
        let error = TokenGenerator::new(&model, &[1], &config(options)).err().unwrap();
        assert!(is_conflict(error));
    }
}

/// An interrupted search returns its best completions so far.
#[test]
fn searches_can_be_interrupted() {
    let model = tiny();
    let steps = std::cell::Cell::new(0);
    let interrupt = || {
        steps.set(steps.get() + 1);
        if steps.get() == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let beams = config(&json!({"num_beams": 3, "max_new_tokens": 20}));
    let found = beam_search(&model, &[1, 2], &beams, &[], None, &interrupt).unwrap();
    assert_eq!(found[0].stop_reason, StopReason::Interrupted);
    assert!((3..=4).contains(&found[0].ids.len()), "{found:?}");
    steps.set(0);
    let contrastive = config(&json!({"penalty_alpha": 0.5, "max_new_tokens": 20}));
    let (ids, reason) = contrastive_search(&model, &[1, 2], &contrastive, &[], None, &interrupt).unwrap();
    assert_eq!((ids.len(), reason), (3, StopReason::Interrupted));
}

/// A beam that cannot continue is dropped; the search fails only if no beam remains.
#[test]
fn dead_beam_does_not_end_the_search() {
    let model = tiny();
    // No token may follow 10, while 20 and 30 may follow each other.
    let allowed = AllowedTokens::new(|history| match history.generated().last() {
        None => vec![10, 20, 30],
        Some(20) => vec![30],
        Some(30) => vec![20],
        _ => vec![7],
    });
    let beams = config(&json!({"num_beams": 3, "max_new_tokens": 4, "num_return_sequences": 3}));
    let never = LogitsProcessor::SuppressTokens(vec![7]);
    let processors = [LogitsProcessor::AllowedTokens(allowed), never];
    let found = beam_search(&model, &[1], &beams, &processors, None, &|| ControlFlow::Continue(())).unwrap();
    let mut ids: Vec<Vec<u32>> = found.into_iter().map(|text| text.ids).collect();
    ids.sort();
    assert_eq!(ids, [[20, 30, 20, 30], [30, 20, 30, 20]]);
    let nothing = [LogitsProcessor::SuppressTokens((0..300).collect())];
    let error = beam_search(&model, &[1], &beams, &nothing, None, &|| ControlFlow::Continue(())).unwrap_err();
    assert!(matches!(error, GenerationError::NoTokenLeft { .. }), "{error}");
}
