//! Integer exponentials of logits, for compressors that need the same sums on every machine.
//!
//! The exponential function comes from `log_softmax.rs` and returns the same bits on every
//! instruction set. Its result is scaled by a power of two and rounded to an integer, and
//! integer sums do not depend on the order.

use crate::log_softmax::{ROUNDING, exp, load_minus};
use crate::simd::{InstructionSet, Job, LANES, Simd};

/// Scale of the integers, 2³⁰; the largest logit maps to this value.
///
/// The sum of 2²⁴ such integers is at most 2⁵⁴.
const SCALE: f64 = (1u64 << 30) as f64;

/// Returns `round(exp(logit - largest) · 2³⁰)` for every logit, with ties to even.
///
/// Returns `None` if a logit is NaN or the largest is infinite.
///
/// ```
/// use candle_gpt2_arithmetic::integer_exponentials;
///
/// assert_eq!(integer_exponentials(&[0., -1., f32::NEG_INFINITY], 0.), Some(vec![1 << 30, 395_007_542, 0]));
/// assert_eq!(integer_exponentials(&[0., f32::NAN], 0.), None);
/// ```
pub fn integer_exponentials(logits: &[f32], largest: f32) -> Option<Vec<u32>> {
    let mut integers = vec![0; logits.len().next_multiple_of(LANES)];
    let largest = f64::from(largest);
    let are_numbers =
        InstructionSet::detected().run(IntegerExponentials { logits, largest, integers: &mut integers });
    integers.truncate(logits.len());
    are_numbers.then_some(integers)
}

struct IntegerExponentials<'a> {
    logits: &'a [f32],
    largest: f64,
    /// Integers for the logits, padded to whole groups of lanes.
    integers: &'a mut [u32],
}

impl Job for IntegerExponentials<'_> {
    type Output = bool;

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "the integer is in the low bits of the sum")]
    fn run<S: Simd>(self, _: S) -> bool {
        // Adding up the exponentials preserves NaN.
        let mut sums = [0.0; LANES];
        let mut index = 0;
        while index < self.logits.len() {
            let exponentials = exp(load_minus(self.logits, index, self.largest));
            for lane in 0..LANES {
                sums[lane] += exponentials[lane];
                self.integers[index + lane] = (exponentials[lane] * SCALE + ROUNDING).to_bits() as u32;
            }
            index += LANES;
        }
        let mut are_numbers = true;
        for lane in 0..LANES {
            are_numbers &= sums[lane].is_finite();
        }
        are_numbers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::noise;

    #[test]
    fn instruction_sets_agree_on_rounded_exponentials() {
        for vocabulary in [1, 15, 16, 17, 2100, 50_257] {
            let logits = noise(vocabulary, 3, -30.0, 20.0);
            let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            let expected: Vec<f64> =
                logits.iter().map(|logit| (f64::from(*logit) - largest).exp() * SCALE).collect();
            let mut all = Vec::new();
            for set in InstructionSet::available() {
                let mut integers = vec![0; vocabulary.next_multiple_of(LANES)];
                assert!(set.run(IntegerExponentials { logits: &logits, largest, integers: &mut integers }));
                for (found, expected) in integers.iter().zip(&expected) {
                    // Allows half a unit for rounding, plus the Taylor series error times 2³⁰.
                    assert!(
                        (f64::from(*found) - expected).abs() <= 0.5 + 1e-3,
                        "{set:?}: {found} vs. {expected}"
                    );
                }
                all.push(integers);
            }
            assert!(all.iter().all(|integers| *integers == all[0]), "{vocabulary}");
        }
    }

    #[test]
    fn non_finite_logits_return_none() {
        assert_eq!(integer_exponentials(&[f32::INFINITY, 0.0], f32::INFINITY), None);
        assert_eq!(integer_exponentials(&[f32::NEG_INFINITY; 20], f32::NEG_INFINITY), None);
        let mut logits = vec![0.0; 40];
        logits[37] = f32::NAN;
        assert_eq!(integer_exponentials(&logits, 0.0), None);
        assert_eq!(integer_exponentials(&[], f32::NEG_INFINITY), Some(Vec::new()));
        // An exponential below half of 2⁻³⁰ rounds to zero.
        assert_eq!(integer_exponentials(&[0.0, -21.5], 0.0), Some(vec![1 << 30, 0]));
    }
}
