//! Processors that restrict sampling to sufficiently probable tokens.

use std::cmp::Ordering;

use crate::probabilities::{Candidate, Probabilities, kth_largest};

/// Number of candidates in the first partial sort.
const FIRST_SORTED: usize = 128;

pub(super) fn keep_top_k(logits: &mut [f32], top_k: usize) {
    let top_k = top_k.max(1);
    if top_k >= logits.len() {
        return;
    }
    let smallest_kept = kth_largest(logits, top_k);
    logits
        .iter_mut()
        .for_each(|logit| *logit = if *logit < smallest_kept { f32::NEG_INFINITY } else { *logit });
}

pub(super) fn keep_top_p(logits: &mut [f32], top_p: f64) {
    if top_p >= 1.0 {
        return;
    }
    let mut candidates = Probabilities::of(logits).candidates;
    // Among equal tokens, the one with the larger id counts as more probable. The reference sorts in
    // ascending order, keeps the order of equal tokens, and removes from the bottom.
    let more_probable =
        |a: &Candidate, b: &Candidate| b.probability.total_cmp(&a.probability).then(b.token.cmp(&a.token));
    // The most probable token remains, however small the mass is.
    let mass = top_p.max(f64::MIN_POSITIVE);
    let kept = sort_until(&mut candidates, mass, |candidate| candidate.probability, more_probable);
    candidates[kept..].iter().for_each(|candidate| logits[candidate.token] = f32::NEG_INFINITY);
}

/// Keeps the most probable tokens whose entropy terms add up to at most `top_h` times the entropy.
///
/// Like transformers, considers only the 100 most probable tokens, and computes the entropy over them. The
/// most probable token always remains.
pub(super) fn keep_top_h(logits: &mut [f32], top_h: f64) {
    const CONSIDERED: usize = 100;
    let more_probable =
        |a: &Candidate, b: &Candidate| b.probability.total_cmp(&a.probability).then(a.token.cmp(&b.token));
    let mut candidates = Probabilities::of(logits).candidates;
    candidates.retain(|candidate| candidate.probability > 0.0);
    if candidates.len() > CONSIDERED {
        candidates.select_nth_unstable_by(CONSIDERED, more_probable);
        candidates.truncate(CONSIDERED);
    }
    candidates.sort_unstable_by(more_probable);
    let mass: f64 = candidates.iter().map(|candidate| candidate.probability).sum();
    let mut sum = 0.0;
    let sums: Vec<f64> = candidates
        .iter()
        .map(|candidate| {
            let probability = candidate.probability / mass;
            sum -= probability * libm::log(probability);
            sum
        })
        .collect();
    let kept = sums.iter().take_while(|reached| **reached <= top_h * sum).count().max(1);
    let mut kept: Vec<usize> = candidates.iter().take(kept).map(|candidate| candidate.token).collect();
    kept.sort_unstable();
    for (token, logit) in logits.iter_mut().enumerate() {
        if kept.binary_search(&token).is_err() {
            *logit = f32::NEG_INFINITY;
        }
    }
}

pub(super) fn keep_typical(logits: &mut [f32], mass: f64) {
    let probabilities = Probabilities::of(logits);
    let entropy = probabilities.entropy();
    // The distance of each candidate's information from the entropy is computed once, not once per
    // comparison.
    let with_distance =
        |candidate: Candidate| ((-libm::log(candidate.probability) - entropy).abs(), candidate);
    let mut candidates: Vec<(f64, Candidate)> =
        probabilities.candidates.into_iter().map(with_distance).collect();
    let closer =
        |a: &(f64, Candidate), b: &(f64, Candidate)| a.0.total_cmp(&b.0).then(a.1.token.cmp(&b.1.token));
    // The closest token remains, however small the mass is.
    let mass = mass.max(f64::MIN_POSITIVE);
    let reached = sort_until(&mut candidates, mass, |(_, candidate)| candidate.probability, closer);
    // Tokens at the same distance as the last one remain too.
    let farthest = candidates[..reached].last().map_or(0.0, |(distance, _)| *distance);
    for (_, candidate) in candidates.iter().skip(1).filter(|(distance, _)| *distance > farthest) {
        logits[candidate.token] = f32::NEG_INFINITY;
    }
}

/// Sorts candidates by `order` until the probabilities of the sorted ones add up to `mass`.
///
/// Returns the number of sorted candidates, which come first. The rest remain mostly unsorted.
fn sort_until<T>(
    candidates: &mut [T],
    mass: f64,
    probability: impl Fn(&T) -> f64,
    order: impl Fn(&T, &T) -> Ordering,
) -> usize {
    let mut sum = 0.0;
    let mut sorted = 0;
    while sorted < candidates.len() && sum < mass {
        let end = candidates.len().min((sorted * 4).max(FIRST_SORTED));
        if end < candidates.len() {
            candidates[sorted..].select_nth_unstable_by(end - sorted, &order);
        }
        candidates[sorted..end].sort_unstable_by(&order);
        while sorted < end && sum < mass {
            sum += probability(&candidates[sorted]);
            sorted += 1;
        }
    }
    sorted
}

/// Keeps the most probable token and all tokens at or above a threshold.
///
/// `threshold` computes the threshold from the entropy.
pub(super) fn keep_above(logits: &mut [f32], threshold: impl Fn(f64) -> f64) {
    let probabilities = Probabilities::of(logits);
    let threshold = threshold(probabilities.entropy()).min(probabilities.largest());
    probabilities.keep(logits, |candidate| candidate.probability >= threshold);
}
