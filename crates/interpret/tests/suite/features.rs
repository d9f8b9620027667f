//! Tests of feature examples against plain loops, and of feature logits against direct attribution.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use candle_gpt2::{Site, SiteKind};
use candle_gpt2_interpret::{
    Dictionary, DictionaryConfig, Direction, FeatureExample, FeatureExamples, FeatureSummary, feature_logits,
    site_width,
};
use candle_gpt2_testing::{pattern, values};
use serde_json::json;

use crate::common::{CASES, Case};

/// Tolerance for f32 sums of a few dozen products of values near 1.
const ROUNDING: f64 = 1e-4;

const FEATURES: usize = 5;

/// Token ids of a text, and a row of latents for each token; about a third of them are positive.
fn text(number: usize) -> (Vec<u32>, Vec<Vec<f32>>) {
    let tokens = 2 + number * 7 % 40;
    let ids = (0..tokens).map(|token| u32::try_from(number * 100 + token).unwrap()).collect();
    let numbers = values(&pattern(&[tokens, FEATURES], 4.0, u64::try_from(number).unwrap()));
    #[expect(clippy::cast_possible_truncation, reason = "they were f32")]
    let rows = numbers.chunks(FEATURES).map(|row| row.iter().map(|value| (value - 1.0).max(0.0) as f32));
    (ids, rows.map(Iterator::collect).collect())
}

fn collected(features: &[usize], count: usize, texts: usize) -> Vec<FeatureSummary> {
    let mut examples = FeatureExamples::new(features.to_vec(), count);
    for number in 0..texts {
        let (ids, rows) = text(number);
        let latents = Tensor::from_vec(rows.concat(), (ids.len(), FEATURES), &Device::Cpu).unwrap();
        examples.add(&ids, &latents).unwrap();
    }
    assert_eq!(examples.texts(), texts);
    let tokens: usize = (0..texts).map(|number| text(number).0.len() - 1).sum();
    assert_eq!(examples.tokens(), tokens as u64);
    examples.finish()
}

/// Strongest token of each text that activates a feature, in descending order of activation.
///
/// The entries are the text, the token and the activation.
fn ranked(feature: usize, texts: usize) -> Vec<(usize, usize, f32)> {
    let strongest = |number: usize| {
        let (_, rows) = text(number);
        let mut best = (number, 0, 0.0);
        for (token, row) in rows.iter().enumerate().skip(1) {
            if row[feature] > best.2 {
                best = (number, token, row[feature]);
            }
        }
        best
    };
    let mut found: Vec<_> = (0..texts).map(strongest).filter(|best| best.2 > 0.0).collect();
    found.sort_by(|a, b| b.2.total_cmp(&a.2));
    found
}

fn assert_example(example: &FeatureExample, feature: usize, expected: (usize, usize, f32)) {
    let (number, token, value) = expected;
    let (ids, rows) = text(number);
    let first = token.saturating_sub(16);
    let end = (token + 9).min(ids.len());
    let activations: Vec<f32> =
        (first..end).map(|token| if token == 0 { 0.0 } else { rows[token][feature] }).collect();
    assert_eq!((example.text, example.strongest), (number, token - first));
    assert_eq!((&example.ids[..], &example.activations), (&ids[first..end], &activations));
    assert_eq!(example.activation(), value);
}

#[test]
fn strongest_texts_counts_and_histogram_match_plain_loops() {
    let (texts, count) = (300, 4);
    for found in collected(&[4, 0, 2], count, texts) {
        let feature = found.feature;
        let active: Vec<f32> = (0..texts)
            .flat_map(|number| text(number).1.into_iter().skip(1).map(move |row| row[feature]))
            .filter(|value| *value > 0.0)
            .collect();
        assert_eq!(found.active, active.len() as u64);
        assert_eq!(found.least, active.iter().copied().fold(f32::INFINITY, f32::min));
        assert_eq!(found.largest, active.iter().copied().fold(0.0, f32::max));
        let ranked = ranked(feature, texts);
        assert_eq!(found.texts, ranked.len() as u64);
        assert_eq!(found.strongest.len(), count);
        for (example, expected) in found.strongest.iter().zip(&ranked) {
            assert_example(example, feature, *expected);
        }
        let (width, counts) = (found.histogram.width, found.histogram.counts());
        assert!(counts.len() > 8 && counts.len() <= 16, "at least half of the bins: {counts:?}");
        assert_eq!(width.log2().fract(), 0.0);
        for (bin, counted) in counts.iter().enumerate() {
            let inside = |value: &&f32| (bin as f32 * width..(bin + 1) as f32 * width).contains(*value);
            assert_eq!(*counted, active.iter().filter(inside).count() as u64, "bin {bin}");
        }
    }
}

#[test]
fn quarters_partition_active_texts_by_strength() {
    // Few enough texts that the sample contains all of them.
    let (texts, count) = (20, 5);
    for found in collected(&[1, 3], count, texts) {
        let ranked = ranked(found.feature, texts);
        assert!(ranked.len() > count);
        let examples: Vec<&FeatureExample> = found.quarters.iter().flatten().collect();
        assert_eq!(examples.len(), ranked.len());
        for (example, expected) in examples.iter().zip(&ranked) {
            assert_example(example, found.feature, *expected);
        }
        let sizes: Vec<usize> = found.quarters.iter().map(Vec::len).collect();
        assert_eq!(sizes.len(), 4);
        assert!(sizes.iter().max().unwrap() - sizes.iter().min().unwrap() <= 1, "{sizes:?}");
    }
    // If all texts are among the strongest, the quarters are empty.
    assert!(collected(&[1], 20, 20)[0].quarters.is_empty());
}

/// Checks that the sample from many texts is independent of strength and order.
#[test]
fn sample_is_uniform_over_texts() {
    let (texts, features, count) = (400, 200, 2);
    let mut examples = FeatureExamples::new((0..features).collect(), count);
    for number in 0..texts {
        // Later texts are stronger.
        let row = vec![number as f32 + 1.0; features];
        let latents = Tensor::from_vec([row.clone(), row].concat(), (2, features), &Device::Cpu).unwrap();
        examples.add(&[1, 2], &latents).unwrap();
    }
    let sample: Vec<usize> = examples
        .finish()
        .iter()
        .flat_map(|found| found.quarters.iter().flatten().map(|example| example.text))
        .collect();
    assert_eq!(sample.len(), features * 4 * count);
    let mean = sample.iter().sum::<usize>() as f64 / sample.len() as f64;
    // The mean of 1,600 uniform numbers from 0 to 399 has a standard deviation of
    // `400 / sqrt(12 * 1600) = 2.9`. The tolerance is four standard deviations.
    assert!((mean - 199.5).abs() < 11.6, "{mean}");
}

#[test]
fn first_tokens_are_skipped_and_invalid_latents_rejected() {
    let latents = |rows: &[[f32; 2]]| Tensor::from_vec(rows.concat(), (rows.len(), 2), &Device::Cpu).unwrap();
    let mut examples = FeatureExamples::new(vec![0, 1], 3);
    examples.add(&[7], &latents(&[[5.0, 5.0]])).unwrap();
    examples.add(&[7, 8], &latents(&[[5.0, 5.0], [0.0, 1.0]])).unwrap();
    let message = examples.add(&[7], &latents(&[[0.0; 2]; 2])).unwrap_err().to_string();
    assert!(message.contains("expected latents for 1 tokens, found latents for 2"), "{message}");
    let message = examples.add(&[7, 8], &latents(&[[0.0; 2], [0.0, f32::NAN]])).unwrap_err().to_string();
    assert!(message.contains("latent 1 is NaN at token 1"), "{message}");
    let mut other = FeatureExamples::new(vec![2], 3);
    let message = other.add(&[7], &latents(&[[0.0; 2]])).unwrap_err().to_string();
    assert!(message.contains("latent 2 is out of range; the dictionary has 2"), "{message}");
    let found = examples.finish();
    assert_eq!((found[0].active, found[0].texts, found[0].histogram.counts().len()), (0, 0, 0));
    assert!(found[0].strongest.is_empty() && found[0].quarters.is_empty());
    assert_eq!(found[1].strongest[0].activations, [0.0, 1.0]);
    assert!(FeatureExamples::max_bytes(usize::MAX, usize::MAX) == u64::MAX, "the estimate saturates");
}

/// A dictionary with arbitrary directions for a hook point.
fn dictionary(site: Site, width: usize) -> Dictionary {
    let tensors: BTreeMap<String, Tensor> = [
        ("W_enc", pattern(&[width, FEATURES], 1.0, 1)),
        ("b_enc", pattern(&[FEATURES], 1.0, 2)),
        ("W_dec", pattern(&[FEATURES, width], 1.0, 3)),
        ("b_dec", pattern(&[width], 1.0, 4)),
    ]
    .map(|(name, tensor)| (name.to_owned(), tensor.to_dtype(DType::F32).unwrap()))
    .into();
    let config = json!({
        "hook_name": site.to_string(), "architecture": "standard", "d_in": width, "d_sae": FEATURES, "activation_fn": "relu",
        "apply_b_dec_to_input": true,
    });
    Dictionary::from_tensors(&tensors, &DictionaryConfig::from_json(&config.to_string()).unwrap()).unwrap()
}

/// Checks that a token's logit equals the direct attribution of the vector that the feature writes.
#[test]
fn feature_logits_equal_direct_attribution() {
    for case in CASES {
        let model = Case::open(case).model;
        let vocabulary = model.config().vocab_size;
        let block = &model.transformer().blocks()[1];
        for kind in [SiteKind::ResidPre, SiteKind::MlpOut, SiteKind::Z, SiteKind::MlpPost] {
            let site = Site::in_block(1, kind);
            let dictionary = dictionary(site, site_width(site, model.config()).unwrap());
            let found = feature_logits(&model, &dictionary, &[2, 0], vocabulary).unwrap().unwrap();
            for (feature, logits) in [2, 0].into_iter().zip(&found) {
                let direction = dictionary.direction(feature).unwrap().unsqueeze(0).unwrap();
                let written = match kind {
                    SiteKind::Z => {
                        block.attn().results(&direction.unsqueeze(0).unwrap()).unwrap().sum(2).unwrap()
                    }
                    SiteKind::MlpPost => {
                        let contract = block.mlp().contract();
                        let zeros = direction.zeros_like().unwrap();
                        let of = |x: &Tensor| candle_core::Module::forward(contract, x).unwrap();
                        (of(&direction) - of(&zeros)).unwrap()
                    }
                    _ => direction,
                };
                let written = values(&written);
                assert_eq!((logits.top.len(), logits.bottom.len()), (vocabulary, vocabulary));
                for (token, logit) in &logits.top {
                    let of_token = Direction::new(&model, *token, None).unwrap();
                    let expected: f64 =
                        values(&of_token.values).iter().zip(&written).map(|(a, b)| a * b).sum();
                    let scale = expected.abs().max(1.0);
                    assert!(
                        (f64::from(*logit) - expected).abs() < ROUNDING * scale,
                        "{case}, {site}, feature {feature}, token {token}: {logit}, expected {expected}"
                    );
                }
                assert!(
                    logits.top.is_sorted_by(|a, b| a.1 >= b.1)
                        && logits.bottom.is_sorted_by(|a, b| a.1 <= b.1)
                );
            }
            let few = feature_logits(&model, &dictionary, &[2, 0], 3).unwrap().unwrap();
            for (few, all) in few.iter().zip(&found) {
                assert_eq!((&few.top[..], &few.bottom[..]), (&all.top[..3], &all.bottom[..3]));
            }
        }
        let norm = Site::in_block(1, SiteKind::Ln2Normalized);
        let dictionary = dictionary(norm, model.config().n_embd);
        assert_eq!(feature_logits(&model, &dictionary, &[0], 3).unwrap(), None, "a norm writes nothing");
    }
}
