//! The blocks that packed matrices are made of, 64 inputs of 16 outputs: what a format has to say.

use std::slice::Chunks;

use crate::fetch::Ahead;
use crate::simd::{LANES, Line, Simd, TileJob};

/// Inputs of a block.
pub(crate) const DEPTH: usize = 64;

/// Weights in f32: for each input the 16 outputs.
pub(crate) type Expanded = [Line<[f32; LANES]>; DEPTH];

/// A block of one format.
pub(crate) trait Block: Copy + Send + Sync + 'static {
    /// What products take of the activations: values, or groups of them.
    type Activation: Copy + Default + Send + Sync;
    /// The blocks that tiles of many rows take: these, or what they are expanded to once for all those rows.
    type ForManyRows: Block<Activation = Self::Activation>;
    /// Whether products multiply bytes.
    #[allow(dead_code, reason = "only instruction sets that multiply bytes in two ways ask")]
    const MULTIPLIES_BYTES: bool;
    /// Whether they multiply weights in f32.
    const MULTIPLIES_F32: bool = false;
    /// Activations of a block and row.
    const ACTIVATIONS: usize;
    /// Blocks of a slice. Products of a slice are added first, so formats that expand to each other have the same.
    const SLICE_BLOCKS: usize;
    /// A block of zeros.
    const ZERO: Self;

    /// The nearest block of this format.
    fn encode<S: Simd>(simd: S, weights: &Expanded) -> Self;

    /// The weight of one input and output, both counted within the block.
    fn value(&self, input: usize, output: usize) -> f32;

    /// Expands blocks for many rows, if they have to be.
    #[inline(always)]
    fn expand<S: Simd>(_: S, _: &[Self], _: &mut [Self::ForManyRows]) {}

    /// Brings rows of inputs into the form that products take: one input or group of them after the other with all of the
    /// tile's rows, of which there are `height`.
    fn arrange<S: Simd>(simd: S, rows: Chunks<'_, f32>, tile: &mut [Self::Activation], height: usize);

    /// Whether they have to be expanded for many rows.
    #[inline(always)]
    fn is_expanded_for_many_rows<S: Simd>() -> bool {
        false
    }

    /// The height of a tile for so many rows: the lowest that holds them, or that for many.
    fn tile_height<S: Simd>(rows: usize) -> usize;

    /// Runs a job for a tile of this height.
    fn in_tile<S: Simd, J: TileJob<S>>(simd: S, height: usize, job: J) -> J::Output;

    /// The products of one slice, for each row of a tile and each panel; fetches what `ahead` says.
    fn sums<S: Simd, const ROWS: usize, const PANELS: usize>(
        simd: S,
        activations: &[Self::Activation],
        panels: [&[Self]; PANELS],
        ahead: Ahead,
    ) -> [[S::Vector; PANELS]; ROWS];
}
