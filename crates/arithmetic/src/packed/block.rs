//! The blocks that packed matrices are made of, 64 inputs of 16 outputs: what a precision has to say, and those in floating
//! point. `quantized` has the others.

use std::slice::Chunks;

use half::f16;

use super::DEPTH;
use super::product::{Tile, tile_of_blocks};
use crate::simd::{LANES, Line, Simd};

/// Weights in f32: for each input the 16 outputs.
pub(crate) type Expanded = [Line<[f32; LANES]>; DEPTH];

/// Blocks of a slice in floating point: all 768 inputs of the smallest GPT-2, so that most of its sums are written once. A slice
/// of a panel takes 48 KiB in f32, which tiles read in order from the second cache.
const FLOAT_SLICE_BLOCKS: usize = 12;

/// A block of one precision.
pub(crate) trait Block: Sized + Send + Sync {
    /// What products take of the activations: values, or groups of them.
    type Activation: Copy + Default + Send + Sync;
    /// What tiles take of the weights.
    type Weights;
    /// Activations of a block.
    const ACTIVATIONS: usize;
    /// Blocks of a slice: what of a panel stays in the nearer caches while all tiles of a part pass over it.
    const SLICE_BLOCKS: usize;

    /// The nearest block of this precision.
    fn encode<S: Simd>(simd: S, weights: &Expanded) -> Self;

    /// The weight of one input and output, both counted within the block.
    fn value(&self, input: usize, output: usize) -> f32;

    /// Brings rows of inputs into the form that products take: one input or group of them after the other with all of the tile's
    /// rows.
    fn arrange<S: Simd>(simd: S, rows: Chunks<'_, f32>, tile: &mut [Self::Activation], tile_rows: usize);

    /// The products of one row with a panel.
    fn row_sums<S: Simd>(simd: S, panel: &[Self], row: &[Self::Activation]) -> S::Floats;

    /// Room for the weights of as many blocks, where they have to be expanded.
    fn scratch(blocks: usize) -> Vec<Self::Weights>;

    /// The weights of neighbouring blocks, in `scratch` where they have to be expanded.
    fn weights<'a, S: Simd>(
        simd: S,
        blocks: &'a [Self],
        scratch: &'a mut [Self::Weights],
    ) -> &'a [Self::Weights];

    /// Rows of the tile that [`Block::tile`] computes.
    fn tile_rows<S: Simd>() -> usize;

    /// Computes a tile.
    fn tile<S: Simd>(simd: S, tile: Tile<'_, '_, Self::Activation, Self::Weights>);
}

/// Weights as they are.
pub(crate) type F32Block = Expanded;

impl Block for F32Block {
    type Activation = f32;
    type Weights = Self;
    const ACTIVATIONS: usize = DEPTH;
    const SLICE_BLOCKS: usize = FLOAT_SLICE_BLOCKS;

    #[inline(always)]
    fn encode<S: Simd>(_: S, weights: &Expanded) -> Self {
        *weights
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        self[input].0[output]
    }

    #[inline(always)]
    fn arrange<S: Simd>(_: S, rows: Chunks<'_, f32>, tile: &mut [f32], tile_rows: usize) {
        interleave(rows, tile, tile_rows);
    }

    #[inline(always)]
    fn row_sums<S: Simd>(simd: S, panel: &[Self], row: &[f32]) -> S::Floats {
        row_sums(simd, panel.iter(), row, |line| simd.load(&line.0))
    }

    fn scratch(_: usize) -> Vec<Self> {
        Vec::new()
    }

    #[inline(always)]
    fn weights<'a, S: Simd>(_: S, blocks: &'a [Self], _: &'a mut [Self]) -> &'a [Self] {
        blocks
    }

    #[inline(always)]
    fn tile_rows<S: Simd>() -> usize {
        S::TILE_ROWS
    }

    #[inline(always)]
    fn tile<S: Simd>(simd: S, tile: Tile<'_, '_, f32, Self>) {
        tile_of_blocks(simd, tile);
    }
}

/// Weights in f16, two inputs a cache line.
#[repr(C, align(64))]
pub(crate) struct F16Block([[u16; LANES]; DEPTH]);

impl Block for F16Block {
    type Activation = f32;
    type Weights = Expanded;
    const ACTIVATIONS: usize = DEPTH;
    const SLICE_BLOCKS: usize = FLOAT_SLICE_BLOCKS;

    #[inline(always)]
    fn encode<S: Simd>(simd: S, weights: &Expanded) -> Self {
        let mut block = Self([[0; LANES]; DEPTH]);
        for (line, bits) in weights.iter().zip(&mut block.0) {
            simd.store_f16(simd.load(&line.0), bits);
        }
        block
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        f16::from_bits(self.0[input][output]).to_f32()
    }

    #[inline(always)]
    fn arrange<S: Simd>(_: S, rows: Chunks<'_, f32>, tile: &mut [f32], tile_rows: usize) {
        interleave(rows, tile, tile_rows);
    }

    #[inline(always)]
    fn row_sums<S: Simd>(simd: S, panel: &[Self], row: &[f32]) -> S::Floats {
        row_sums(simd, panel.iter().map(|block| &block.0), row, |line| simd.load_f16(line))
    }

    fn scratch(blocks: usize) -> Vec<Expanded> {
        vec![[Line([0.0; LANES]); DEPTH]; blocks]
    }

    #[inline(always)]
    fn weights<'a, S: Simd>(simd: S, blocks: &'a [Self], scratch: &'a mut [Expanded]) -> &'a [Expanded] {
        for (block, to) in blocks.iter().zip(scratch.iter_mut()) {
            for (bits, line) in block.0.iter().zip(to) {
                simd.store(simd.load_f16(bits), &mut line.0);
            }
        }
        &scratch[..blocks.len()]
    }

    #[inline(always)]
    fn tile_rows<S: Simd>() -> usize {
        S::TILE_ROWS
    }

    #[inline(always)]
    fn tile<S: Simd>(simd: S, tile: Tile<'_, '_, f32, Expanded>) {
        tile_of_blocks(simd, tile);
    }
}

/// Writes rows side by side, some inputs of all rows at a time, which stay in the first cache meanwhile.
#[inline(always)]
fn interleave(rows: Chunks<'_, f32>, tile: &mut [f32], tile_rows: usize) {
    for (chunk, tile) in tile.chunks_mut(LANES * tile_rows).enumerate() {
        for (row, inputs) in rows.clone().enumerate() {
            let inputs = inputs.iter().skip(chunk * LANES);
            for (input, to) in inputs.zip(tile[row..].iter_mut().step_by(tile_rows)) {
                *to = *input;
            }
        }
    }
}

/// The products of one row with a panel of lines, each `load`ed for one input; in four sums, which hide each other's latency.
#[inline(always)]
fn row_sums<'a, S: Simd, L: 'a>(
    simd: S,
    panel: impl Iterator<Item = &'a [L; DEPTH]>,
    row: &[f32],
    load: impl Fn(&L) -> S::Floats,
) -> S::Floats {
    let mut sums = [simd.splat(0.0); 4];
    for (block, inputs) in panel.zip(row.as_chunks::<DEPTH>().0) {
        for (lines, inputs) in block.as_chunks::<4>().0.iter().zip(inputs.as_chunks::<4>().0) {
            for index in 0..4 {
                sums[index] = simd.mul_add(simd.splat(inputs[index]), load(&lines[index]), sums[index]);
            }
        }
    }
    simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3]))
}
