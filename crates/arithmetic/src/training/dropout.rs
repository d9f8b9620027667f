//! Counter-based dropout: the seed and a value's position determine whether the value is kept.
//!
//! Any thread can therefore sample any part of a mask. The backward pass samples the
//! mask again, so no mask is stored.
//!
//! The samples come from Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy
//! as 1, 2, 3", 2011), sixteen counters at a time.

use std::ops::Range;

use crate::simd::{LANES, Number, Real, Vectors, Work};
use crate::threads::{Parts, computed_in_parts};

/// Number of samples per counter.
const WORDS: usize = 4;
/// Samples per group of sixteen counters.
const GROUP: usize = WORDS * LANES;
/// Values per task, in whole groups.
const BLOCK: usize = 128 * GROUP;
/// Number of Philox rounds.
const ROUNDS: usize = 10;
/// Multipliers for two words of a counter in each round.
const FACTORS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Increments for the two words of the key after each round.
const STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Dropout: zeroes random values at the given rate and scales up the rest.
///
/// ```
/// use candle_gpt2_arithmetic::{Dropout, Float};
///
/// let dropout = Dropout { rate: 0.75, seed: 7 };
/// assert_eq!(dropout.factor(), 4.0);
/// let mut kept = [false; 1000];
/// dropout.sample(0, 0, &mut kept);
/// assert!((150..350).contains(&kept.iter().filter(|is_kept| **is_kept).count()));
/// let dropped = Float::dropout(&[1f32; 1000], dropout);
/// assert!(dropped.iter().zip(kept).all(|(value, is_kept)| *value == if is_kept { 4.0 } else { 0.0 }));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Fraction of values that become zero, from 0 to 1.
    pub rate: f64,
    /// Seed for the samples.
    pub seed: u64,
}

impl Dropout {
    /// Returns the factor for kept values; it preserves the expected value.
    #[inline(always)]
    pub fn factor(self) -> f64 {
        if self.rate < 1.0 { 1.0 / (1.0 - self.rate) } else { 0.0 }
    }

    /// Samples which values in a stream are kept, starting at position `first`.
    ///
    /// Each is kept with probability `1 - rate`, in steps of `2^-32`.
    pub fn sample(self, stream: u64, first: u64, kept: &mut [bool]) {
        let limit = self.limit();
        let mut done = 0;
        while done < kept.len() {
            let (samples, some) = self.samples(stream, first + done as u64, kept.len() - done);
            let samples = &samples[some.clone()];
            for index in 0..samples.len() {
                kept[done + index] = u64::from(samples[index]) >= limit;
            }
            done += some.len();
        }
    }

    /// Writes `x` after dropout to `y`, for values of a stream that start at position `first`.
    #[inline(always)]
    pub(super) fn apply<T: Number>(self, stream: u64, first: u64, x: &[T], y: &mut [T]) {
        let (limit, factor) = (self.limit(), T::of(self.factor()));
        let mut done = 0;
        while done < x.len() {
            let (samples, some) = self.samples(stream, first + done as u64, x.len() - done);
            let samples = &samples[some.clone()];
            let (x, y) = (&x[done..done + samples.len()], &mut y[done..done + samples.len()]);
            for index in 0..samples.len() {
                y[index] = if u64::from(samples[index]) >= limit { x[index] * factor } else { T::ZERO };
            }
            done += some.len();
        }
    }

    /// Returns the threshold; a value becomes zero if its sample is smaller.
    #[inline(always)]
    pub fn limit(self) -> u64 {
        #[expect(clippy::cast_possible_truncation, reason = "from 0 to 2^32")]
        let limit = (self.rate * (1u64 << 32) as f64).ceil() as u64;
        limit
    }

    /// Returns the samples in the group that contains `place`, and the range of samples to use.
    ///
    /// The range covers `len` positions starting at `place`, up to the end of the group.
    #[inline(always)]
    fn samples(self, stream: u64, place: u64, len: usize) -> ([u32; GROUP], Range<usize>) {
        #[expect(clippy::cast_possible_truncation, reason = "less than the length of a group")]
        let first = (place % GROUP as u64) as usize;
        let end = if len < GROUP - first { first + len } else { GROUP };
        let words = philox(self.seed, stream, place / GROUP as u64 * LANES as u64);
        let mut samples = [0; GROUP];
        for word in 0..WORDS {
            for lane in 0..LANES {
                samples[word * LANES + lane] = words[word][lane];
            }
        }
        (samples, first..end)
    }
}

/// Returns a stream's samples for sixteen counters, starting at `first`.
///
/// `first` must be a multiple of 16. The result has the first word of each counter,
/// then the second of each, and so on.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "there are only sixteen lanes")]
fn philox(seed: u64, stream: u64, first: u64) -> [[u32; LANES]; WORDS] {
    let mut key = halves(seed);
    let ([low, high], stream) = (halves(first), halves(stream));
    let mut words = [[0; LANES], [high; LANES], [stream[0]; LANES], [stream[1]; LANES]];
    for lane in 0..LANES {
        words[0][lane] = low + lane as u32;
    }
    for _ in 0..ROUNDS {
        for lane in 0..LANES {
            let [a_low, a_high] = halves(u64::from(FACTORS[0]) * u64::from(words[0][lane]));
            let [b_low, b_high] = halves(u64::from(FACTORS[1]) * u64::from(words[2][lane]));
            words[0][lane] = b_high ^ words[1][lane] ^ key[0];
            words[1][lane] = b_low;
            words[2][lane] = a_high ^ words[3][lane] ^ key[1];
            words[3][lane] = a_low;
        }
        key = [key[0].wrapping_add(STEPS[0]), key[1].wrapping_add(STEPS[1])];
    }
    words
}

/// Splits a number into its low half and its high half.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "each half is 32 bits")]
fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

/// Applies dropout to `x` with the first samples of stream 0.
pub(super) fn dropout<T: Real>(x: &[T], dropout: Dropout) -> Vec<T> {
    let parts = Parts { row_len: 1, rows: BLOCK, columns: 1 };
    computed_in_parts(x.len(), parts, |mut part| {
        let first = part.first_row;
        let x = &x[first..first + part.rows()];
        T::vectorized(Apply { dropout, first: first as u64, x, y: part.all() });
    })
}

struct Apply<'a, T> {
    dropout: Dropout,
    first: u64,
    x: &'a [T],
    y: &'a mut [T],
}

impl<T: Number> Work<T> for Apply<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, _: V) {
        self.dropout.apply(0, self.first, self.x, self.y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{F32Job, InstructionSet};

    /// Checks the samples against Random123's test vectors for ten-round philox4x32 (`kat_vectors`).
    ///
    /// Each vector consists of a counter, a key and the samples.
    #[test]
    fn samples_match_published_vectors() {
        let ones = u64::MAX;
        for (counter, stream, key, expected) in [
            (0, 0, 0, [0x6627_e8d5u32, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            (ones, ones, ones, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                0x85a3_08d3_243f_6a88,
                0x0370_7344_1319_8a2e,
                0x299f_31d0_a409_3822,
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ] {
            let lane = usize::try_from(counter % LANES as u64).unwrap();
            let samples = philox(key, stream, counter - lane as u64);
            assert_eq!(samples.map(|words| words[lane]), expected, "counter {counter:x}");
        }
    }

    /// Checks that any part of a mask, sampled on its own, equals that part of the whole mask.
    ///
    /// Also checks that kept values are scaled, with every instruction set.
    #[test]
    fn any_part_of_a_mask_can_be_sampled() {
        let dropout = Dropout { rate: 0.3, seed: 11 };
        let mut all = vec![false; 3 * GROUP];
        dropout.sample(5, 0, &mut all);
        for (first, len) in [(0, 1), (1, GROUP), (GROUP - 1, GROUP + 2), (70, 0), (2 * GROUP, GROUP)] {
            let mut some = vec![false; len];
            dropout.sample(5, first as u64, &mut some);
            assert_eq!(some, all[first..first + len], "{len} from {first}");
        }
        let x: Vec<f32> = (1..=3 * GROUP).map(|index| index as f32).collect();
        let mut stream_0_mask = vec![false; x.len()];
        dropout.sample(0, 0, &mut stream_0_mask);
        assert_ne!(stream_0_mask, all);
        #[expect(clippy::cast_possible_truncation, reason = "as the kernel rounds it")]
        let factor = dropout.factor() as f32;
        let expected: Vec<f32> =
            x.iter().zip(&stream_0_mask).map(|(x, kept)| if *kept { x * factor } else { 0.0 }).collect();
        for set in InstructionSet::available() {
            let mut y = vec![f32::NAN; x.len()];
            set.run(F32Job(Apply { dropout, first: 0, x: &x, y: &mut y }));
            assert_eq!(y, expected, "{set:?}");
        }
    }

    /// Checks the fraction of kept values against the rate.
    ///
    /// With a million samples, the fraction's standard deviation is at most 0.0005.
    #[test]
    fn kept_fraction_matches_the_rate() {
        for rate in [0.0, 0.1, 0.5, 0.9, 1.0] {
            let mut kept = vec![false; 1_000_000];
            Dropout { rate, seed: 3 }.sample(1, 17, &mut kept);
            let fraction = kept.iter().filter(|kept| **kept).count() as f64 / 1e6;
            let bound = if rate == 0.0 || rate == 1.0 { 0.0 } else { 0.0025 };
            assert!((fraction - (1.0 - rate)).abs() <= bound, "{fraction} at a rate of {rate}");
        }
    }
}
