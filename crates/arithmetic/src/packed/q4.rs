//! 4-bit indices into a table of 16 integers.

use super::integers::{Bytes, Quants, ScaleSearch, best_scales};
use crate::simd::{BYTE_INPUTS, ByteLines, GROUP, LANES, Line, SMALL_OFFSET, Simd};

/// Inputs per line of nibbles.
const NIBBLE_INPUTS: usize = 8;

/// Nibbles in lines of eight inputs, with four bytes per output.
///
/// The low nibbles hold the first four inputs, the high nibbles the last four.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Nibbles([[u8; BYTE_INPUTS * LANES]; GROUP / NIBBLE_INPUTS]);

/// Integers that 4-bit weights index, in ascending order; the first has the largest magnitude.
///
/// For normally distributed weights in groups of 32, each with the best candidate scale,
/// this table has the smallest squared error of all tables of 6-bit integers. Its error is
/// one percent larger than that of the best 8-bit table.
pub(super) const TABLE: [i8; 16] = [-32, -25, -19, -15, -11, -8, -5, -2, 1, 4, 7, 10, 13, 17, 22, 28];

impl Quants for Nibbles {
    type Expanded = Bytes<SMALL_OFFSET>;
    const OFFSET: u8 = SMALL_OFFSET;
    const ZERO: Self = Self([[0; BYTE_INPUTS * LANES]; GROUP / NIBBLE_INPUTS]);

    #[inline(always)]
    fn encode<S: Simd>(simd: S, weights: &[Line<[f32; LANES]>; GROUP]) -> (Self, [u16; LANES]) {
        let (scales, inverses) = best_scales::<Self, S>(simd, weights);
        let mut lines = [[0; BYTE_INPUTS * LANES]; GROUP / NIBBLE_INPUTS];
        for (line, weights) in lines.iter_mut().zip(weights.as_chunks::<NIBBLE_INPUTS>().0) {
            let mut indices = [simd.splat(0.0); NIBBLE_INPUTS];
            for (index, weights) in indices.iter_mut().zip(weights) {
                let quotient = simd.mul(simd.load(&weights.0), inverses);
                *index = Self::add_below(simd, quotient, simd.splat(0.0), &[1.0; 15]);
            }
            simd.store_nibbles(indices, line);
        }
        (Self(lines), scales)
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        let byte = self.0[input / NIBBLE_INPUTS][output * BYTE_INPUTS + input % BYTE_INPUTS];
        let index = if input % NIBBLE_INPUTS < BYTE_INPUTS { byte & 15 } else { byte >> 4 };
        f32::from(TABLE[usize::from(index)])
    }

    #[inline(always)]
    fn expand<S: Simd>(&self, simd: S, to: &mut ByteLines) {
        let (pairs, _) = to.as_chunks_mut::<2>();
        for line in 0..GROUP / NIBBLE_INPUTS {
            simd.look_up_nibbles(&self.0[line], &Self::UNSIGNED, &mut pairs[line]);
        }
    }
}

impl Nibbles {
    /// Candidate scales, as multiples of the largest-magnitude weight.
    ///
    /// Each is a multiple of the reciprocal of the table's first entry.
    const SCALE_FACTORS: [f32; 9] = {
        let mut shares = [1.0, 1.05, 1.1, 1.14, 0.95, 0.9, 0.85, 0.8, 0.75];
        let mut index = 0;
        while index < shares.len() {
            shares[index] /= TABLE[0] as f32;
            index += 1;
        }
        shares
    };

    /// Table with the offset added.
    const UNSIGNED: [u8; 16] = {
        let mut unsigned = [0; 16];
        let mut index = 0;
        while index < unsigned.len() {
            unsigned[index] = TABLE[index].cast_unsigned().wrapping_add(SMALL_OFFSET);
            index += 1;
        }
        unsigned
    };
    /// Midpoints between neighboring entries; above a midpoint, the upper entry is nearer.
    const MIDDLES: [f32; 15] = Self::of_neighbors(0.5, 0.5);
    /// Differences between neighboring entries.
    const STEPS: [f32; 15] = Self::of_neighbors(-1.0, 1.0);

    /// Computes weighted sums of neighboring entries.
    const fn of_neighbors(first: f32, second: f32) -> [f32; 15] {
        let mut sums = [0.0; 15];
        let mut index = 0;
        while index < sums.len() {
            sums[index] = first * TABLE[index] as f32 + second * TABLE[index + 1] as f32;
            index += 1;
        }
        sums
    }

    /// Adds the steps from the first entry up to the entry nearest to the quotient.
    #[inline(always)]
    fn add_below<S: Simd>(
        simd: S,
        quotient: S::Vector,
        mut start: S::Vector,
        steps: &[f32; 15],
    ) -> S::Vector {
        for (middle, step) in Self::MIDDLES.iter().zip(steps) {
            start = simd.add_where_greater(start, quotient, simd.splat(*middle), simd.splat(*step));
        }
        start
    }
}

impl ScaleSearch for Nibbles {
    const SCALES: &'static [f32] = &Self::SCALE_FACTORS;

    #[inline(always)]
    fn nearest<S: Simd>(simd: S, quotient: S::Vector) -> S::Vector {
        Self::add_below(simd, quotient, simd.splat(f32::from(TABLE[0])), &Self::STEPS)
    }
}
