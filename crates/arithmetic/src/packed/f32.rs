//! Unrounded weights.

use std::slice::Chunks;

use super::block::{Block, DEPTH, Expanded};
use super::floats::{Lines, SLICE_BLOCKS, interleave, sums};
use crate::fetch::PrefetchPlan;
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
        ahead: PrefetchPlan,
    ) -> [[S::Vector; PANELS]; ROWS] {
        sums(simd, activations, panels, ahead)
    }
}

impl<S: Simd> Lines<S> for F32Block {
    type Line = Line<[f32; LANES]>;

    #[inline(always)]
    fn lines(&self) -> &Self {
        self
    }
}
