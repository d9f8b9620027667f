//! Blocks of packed matrices (64 inputs by 16 outputs) and the trait that each format implements.

use std::slice::Chunks;

use crate::fetch::PrefetchPlan;
use crate::simd::{LANES, Line, Simd, TileJob};

/// Inputs per block.
pub(crate) const DEPTH: usize = 64;

/// A block's weights in f32, with 16 outputs for each input.
pub(crate) type Expanded = [Line<[f32; LANES]>; DEPTH];

/// Returns the blocks of panel `index`.
#[inline(always)]
pub(super) fn panel_of<B>(blocks: &[B], index: usize, in_features: usize) -> &[B] {
    let length = in_features.div_ceil(DEPTH);
    &blocks[index * length..(index + 1) * length]
}

/// Block in one storage format.
pub(crate) trait Block: Copy + Send + Sync + 'static {
    /// Unit in which products read activations: one f32 or a group of bytes.
    type Activation: Copy + Default + Send + Sync;
    /// Block type for many rows: this type, or an expansion computed once for all the rows.
    type ForManyRows: Block<Activation = Self::Activation>;
    /// Whether products multiply bytes.
    #[allow(dead_code, reason = "unused unless an instruction set can multiply bytes in two ways")]
    const MULTIPLIES_BYTES: bool;
    /// Whether products multiply f32 weights.
    const MULTIPLIES_F32: bool = false;
    /// Number of activations per row of a block.
    const ACTIVATIONS: usize;
    /// Blocks per slice.
    ///
    /// The products within a slice are summed first, so a format and its expansion must use the same value.
    const SLICE_BLOCKS: usize;
    /// All-zero block.
    const ZERO: Self;

    /// Rounds weights to the nearest block of this format.
    fn encode<S: Simd>(simd: S, weights: &Expanded) -> Self;

    /// Returns the weight for one input and output, both indexed within the block.
    fn value(&self, input: usize, output: usize) -> f32;

    /// Expands blocks for many rows, if the format requires it.
    #[inline(always)]
    fn expand<S: Simd>(_: S, _: &[Self], _: &mut [Self::ForManyRows]) {}

    /// Converts rows of inputs to activations, interleaved for a tile of `height` rows.
    ///
    /// Each input or group of inputs is stored for all rows of the tile before the next one.
    fn arrange<S: Simd>(simd: S, rows: Chunks<'_, f32>, tile: &mut [Self::Activation], height: usize);

    /// Whether blocks must be expanded for many rows.
    #[inline(always)]
    fn is_expanded_for_many_rows<S: Simd>() -> bool {
        false
    }

    /// Returns the tile height for `rows` rows.
    ///
    /// This is the smallest height that holds the rows, or the full height for many rows.
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
