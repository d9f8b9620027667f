//! Tests that scores in pieces and in batches equal the scores of whole windows and lone sequences.

use std::cell::Cell;
use std::path::Path;

use candle_core::{Device, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, LogitsFor, Pass};
use candle_gpt2_generation::{score, score_continuations};
use candle_gpt2_weights::{Checkpoint, LoadOptions, WeightDType};

/// Tolerance for log-probabilities from the same f32 arithmetic, summed in a different order.
const SAME: f64 = 2e-5;
/// Tolerance for identical logits whose exponentials are summed in f64 in a different order.
///
/// Different logits would exceed it by far.
const SAME_LOGITS: f64 = 1e-11;

/// Loads the built-in model; its context of 512 tokens is longer than one piece of logits.
fn built_in(dtype: WeightDType) -> Gpt2LMHeadModel {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stories");
    let options = LoadOptions { dtype: Some(dtype), ..LoadOptions::default() };
    Checkpoint::open(folder).unwrap().load(&options, &|_| ()).unwrap()
}

fn ids(count: u32, seed: u32) -> Vec<u32> {
    (0..count).map(|index| (index * 131 + seed * 7 + index * index % 57) % 1000).collect()
}

/// Returns the logits after every token of a window.
fn logits(model: &Gpt2LMHeadModel, window: &[u32]) -> Vec<Vec<f32>> {
    let window = Tensor::from_slice(window, (1, window.len()), &Device::Cpu).unwrap();
    let logits = model.forward_with(&window, LogitsFor::EveryToken, None, &mut Pass::inference()).unwrap();
    logits.squeeze(0).unwrap().to_vec2().unwrap()
}

fn log_probability(logits: &[f32], id: u32) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum();
    f64::from(logits[id as usize]) - (largest + sum.ln())
}

/// Covers windows that are scored in a single piece or in several pieces.
///
/// Some sequences end with a single new token, or have one new token in each window.
#[test]
fn piecewise_scores_equal_whole_windows() {
    for dtype in [WeightDType::F32, WeightDType::Q8] {
        let model = built_in(dtype);
        for (count, stride) in [(512, 256), (800, 512), (770, 256), (513, 1), (1000, 200), (2, 5)] {
            let ids = ids(count, 3);
            let mut expected = vec![None; ids.len()];
            let mut scored = 1;
            for begin in (0..ids.len()).step_by(stride) {
                let end = ids.len().min(begin + 512);
                let logits = logits(&model, &ids[begin..end]);
                for position in scored.max(begin + 1)..end {
                    expected[position] = Some(log_probability(&logits[position - begin - 1], ids[position]));
                }
                scored = end;
                if end == ids.len() {
                    break;
                }
            }
            let counted = Cell::new(0);
            let found =
                score(&model, &ids, stride, 2, &|tokens| counted.set(counted.get() + tokens)).unwrap();
            assert_eq!(found.logprobs.len(), expected.len());
            for (place, (found, expected)) in found.logprobs.iter().zip(&expected).enumerate() {
                let is_same = match (found, expected) {
                    (Some(found), Some(expected)) => (found - expected).abs() < SAME_LOGITS,
                    (found, expected) => found == expected,
                };
                assert!(
                    is_same,
                    "{dtype:?}, {count} tokens, stride {stride}, token {place}: {found:?} {expected:?}"
                );
            }
            assert_eq!(counted.get(), u64::from(count));
            let scored = found.alternatives.iter().filter(|best| best.len() == 2).count();
            assert_eq!(scored, expected.iter().flatten().count());
        }
    }
}

/// Continuations in a batch score the same as alone, bit for bit.
///
/// The continuations have various lengths, and some sets exceed the size of a batch.
#[test]
fn batched_continuations_score_as_alone() {
    let model = built_in(WeightDType::F32);
    for (prompt_len, lengths) in
        [(20, vec![1, 2, 9, 3, 1, 30]), (1, vec![2; 40]), (200, vec![50, 57, 1, 20]), (5, vec![1, 1])]
    {
        let prompt = ids(prompt_len, 1);
        let continuations: Vec<Vec<u32>> =
            lengths.iter().zip(2..).map(|(length, seed)| ids(*length, seed)).collect();
        let calls = Cell::new(0);
        let found =
            score_continuations(&model, &prompt, &continuations, &|| calls.set(calls.get() + 1)).unwrap();
        assert_eq!((found.len(), calls.get()), (continuations.len(), continuations.len()));
        for (index, continuation) in continuations.iter().enumerate() {
            let alone = score_continuations(&model, &prompt, std::slice::from_ref(continuation), &|| ());
            assert_eq!(alone.unwrap(), found[index..=index], "{prompt_len} and {}", continuation.len());
        }
        for (found, continuation) in found.iter().zip(&continuations) {
            let whole = [&prompt[..], continuation].concat();
            let logits = logits(&model, &whole[..whole.len() - 1]);
            let mut is_greedy = true;
            for (place, (logprob, id)) in found.logprobs.iter().zip(continuation).enumerate() {
                let row = &logits[prompt.len() + place - 1];
                let expected = log_probability(row, *id);
                assert!((logprob - expected).abs() < SAME, "place {place}: {logprob} for {expected}");
                is_greedy &= row.iter().all(|logit| *logit <= row[*id as usize]);
            }
            assert_eq!((found.logprobs.len(), found.is_greedy), (continuation.len(), is_greedy));
        }
    }
    // The greedy continuation is reported as greedy, and a longer one in the batch has no effect.
    let prompt = ids(12, 4);
    let best = |ids: &[u32]| -> u32 {
        let last = logits(&model, ids).pop().unwrap();
        let largest = last.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        u32::try_from(last.iter().position(|logit| *logit == largest).unwrap()).unwrap()
    };
    let first = best(&prompt);
    let second = best(&[&prompt[..], &[first]].concat());
    let others = [vec![first, second], vec![first], vec![first, second, 5, 6, 7]];
    let found = score_continuations(&model, &prompt, &others, &|| ()).unwrap();
    for (index, other) in others.iter().enumerate() {
        let alone = score_continuations(&model, &prompt, std::slice::from_ref(other), &|| ()).unwrap();
        assert_eq!(alone, found[index..=index], "bit-identical to the single one");
    }
    assert_eq!(found.iter().map(|found| found.is_greedy).collect::<Vec<_>>()[..2], [true, true]);
    assert!((found[0].sum() - (found[2].logprobs[0] + found[2].logprobs[1])).abs() < SAME);
}
