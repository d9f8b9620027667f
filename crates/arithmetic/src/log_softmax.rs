//! Softmax statistics of logits over a vocabulary, computed in f64.
//!
//! `exp(x) = 2^n · exp(r)` with `n = round(x / ln 2)` and `r = x - n ln 2`, so that `|r| ≤ ln 2 / 2`. There,
//! eleven terms of the Taylor series leave a relative error below 3e-13. Sixteen sums run in parallel, in
//! plain Rust without fused multiply-adds, so every instruction set returns the same bits.

use std::f64::consts::{LN_2, LOG2_E};

use crate::simd::{InstructionSet, Job, LANES, Simd};

/// Input below which `exp` returns zero; its exponential is close to the smallest normal f64.
const EXP_SMALLEST: f64 = -708.0;
/// Constant 1.5 · 2^52; adding a number to it leaves that number as an integer in the low bits.
///
/// The number must be smaller than 2^51 and is rounded to an integer.
pub(crate) const ROUNDING: f64 = 6_755_399_441_055_744.0;
/// Number of fraction bits in an f64.
const FRACTION_BITS: u32 = 52;
/// Exponent bias of an f64.
const EXPONENT_BIAS: u64 = 1023;
/// Coefficients of the Taylor series: 1/10!, …, 1/2!, 1/1!, 1/0!.
const EXP_SERIES: [f64; 11] = [
    1.0 / 3_628_800.0,
    1.0 / 362_880.0,
    1.0 / 40_320.0,
    1.0 / 5_040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
    1.0,
    1.0,
];

type Doubles = [f64; LANES];

/// Returns `ln Σ exp(logit)`, which turns logits into log-probabilities.
///
/// `largest` is the largest logit. The result is NaN if a logit is NaN or the largest is
/// infinite, and `-inf` if there are no logits.
///
/// ```
/// use candle_gpt2_arithmetic::log_sum_exp;
///
/// assert!((log_sum_exp(&[0., 0., 0.], 0.) - 3f64.ln()).abs() < 1e-6);
/// ```
pub fn log_sum_exp(logits: &[f32], largest: f32) -> f64 {
    let largest = f64::from(largest);
    largest + libm::log(InstructionSet::detected().run(ExponentialSum { logits, largest }))
}

/// Replaces each number by its exponential; numbers must be at most 709.
///
/// NaN stays NaN, and numbers below -708 become 0.
///
/// ```
/// let mut numbers = [0., f64::NEG_INFINITY, 1.];
/// candle_gpt2_arithmetic::exponentials(&mut numbers);
/// assert_eq!(numbers[..2], [1., 0.]);
/// assert!((numbers[2] - std::f64::consts::E).abs() < 1e-12);
/// ```
pub fn exponentials(numbers: &mut [f64]) {
    InstructionSet::detected().run(Exponentials(numbers));
}

/// Returns the relative entropy `Σ p (ln p - ln q)` over a vocabulary, in nats.
///
/// Each distribution consists of its logits and their [`log_sum_exp`]; `ln p` and `ln q` are the differences.
/// Terms with `p = 0` are 0. The result is exactly 0 if the two distributions are the same.
///
/// ```
/// use candle_gpt2_arithmetic::{log_sum_exp, relative_entropy};
///
/// let (p, q) = ([1f32, 2., 4.], [4f32, 2., 1.]);
/// let (p, q) = ((&p[..], log_sum_exp(&p, 4.)), (&q[..], log_sum_exp(&q, 4.)));
/// assert_eq!(relative_entropy(p, p), 0.0);
/// assert!(relative_entropy(p, q) > 1.0);
/// ```
///
/// # Panics
/// Panics if the numbers of logits differ.
pub fn relative_entropy(p: (&[f32], f64), q: (&[f32], f64)) -> f64 {
    assert_eq!(p.0.len(), q.0.len(), "both distributions must have the same number of logits");
    InstructionSet::detected().run(RelativeEntropy { p, q })
}

struct Exponentials<'a>(&'a mut [f64]);

impl Job for Exponentials<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for numbers in self.0.chunks_mut(LANES) {
            let mut sixteen = [0.0; LANES];
            for lane in 0..numbers.len() {
                sixteen[lane] = numbers[lane];
            }
            let exponentials = exp(sixteen);
            for lane in 0..numbers.len() {
                numbers[lane] = exponentials[lane];
            }
        }
    }
}

struct ExponentialSum<'a> {
    logits: &'a [f32],
    largest: f64,
}

impl Job for ExponentialSum<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> f64 {
        let mut sums = [0.0; LANES];
        let mut index = 0;
        while index < self.logits.len() {
            let exponentials = exp(load_minus(self.logits, index, self.largest));
            for lane in 0..LANES {
                sums[lane] += exponentials[lane];
            }
            index += LANES;
        }
        total(sums)
    }
}

struct RelativeEntropy<'a> {
    p: (&'a [f32], f64),
    q: (&'a [f32], f64),
}

impl Job for RelativeEntropy<'_> {
    type Output = f64;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> f64 {
        let mut sums = [0.0; LANES];
        let mut index = 0;
        while index < self.p.0.len() {
            let log_p = load_minus(self.p.0, index, self.p.1);
            let log_q = load_minus(self.q.0, index, self.q.1);
            let p = exp(log_p);
            for lane in 0..LANES {
                let term = p[lane] * (log_p[lane] - log_q[lane]);
                sums[lane] += if p[lane] == 0.0 { 0.0 } else { term };
            }
            index += LANES;
        }
        total(sums)
    }
}

/// Returns sixteen values starting at `index`, minus `subtracted`, padded with `-inf`.
#[inline(always)]
pub(crate) fn load_minus(values: &[f32], index: usize, subtracted: f64) -> Doubles {
    let mut sixteen = [f32::NEG_INFINITY; LANES];
    let rest = &values[index..];
    if let Some(whole) = rest.first_chunk() {
        sixteen = *whole;
    } else {
        sixteen[..rest.len()].copy_from_slice(rest);
    }
    let mut wide = [0.0; LANES];
    for lane in 0..LANES {
        wide[lane] = sixteen[lane] as f64 - subtracted;
    }
    wide
}

/// Computes `exp(x)` for numbers up to 709; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp(x: Doubles) -> Doubles {
    let mut exponentials = [0.0; LANES];
    for lane in 0..LANES {
        let x = x[lane];
        let is_zero = x < EXP_SMALLEST;
        let shifted = x * LOG2_E + ROUNDING;
        let r = x - (shifted - ROUNDING) * LN_2;
        let mut series = EXP_SERIES[0];
        for term in 1..EXP_SERIES.len() {
            series = series * r + EXP_SERIES[term];
        }
        let power = (shifted.to_bits() << FRACTION_BITS).wrapping_add(EXPONENT_BIAS << FRACTION_BITS);
        let exponential = series * f64::from_bits(power);
        exponentials[lane] = if is_zero { 0.0 } else { exponential };
    }
    exponentials
}

#[inline(always)]
fn total(sums: Doubles) -> f64 {
    let mut total = 0.0;
    for lane in 0..LANES {
        total += sums[lane];
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::noise;

    fn reference_log_sum_exp(logits: &[f32]) -> f64 {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - f64::from(largest)).exp()).sum();
        f64::from(largest) + sum.ln()
    }

    fn largest(logits: &[f32]) -> f64 {
        f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max))
    }

    #[test]
    fn exp_equals_the_standard_library() {
        let numbers = (-71_000..=500).map(|step| f64::from(step) * 0.01).chain([-1e-300, -0.0, 0.0]);
        for x in numbers {
            let (found, expected) = (exp([x; LANES]), x.exp());
            let relative = (found[0] - expected).abs() / expected;
            assert!(
                if x < EXP_SMALLEST { found[0] == 0.0 } else { relative < 1e-12 },
                "exp({x}) = {}",
                found[0]
            );
        }
        assert_eq!(exp([f64::NEG_INFINITY; LANES]), [0.0; LANES]);
        assert_eq!(exp([0.0; LANES]), [1.0; LANES]);
        assert!(exp([f64::NAN; LANES])[0].is_nan());
    }

    #[test]
    fn instruction_sets_agree_bit_for_bit() {
        for vocabulary in [1, 15, 16, 17, 2100, 50_257] {
            let (p, q) = (noise(vocabulary, 1, -30.0, 20.0), noise(vocabulary, 2, 10.0, 20.0));
            let (p_sum, q_sum) = (reference_log_sum_exp(&p), reference_log_sum_exp(&q));
            let log = |logits: &[f32], sum: f64| -> Vec<f64> {
                logits.iter().map(|logit| f64::from(*logit) - sum).collect()
            };
            let terms = log(&p, p_sum).into_iter().zip(log(&q, q_sum)).map(|(p, q)| p.exp() * (p - q));
            let expected: f64 = terms.sum();
            let (mut sums, mut entropies, mut exponentials) = (Vec::new(), Vec::new(), Vec::new());
            for set in InstructionSet::available() {
                let sum = set.run(ExponentialSum { logits: &p, largest: largest(&p) });
                assert!((largest(&p) + sum.ln() - p_sum).abs() < 1e-12, "{set:?} {vocabulary}: {sum}");
                sums.push(sum.to_bits());
                let entropy = set.run(RelativeEntropy { p: (&p, p_sum), q: (&q, q_sum) });
                assert!((entropy - expected).abs() < 1e-11, "{set:?} {vocabulary}: {entropy} vs. {expected}");
                entropies.push(entropy.to_bits());
                assert_eq!(set.run(RelativeEntropy { p: (&p, p_sum), q: (&p, p_sum) }), 0.0, "{set:?}");
                let mut numbers = log(&p, p_sum);
                set.run(Exponentials(&mut numbers));
                exponentials.push(numbers);
            }
            assert!(sums.iter().all(|sum| *sum == sums[0]), "{sums:?}");
            assert!(entropies.iter().all(|entropy| *entropy == entropies[0]), "{entropies:?}");
            let each: Vec<f64> = log(&p, p_sum).into_iter().map(|number| exp([number; LANES])[0]).collect();
            assert!(exponentials.iter().all(|numbers| *numbers == each), "{vocabulary}");
        }
    }

    #[test]
    fn non_finite_logits_propagate() {
        let sum =
            |logits: &[f32]| log_sum_exp(logits, logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        assert!(sum(&[0.0, f32::NAN]).is_nan());
        assert!(sum(&[f32::INFINITY, 0.0]).is_nan());
        assert!(sum(&[f32::NEG_INFINITY; 20]).is_nan());
        assert_eq!(sum(&[]), f64::NEG_INFINITY);
        assert_eq!(sum(&[3.0, f32::NEG_INFINITY]), 3.0);
        let (one_hot, uniform) = ([0.0, f32::NEG_INFINITY], [0.0, 0.0]);
        let entropy = |p: &[f32], q: &[f32]| {
            relative_entropy((p, reference_log_sum_exp(p)), (q, reference_log_sum_exp(q)))
        };
        assert!((entropy(&one_hot, &uniform) - 2f64.ln()).abs() < 1e-15);
        assert_eq!(entropy(&one_hot, &one_hot), 0.0);
        assert_eq!(entropy(&uniform, &one_hot), f64::INFINITY);
    }
}
