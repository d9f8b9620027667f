//! Compares greedy completions and scores with transformers, on a tiny and a published checkpoint.
//!
//! `GPT2_TEST_DEVICE` selects the device; the completions are the same on all devices.

use std::sync::Arc;
use std::time::Instant;

use std::path::Path;

use candle_gpt2::Gpt2LMHeadModel;
use candle_gpt2_generation::{
    GenerationConfig, GenerationError, StopReason, TextGenerator, TokenGenerator, score,
};
use candle_gpt2_testing::{checkpoints, device, fixture_path, json_fixture};
use candle_gpt2_weights::{Checkpoint, LoadOptions, Tokenizer, load_tokenizer};
use serde_json::Value;

/// Tolerance between log-probabilities from two f32 computations that take the logarithm in f64.
const LOGPROB: f64 = 1e-4;
/// Tolerance on a GPU, where logits of magnitude 10 differ by this much.
const LOGPROB_ON_GPU: f64 = 1e-3;

fn load(folder: &Path) -> Gpt2LMHeadModel {
    let options = LoadOptions { device: device(), ..LoadOptions::default() };
    let model = Checkpoint::open(folder).unwrap().load(&options, &|_| ()).unwrap();
    #[expect(unsafe_code, reason = "the program records steps too, and recording has a contract")]
    // SAFETY: these tests run on a GPU with one test thread, so nothing else uses the device.
    unsafe {
        model.with_recorded_steps()
    }
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn greedy(model: &Gpt2LMHeadModel, max_new_tokens: usize) -> GenerationConfig {
    let eos_token_id = model.config().eos_token_id.clone();
    GenerationConfig { max_new_tokens, eos_token_id, ..GenerationConfig::default() }
}

fn generate(model: &Gpt2LMHeadModel, prompt: &[u32], config: &GenerationConfig) -> (Vec<u32>, StopReason) {
    let started = Instant::now();
    let clock = Arc::new(move || started.elapsed());
    let mut tokens = TokenGenerator::new(model, prompt, config).unwrap().with_clock(clock);
    let ids = tokens.by_ref().collect::<Result<_, _>>().unwrap();
    (ids, tokens.stop_reason().unwrap())
}

/// Compares greedy ids and text with transformers, and the streamed pieces with the whole text.
#[track_caller]
fn assert_greedy(model: &Gpt2LMHeadModel, tokenizer: &Tokenizer, case: &Value, max_new_tokens: usize) {
    let prompt = case["prompt"].as_str().unwrap();
    let prompt_ids = tokenizer.encode(prompt, true).unwrap().get_ids().to_vec();
    assert_eq!(prompt_ids, ids(&case["prompt_ids"]), "{prompt:?}");
    let (new, _) = generate(model, &prompt_ids, &greedy(model, max_new_tokens));
    assert_eq!(new, ids(&case["ids"]), "{prompt:?}");
    let config = greedy(model, max_new_tokens);
    let pieces = TextGenerator::new(model, &prompt_ids, &config, tokenizer).unwrap();
    let text: String = pieces.collect::<Result<_, _>>().unwrap();
    assert_eq!(text, case["text"].as_str().unwrap(), "{prompt:?}");
}

#[track_caller]
fn assert_score(model: &Gpt2LMHeadModel, case: &Value) {
    let stride = usize::try_from(case["stride"].as_u64().unwrap()).unwrap();
    let found = score(model, &ids(&case["ids"]), stride, 0, &|_| ()).unwrap();
    let tolerance = if device().is_cpu() { LOGPROB } else { LOGPROB_ON_GPU };
    let expected: Vec<Option<f64>> = serde_json::from_value(case["logprobs"].clone()).unwrap();
    assert_eq!(found.logprobs.len(), expected.len());
    for (position, (found, expected)) in found.logprobs.iter().zip(&expected).enumerate() {
        match (found, expected) {
            (None, None) => {}
            (Some(found), Some(expected)) if (found - expected).abs() < tolerance => {}
            _ => panic!("stride {stride}, position {position}: expected {expected:?}, found {found:?}"),
        }
    }
    let expected_loss = case["loss"].as_f64().unwrap();
    assert!(
        (found.loss - expected_loss).abs() < tolerance,
        "expected loss {expected_loss}, found {}",
        found.loss
    );
    let expected_perplexity = case["perplexity"].as_f64().unwrap();
    assert!((found.perplexity() / expected_perplexity - 1.0).abs() < tolerance);
}

fn tiny() -> (Gpt2LMHeadModel, Tokenizer) {
    let folder = fixture_path("tiny-checkpoint");
    (load(&folder), load_tokenizer(&folder).unwrap())
}

#[test]
fn greedy_text_equals_transformers() {
    let (model, tokenizer) = tiny();
    let expected = json_fixture("tiny_checkpoint_expected");
    let cases = expected["greedy"].as_array().unwrap();
    assert_eq!(cases.len(), 3);
    for case in cases {
        assert_greedy(&model, &tokenizer, case, 20);
    }
}

#[test]
fn scores_equal_transformers_in_one_or_many_windows() {
    let (model, _) = tiny();
    let expected = json_fixture("tiny_checkpoint_expected");
    for key in ["score", "score_strided"] {
        let cases = expected[key].as_array().unwrap();
        assert!(!cases.is_empty());
        for case in cases {
            assert_score(&model, case);
        }
    }
}

/// Compares a third-party GPT-2 with transformers: 60 greedy tokens for three prompts, and a score.
#[test]
fn published_tarotble_checkpoint_equals_transformers() {
    let Some(folder) = checkpoints() else { return };
    let folder = folder.join("tarotble");
    let model = load(&folder);
    let tokenizer = load_tokenizer(folder.join("aitextgen.tokenizer.json")).unwrap();
    let expected = json_fixture("tarotble_expected");
    let cases = expected["greedy"].as_array().unwrap();
    assert_eq!(cases.len(), 3);
    for case in cases {
        assert_greedy(&model, &tokenizer, case, 60);
    }
    assert_score(&model, &expected["score"]);
}

#[test]
fn generation_stops_for_each_reason() {
    let (model, _) = tiny();
    let prompt = [289, 221, 299];
    let (ids, reason) = generate(&model, &prompt, &greedy(&model, 4));
    assert_eq!((ids.len(), reason), (4, StopReason::MaxNewTokens));
    assert_eq!(generate(&model, &prompt, &greedy(&model, 0)), (vec![], StopReason::MaxNewTokens));
    // The third greedy token ends the completion if it is configured as an end-of-text token.
    let until = GenerationConfig { eos_token_id: vec![299, ids[2]], ..greedy(&model, 40) };
    let end = ids.iter().position(|id| *id == ids[2]).unwrap();
    assert_eq!(generate(&model, &prompt, &until), (ids[..=end].to_vec(), StopReason::Eos));
    // The prompt takes three of the 48 positions, and 45 hold new tokens that are read. One more token is
    // generated but not read.
    let forever = GenerationConfig { eos_token_id: vec![], ..greedy(&model, usize::MAX) };
    let (ids, reason) = generate(&model, &prompt, &forever);
    assert_eq!((ids.len(), reason), (46, StopReason::Context));
    let whole_context = [7; 48];
    assert_eq!(generate(&model, &whole_context, &forever).0.len(), 1);
}

#[test]
fn invalid_requests_are_rejected_before_any_work() {
    let (model, _) = tiny();
    let reject = |prompt: &[u32], config: &GenerationConfig| {
        TokenGenerator::new(&model, prompt, config).err().unwrap()
    };
    let config = greedy(&model, 4);
    assert!(matches!(reject(&[], &config), GenerationError::EmptyPrompt));
    let too_long = reject(&[0; 49], &config).to_string();
    assert_eq!(
        too_long,
        "the prompt has 49 tokens, but the model's context has 48; shorten the prompt by 1, or keep only part of it"
    );
    let beyond = reject(&[0, 300], &config).to_string();
    assert!(
        beyond.contains("token id 300 (token 2 of the input) is outside the vocabulary of 300"),
        "{beyond}"
    );
    let score = |ids: &[u32], stride| score(&model, ids, stride, 0, &|_| ()).unwrap_err();
    assert!(matches!(score(&[1], 8), GenerationError::TooShortToScore { tokens: 1 }));
    assert!(matches!(score(&[1, 300], 8), GenerationError::IdBeyondVocabulary { .. }));
    assert!(matches!(score(&[1, 2], 0), GenerationError::OptionOutOfRange { .. }));
    assert!(matches!(score(&[1, 2], 49), GenerationError::OptionOutOfRange { .. }));
}

#[test]
fn generation_ends_after_an_error() {
    let folder = candle_gpt2_testing::CheckpointFolder::tiny().with_tensors(|tensors| {
        let nan = candle_core::Tensor::from_vec(vec![f32::NAN; 28], 28, &device()).unwrap();
        tensors.insert("transformer.ln_f.bias".into(), nan);
    });
    let model = load(folder.path());
    let results: Vec<_> = TokenGenerator::new(&model, &[1, 2], &greedy(&model, 9)).unwrap().collect();
    assert!(matches!(results.as_slice(), [Err(GenerationError::NotFinite)]), "{results:?}");
}

#[test]
fn same_seed_samples_the_same_tokens() {
    let (model, _) = tiny();
    let sample = |seed| {
        let config = GenerationConfig { do_sample: true, top_p: 0.95, seed, ..greedy(&model, 30) };
        generate(&model, &[289, 221], &config).0
    };
    assert_eq!(sample(1), sample(1));
    assert_ne!(sample(1), sample(2));
    // The generator is ChaCha8 and the arithmetic is fixed, so these ids are the same on every machine.
    // `scripts/reference/sampling.py` computed them from the model's logits.
    let config =
        GenerationConfig { do_sample: true, seed: 42, temperature: 0.8, top_k: 20, ..greedy(&model, 12) };
    let sampled = generate(&model, &[289, 221, 299], &config).0;
    assert_eq!(sampled, ids(&json_fixture("sampled_expected")["ids"]));
    // A temperature near zero leaves only the most probable token.
    let cold =
        GenerationConfig { do_sample: true, temperature: 1e-4, top_k: 0, seed: 3, ..greedy(&model, 30) };
    let cold = generate(&model, &[289, 221], &cold);
    assert_eq!(cold, generate(&model, &[289, 221], &greedy(&model, 30)));
}
