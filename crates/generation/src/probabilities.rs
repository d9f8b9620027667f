//! Probabilities of the next token in f64, and selection of the largest logits.

/// Number of logits that are compared at a time with vector instructions.
const CHUNK: usize = 64;

/// A token that can still be sampled.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Candidate {
    pub(crate) token: usize,
    pub(crate) probability: f64,
}

/// Probabilities of the tokens that can still be sampled, ordered by id.
#[derive(Debug)]
pub(crate) struct Probabilities {
    pub(crate) candidates: Vec<Candidate>,
}

impl Probabilities {
    /// Computes the softmax of the logits in f64.
    pub(crate) fn of(logits: &[f32]) -> Self {
        let (mut tokens, mut powers) = (Vec::new(), Vec::new());
        let maximum = largest(logits);
        for (index, chunk) in logits.chunks(CHUNK).enumerate() {
            if largest(chunk) == f32::NEG_INFINITY {
                continue;
            }
            for (offset, logit) in chunk.iter().enumerate().filter(|(_, logit)| **logit > f32::NEG_INFINITY) {
                tokens.push(index * CHUNK + offset);
                powers.push(f64::from(logit - maximum));
            }
        }
        candle_gpt2_arithmetic::exponentials(&mut powers);
        let sum: f64 = powers.iter().sum();
        let candidates = tokens.into_iter().zip(powers);
        let candidates =
            candidates.map(|(token, power)| Candidate { token, probability: power / sum }).collect();
        Self { candidates }
    }

    /// Samples a token: the first one whose cumulative probability, in order of ids, exceeds `uniform`.
    pub(crate) fn draw(&self, uniform: f64) -> Option<usize> {
        let possible = || self.candidates.iter().filter(|candidate| candidate.probability > 0.0);
        let mut sum = 0.0;
        let drawn = possible().find(|candidate| {
            sum += candidate.probability;
            uniform < sum
        });
        drawn.or_else(|| possible().next_back()).map(|candidate| candidate.token)
    }

    /// Writes each probability to the index of its token.
    pub(crate) fn fill(&self, probabilities: &mut [f64]) {
        for candidate in &self.candidates {
            probabilities[candidate.token] = candidate.probability;
        }
    }

    pub(crate) fn largest(&self) -> f64 {
        self.candidates.iter().map(|candidate| candidate.probability).fold(0.0, f64::max)
    }

    pub(crate) fn entropy(&self) -> f64 {
        let possible = self.candidates.iter().map(|candidate| candidate.probability).filter(|p| *p > 0.0);
        -possible.map(|probability| probability * libm::log(probability)).sum::<f64>()
    }

    pub(crate) fn keep(&self, logits: &mut [f32], is_kept: impl Fn(&Candidate) -> bool) {
        for candidate in self.candidates.iter().filter(|candidate| !is_kept(candidate)) {
            logits[candidate.token] = f32::NEG_INFINITY;
        }
    }
}

/// Computes `ln Σ exp(logit)` in f64.
pub(crate) fn log_sum_exp(logits: &[f32]) -> f64 {
    candle_gpt2_arithmetic::log_sum_exp(logits, largest(logits))
}

/// Returns the largest number, ignoring NaN, or `-inf` if there is none.
///
/// ```
/// assert_eq!(candle_gpt2_generation::largest(&[1.0, f32::NAN, 3.0, 2.0]), 3.0);
/// ```
pub fn largest(numbers: &[f32]) -> f32 {
    /// Number of independent accumulators; they let the comparisons compile to vector instructions.
    const LANES: usize = 16;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = numbers.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, number) in lanes.iter_mut().zip(chunk) {
            *lane = if *number > *lane { *number } else { *lane };
        }
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// Finds the k-th largest number in one pass.
///
/// Most chunks contain nothing above the best k so far and are skipped.
pub(crate) fn kth_largest(numbers: &[f32], k: usize) -> f32 {
    if k > numbers.len() {
        return f32::NEG_INFINITY;
    }
    let mut best: Vec<f32> = Vec::with_capacity(2 * k);
    let mut threshold = f32::NEG_INFINITY;
    let reduce = |best: &mut Vec<f32>| {
        let (_, kth, _) = best.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
        let kth = *kth;
        best.truncate(k);
        kth
    };
    for chunk in numbers.chunks(CHUNK) {
        if best.len() >= k && largest(chunk) <= threshold {
            continue;
        }
        for number in chunk {
            if best.len() < k || *number > threshold {
                best.push(*number);
            }
            if best.len() == 2 * k {
                threshold = reduce(&mut best);
            }
        }
    }
    reduce(&mut best)
}

/// Returns the `count` most probable tokens with their logits, most probable first.
///
/// Ties are ordered by id. Removed tokens are left out.
pub(crate) fn most_probable(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    if count == 0 {
        return Vec::new();
    }
    let threshold = kth_largest(logits, count);
    let tokens = (0..).zip(logits.iter().copied());
    let mut best: Vec<(u32, f32)> =
        tokens.filter(|(_, logit)| *logit >= threshold && *logit > f32::NEG_INFINITY).collect();
    best.sort_by(|a, b| b.1.total_cmp(&a.1));
    best.truncate(count);
    best
}
