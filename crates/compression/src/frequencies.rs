//! Conversion of logits to integer token frequencies, and lookup of a token by position.
//!
//! The exponentials of the logits are integers; see [`integer_exponentials`]. `S(i)` is the sum of those
//! before token `i`, `V` the number of tokens and `T` the total frequency. Token `i`'s interval starts at
//!
//! ```text
//! start(i) = i + ⌊S(i) · (T - V) / S(V)⌋
//! ```
//!
//! Each token has a frequency of at least 1. All frequencies add up to exactly `T`, so no remainder has to be
//! distributed. The frequency of a token with probability `p` differs from `p · T` by less than `2 + p · V`,
//! apart from the rounding of the exponentials. Only the bits of the logits matter: equal logits give equal
//! frequencies.

use candle_gpt2_arithmetic::integer_exponentials;
use candle_gpt2_generation::{GenerationError, largest};

use crate::coder::{Interval, TOTAL};

/// Number of exponentials in a block; the search for a token skips whole blocks.
const BLOCK: usize = 256;

/// Frequencies of all tokens.
pub(crate) struct Frequencies {
    exponentials: Vec<u32>,
    sum: u64,
}

impl Frequencies {
    /// Computes frequencies from logits; fails if a logit is NaN or the largest one is infinite.
    pub(crate) fn of(logits: &[f32]) -> Result<Self, GenerationError> {
        let exponentials = integer_exponentials(logits, largest(logits)).ok_or(GenerationError::NotFinite)?;
        let sum = sum(&exponentials);
        Ok(Self { exponentials, sum })
    }

    /// Returns the interval of a token in the vocabulary.
    pub(crate) fn of_token(&self, id: u32) -> Interval {
        let token = id as usize;
        self.interval(token, sum(&self.exponentials[..token]))
    }

    /// Returns the token whose interval contains `position`; `position` must be below [`TOTAL`].
    pub(crate) fn at(&self, position: u64) -> (u32, Interval) {
        let (mut token, mut before) = (0, 0);
        // Skips whole blocks first. The token is in the last block that begins at or below `position`.
        for block in self.exponentials.chunks(BLOCK) {
            let behind = before + sum(block);
            if self.start(token + block.len(), behind) > position {
                break;
            }
            (token, before) = (token + block.len(), behind);
        }
        while token + 1 < self.exponentials.len() {
            let behind = before + u64::from(self.exponentials[token]);
            if self.start(token + 1, behind) > position {
                break;
            }
            (token, before) = (token + 1, behind);
        }
        #[expect(clippy::cast_possible_truncation, reason = "ids are u32")]
        (token as u32, self.interval(token, before))
    }

    fn interval(&self, token: usize, before: u64) -> Interval {
        let start = self.start(token, before);
        let end = self.start(token + 1, before + u64::from(self.exponentials[token]));
        Interval { start, size: end - start }
    }

    /// Returns the start of a token's interval; `before` is the sum of all preceding exponentials.
    #[expect(clippy::cast_possible_truncation, reason = "at most TOTAL")]
    fn start(&self, token: usize, before: u64) -> u64 {
        let tokens = self.exponentials.len() as u64;
        token as u64 + (u128::from(before) * u128::from(TOTAL - tokens) / u128::from(self.sum)) as u64
    }
}

fn sum(exponentials: &[u32]) -> u64 {
    exponentials.iter().copied().map(u64::from).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(frequencies: &Frequencies) -> Vec<Interval> {
        (0..).take(frequencies.exponentials.len()).map(|id| frequencies.of_token(id)).collect()
    }

    #[test]
    fn frequencies_match_known_values() {
        let frequencies = Frequencies::of(&[0.0, f32::NEG_INFINITY, 0.0]).unwrap();
        // Two halves of 2³² - 3 units, the first rounded down, plus one unit for each of the three tokens.
        let half = (TOTAL - 3) / 2;
        let expected = [
            Interval { start: 0, size: half + 1 },
            Interval { start: half + 1, size: 1 },
            Interval { start: half + 2, size: half + 2 },
        ];
        assert_eq!(all(&frequencies), expected);
    }

    #[test]
    fn intervals_partition_the_range_and_match_softmax() {
        // Vocabulary sizes near the block size and far from it, with flat and sharp distributions.
        for vocabulary in [1, 2, 255, 256, 257, 700, 50_257] {
            for sharpness in [0.0f32, 1.0, 30.0] {
                let logits: Vec<f32> =
                    (0..vocabulary).map(|token| sharpness * ((token * 37 % 101) as f32 / 101.0)).collect();
                let frequencies = Frequencies::of(&logits).unwrap();
                let (mut end, sum) = (0, logits.iter().map(|logit| f64::from(*logit).exp()).sum::<f64>());
                for (token, interval) in all(&frequencies).into_iter().enumerate() {
                    assert_eq!(interval.start, end, "{vocabulary} {sharpness} {token}");
                    assert!(interval.size > 0);
                    end += interval.size;
                    let fraction = interval.size as f64 / TOTAL as f64;
                    let probability = f64::from(logits[token]).exp() / sum;
                    // Allows one unit for the token itself, one for rounding, the units of the other tokens,
                    // and 2⁻³⁰ of the largest exponential.
                    let tolerance = (2.0 + vocabulary as f64 * probability) / TOTAL as f64 + 1e-9;
                    assert!((fraction - probability).abs() <= tolerance, "{fraction} for {probability}");
                    if token % 97 == 0 || token + 300 > vocabulary {
                        for position in [interval.start, interval.start + interval.size - 1] {
                            assert_eq!(frequencies.at(position), (u32::try_from(token).unwrap(), interval));
                        }
                    }
                }
                assert_eq!(end, TOTAL, "{vocabulary} {sharpness}");
            }
        }
    }

    #[test]
    fn non_finite_logits_are_rejected() {
        for logits in [&[0.0, f32::NAN][..], &[f32::INFINITY], &[f32::NEG_INFINITY; 2]] {
            assert!(matches!(Frequencies::of(logits), Err(GenerationError::NotFinite)));
        }
    }
}
