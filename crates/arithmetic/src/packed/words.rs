//! Integers in 16 bits, which those of all formats are expanded to for many rows where no instruction multiplies bytes.

use std::slice::Chunks;

use super::block::{Block, Expanded};
use super::integers::{Bytes, GROUPS, Quantized, SLICE_BLOCKS, arrange_groups};
use crate::simd::{BYTE_INPUTS, ByteGroup, GROUP, LANES, Simd, TileJob, WordGroup};
use crate::tile::Sums;

/// A block of integers in 16 bits.
pub(crate) type WordBlock = [WordGroup; GROUPS];

impl Block for WordBlock {
    type Activation = ByteGroup;
    type ForManyRows = Self;
    const MULTIPLIES_BYTES: bool = true;
    const ACTIVATIONS: usize = GROUPS;
    const SLICE_BLOCKS: usize = SLICE_BLOCKS;
    const ZERO: Self = [WordGroup { lines: [[0; 2 * LANES]; GROUP / 2], scales: [0.0; LANES] }; GROUPS];

    #[inline(always)]
    fn encode<S: Simd>(simd: S, weights: &Expanded) -> Self {
        let mut block = [Self::ZERO];
        Quantized::<Bytes<128>>::expand(simd, &[Quantized::encode(simd, weights)], &mut block);
        block[0]
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        let group = &self[input / GROUP];
        let (four, index) = (input % GROUP / BYTE_INPUTS, input % BYTE_INPUTS);
        f32::from(group.lines[2 * four + index % 2][2 * output + index / 2]) * group.scales[output]
    }

    #[inline(always)]
    fn expand<S: Simd>(_: S, blocks: &[Self], to: &mut [Self]) {
        to.copy_from_slice(blocks);
    }

    #[inline(always)]
    fn arrange<S: Simd>(simd: S, rows: Chunks<'_, f32>, tile: &mut [ByteGroup], height: usize) {
        arrange_groups(simd, rows, tile, height);
    }

    #[inline(always)]
    fn tile_rows<S: Simd>() -> usize {
        S::INTEGER_TILE_ROWS
    }

    #[inline(always)]
    fn in_tile<S: Simd, J: TileJob<S>>(simd: S, height: usize, job: J) -> J::Output {
        simd.in_integer_tile(height, job)
    }

    #[inline(always)]
    fn sums<S: Simd, const ROWS: usize, const PANELS: usize>(
        simd: S,
        activations: &[ByteGroup],
        panels: [&[Self]; PANELS],
    ) -> Sums<S, ROWS, PANELS> {
        let mut groups: [&[WordGroup]; PANELS] = [&[]; PANELS];
        for panel in 0..PANELS {
            groups[panel] = panels[panel].as_flattened();
        }
        simd.word_sums(groups, activations.as_chunks().0)
    }
}
