//! From logits to a token: processors narrow the distribution, the sampler picks.
//!
//! The arithmetic is that of transformers' `TemperatureLogitsWarper`, `TopKLogitsWarper` and `TopPLogitsWarper`
//! (`src/transformers/generation/logits_process.py`), applied in that order.

use gpt2_kernels::Generator;

use crate::{GenerationError, Sampling};

/// A change of the logits of one row: what is removed becomes `-inf`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LogitsProcessor {
    /// Divides every logit by this.
    Temperature(f64),
    /// Removes every token whose logit is below the k-th largest.
    TopK(usize),
    /// Removes every token for which the more probable ones already add up to p; the most probable stays.
    TopP(f64),
}

impl LogitsProcessor {
    /// Applies the change.
    pub fn process(self, logits: &mut [f32]) {
        match self {
            Self::Temperature(temperature) => {
                #[expect(clippy::cast_possible_truncation, reason = "logits are f32, as in the reference")]
                let divisor = temperature as f32;
                logits.iter_mut().for_each(|logit| *logit /= divisor);
            }
            Self::TopK(top_k) => keep_top_k(logits, top_k),
            Self::TopP(top_p) => keep_top_p(logits, top_p),
        }
    }
}

fn keep_top_k(logits: &mut [f32], top_k: usize) {
    if top_k >= logits.len() {
        return;
    }
    let top_k = top_k.max(1);
    let mut order = logits.to_vec();
    let (_, smallest_kept, _) = order.select_nth_unstable_by(top_k - 1, |a, b| b.total_cmp(a));
    let smallest_kept = *smallest_kept;
    logits.iter_mut().filter(|logit| **logit < smallest_kept).for_each(|logit| *logit = f32::NEG_INFINITY);
}

fn keep_top_p(logits: &mut [f32], top_p: f64) {
    if top_p >= 1.0 {
        return;
    }
    let probabilities = softmax(logits);
    let mut order: Vec<usize> =
        (0..logits.len()).filter(|token| logits[*token] > f32::NEG_INFINITY).collect();
    // Of equal tokens the one with the larger id counts as the more probable: the reference sorts upwards, keeping
    // the order of equals, and removes from the bottom.
    order.sort_by(|a, b| probabilities[*b].total_cmp(&probabilities[*a]).then(b.cmp(a)));
    let mut more_probable = 0.0;
    for token in order {
        if more_probable >= top_p {
            logits[token] = f32::NEG_INFINITY;
        }
        more_probable += probabilities[token];
    }
}

/// Probabilities of the logits, in f64.
pub(crate) fn softmax(logits: &[f32]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let exponentials: Vec<f64> = logits.iter().map(|logit| f64::from(logit - largest).exp()).collect();
    let sum: f64 = exponentials.iter().sum();
    exponentials.into_iter().map(|exponential| exponential / sum).collect()
}

/// Picks a token from logits.
#[derive(Debug, Clone)]
pub struct Sampler {
    processors: Vec<LogitsProcessor>,
    /// Draws the token; absent in greedy search.
    generator: Option<Generator>,
}

impl Sampler {
    /// The sampler for these options, which [`GenerationConfig::check`](crate::GenerationConfig::check) accepts.
    pub fn new(sampling: Sampling) -> Self {
        let Sampling::Random { temperature, top_k, top_p, seed } = sampling else {
            return Self { processors: Vec::new(), generator: None };
        };
        let mut processors = vec![LogitsProcessor::Temperature(temperature)];
        processors.extend(top_k.map(LogitsProcessor::TopK));
        processors.push(LogitsProcessor::TopP(top_p));
        Self { processors, generator: Some(Generator::new(seed)) }
    }

    /// Picks the next token; `logits` has one entry for each token of the vocabulary and is changed on the way.
    ///
    /// # Errors
    /// When a logit is NaN or `+inf`, or none is finite.
    pub fn sample(&mut self, logits: &mut [f32]) -> Result<u32, GenerationError> {
        check_finite(logits)?;
        for processor in &self.processors {
            processor.process(logits);
        }
        check_finite(logits)?;
        let token = match &mut self.generator {
            None => argmax(logits),
            Some(generator) => draw(logits, generator.uniform()),
        };
        u32::try_from(token).map_err(|_| GenerationError::NotFinite)
    }
}

/// Refuses logits from which no token can be picked.
fn check_finite(logits: &[f32]) -> Result<(), GenerationError> {
    let largest = logits.iter().copied().max_by(f32::total_cmp);
    if largest.is_some_and(f32::is_finite) && !logits.iter().any(|logit| logit.is_nan()) {
        return Ok(());
    }
    Err(GenerationError::NotFinite)
}

/// The smallest index of the largest logit.
fn argmax(logits: &[f32]) -> usize {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best
}

/// The token in which a share `uniform` of the probability, summed in the order of the ids, ends.
fn draw(logits: &[f32], uniform: f64) -> usize {
    let probabilities = softmax(logits);
    let mut sum = 0.0;
    let mut last_possible = 0;
    for (token, probability) in
        probabilities.iter().enumerate().filter(|(_, probability)| **probability > 0.0)
    {
        sum += probability;
        last_possible = token;
        if uniform < sum {
            break;
        }
    }
    last_possible
}

#[cfg(test)]
mod tests {
    use super::*;

    const GONE: f32 = f32::NEG_INFINITY;

    fn processed(processor: LogitsProcessor, logits: &[f32]) -> Vec<f32> {
        let mut logits = logits.to_vec();
        processor.process(&mut logits);
        logits
    }

    #[test]
    fn temperature_divides() {
        assert_eq!(processed(LogitsProcessor::Temperature(0.5), &[1.0, -2.0]), [2.0, -4.0]);
    }

    #[test]
    fn top_k_keeps_the_largest_and_their_equals() {
        let logits = [1.0, 3.0, 2.0, 3.0, 0.0];
        assert_eq!(processed(LogitsProcessor::TopK(2), &logits), [GONE, 3.0, GONE, 3.0, GONE]);
        assert_eq!(processed(LogitsProcessor::TopK(1), &logits), [GONE, 3.0, GONE, 3.0, GONE]);
        assert_eq!(processed(LogitsProcessor::TopK(3), &logits), [GONE, 3.0, 2.0, 3.0, GONE]);
        assert_eq!(processed(LogitsProcessor::TopK(9), &logits), logits);
        let none = LogitsProcessor::TopK(0);
        assert_eq!(
            processed(none, &logits),
            processed(LogitsProcessor::TopK(1), &logits),
            "one always stays"
        );
    }

    #[test]
    fn top_p_keeps_the_smallest_set_that_reaches_p() {
        // Probabilities 0.5, 0.25, 0.125, 0.125.
        let logits = [0.5f32, 0.25, 0.125, 0.125].map(f32::ln);
        let kept = |top_p: f64| {
            processed(LogitsProcessor::TopP(top_p), &logits).iter().filter(|logit| logit.is_finite()).count()
        };
        assert_eq!(kept(0.1), 1);
        assert_eq!(kept(0.49), 1);
        assert_eq!(kept(0.6), 2);
        assert_eq!(kept(0.8), 3);
        assert_eq!(kept(0.9), 4);
        assert_eq!(kept(1.0), 4);
        // Of the two least probable the one with the larger id stays, as in the reference.
        let at_the_edge = processed(LogitsProcessor::TopP(0.8), &logits);
        assert_eq!((at_the_edge[2], at_the_edge[3].is_finite()), (GONE, true));
    }

    #[test]
    fn greedy_takes_the_smallest_id_of_the_largest() {
        let mut sampler = Sampler::new(Sampling::Greedy);
        assert_eq!(sampler.sample(&mut [0.0, 2.0, 2.0, 1.0]).unwrap(), 1);
        assert_eq!(sampler.sample(&mut [GONE, GONE, -5.0]).unwrap(), 2);
    }

    #[test]
    fn logits_that_are_not_finite_are_an_error() {
        let mut sampler = Sampler::new(Sampling::Greedy);
        for mut logits in
            [vec![0.0, f32::NAN], vec![-f32::NAN, 0.0], vec![f32::INFINITY, 0.0], vec![GONE; 2], vec![]]
        {
            assert!(matches!(sampler.sample(&mut logits), Err(GenerationError::NotFinite)), "{logits:?}");
        }
    }

    fn random(temperature: f64, top_k: Option<usize>, top_p: f64, seed: u64) -> Sampler {
        Sampler::new(Sampling::Random { temperature, top_k, top_p, seed })
    }

    /// Chi-square over 100,000 draws against the exact probabilities. With at most 7 degrees of freedom a value
    /// above 30 has a probability below 0.0001; the seed is fixed, so the test is too.
    #[test]
    fn draws_follow_the_distribution() {
        const DRAWS: usize = 100_000;
        let logits = [1.0f32, -0.5, 0.3, 2.0, 0.0, -3.0, 1.5, 0.7];
        for (temperature, top_k, top_p) in
            [(1.0, None, 1.0), (0.7, None, 1.0), (1.3, Some(4), 1.0), (1.0, None, 0.8)]
        {
            let mut narrowed = logits.to_vec();
            let mut sampler = random(temperature, top_k, top_p, 42);
            for processor in &sampler.processors {
                processor.process(&mut narrowed);
            }
            let probabilities = softmax(&narrowed);
            let mut counts = [0usize; 8];
            for _ in 0..DRAWS {
                counts[sampler.sample(&mut logits.clone()).unwrap() as usize] += 1;
            }
            let mut chi_square = 0.0;
            for (count, probability) in counts.iter().zip(&probabilities) {
                let expected = probability * DRAWS as f64;
                if expected == 0.0 {
                    assert_eq!(*count, 0, "a removed token was drawn");
                } else {
                    chi_square += (*count as f64 - expected).powi(2) / expected;
                }
            }
            assert!(chi_square < 30.0, "{temperature}, {top_k:?}, {top_p}: chi-square {chi_square}");
        }
    }

    #[test]
    fn the_same_seed_draws_the_same_tokens() {
        let draws = |seed| -> Vec<u32> {
            let mut sampler = random(1.0, None, 1.0, seed);
            (0..50).map(|_| sampler.sample(&mut [0.0; 100]).unwrap()).collect()
        };
        assert_eq!(draws(5), draws(5));
        assert_ne!(draws(5), draws(6));
    }
}
