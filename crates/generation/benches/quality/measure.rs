//! How far a model with rounded weights is from the same model in f32, token by token.

use candle_core::{DType, Device, Tensor};
use gpt2::{Gpt2LMHead, LogitsFor, Pass};
use gpt2_generation::{GenerationConfig, TokenGenerator};

/// Seed of the texts that a model is measured on.
const SEED: u64 = 17;

/// The distance of a model from the reference.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Quality {
    /// Mean Kullback-Leibler divergence of the model's next-token distribution from the reference's, in nats a token.
    pub(crate) divergence: f64,
    /// The divergence that one place in a hundred exceeds.
    pub(crate) percentile_99: f64,
    /// Share of places where both find the same token the most probable.
    pub(crate) top_1_agreement: f64,
    /// The model's perplexity over the reference's.
    pub(crate) perplexity_ratio: f64,
}

/// Texts of one context each that the model itself draws from the id `start` on, from its whole distribution: in its domain
/// for sure, and no file is needed.
pub(crate) fn texts_of(model: &Gpt2LMHead, start: u32, texts: usize) -> Vec<Vec<u32>> {
    let text = |index| {
        let config = GenerationConfig {
            do_sample: true,
            top_k: 0,
            seed: SEED + index as u64,
            max_new_tokens: model.config().n_positions - 1,
            ..GenerationConfig::default()
        };
        let tokens = TokenGenerator::new(model, &[start], &config).expect("a generator");
        let tokens = tokens.collect::<Result<Vec<u32>, _>>().expect("tokens");
        [vec![start], tokens].concat()
    };
    (0..texts).map(text).collect()
}

/// The distance of a model from the reference over some texts, none longer than the context.
pub(crate) fn quality(model: &Gpt2LMHead, reference: &Gpt2LMHead, texts: &[Vec<u32>]) -> Quality {
    let (mut divergences, mut agreements, mut excess) = (Vec::new(), 0, 0.0);
    for ids in texts {
        let (found, expected) = (log_probabilities(model, ids), log_probabilities(reference, ids));
        // The last place predicts what is not known.
        for (place, next) in ids.iter().enumerate().skip(1) {
            let (q, p) = (&found[place - 1], &expected[place - 1]);
            divergences.push(p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>());
            agreements += usize::from(most_probable(p) == most_probable(q));
            let next = usize::try_from(*next).expect("an index");
            excess += p[next] - q[next];
        }
    }
    let places = divergences.len() as f64;
    let divergence = divergences.iter().sum::<f64>() / places;
    divergences.sort_by(f64::total_cmp);
    Quality {
        divergence,
        percentile_99: divergences[divergences.len() * 99 / 100],
        top_1_agreement: agreements as f64 / places,
        perplexity_ratio: (excess / places).exp(),
    }
}

/// The logarithms of the probabilities after each token, with keys and values as the model keeps them.
fn log_probabilities(model: &Gpt2LMHead, ids: &[u32]) -> Vec<Vec<f64>> {
    let mut cache = model.new_cache(1, ids.len()).expect("a cache");
    let ids = Tensor::from_slice(ids, (1, ids.len()), &Device::Cpu).expect("a tensor");
    let pass = &mut Pass::inference();
    let logits = model.forward(&ids, LogitsFor::EveryToken, Some(&mut cache), pass).expect("logits");
    let rows = logits.squeeze(0).and_then(|rows| rows.to_dtype(DType::F64)).expect("one text");
    let rows: Vec<Vec<f64>> = rows.to_vec2().expect("rows");
    rows.into_iter().map(normalized).collect()
}

fn normalized(logits: Vec<f64>) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let normalizer = largest + logits.iter().map(|logit| (logit - largest).exp()).sum::<f64>().ln();
    logits.into_iter().map(|logit| logit - normalizer).collect()
}

fn most_probable(log_probabilities: &[f64]) -> Option<usize> {
    (0..log_probabilities.len()).max_by(|a, b| log_probabilities[*a].total_cmp(&log_probabilities[*b]))
}
