//! Code shared by the floating-point formats: activation layout and sums.

use std::slice::Chunks;

use super::block::DEPTH;
use crate::fetch::{FETCHES, PrefetchPlan};
use crate::simd::{Interleaved, PanelLine, Sums, add_products};
use crate::simd::{LANES, Simd};

/// Blocks per slice: the smallest GPT-2's 768 inputs, so that most sums are written only once.
///
/// A slice of a panel takes 48 KiB in f32. Tiles read it in order from the L2 cache.
pub(super) const SLICE_BLOCKS: usize = 12;
/// Blocks per chain of additions, for 256 products per sum.
///
/// Longer chains of f32 roundings would make the sums less accurate.
const CHAIN_BLOCKS: usize = 4;

/// Number of inputs between prefetches.
const FETCHED_INPUTS: usize = if FETCHES { 8 } else { DEPTH };

/// Interleaves rows a few inputs at a time, so that the data stays in the L1 cache.
#[inline(always)]
pub(super) fn interleave(rows: Chunks<'_, f32>, tile: &mut [f32], height: usize) {
    for (chunk, tile) in tile.chunks_mut(LANES * height).enumerate() {
        for (row, inputs) in rows.clone().enumerate() {
            let inputs = inputs.iter().skip(chunk * LANES);
            for (input, to) in inputs.zip(tile[row..].iter_mut().step_by(height)) {
                *to = *input;
            }
        }
    }
}

/// Block as a sequence of lines, one for each input.
pub(super) trait Lines<S: Simd> {
    type Line: PanelLine<S>;

    fn lines(&self) -> &[Self::Line; DEPTH];
}

/// Sums the products of activations and panels, one chain of inputs at a time.
#[inline(always)]
pub(super) fn sums<S: Simd, B: Lines<S>, const ROWS: usize, const PANELS: usize>(
    simd: S,
    activations: &[f32],
    panels: [&[B]; PANELS],
    ahead: PrefetchPlan,
) -> Sums<S, ROWS, PANELS> {
    let zeros = [[simd.splat(0.0); PANELS]; ROWS];
    let (mut sums, mut chain) = (zeros, zeros);
    let blocks = panels[0].len();
    for block in 0..blocks {
        for first in (0..DEPTH).step_by(FETCHED_INPUTS) {
            // Low tiles leave registers free, so the compiler may unroll the loop.
            let is_low = FETCHES && ROWS < S::TILE_ROWS;
            let count = if is_low { FETCHED_INPUTS } else { simd.unknown(FETCHED_INPUTS) };
            let inputs = &activations[(block * DEPTH + first) * ROWS..];
            let rows = Interleaved::<_, ROWS>::new(inputs, count);
            let mut lines: [&[B::Line]; PANELS] = [&[]; PANELS];
            for panel in 0..PANELS {
                lines[panel] = &panels[panel][block].lines()[first..first + FETCHED_INPUTS];
                ahead.fetch(lines[panel], block * size_of::<B>() + first * size_of::<B::Line>());
            }
            chain = add_products(simd, chain, &rows, lines);
        }
        if (block + 1) % CHAIN_BLOCKS == 0 || block + 1 == blocks {
            for row in 0..ROWS {
                for panel in 0..PANELS {
                    sums[row][panel] = simd.add(sums[row][panel], chain[row][panel]);
                }
            }
            chain = zeros;
        }
    }
    sums
}
