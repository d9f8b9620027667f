//! Keys and values as 8-bit integers with f16 scales.
//!
//! A key has a scale for every 32 inputs, so that scores can be computed in integers. A value has a scale for
//! every 16 columns.
//!
//! `x ≈ s q` with `s = max|x| / 127`, rounded to f16, and `q = round(x / s)`. Queries are rounded like
//! activations in products with integer weights. A non-finite value makes its scale NaN.

use super::format::Format;
use crate::byte_group::{LARGEST_BYTE, add_scaled, nearest_group};
use crate::simd::{BYTE_INPUTS, BYTE_LINES, ByteGroup, ByteLines, GROUP, LANES, Simd, TileJob, tile_height};
use crate::simd::{PanelLine, SeparateRows, Sums, sum_products};

/// Size in bytes of a line of keys without scales: four inputs for each of 16 keys.
const BYTE_LINE: usize = BYTE_INPUTS * LANES;
/// Size in bytes of the integers in a line of keys; their scales follow.
const KEY_QUANTS: usize = BYTE_LINES * BYTE_LINE;
/// Size of a scale in bytes.
const SCALE: usize = 2;
/// Size in bytes of a line of values: integers for 16 columns, followed by their scale.
const VALUE_LINE: usize = LANES + SCALE;

/// Format that stores 8-bit integers.
pub(super) struct Bytes;

impl Format for Bytes {
    type Unit = u8;
    type Query = ByteGroup;
    const KEY_INPUTS: usize = GROUP;
    const KEY_LINE: usize = KEY_QUANTS + LANES * SCALE;
    const VALUE_LINE: usize = VALUE_LINE;
    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn arrange<S: Simd>(simd: S, query: &[f32], to: &mut [ByteGroup]) {
        for group in 0..to.len() {
            let inputs = &query[group * GROUP..];
            to[group] = nearest_group(simd, &inputs[..inputs.len().min(GROUP)]);
        }
    }

    #[inline(always)]
    fn write_key<S: Simd>(simd: S, key: &[f32], panel: &mut [u8], lane: usize) {
        for group in 0..key.len().div_ceil(GROUP) {
            let (inputs, line) = (&key[group * GROUP..], &mut panel[group * Self::KEY_LINE..]);
            let low = simd.load_first(&inputs[..inputs.len().min(LANES)], 0.0);
            let rest = &inputs[inputs.len().min(LANES)..];
            let high = simd.load_first(&rest[..rest.len().min(LANES)], 0.0);
            let (quants, scale) = quantized(simd, [low, high]);
            for half in 0..2 {
                for index in 0..LANES {
                    let (input, quant) = (half * LANES + index, quants[half][index]);
                    // Products read keys as unsigned bytes, with 128 added.
                    line[input / BYTE_INPUTS * BYTE_LINE + lane * BYTE_INPUTS + input % BYTE_INPUTS] =
                        quant.cast_unsigned() ^ 0x80;
                }
            }
            line[KEY_QUANTS + lane * SCALE..][..SCALE].copy_from_slice(&scale.to_le_bytes());
        }
    }

    #[inline(always)]
    fn write_value<S: Simd>(simd: S, columns: &[f32], line: &mut [u8]) {
        let columns = simd.load_first(&columns[..columns.len().min(LANES)], 0.0);
        let ([quants, _], scale) = quantized(simd, [columns, simd.splat(0.0)]);
        for index in 0..LANES {
            line[index] = quants[index].cast_unsigned();
        }
        line[LANES..VALUE_LINE].copy_from_slice(&scale.to_le_bytes());
    }

    fn read_key(panel: &[u8], lane: usize, to: &mut [f32]) {
        for (line, to) in panel.chunks(Self::KEY_LINE).zip(to.chunks_mut(GROUP)) {
            let scale = scale_at(line, KEY_QUANTS + lane * SCALE);
            for (input, to) in to.iter_mut().enumerate() {
                let byte = line[input / BYTE_INPUTS * BYTE_LINE + lane * BYTE_INPUTS + input % BYTE_INPUTS];
                *to = f32::from((byte ^ 0x80).cast_signed()) * scale;
            }
        }
    }

    fn read_value(line: &[u8], to: &mut [f32]) {
        let scale = scale_at(line, LANES);
        for (byte, to) in line.iter().zip(to) {
            *to = f32::from(byte.cast_signed()) * scale;
        }
    }

    #[inline(always)]
    fn in_tile<S: Simd, J: TileJob<S>>(simd: S, queries: usize, job: J) -> J::Output {
        simd.in_integer_tile(tile_height(queries, S::INTEGER_TILE_ROWS), job)
    }

    #[inline(always)]
    fn tile_rows<S: Simd>() -> usize {
        S::INTEGER_TILE_ROWS
    }

    #[inline(always)]
    fn scores<S: Simd, const ROWS: usize, const PANELS: usize>(
        simd: S,
        queries: [&[ByteGroup]; ROWS],
        panels: [&[u8]; PANELS],
    ) -> Sums<S, ROWS, PANELS> {
        let mut sums = [[simd.splat(0.0); PANELS]; ROWS];
        for group in 0..queries[0].len() {
            let mut rows = [queries[0][group]; ROWS];
            for row in 0..ROWS {
                rows[row] = queries[row][group];
            }
            let mut bytes: [&ByteLines; PANELS] = [&[[0; BYTE_LINE]; BYTE_LINES]; PANELS];
            let mut scales = [simd.splat(0.0); PANELS];
            for panel in 0..PANELS {
                let (quants, of_lanes) =
                    panels[panel][group * Self::KEY_LINE..][..Self::KEY_LINE].split_at(KEY_QUANTS);
                if let Some(lines) = quants.as_chunks().0.first_chunk() {
                    bytes[panel] = lines;
                }
                let mut bits = [0; LANES];
                for lane in 0..LANES {
                    bits[lane] = u16::from_le_bytes([of_lanes[lane * SCALE], of_lanes[lane * SCALE + 1]]);
                }
                scales[panel] = simd.load_f16(&bits);
            }
            let products = simd.byte_sums(bytes, &rows, 128);
            sums = add_scaled(simd, sums, products, scales, &rows);
        }
        sums
    }

    #[inline(always)]
    fn weighted<S: Simd, const ROWS: usize, const PANELS: usize>(
        simd: S,
        weights: [&[f32]; ROWS],
        panels: [&[u8]; PANELS],
    ) -> Sums<S, ROWS, PANELS> {
        let mut lines: [&[[u8; VALUE_LINE]]; PANELS] = [&[]; PANELS];
        for panel in 0..PANELS {
            lines[panel] = panels[panel].as_chunks().0;
        }
        sum_products(simd, &SeparateRows::new(weights, weights[0].len()), lines)
    }
}

impl<S: Simd> PanelLine<S> for [u8; VALUE_LINE] {
    #[inline(always)]
    fn load(&self, simd: S) -> S::Vector {
        let mut quants = [0; LANES];
        quants.copy_from_slice(&self[..LANES]);
        let scale = simd.load_f16(&[u16::from_le_bytes([self[LANES], self[LANES + 1]]); LANES]);
        simd.mul(simd.load_signed_bytes(&quants), scale)
    }
}

fn scale_at(line: &[u8], place: usize) -> f32 {
    half::f16::from_bits(u16::from_le_bytes([line[place], line[place + 1]])).to_f32_const()
}

/// Rounds 32 values to integers and returns them with the bits of their scale.
#[inline(always)]
fn quantized<S: Simd>(simd: S, halves: [S::Vector; 2]) -> ([[i8; LANES]; 2], u16) {
    let largest = simd.largest_magnitude(halves[0], halves[1]);
    // A non-finite value must make the scale NaN: infinity times zero is NaN.
    let scale = largest * (1.0 / LARGEST_BYTE) + largest * 0.0;
    let mut bits = [0; LANES];
    simd.store_f16(simd.splat(scale), &mut bits);
    let mut rounded = [0.0; LANES];
    simd.store(simd.load_f16(&bits), &mut rounded);
    let inverse = simd.splat(if rounded[0] == 0.0 { 0.0 } else { rounded[0].recip() });
    let (lowest, highest) = (simd.splat(-LARGEST_BYTE), simd.splat(LARGEST_BYTE));
    let mut quants = [[0; LANES]; 2];
    for half in 0..2 {
        let nearest = simd.round(simd.mul(halves[half], inverse));
        // Rounding a small scale to f16 can push quotients out of range, so they are clamped.
        simd.store_signed_bytes(simd.min(simd.max(nearest, lowest), highest), &mut quants[half]);
    }
    (quants, bits[0])
}
