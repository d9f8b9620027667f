//! Blocks of packed matrices, 64 inputs of 16 outputs, and the trait that each format implements.

use std::slice::Chunks;

use crate::fetch::PrefetchPlan;
use crate::simd::{LANES, Line, Simd, TileJob};

/// Inputs per block.
pub(crate) const DEPTH: usize = 64;

/// Weights of a block in f32, with 16 outputs for each input.
pub(crate) type Expanded = [Line<[f32; LANES]>; DEPTH];

/// Returns the blocks of panel `index`.
#[inline(always)]
pub(super) fn panel_of<B>(blocks: &[B], index: usize, in_features: usize) -> &[B] {
    let length = in_features.div_ceil(DEPTH);
    &blocks[index * length..(index + 1) * length]
}

/// Block of one format.
pub(crate) trait Block: Copy + Send + Sync + 'static {
    /// Activation type of products: values, or groups of them.
    type Activation: Copy + Default + Send + Sync;
    /// Block type for tiles of many rows: this one, or its expansion, made once for all those rows.
    type ForManyRows: Block<Activation = Self::Activation>;
    /// Whether products multiply bytes.
    #[allow(dead_code, reason = "unused unless an instruction set can multiply bytes in two ways")]
    const MULTIPLIES_BYTES: bool;
    /// Whether products multiply f32 weights.
    const MULTIPLIES_F32: bool = false;
    /// Activations of one row for a block.
    const ACTIVATIONS: usize;
    /// Blocks per slice.
    ///
    /// The products of a slice are summed first, so formats that expand to each other must agree.
    const SLICE_BLOCKS: usize;
    /// Block of zeros.
    const ZERO: Self;

    /// Rounds weights to the nearest block of this format.
    fn encode<S: Simd>(simd: S, weights: &Expanded) -> Self;

    /// Returns the weight of one input and output, both counted within the block.
    fn value(&self, input: usize, output: usize) -> f32;

    /// Expands blocks for many rows, if the format requires it.
    #[inline(always)]
    fn expand<S: Simd>(_: S, _: &[Self], _: &mut [Self::ForManyRows]) {}

    /// Converts rows of inputs into activations, interleaved for a tile of `height` rows.
    ///
    /// Each input, or group of inputs, comes with all rows of the tile.
    fn arrange<S: Simd>(simd: S, rows: Chunks<'_, f32>, tile: &mut [Self::Activation], height: usize);

    /// Whether blocks must be expanded for many rows.
    #[inline(always)]
    fn is_expanded_for_many_rows<S: Simd>() -> bool {
        false
    }

    /// Returns the tile height for `rows` rows.
    ///
    /// It is the lowest height that holds the rows, or the height for many rows.
    fn tile_height<S: Simd>(rows: usize) -> usize;

    /// Runs a job for a tile of this height.
    fn in_tile<S: Simd, J: TileJob<S>>(simd: S, height: usize, job: J) -> J::Output;

    /// Computes the products of one slice for each row of a tile and each panel.
    ///
    /// Prefetches according to `ahead`.
    fn sums<S: Simd, const ROWS: usize, const PANELS: usize>(
        simd: S,
        activations: &[Self::Activation],
        panels: [&[Self]; PANELS],
        ahead: PrefetchPlan,
    ) -> [[S::Vector; PANELS]; ROWS];
}
