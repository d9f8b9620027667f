//! From logits to the shares of tokens, and from a place among the shares to its token.
//!
//! The exponentials of the logits are integers ([`integer_exponentials`]), and with the sums `S(i)` of those before token `i` the
//! shares are laid out as
//!
//! ```text
//! start(i) = i + ⌊S(i) · (T - V) / S(V)⌋        T shares for V tokens
//! ```
//!
//! Each token has at least one share, all together have exactly `T`, and there is nothing left over to hand out. A share differs from
//! the softmax's by less than two of 2³². Nothing but the logits' bits matters: the same logits give the same shares.

use candle_gpt2_arithmetic::integer_exponentials;
use candle_gpt2_generation::{GenerationError, largest};

use crate::coder::{Interval, TOTAL};

/// Exponentials that are added up before it is asked whether the token is among them.
const BLOCK: usize = 256;

/// The shares of all tokens.
pub(crate) struct Frequencies {
    exponentials: Vec<u32>,
    sum: u64,
}

impl Frequencies {
    /// Those of logits; an error if they are not numbers.
    pub(crate) fn of(logits: &[f32]) -> Result<Self, GenerationError> {
        let exponentials = integer_exponentials(logits, largest(logits)).ok_or(GenerationError::NotFinite)?;
        let sum = sum(&exponentials);
        Ok(Self { exponentials, sum })
    }

    /// The share of a token of the vocabulary.
    pub(crate) fn of_token(&self, id: u32) -> Interval {
        let token = id as usize;
        self.interval(token, sum(&self.exponentials[..token]))
    }

    /// The token whose share holds this place, below [`TOTAL`].
    pub(crate) fn at(&self, place: u64) -> (u32, Interval) {
        let (mut token, mut before) = (0, 0);
        // Whole blocks first: the token is in the last one that begins at or below the place.
        for block in self.exponentials.chunks(BLOCK) {
            let behind = before + sum(block);
            if self.start(token + block.len(), behind) > place {
                break;
            }
            (token, before) = (token + block.len(), behind);
        }
        while token + 1 < self.exponentials.len() {
            let behind = before + u64::from(self.exponentials[token]);
            if self.start(token + 1, behind) > place {
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

    /// Where the share of a token begins; `before` is the sum of the exponentials before it.
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
    fn shares_are_known_numbers() {
        let frequencies = Frequencies::of(&[0.0, f32::NEG_INFINITY, 0.0]).unwrap();
        // 2³² - 3 shares in two halves of which the first is rounded down, and one for each.
        let half = (TOTAL - 3) / 2;
        let expected = [
            Interval { start: 0, size: half + 1 },
            Interval { start: half + 1, size: 1 },
            Interval { start: half + 2, size: half + 2 },
        ];
        assert_eq!(all(&frequencies), expected);
    }

    #[test]
    fn shares_fill_the_whole_and_each_place_finds_its_token() {
        // Of as many tokens as blocks have, one fewer and one more; sharp and flat.
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
                    let share = interval.size as f64 / TOTAL as f64;
                    let probability = f64::from(logits[token]).exp() / sum;
                    // One share of its own, one of rounding, those that the others' own take away, and 2⁻³⁰ of the largest.
                    let tolerance = (2.0 + vocabulary as f64 * probability) / TOTAL as f64 + 1e-9;
                    assert!((share - probability).abs() <= tolerance, "{share} for {probability}");
                    if token % 97 == 0 || token + 300 > vocabulary {
                        for place in [interval.start, interval.start + interval.size - 1] {
                            assert_eq!(frequencies.at(place), (u32::try_from(token).unwrap(), interval));
                        }
                    }
                }
                assert_eq!(end, TOTAL, "{vocabulary} {sharpness}");
            }
        }
    }

    #[test]
    fn logits_that_are_no_numbers_are_refused() {
        for logits in [&[0.0, f32::NAN][..], &[f32::INFINITY], &[f32::NEG_INFINITY; 2]] {
            assert!(matches!(Frequencies::of(logits), Err(GenerationError::NotFinite)));
        }
    }
}
