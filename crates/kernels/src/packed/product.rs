//! `y = x Wᵀ` for packed weights, with what follows a product while it is still in registers: bias and GELU.
//!
//! One row is a walk through the panels, bound by memory. Many rows are tiles: the activations are laid out once in tiles
//! of as many rows as fill the registers, a slice of a panel stays in the first cache while all tiles of a part pass over
//! it, and weights that are not f32 are expanded once for all those rows. Every sum is added in one fixed order.

use super::block::Block;
use super::{DEPTH, PackedMatrix, Panels, panel_of, with_blocks};
use crate::parallel::{Part, Parts, for_each_part};
use crate::simd::{InstructionSet, Job, LANES, Line, Simd};
use crate::vector_math::gelu_tanh;

/// Panels of a part when there is one row.
const ROW_PART_PANELS: usize = 4;
/// Panels of a part when there are many rows.
const TILE_PART_PANELS: usize = 8;
/// Rows of a part: a multiple of every tile's, and few enough that a slice of them stays in the second cache.
const TILE_PART_ROWS: usize = 144;
/// Blocks of a slice: 256 inputs of a panel take 16 KiB, half of the smallest first cache.
const SLICE_BLOCKS: usize = 4;

/// What follows a product: `activation(x Wᵀ + bias)`.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Epilogue<'a> {
    /// The bias, filled up with zeros to whole panels.
    pub(crate) bias: Option<&'a [f32]>,
    /// Whether the tanh form of GELU is applied.
    pub(crate) gelu: bool,
}

impl Epilogue<'_> {
    /// Applies it to the outputs of a panel, the first of which is `output`.
    #[inline(always)]
    fn apply<S: Simd>(&self, simd: S, mut values: S::Floats, output: usize) -> S::Floats {
        if let Some(bias) = self.bias.and_then(|bias| bias.get(output..)).and_then(|bias| bias.first_chunk())
        {
            values = simd.add(values, simd.load(bias));
        }
        if self.gelu {
            values = gelu_tanh(simd, values);
        }
        values
    }
}

/// The product of `rows` rows of activations with a packed matrix.
///
/// # Shapes
/// `x` `(rows, in)`; returns `(rows, out)`.
pub(crate) fn product(
    matrix: &PackedMatrix,
    x: &[f32],
    rows: usize,
    epilogue: Epilogue<'_>,
    instructions: InstructionSet,
) -> Vec<f32> {
    let mut y = vec![0.0; rows * matrix.out_features()];
    if y.is_empty() {
        return y;
    }
    with_blocks!(&matrix.panels, |blocks| match rows {
        1 => one_row(matrix, blocks, x, epilogue, instructions, &mut y),
        _ => many_rows(matrix, blocks, x, rows, epilogue, instructions, &mut y),
    });
    y
}

fn one_row<B: Block>(
    matrix: &PackedMatrix,
    blocks: &[B],
    x: &[f32],
    epilogue: Epilogue<'_>,
    instructions: InstructionSet,
    y: &mut [f32],
) {
    let mut padded = vec![[0.0; DEPTH]; x.len().div_ceil(DEPTH)];
    padded.as_flattened_mut()[..x.len()].copy_from_slice(x);
    let parts = Parts { row_len: y.len(), rows: 1, columns: ROW_PART_PANELS * LANES };
    for_each_part(y, parts, |mut part| {
        let first_panel = part.first_column / LANES;
        for (index, outputs) in part.row(0).chunks_mut(LANES).enumerate() {
            let panel = first_panel + index;
            let blocks = panel_of(blocks, panel, matrix.in_features());
            instructions.run(PanelJob { blocks, inputs: &padded, outputs, output: panel * LANES, epilogue });
        }
    });
}

/// The outputs of one panel for one row.
struct PanelJob<'a, B> {
    blocks: &'a [B],
    inputs: &'a [[f32; DEPTH]],
    outputs: &'a mut [f32],
    /// Index of the first output.
    output: usize,
    epilogue: Epilogue<'a>,
}

impl<B: Block> Job for PanelJob<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut sums = [simd.splat(0.0); 4];
        for (block, inputs) in self.blocks.iter().zip(self.inputs) {
            block.accumulate(simd, inputs, &mut sums);
        }
        let sum = simd.add(simd.add(sums[0], sums[1]), simd.add(sums[2], sums[3]));
        store_first(simd, self.epilogue.apply(simd, sum, self.output), self.outputs);
    }
}

fn many_rows<B: Block>(
    matrix: &PackedMatrix,
    blocks: &[B],
    x: &[f32],
    rows: usize,
    epilogue: Epilogue<'_>,
    instructions: InstructionSet,
    y: &mut [f32],
) {
    let in_features = matrix.in_features();
    let tile_rows = instructions.tile_rows();
    let depth = in_features.next_multiple_of(DEPTH);
    let mut tiles = vec![0.0; rows.div_ceil(tile_rows) * depth * tile_rows];
    if in_features > 0 {
        let tile_len = depth * tile_rows;
        for_each_part(&mut tiles, Parts { row_len: tile_len, rows: 1, columns: tile_len }, |mut part| {
            let first_row = part.first_row * tile_rows;
            let tile = part.row(0);
            let rows_of_tile = x.chunks(in_features).skip(first_row).take(tile_rows);
            for (row, inputs) in rows_of_tile.enumerate() {
                for (input, column) in inputs.iter().zip(tile.chunks_mut(tile_rows)) {
                    column[row] = *input;
                }
            }
        });
    }
    let parts =
        Parts { row_len: matrix.out_features(), rows: TILE_PART_ROWS, columns: TILE_PART_PANELS * LANES };
    for_each_part(y, parts, |part| {
        let job = PartJob { blocks, in_features, tiles: &tiles, tile_rows, part, epilogue };
        instructions.run(job);
    });
}

/// Some outputs of some rows.
struct PartJob<'a, 'b, B> {
    blocks: &'a [B],
    in_features: usize,
    /// Activations: tile after tile, in each tile input after input, and for each input its rows.
    tiles: &'a [f32],
    tile_rows: usize,
    part: Part<'b, f32>,
    epilogue: Epilogue<'a>,
}

impl<B: Block> Job for PartJob<'_, '_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let mut expanded = [[Line([0.0; LANES]); DEPTH]; SLICE_BLOCKS * MAX_TILE_PANELS];
        let panel_blocks = self.in_features.div_ceil(DEPTH);
        let tile_len = panel_blocks * DEPTH * self.tile_rows;
        let first_panel = self.part.first_column / LANES;
        let panels = self.part.columns().div_ceil(LANES);
        for first_block in (0..panel_blocks).step_by(SLICE_BLOCKS) {
            let slice = first_block..panel_blocks.min(first_block + SLICE_BLOCKS);
            for panel in (0..panels).step_by(S::TILE_PANELS) {
                let count = S::TILE_PANELS.min(panels - panel);
                let mut lines: [&[Line<[f32; LANES]>]; MAX_TILE_PANELS] = [&[]; MAX_TILE_PANELS];
                let scratch = expanded.chunks_mut(SLICE_BLOCKS);
                for (index, (lines, scratch)) in lines[..count].iter_mut().zip(scratch).enumerate() {
                    let blocks = panel_of(self.blocks, first_panel + panel + index, self.in_features);
                    *lines = B::lines(simd, &blocks[slice.clone()], scratch);
                }
                for row in (0..self.part.rows()).step_by(self.tile_rows) {
                    let start = (self.part.first_row + row) / self.tile_rows * tile_len
                        + first_block * DEPTH * self.tile_rows;
                    let length = slice.len() * DEPTH * self.tile_rows;
                    simd.tile(Tile {
                        activations: &self.tiles[start..start + length],
                        panels: &lines[..count],
                        part: &mut self.part,
                        row,
                        column: panel * LANES,
                        is_first: first_block == 0,
                        epilogue: (slice.end == panel_blocks).then_some(&self.epilogue),
                    });
                }
            }
        }
    }
}

/// Panels of the widest tile.
const MAX_TILE_PANELS: usize = 2;

/// One slice of a product for one tile.
pub(crate) struct Tile<'a, 'b> {
    /// For each input of the slice the activations of the tile's rows.
    activations: &'a [f32],
    /// The slices of the panels.
    panels: &'a [&'a [Line<[f32; LANES]>]],
    /// Where the results go.
    part: &'a mut Part<'b, f32>,
    /// First row of the tile in the part.
    row: usize,
    /// First column of the tile in the part.
    column: usize,
    /// Whether this is the first slice; else its products are added to what the part holds.
    is_first: bool,
    /// What follows behind the last slice.
    epilogue: Option<&'a Epilogue<'a>>,
}

/// Computes a tile of `ROWS` rows and up to `PANELS` panels in registers.
#[inline(always)]
pub(crate) fn compute_tile<S: Simd, const ROWS: usize, const PANELS: usize>(simd: S, tile: Tile<'_, '_>) {
    match tile.panels.len() {
        1 => compute_whole_tile::<S, ROWS, 1>(simd, tile),
        _ => compute_whole_tile::<S, ROWS, PANELS>(simd, tile),
    }
}

#[inline(always)]
fn compute_whole_tile<S: Simd, const ROWS: usize, const PANELS: usize>(simd: S, tile: Tile<'_, '_>) {
    let (inputs, _) = tile.activations.as_chunks::<ROWS>();
    let panels: [_; PANELS] = std::array::from_fn(|panel| &tile.panels[panel][..inputs.len()]);
    let mut sums = [[simd.splat(0.0); PANELS]; ROWS];
    for (index, activations) in inputs.iter().enumerate() {
        let weights: [_; PANELS] = std::array::from_fn(|panel| simd.load(&panels[panel][index].0));
        for row in 0..ROWS {
            let activation = simd.splat(activations[row]);
            for panel in 0..PANELS {
                sums[row][panel] = simd.mul_add(activation, weights[panel], sums[row][panel]);
            }
        }
    }
    // Registers cannot be indexed by a number that is known at run time only; memory can.
    let mut computed = [[Line([0.0; LANES]); PANELS]; ROWS];
    for row in 0..ROWS {
        for panel in 0..PANELS {
            simd.store(sums[row][panel], &mut computed[row][panel].0);
        }
    }
    let first_output = tile.part.first_column + tile.column;
    let rows = tile.part.rows() - tile.row;
    for (row, computed) in computed.iter().take(rows).enumerate() {
        let outputs = &mut tile.part.row(tile.row + row)[tile.column..];
        for (panel, (sum, outputs)) in computed.iter().zip(outputs.chunks_mut(LANES)).enumerate() {
            let mut values = simd.load(&sum.0);
            if !tile.is_first {
                values = simd.add(load_first(simd, outputs), values);
            }
            if let Some(epilogue) = tile.epilogue {
                values = epilogue.apply(simd, values, first_output + panel * LANES);
            }
            store_first(simd, values, outputs);
        }
    }
}

/// A vector of up to sixteen values, filled up with zeros.
#[inline(always)]
fn load_first<S: Simd>(simd: S, values: &[f32]) -> S::Floats {
    if let Some(whole) = values.first_chunk() {
        return simd.load(whole);
    }
    let mut whole = [0.0; LANES];
    whole[..values.len()].copy_from_slice(values);
    simd.load(&whole)
}

/// Stores as many lanes as there is room for.
#[inline(always)]
fn store_first<S: Simd>(simd: S, values: S::Floats, to: &mut [f32]) {
    if let Some(whole) = to.first_chunk_mut() {
        simd.store(values, whole);
        return;
    }
    let mut whole = [0.0; LANES];
    simd.store(values, &mut whole);
    to.copy_from_slice(&whole[..to.len()]);
}
