//! 5-bit integers.

use super::integers::{Bytes, Quants, ScaleSearch, best_scales};
use crate::simd::{BYTE_INPUTS, ByteLines, GROUP, LANES, Line, SMALL_OFFSET, Simd};

/// Inputs per line of nibbles.
const NIBBLE_INPUTS: usize = 8;
/// Offset of stored integers.
const STORED_OFFSET: u8 = 16;

/// 5-bit integers, with the low four bits and the high bit stored separately.
///
/// The low bits are nibbles in lines of eight inputs, as for 4-bit weights. One line holds the high bits of
/// all 32 inputs. The high bits of four inputs have the same position in their bytes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Fives {
    low: [[u8; BYTE_INPUTS * LANES]; GROUP / NIBBLE_INPUTS],
    high: [u8; BYTE_INPUTS * LANES],
}

impl Quants for Fives {
    type Expanded = Bytes<SMALL_OFFSET>;
    const OFFSET: u8 = SMALL_OFFSET;
    const ZERO: Self =
        Self { low: [[0; BYTE_INPUTS * LANES]; GROUP / NIBBLE_INPUTS], high: [0; BYTE_INPUTS * LANES] };

    #[inline(always)]
    fn encode<S: Simd>(simd: S, weights: &[Line<[f32; LANES]>; GROUP]) -> (Self, [u16; LANES]) {
        let (scales, inverses) = best_scales::<Self, S>(simd, weights);
        let mut fives = Self::ZERO;
        for (line, weights) in weights.as_chunks::<BYTE_INPUTS>().0.iter().enumerate() {
            let mut quants = [simd.splat(0.0); BYTE_INPUTS];
            for (quant, weights) in quants.iter_mut().zip(weights) {
                let nearest = Self::nearest(simd, simd.mul(simd.load(&weights.0), inverses));
                *quant = simd.add(nearest, simd.splat(f32::from(STORED_OFFSET)));
            }
            let mut bytes = [0; BYTE_INPUTS * LANES];
            simd.store_bytes(quants, &mut bytes);
            for (index, byte) in bytes.iter().enumerate() {
                fives.low[line / 2][index] |= (byte & 0x0f) << (4 * (line % 2));
                fives.high[index] |= (byte >> 4) << line;
            }
        }
        (fives, scales)
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        let column = output * BYTE_INPUTS + input % BYTE_INPUTS;
        let line = input / BYTE_INPUTS;
        let low = self.low[line / 2][column] >> (4 * (line % 2)) & 0x0f;
        let high = self.high[column] >> line & 1;
        f32::from(low | high << 4) - f32::from(STORED_OFFSET)
    }

    #[inline(always)]
    fn expand<S: Simd>(&self, _: S, to: &mut ByteLines) {
        for (line, to) in to.iter_mut().enumerate() {
            let low = &self.low[line / 2];
            for (index, to) in to.iter_mut().enumerate() {
                // All inputs of a line have the same bit position in their bytes, so they use the same
                // shifts.
                let low = if line % 2 == 0 { low[index] & 0x0f } else { low[index] >> 4 };
                *to = (low | (self.high[index] >> line & 1) << 4) + (SMALL_OFFSET - STORED_OFFSET);
            }
        }
    }
}

impl Fives {
    /// Candidate integers for the largest-magnitude weight, likeliest first.
    ///
    /// The list is complete because some groups consist of multiples of an f16 number, as in GGUF's Q5_0. The
    /// search then recovers that number, whichever multiple is the largest.
    const LARGEST: [f32; 31] = [
        -16.0, 15.0, -15.0, 14.0, -14.0, 13.0, -13.0, 12.0, -12.0, 11.0, -11.0, 10.0, -10.0, 9.0, -9.0, 8.0,
        -8.0, 7.0, -7.0, 6.0, -6.0, 5.0, -5.0, 4.0, -4.0, 3.0, -3.0, 2.0, -2.0, 1.0, -1.0,
    ];
    const SCALE_FACTORS: [f32; 31] = {
        let mut shares = Self::LARGEST;
        let mut index = 0;
        while index < shares.len() {
            shares[index] = 1.0 / shares[index];
            index += 1;
        }
        shares
    };
}

impl ScaleSearch for Fives {
    const SCALES: &'static [f32] = &Self::SCALE_FACTORS;

    #[inline(always)]
    fn nearest<S: Simd>(simd: S, quotient: S::Vector) -> S::Vector {
        simd.min(simd.max(simd.round(quotient), simd.splat(-16.0)), simd.splat(15.0))
    }
}
