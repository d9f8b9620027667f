//! Tests that scores are bit-identical in any batch and close to the scores of single sequences.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, KvDType, LogitsFor, Pass};
use candle_gpt2_generation::{
    GenerationError, Sequence, TokenScore, diverge, score_continuations, score_sequences,
};
use candle_gpt2_testing::{CheckpointFolder, Fixture};
use candle_gpt2_weights::{Checkpoint, LoadOptions, WeightDType};

/// Tolerance for log-probabilities from the same f32 arithmetic, summed in a different order.
///
/// Keys and values are not rounded.
const SAME: f64 = 1e-5;
const WEIGHT_TYPES: [WeightDType; 3] = [WeightDType::F32, WeightDType::F16, WeightDType::Q8];

/// Loads the built-in model, which has a context of 512 tokens.
fn built_in(dtype: WeightDType) -> Gpt2LMHeadModel {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stories");
    let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
    Checkpoint::open(folder).unwrap().load(&options, &|_| ()).unwrap()
}

fn ids(count: usize, seed: u32) -> Vec<u32> {
    (0..).take(count).map(|index: u32| (index * 131 + seed * 37 + index * index % 57) % 1000).collect()
}

/// Creates a sequence of `rest` tokens after a prefix, scored from token `first`.
fn after(prefix: &[u32], rest: usize, seed: u32, first: usize) -> Sequence {
    Sequence { ids: [prefix, &ids(rest, seed)].concat(), first }
}

/// Creates groups of all kinds, for a context of 512 tokens.
fn groups() -> Vec<Vec<Sequence>> {
    let context = |count| ids(count, 1);
    let choices = |count, lengths: &[usize]| -> Vec<Sequence> {
        let choice = |(seed, rest): (u32, &usize)| after(&context(count), *rest, seed, count);
        (2..).zip(lengths).map(choice).collect()
    };
    vec![
        choices(20, &[5, 9, 3, 30]),
        choices(21, &[5, 9, 3, 30]),
        // Single-token choices: the model reads only the context.
        choices(40, &[1, 1, 1]),
        choices(3, &[1, 2, 1, 17]),
        vec![],
        // Groups of one sequence: a word after its context, a window, a sequence that is scored from its
        // second token, and the shortest possible sequence.
        vec![after(&context(80), 2, 3, 80)],
        vec![after(&[], 513, 4, 257)],
        vec![after(&[], 200, 5, 1)],
        vec![after(&[7], 1, 5, 1)],
        // A duplicated sequence, and a longer sequence that extends it.
        vec![after(&context(9), 6, 2, 9), after(&context(9), 6, 2, 9), after(&context(9), 12, 2, 9)],
        // Sequences without a common prefix.
        vec![after(&[1], 12, 2, 1), after(&[2], 15, 3, 1)],
        // Scores that start at different tokens, most of them inside the common prefix.
        vec![after(&context(30), 4, 2, 10), after(&context(30), 7, 3, 1), after(&context(30), 2, 4, 31)],
        // Sequences that fill the context, next to shorter ones.
        choices(400, &[113, 3, 113, 20]),
        choices(511, &[2, 1]),
        choices(200, &[313]),
        // Contexts that differ before the same scored tokens, as in Winogrande.
        vec![
            after(&[&context(10)[..], &[3]].concat(), 8, 9, 11),
            after(&[&context(10)[..], &[4, 5]].concat(), 8, 9, 12),
        ],
    ]
}

fn scored(model: &Gpt2LMHeadModel, groups: &[Vec<&Sequence>]) -> Vec<Vec<Vec<TokenScore>>> {
    score_sequences(model, groups).unwrap()
}

fn references(groups: &[Vec<Sequence>]) -> Vec<Vec<&Sequence>> {
    groups.iter().map(|group| group.iter().collect()).collect()
}

/// Scores a sequence with a single pass over its tokens.
fn naive(model: &Gpt2LMHeadModel, Sequence { ids, first }: &Sequence) -> Vec<TokenScore> {
    let logits = logits(model, &ids[..ids.len() - 1]);
    (*first..ids.len()).map(|position| score(&logits[position - 1], ids[position])).collect()
}

/// Scores a token with the standard library's exponential function and a sequential sum.
fn score(logits: &[f32], id: u32) -> TokenScore {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - f64::from(largest)).exp()).sum();
    let logprob = f64::from(logits[id as usize]) - f64::from(largest) - sum.ln();
    TokenScore { logprob, is_greedy: logits.iter().position(|logit| *logit == largest) == Some(id as usize) }
}

/// Returns the logits after every token, read through a KV cache.
fn logits(model: &Gpt2LMHeadModel, ids: &[u32]) -> Vec<Vec<f32>> {
    let mut cache = model.new_cache(1, ids.len()).unwrap();
    let ids = Tensor::from_slice(ids, (1, ids.len()), &Device::Cpu).unwrap();
    let logits =
        model.forward_with(&ids, LogitsFor::EveryToken, Some(&mut cache), &mut Pass::inference()).unwrap();
    logits.squeeze(0).unwrap().to_vec2().unwrap()
}

#[test]
fn grouped_sequences_score_as_alone() {
    for dtype in WEIGHT_TYPES {
        let model = built_in(dtype);
        let groups = groups();
        let found = scored(&model, &references(&groups));
        assert_eq!(found.len(), groups.len());
        for (number, (found, group)) in found.iter().zip(&groups).enumerate() {
            assert_eq!(found.len(), group.len(), "group {number}");
            for (found, sequence) in found.iter().zip(group) {
                let expected = naive(&model, sequence);
                assert_eq!(found.len(), expected.len(), "group {number}");
                for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
                    let difference = (found.logprob - expected.logprob).abs();
                    assert!(
                        difference < SAME,
                        "{dtype:?}, group {number}, token {place}: {found:?} for {expected:?}"
                    );
                    assert_eq!(
                        found.is_greedy, expected.is_greedy,
                        "{dtype:?}, group {number}, token {place}"
                    );
                }
            }
        }
    }
}

/// A group has the same scores alone, in another order, and next to its own copies in many passes.
#[test]
fn group_scores_do_not_depend_on_other_groups() {
    for dtype in WEIGHT_TYPES {
        let model = built_in(dtype);
        let groups = groups();
        let groups = references(&groups);
        let together = scored(&model, &groups);
        for (group, expected) in groups.iter().zip(&together) {
            let alone = scored(&model, std::slice::from_ref(group));
            assert_eq!(alone, std::slice::from_ref(expected), "{dtype:?}: alone");
        }
        let backwards: Vec<Vec<&Sequence>> = groups.iter().rev().cloned().collect();
        let mut found = scored(&model, &backwards);
        found.reverse();
        assert_eq!(found, together, "{dtype:?}: in another order");
        let many: Vec<Vec<&Sequence>> = groups.iter().cycle().take(5 * groups.len()).cloned().collect();
        let expected: Vec<_> = together.iter().cycle().take(many.len()).cloned().collect();
        assert_eq!(scored(&model, &many), expected, "{dtype:?}: in many passes");
        for (group, expected) in groups.iter().zip(&together) {
            let reversed: Vec<&Sequence> = group.iter().rev().copied().collect();
            let mut found = scored(&model, &[reversed]);
            found[0].reverse();
            assert_eq!(found[0], *expected, "{dtype:?}: sequences of a group in another order");
        }
    }
}

#[test]
fn first_of_equally_probable_tokens_is_greedy() {
    // With all weights zero, all tokens are equally probable.
    let config = Gpt2Config::from_json(
        r#"{"model_type": "gpt2", "vocab_size": 11, "n_positions": 5, "n_embd": 6, "n_layer": 2, "n_head": 3}"#,
    );
    let zeros = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
    let model = Gpt2LMHeadModel::load(&config.unwrap(), zeros).unwrap();
    let sequence = Sequence { ids: vec![3, 0, 1, 10, 0, 0], first: 1 };
    let found = scored(&model, &[vec![&sequence]]).remove(0).remove(0);
    for (place, (score, is_greedy)) in found.iter().zip([true, false, false, true, true]).enumerate() {
        assert!((score.logprob + 11f64.ln()).abs() < 1e-12, "{score:?}");
        assert_eq!(score.is_greedy, is_greedy, "token {place}");
    }
    let [greedy, other] = [vec![0, 0], vec![0, 1]];
    let found = score_continuations(&model, &[3], &[greedy, other], &|| ()).unwrap();
    assert_eq!(found.iter().map(|found| found.is_greedy).collect::<Vec<_>>(), [true, false]);
}

#[test]
fn invalid_sequences_are_reported() {
    let model = built_in(WeightDType::F32);
    assert!(scored(&model, &[]).is_empty());
    assert_eq!(scored(&model, &[vec![], vec![]]), [vec![], vec![]] as [Vec<Vec<TokenScore>>; 2]);
    let good = after(&[], 20, 1, 1);
    for (bad, message) in [
        (Sequence { ids: vec![], first: 1 }, "cannot score a sequence of 0 tokens from index 1"),
        (Sequence { ids: vec![1, 2, 3], first: 0 }, "cannot score a sequence of 3 tokens from index 0"),
        (Sequence { ids: vec![1, 2, 3], first: 3 }, "cannot score a sequence of 3 tokens from index 3"),
        (Sequence { ids: vec![1, 2, 3], first: usize::MAX }, "the index must be at least 1"),
        (
            after(&[], 514, 1, 1),
            "the sequence needs 513 positions, but the model's context has 512; shorten it by 1",
        ),
        (Sequence { ids: vec![1, 2, 5000], first: 1 }, "token id 5000 (token 3"),
    ] {
        let error = score_sequences(&model, &[vec![&good], vec![&good, &bad]]).unwrap_err();
        assert!(error.is_usage() && matches!(error, GenerationError::Sequence { group: 2, number: 2, .. }));
        let text = error.to_string();
        assert!(text.starts_with("sequence 2 of group 2: ") && text.contains(message), "{text}");
    }
    let broken = CheckpointFolder::tiny().with_tensors(|tensors| {
        let nan = Tensor::from_vec(vec![f32::NAN; 28], 28, &Device::Cpu).unwrap();
        tensors.insert("transformer.ln_f.bias".into(), nan);
    });
    let broken = Checkpoint::open(broken.path()).unwrap().load(&LoadOptions::default(), &|_| ()).unwrap();
    let short = after(&[], 20, 1, 1).ids.iter().map(|id| id % 300).collect();
    let short = Sequence { ids: short, first: 1 };
    assert!(matches!(score_sequences(&broken, &[vec![&short]]).unwrap_err(), GenerationError::NotFinite));
    assert!(matches!(diverge(&broken, &broken, &short.ids, 1).unwrap_err(), GenerationError::NotFinite));
}

/// Compares scores with transformers' logits for small models and two rows of tokens.
#[test]
fn scores_equal_transformers() {
    for case in ["gelu_new", "inverse_layer_scale", "odd_head", "untied", "one_layer"] {
        let fixture = Fixture::open(&format!("gpt2/{case}"));
        let config = Gpt2Config::from_json(&fixture.recorded()["config"].to_string()).unwrap();
        let model = Gpt2LMHeadModel::load(&config, fixture.parameters("")).unwrap();
        let rows: Vec<Vec<u32>> =
            fixture.tensor("input_ids").to_dtype(DType::U32).unwrap().to_vec2().unwrap();
        let logits: Vec<Vec<Vec<f32>>> = fixture.tensor("expected.logits").to_vec3().unwrap();
        let sequence = |ids: &Vec<u32>| Sequence { ids: [&ids[..], &[5]].concat(), first: 1 };
        let sequences: Vec<Sequence> = rows.iter().map(sequence).collect();
        let found = scored(&model, &[sequences.iter().collect()]).remove(0);
        for ((sequence, found), logits) in sequences.iter().zip(found).zip(logits) {
            assert_eq!(found.len(), logits.len(), "{case}");
            for ((found, logits), id) in found.iter().zip(logits).zip(&sequence.ids[1..]) {
                let expected = score(&logits, *id);
                assert!(
                    (found.logprob - expected.logprob).abs() < 1e-4,
                    "{case}: {found:?} for {expected:?}"
                );
                assert_eq!(found.is_greedy, expected.is_greedy, "{case}");
            }
        }
    }
}

#[test]
fn divergence_equals_its_definition() {
    let (base, other) = (built_in(WeightDType::F32), built_in(WeightDType::Q8));
    for (count, first) in [(2, 1), (150, 1), (200, 100), (513, 512)] {
        let ids = ids(count, 3);
        let (base_logits, other_logits) =
            (logits(&base, &ids[..count - 1]), logits(&other, &ids[..count - 1]));
        let found = diverge(&base, &other, &ids, first).unwrap();
        assert_eq!(found.len(), count - first);
        for (found, position) in found.iter().zip(first..) {
            let (p, q) = (&base_logits[position - 1], &other_logits[position - 1]);
            let log_softmax = |logits: &[f32]| -> Vec<f64> {
                let normalizer = f64::from(logits[0]) - score(logits, 0).logprob;
                logits.iter().map(|logit| f64::from(*logit) - normalizer).collect()
            };
            let (log_p, log_q) = (log_softmax(p), log_softmax(q));
            let kl: f64 = log_p.iter().zip(&log_q).map(|(p, q)| p.exp() * (p - q)).sum();
            assert!(kl > 0.0 && (found.kl - kl).abs() < 1e-12, "token {position}: {found:?} for {kl}");
            let id = ids[position] as usize;
            assert!((found.base_logprob - log_p[id]).abs() < 1e-12, "token {position}: {found:?}");
            assert!((found.logprob - log_q[id]).abs() < 1e-12, "token {position}: {found:?}");
            let top = |logits: &[f32]| {
                let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                logits.iter().position(|logit| *logit == largest)
            };
            assert_eq!(found.same_top, top(p) == top(q), "token {position}");
        }
    }
}

#[test]
fn model_does_not_diverge_from_itself() {
    for dtype in WEIGHT_TYPES {
        let model = built_in(dtype);
        let ids = ids(513, 2);
        let found = diverge(&model, &model, &ids, 1).unwrap();
        assert_eq!(found.len(), 512);
        assert!(found.iter().all(|found| found.kl == 0.0 && found.same_top), "{dtype:?}");
        assert!(found.iter().all(|found| found.base_logprob == found.logprob), "{dtype:?}");
        // `score_sequences` computes the same log-probabilities in a pass of its own.
        let scores = scored(&model, &[vec![&Sequence { ids: ids.clone(), first: 1 }]]).remove(0).remove(0);
        assert!(found.iter().zip(scores).all(|(found, score)| found.logprob == score.logprob), "{dtype:?}");
    }
}

#[test]
fn kv_cache_dtype_causes_divergence() {
    let model = built_in(WeightDType::F32);
    let rounded = model.clone().with_kv_dtype(KvDType::Q8);
    let mean = |base: &Gpt2LMHeadModel, other: &Gpt2LMHeadModel| {
        let found = diverge(base, other, &ids(200, 2), 100).unwrap();
        found.iter().map(|found| found.kl).sum::<f64>() / found.len() as f64
    };
    let (forward, reverse) = (mean(&model, &rounded), mean(&rounded, &model));
    assert!(forward > 1e-9 && forward < 1e-2, "{forward}");
    // For similar distributions, the divergence is nearly, but not exactly, symmetric.
    assert!(forward != reverse && (forward / reverse - 1.0).abs() < 0.2, "{forward} and {reverse}");
}

#[test]
fn invalid_comparisons_are_rejected() {
    let model = built_in(WeightDType::F32);
    let tiny = CheckpointFolder::tiny();
    let tiny = Checkpoint::open(tiny.path()).unwrap().load(&LoadOptions::default(), &|_| ()).unwrap();
    let rejection =
        |other: &Gpt2LMHeadModel, ids: &[u32], first: usize| diverge(&model, other, ids, first).unwrap_err();
    let error = rejection(&tiny, &[1, 2], 1);
    assert!(matches!(error, GenerationError::OtherVocabulary { found: 300, .. }) && error.is_usage());
    let tokens = ids(514, 1);
    let error = rejection(&model, &tokens, 1);
    assert!(matches!(error, GenerationError::SequenceTooLong { tokens: 513, n_positions: 512 }), "{error}");
    for (ids, first) in [(&tokens[..0], 1), (&tokens[..1], 1), (&tokens[..5], 0), (&tokens[..5], 5)] {
        let error = rejection(&model, ids, first);
        assert!(matches!(error, GenerationError::NothingToScore { .. }) && error.is_usage(), "{error}");
    }
    assert!(matches!(rejection(&model, &[1, 5000], 1), GenerationError::IdBeyondVocabulary { id: 5000, .. }));
}
