//! Weights as they are.

use std::slice::Chunks;

use super::block::{Block, DEPTH, Expanded};
use super::floats::{CHAIN_BLOCKS, Lines, SLICE_BLOCKS, interleave, sums};
use crate::fetch::Ahead;
use crate::simd::Sums;
use crate::simd::{LANES, Line, Simd, TileJob};

/// Weights in f32.
pub(crate) type F32Block = Expanded;

impl Block for F32Block {
    type Activation = f32;
    type ForManyRows = Self;
    const MULTIPLIES_BYTES: bool = false;
    const MULTIPLIES_F32: bool = true;
    const ACTIVATIONS: usize = DEPTH;
    const SLICE_BLOCKS: usize = SLICE_BLOCKS;
    const ZERO: Self = [Line([0.0; LANES]); DEPTH];

    #[inline(always)]
    fn encode<S: Simd>(_: S, weights: &Expanded) -> Self {
        *weights
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        self[input].0[output]
    }

    #[inline(always)]
    fn arrange<S: Simd>(_: S, rows: Chunks<'_, f32>, tile: &mut [f32], height: usize) {
        interleave(rows, tile, height);
    }

    #[inline(always)]
    fn tile_height<S: Simd>(rows: usize) -> usize {
        S::product_height(rows)
    }

    #[inline(always)]
    fn in_tile<S: Simd, J: TileJob<S>>(simd: S, height: usize, job: J) -> J::Output {
        simd.in_product_tile(height, job)
    }

    #[inline(always)]
    fn sums<S: Simd, const ROWS: usize, const PANELS: usize>(
        simd: S,
        activations: &[f32],
        panels: [&[Self]; PANELS],
        ahead: Ahead,
    ) -> [[S::Vector; PANELS]; ROWS] {
        if S::WALKS_LINES {
            sums_of_lines(simd, activations, panels)
        } else {
            sums(simd, activations, panels, ahead)
        }
    }
}

impl<S: Simd> Lines<S> for F32Block {
    type Line = Line<[f32; LANES]>;

    #[inline(always)]
    fn lines(&self) -> &Self {
        self
    }
}

/// As [`sums`], with all lines of a chain in one loop.
#[inline(always)]
fn sums_of_lines<S: Simd, const ROWS: usize, const PANELS: usize>(
    simd: S,
    activations: &[f32],
    panels: [&[F32Block]; PANELS],
) -> Sums<S, ROWS, PANELS> {
    let (rows, _) = activations.as_chunks();
    let mut sums = [[simd.splat(0.0); PANELS]; ROWS];
    let steps = panels[0].len() * DEPTH;
    for first in (0..steps).step_by(CHAIN_BLOCKS * DEPTH) {
        let end = steps.min(first + CHAIN_BLOCKS * DEPTH);
        let mut lines: [&[Line<[f32; LANES]>]; PANELS] = [&[]; PANELS];
        for panel in 0..PANELS {
            lines[panel] = &panels[panel].as_flattened()[first..end];
        }
        let chain = simd.sum_lines::<ROWS, PANELS>(&rows[first..end], lines);
        for row in 0..ROWS {
            for panel in 0..PANELS {
                sums[row][panel] = simd.add(sums[row][panel], chain[row][panel]);
            }
        }
    }
    sums
}
