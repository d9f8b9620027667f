//! Weights in f16, two inputs per cache line.
//!
//! Each tile converts them on the fly, which costs less than reading an f32 copy twice the size.

use std::slice::Chunks;

use half::f16;

use super::block::{Block, DEPTH, Expanded};
use super::floats::{Lines, SLICE_BLOCKS, interleave, sums};
use crate::fetch::PrefetchPlan;
use crate::simd::{LANES, Simd, TileJob};

/// Weights in f16.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct F16Block([[u16; LANES]; DEPTH]);

impl Block for F16Block {
    type Activation = f32;
    type ForManyRows = Self;
    const MULTIPLIES_BYTES: bool = false;
    const ACTIVATIONS: usize = DEPTH;
    const SLICE_BLOCKS: usize = SLICE_BLOCKS;
    const ZERO: Self = Self([[0; LANES]; DEPTH]);

    #[inline(always)]
    fn encode<S: Simd>(simd: S, weights: &Expanded) -> Self {
        let mut block = Self::ZERO;
        for (line, bits) in weights.iter().zip(&mut block.0) {
            simd.store_f16(simd.load(&line.0), bits);
        }
        block
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        f16::from_bits(self.0[input][output]).to_f32()
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
        simd.in_half_tile(height, job)
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

impl<S: Simd> Lines<S> for F16Block {
    type Line = [u16; LANES];

    #[inline(always)]
    fn lines(&self) -> &[[u16; LANES]; DEPTH] {
        &self.0
    }
}
