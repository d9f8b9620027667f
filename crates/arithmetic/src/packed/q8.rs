//! 8-bit integers.

use super::integers::{Bytes, OFFSET, Quants, encoded_bytes};
use crate::simd::{BYTE_INPUTS, ByteLines, GROUP, LANES, Line, Simd};

impl Quants for Bytes {
    const ZERO: Self = Self([[0; BYTE_INPUTS * LANES]; GROUP / BYTE_INPUTS]);
    const ARE_BYTES: bool = true;

    #[inline(always)]
    fn encode<S: Simd>(simd: S, weights: &[Line<[f32; LANES]>; GROUP]) -> (Self, [u16; LANES]) {
        let (lines, scales) = encoded_bytes(simd, weights, 1.0);
        (Self(lines), scales)
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        let byte = self.0[input / BYTE_INPUTS][output * BYTE_INPUTS + input % BYTE_INPUTS];
        f32::from(byte) - OFFSET
    }

    #[inline(always)]
    fn expand<S: Simd>(&self, _: S, _: &mut ByteLines) {}

    #[inline(always)]
    fn bytes<'a>(&'a self, _: &'a ByteLines) -> &'a ByteLines {
        &self.0
    }
}
