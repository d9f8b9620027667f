//! 6-bit integers.

use super::integers::{Bytes, Quants, encoded_bytes};
use crate::simd::{BYTE_INPUTS, ByteLines, GROUP, LANES, Line, SMALL_OFFSET, Simd};

/// Inputs per line of nibbles.
const NIBBLE_INPUTS: usize = 8;
/// Inputs per line of two-bit fields.
const QUARTER_INPUTS: usize = 16;

/// 6-bit integers, with the low four bits and the high two bits stored separately.
///
/// The low bits are nibbles in lines of eight inputs, as for 4-bit weights. The high bits are two-bit fields
/// in lines of sixteen inputs.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Sixes {
    low: [[u8; BYTE_INPUTS * LANES]; GROUP / NIBBLE_INPUTS],
    high: [[u8; BYTE_INPUTS * LANES]; GROUP / QUARTER_INPUTS],
}

impl Quants for Sixes {
    type Expanded = Bytes<SMALL_OFFSET>;
    const OFFSET: u8 = SMALL_OFFSET;
    const ZERO: Self = Self {
        low: [[0; BYTE_INPUTS * LANES]; GROUP / NIBBLE_INPUTS],
        high: [[0; BYTE_INPUTS * LANES]; GROUP / QUARTER_INPUTS],
    };

    #[inline(always)]
    fn encode<S: Simd>(simd: S, weights: &[Line<[f32; LANES]>; GROUP]) -> (Self, [u16; LANES]) {
        let (lines, scales) = encoded_bytes(simd, weights, SMALL_OFFSET);
        let mut low = [[0; BYTE_INPUTS * LANES]; GROUP / NIBBLE_INPUTS];
        for (low, lines) in low.iter_mut().zip(lines.as_chunks::<2>().0) {
            for (low, (first, second)) in low.iter_mut().zip(lines[0].iter().zip(&lines[1])) {
                *low = (first & 0x0f) | second << 4;
            }
        }
        let mut high = [[0; BYTE_INPUTS * LANES]; GROUP / QUARTER_INPUTS];
        for (high, lines) in high.iter_mut().zip(lines.as_chunks::<4>().0) {
            for (index, high) in high.iter_mut().enumerate() {
                *high = (0..4).fold(0, |high, line| high | (lines[line][index] >> 4) << (2 * line));
            }
        }
        (Self { low, high }, scales)
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        let column = output * BYTE_INPUTS + input % BYTE_INPUTS;
        let line = input / BYTE_INPUTS;
        let low = self.low[line / 2][column] >> (4 * (line % 2)) & 0x0f;
        let high = self.high[line / 4][column] >> (2 * (line % 4)) & 0x03;
        f32::from(low | high << 4) - f32::from(SMALL_OFFSET)
    }

    #[inline(always)]
    fn expand<S: Simd>(&self, _: S, to: &mut ByteLines) {
        for (line, to) in to.iter_mut().enumerate() {
            let (low, high) = (&self.low[line / 2], &self.high[line / 4]);
            for (index, to) in to.iter_mut().enumerate() {
                // All inputs of a line have the same bit position in their bytes, so they use the same
                // shifts.
                let low = if line % 2 == 0 { low[index] & 0x0f } else { low[index] >> 4 };
                *to = low | (high[index] >> (2 * (line % 4)) & 0x03) << 4;
            }
        }
    }
}
