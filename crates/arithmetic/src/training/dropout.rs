//! Dropout by counting: whether a value stays depends on a seed and the value's place alone. So any thread draws any part of a mask,
//! the way back draws it again, and none is kept.
//!
//! The draws are those of Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011), sixteen
//! counters at a time.

use std::ops::Range;

use crate::simd::{LANES, Number, Real, Vectors, Work};
use crate::threads::{Parts, computed_in_parts};

/// Draws of a counter.
const WORDS: usize = 4;
/// Draws of sixteen counters.
const GROUP: usize = WORDS * LANES;
/// Values that one task works on, whole groups.
const BLOCK: usize = 128 * GROUP;
/// Rounds of Philox.
const ROUNDS: usize = 10;
/// What two words of a counter are multiplied by in each round.
const FACTORS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// What is added to the two words of the key after each round.
const STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Dropout at a rate: which values become zero, and what the others are multiplied by.
///
/// ```
/// use candle_gpt2_arithmetic::{Dropout, Float};
///
/// let dropout = Dropout { rate: 0.75, seed: 7 };
/// assert_eq!(dropout.factor(), 4.0);
/// let mut kept = [false; 1000];
/// dropout.draw(0, 0, &mut kept);
/// assert!((150..350).contains(&kept.iter().filter(|is_kept| **is_kept).count()));
/// let dropped = Float::dropout(&[1f32; 1000], dropout);
/// assert!(dropped.iter().zip(kept).all(|(value, is_kept)| *value == if is_kept { 4.0 } else { 0.0 }));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Share of the values that become zero, from 0 to 1.
    pub rate: f64,
    /// Seed of the draws.
    pub seed: u64,
}

impl Dropout {
    /// What a value that stays is multiplied by, so that the expected value is that without dropout.
    #[inline(always)]
    pub fn factor(self) -> f64 {
        if self.rate < 1.0 { 1.0 / (1.0 - self.rate) } else { 0.0 }
    }

    /// Draws which values of a stream stay, from the one at place `first` on: each with probability `1 - rate`, in steps of `2^-32`.
    pub fn draw(self, stream: u64, first: u64, kept: &mut [bool]) {
        let limit = self.limit();
        let mut done = 0;
        while done < kept.len() {
            let (draws, some) = self.draws(stream, first + done as u64, kept.len() - done);
            let draws = &draws[some.clone()];
            for index in 0..draws.len() {
                kept[done + index] = u64::from(draws[index]) >= limit;
            }
            done += some.len();
        }
    }

    /// Writes to `y` what is left of `x`, values of a stream from the one at place `first` on.
    #[inline(always)]
    pub(super) fn apply<T: Number>(self, stream: u64, first: u64, x: &[T], y: &mut [T]) {
        let (limit, factor) = (self.limit(), T::of(self.factor()));
        let mut done = 0;
        while done < x.len() {
            let (draws, some) = self.draws(stream, first + done as u64, x.len() - done);
            let draws = &draws[some.clone()];
            let (x, y) = (&x[done..done + draws.len()], &mut y[done..done + draws.len()]);
            for index in 0..draws.len() {
                y[index] = if u64::from(draws[index]) >= limit { x[index] * factor } else { T::ZERO };
            }
            done += some.len();
        }
    }

    /// Values whose draw is below this become zero.
    #[inline(always)]
    pub fn limit(self) -> u64 {
        #[expect(clippy::cast_possible_truncation, reason = "from 0 to 2^32")]
        let limit = (self.rate * (1u64 << 32) as f64).ceil() as u64;
        limit
    }

    /// The draws of the group in which a place is, and which of them belong to the `len` places from it on.
    #[inline(always)]
    fn draws(self, stream: u64, place: u64, len: usize) -> ([u32; GROUP], Range<usize>) {
        #[expect(clippy::cast_possible_truncation, reason = "below the length of a group")]
        let first = (place % GROUP as u64) as usize;
        let end = if len < GROUP - first { first + len } else { GROUP };
        let words = philox(self.seed, stream, place / GROUP as u64 * LANES as u64);
        let mut draws = [0; GROUP];
        for word in 0..WORDS {
            for lane in 0..LANES {
                draws[word * LANES + lane] = words[word][lane];
            }
        }
        (draws, first..end)
    }
}

/// The draws of sixteen counters from `first` on, a multiple of 16, in a stream: the first word of each, then the second of each and so
/// on.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "there are sixteen lanes")]
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

/// The low and the high half.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "halves are taken")]
fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
}

/// What is left of `x`, by the first draws of stream 0.
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
    use crate::simd::{InstructionSet, OfFloats};

    /// The vectors that Random123 publishes for philox4x32 with ten rounds (`kat_vectors`): counter, key and draws.
    #[test]
    fn draws_are_those_that_are_published() {
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
            let draws = philox(key, stream, counter - lane as u64);
            assert_eq!(draws.map(|words| words[lane]), expected, "counter {counter:x}");
        }
    }

    /// A part of a mask is the mask's part, from any place on, and what stays is scaled, with all instructions.
    #[test]
    fn any_part_can_be_drawn_by_itself() {
        let dropout = Dropout { rate: 0.3, seed: 11 };
        let mut all = vec![false; 3 * GROUP];
        dropout.draw(5, 0, &mut all);
        for (first, len) in [(0, 1), (1, GROUP), (GROUP - 1, GROUP + 2), (70, 0), (2 * GROUP, GROUP)] {
            let mut some = vec![false; len];
            dropout.draw(5, first as u64, &mut some);
            assert_eq!(some, all[first..first + len], "{len} from {first}");
        }
        let x: Vec<f32> = (1..=3 * GROUP).map(|index| index as f32).collect();
        let mut of_stream_0 = vec![false; x.len()];
        dropout.draw(0, 0, &mut of_stream_0);
        assert_ne!(of_stream_0, all);
        #[expect(clippy::cast_possible_truncation, reason = "as the kernel rounds it")]
        let factor = dropout.factor() as f32;
        let expected: Vec<f32> =
            x.iter().zip(&of_stream_0).map(|(x, kept)| if *kept { x * factor } else { 0.0 }).collect();
        for set in InstructionSet::available() {
            let mut y = vec![f32::NAN; x.len()];
            set.run(OfFloats(Apply { dropout, first: 0, x: &x, y: &mut y }));
            assert_eq!(y, expected, "{set:?}");
        }
    }

    /// Of a million draws the share that stays has a standard deviation of at most 0.0005.
    #[test]
    fn the_share_that_stays_is_the_one_that_was_asked_for() {
        for rate in [0.0, 0.1, 0.5, 0.9, 1.0] {
            let mut kept = vec![false; 1_000_000];
            Dropout { rate, seed: 3 }.draw(1, 17, &mut kept);
            let share = kept.iter().filter(|kept| **kept).count() as f64 / 1e6;
            let bound = if rate == 0.0 || rate == 1.0 { 0.0 } else { 0.0025 };
            assert!((share - (1.0 - rate)).abs() <= bound, "{share} at a rate of {rate}");
        }
    }
}
