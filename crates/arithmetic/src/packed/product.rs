//! `y = x Wᵀ` for packed weights, with what follows a product while it is still in registers: bias, GELU, a sum.
//!
//! One row is a walk through the panels, bound by memory. Many rows are tiles: the activations are laid out once in tiles
//! of as many rows as fill the registers, a slice of a panel stays in the nearer caches while all tiles of a part pass over
//! it, and weights that have to be expanded are so once for all those rows. Every sum is added in one fixed order.

use std::marker::PhantomData;

use super::block::{Block, Expanded};
use super::{DEPTH, PackedMatrix, Panels, panel_of, with_blocks};
use crate::parallel::{Part, Parts, computed_in_parts};
use crate::pool::thread_count;
use crate::simd::{InstructionSet, Job, LANES, Line, MAX_TILE_PANELS, Simd, load_first, store_first};
use crate::vector_math::gelu_tanh;

/// Panels of a part when there is one row.
const ROW_PART_PANELS: usize = 4;
/// Most panels of a part when there are many rows.
const TILE_PART_PANELS: usize = 8;
/// Most rows of a part, but for what fills its last tile: few enough that a slice of them, 432 KiB in f32, stays in the
/// second cache.
const TILE_PART_ROWS: usize = 144;
/// At least so many parts for each thread, where there is work for them: the last one is then waited for a short time only.
const PARTS_PER_THREAD: usize = 4;
/// Products that are added one to the other in f32.
const CHAIN: usize = 256;

/// What follows a product: `finish(x Wᵀ + bias)`.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Epilogue<'a> {
    /// The bias, filled up with zeros to whole panels.
    pub(crate) bias: Option<&'a [f32]>,
    /// What follows the bias.
    pub(crate) finish: Finish<&'a [f32]>,
}

/// What follows a product and its bias; `R` is how a residual is held.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) enum Finish<R> {
    /// None.
    #[default]
    Nothing,
    /// The tanh form of GELU.
    Gelu,
    /// Adding a residual of the output's shape.
    Add(R),
}

impl Epilogue<'_> {
    /// Applies it to the outputs of a panel, the first of which is at `output` of the row that starts at `row_start`.
    #[inline(always)]
    fn apply<S: Simd>(&self, simd: S, mut values: S::Floats, row_start: usize, output: usize) -> S::Floats {
        if let Some(bias) = self.bias.and_then(|bias| bias.get(output..)).and_then(|bias| bias.first_chunk())
        {
            values = simd.add(values, simd.load(bias));
        }
        match self.finish {
            Finish::Nothing => values,
            Finish::Gelu => gelu_tanh(simd, values),
            // After the last output of a row, the values of the next one go into lanes that are not stored.
            Finish::Add(residual) => simd.add(values, load_first(simd, &residual[row_start + output..])),
        }
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
    if rows * matrix.out_features() == 0 {
        return Vec::new();
    }
    with_blocks!(&matrix.panels, |blocks| match rows {
        1 => one_row(matrix, blocks, x, epilogue, instructions),
        _ => many_rows(matrix, blocks, x, rows, epilogue, instructions),
    })
}

fn one_row<B: Block>(
    matrix: &PackedMatrix,
    blocks: &[B],
    x: &[f32],
    epilogue: Epilogue<'_>,
    instructions: InstructionSet,
) -> Vec<f32> {
    let row = arranged::<B>(x, 1, matrix.in_features(), 1, instructions);
    let parts = Parts { row_len: matrix.out_features(), rows: 1, columns: ROW_PART_PANELS * LANES };
    computed_in_parts(matrix.out_features(), parts, |mut part| {
        let first_panel = part.first_column / LANES;
        for (index, outputs) in part.row(0).chunks_mut(LANES).enumerate() {
            let panel = first_panel + index;
            let blocks = panel_of(blocks, panel, matrix.in_features());
            instructions.run(PanelJob { blocks, row: &row, outputs, output: panel * LANES, epilogue });
        }
    })
}

/// The outputs of one panel for one row.
struct PanelJob<'a, B: Block> {
    blocks: &'a [B],
    row: &'a [B::Activation],
    outputs: &'a mut [f32],
    /// Index of the first output.
    output: usize,
    epilogue: Epilogue<'a>,
}

impl<B: Block> Job for PanelJob<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let sums = B::row_sums(simd, self.blocks, self.row);
        store_first(simd, self.epilogue.apply(simd, sums, 0, self.output), self.outputs);
    }
}

fn many_rows<B: Block>(
    matrix: &PackedMatrix,
    blocks: &[B],
    x: &[f32],
    rows: usize,
    epilogue: Epilogue<'_>,
    instructions: InstructionSet,
) -> Vec<f32> {
    let in_features = matrix.in_features();
    let tile_rows = instructions.run(TileRows::<B>(PhantomData));
    let tiles = arranged::<B>(x, rows, in_features, tile_rows, instructions);
    // Every part of rows reads all weights, so there are as few of them as possible, of one size.
    let row_parts = rows.div_ceil(TILE_PART_ROWS);
    let panels = matrix.out_features().div_ceil(LANES) * row_parts / (PARTS_PER_THREAD * thread_count());
    let parts = Parts {
        row_len: matrix.out_features(),
        rows: rows.div_ceil(row_parts).next_multiple_of(tile_rows),
        columns: panels.clamp(MAX_TILE_PANELS, TILE_PART_PANELS).next_multiple_of(MAX_TILE_PANELS) * LANES,
    };
    computed_in_parts(rows * matrix.out_features(), parts, |part| {
        let job = PartJob { blocks, in_features, tiles: &tiles, tile_rows, part, epilogue };
        instructions.run(job);
    })
}

/// Rows of a tile.
struct TileRows<B>(PhantomData<B>);

impl<B: Block> Job for TileRows<B> {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        B::tile_rows::<S>()
    }
}

/// The activations in tiles of `tile_rows` rows, and in each tile one input or group of them after the other with all its
/// rows. What is missing to whole tiles and blocks is zero.
fn arranged<B: Block>(
    x: &[f32],
    rows: usize,
    in_features: usize,
    tile_rows: usize,
    instructions: InstructionSet,
) -> Vec<B::Activation> {
    let tile_len = in_features.div_ceil(DEPTH) * B::ACTIVATIONS * tile_rows;
    if tile_len == 0 {
        return Vec::new();
    }
    let parts = Parts { row_len: tile_len, rows: 1, columns: tile_len };
    computed_in_parts(rows.div_ceil(tile_rows) * tile_len, parts, |mut part| {
        let start = part.first_row * tile_rows * in_features;
        let x = &x[start..x.len().min(start + tile_rows * in_features)];
        instructions.run(Arrange::<B> { x, in_features, tile: part.row(0), tile_rows });
    })
}

/// Arranges the rows of one tile.
struct Arrange<'a, B: Block> {
    x: &'a [f32],
    in_features: usize,
    tile: &'a mut [B::Activation],
    tile_rows: usize,
}

impl<B: Block> Job for Arrange<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        B::arrange(simd, self.x.chunks(self.in_features), self.tile, self.tile_rows);
    }
}

/// Some outputs of some rows.
struct PartJob<'a, 'b, B: Block> {
    blocks: &'a [B],
    in_features: usize,
    /// Activations, as [`arranged`].
    tiles: &'a [B::Activation],
    tile_rows: usize,
    part: Part<'b, f32>,
    epilogue: Epilogue<'a>,
}

impl<B: Block> Job for PartJob<'_, '_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let panel_blocks = self.in_features.div_ceil(DEPTH);
        let slice_blocks = B::SLICE_BLOCKS.min(panel_blocks);
        let mut scratch = B::scratch(slice_blocks * S::TILE_PANELS);
        let block_len = B::ACTIVATIONS * self.tile_rows;
        let first_panel = self.part.first_column / LANES;
        let panels = self.part.columns().div_ceil(LANES);
        // Without inputs there is one empty slice, for the epilogue.
        for first_block in (0..panel_blocks.max(1)).step_by(B::SLICE_BLOCKS) {
            let slice = first_block..panel_blocks.min(first_block + B::SLICE_BLOCKS);
            for panel in (0..panels).step_by(S::TILE_PANELS) {
                let count = S::TILE_PANELS.min(panels - panel);
                let mut weights: [&[B::Weights]; MAX_TILE_PANELS] = [&[]; MAX_TILE_PANELS];
                let mut rest = scratch.as_mut_slice();
                for (index, weights) in weights[..count].iter_mut().enumerate() {
                    let blocks = panel_of(self.blocks, first_panel + panel + index, self.in_features);
                    let (scratch, others) = rest.split_at_mut(rest.len().min(slice_blocks));
                    rest = others;
                    *weights = B::weights(simd, &blocks[slice.clone()], scratch);
                }
                for row in (0..self.part.rows()).step_by(self.tile_rows) {
                    let tile = (self.part.first_row + row) / self.tile_rows;
                    let start = (tile * panel_blocks + first_block) * block_len;
                    let output = TileOutput {
                        part: &mut self.part,
                        row,
                        column: panel * LANES,
                        is_first: first_block == 0,
                        epilogue: (slice.end == panel_blocks).then_some(&self.epilogue),
                    };
                    let activations = &self.tiles[start..start + slice.len() * block_len];
                    B::tile(simd, Tile { activations, panels: &weights[..count], output });
                }
            }
        }
    }
}

/// One slice of a product for one tile.
pub(crate) struct Tile<'a, 'b, A, W> {
    /// For each input or group of inputs of the slice the activations of the tile's rows.
    pub(super) activations: &'a [A],
    /// The slices of the panels.
    pub(super) panels: &'a [&'a [W]],
    /// Where the sums go.
    pub(super) output: TileOutput<'a, 'b>,
}

/// A tile in f32.
pub(crate) type FloatTile<'a, 'b> = Tile<'a, 'b, f32, Line<[f32; LANES]>>;

/// Computes a tile of whole blocks in f32.
#[inline(always)]
pub(super) fn tile_of_blocks<S: Simd>(simd: S, tile: Tile<'_, '_, f32, Expanded>) {
    let Tile { activations, panels, output } = tile;
    let mut lines: [&[Line<[f32; LANES]>]; MAX_TILE_PANELS] = [&[]; MAX_TILE_PANELS];
    for (lines, blocks) in lines.iter_mut().zip(panels) {
        *lines = blocks.as_flattened();
    }
    simd.tile(Tile { activations, panels: &lines[..panels.len()], output });
}

/// Where the sums of a tile go.
pub(crate) struct TileOutput<'a, 'b> {
    part: &'a mut Part<'b, f32>,
    /// First row of the tile in the part.
    row: usize,
    /// First column of the tile in the part.
    column: usize,
    /// Whether this is the first slice; else its sums are added to what the part holds.
    is_first: bool,
    /// What follows after the last slice.
    epilogue: Option<&'a Epilogue<'a>>,
}

impl TileOutput<'_, '_> {
    #[inline(always)]
    pub(super) fn write<S: Simd, const ROWS: usize, const PANELS: usize>(
        self,
        simd: S,
        sums: [[S::Floats; PANELS]; ROWS],
    ) {
        // Registers cannot be indexed by a number that is known at run time only; memory can.
        let mut computed = [[Line([0.0; LANES]); PANELS]; ROWS];
        for row in 0..ROWS {
            for panel in 0..PANELS {
                simd.store(sums[row][panel], &mut computed[row][panel].0);
            }
        }
        let first_output = self.part.first_column + self.column;
        let rows = self.part.rows() - self.row;
        for (row, computed) in computed.iter().take(rows).enumerate() {
            let row_start = self.part.row_start(self.row + row);
            let outputs = &mut self.part.row(self.row + row)[self.column..];
            for (panel, (sums, outputs)) in computed.iter().zip(outputs.chunks_mut(LANES)).enumerate() {
                let mut values = simd.load(&sums.0);
                if !self.is_first {
                    values = simd.add(load_first(simd, outputs), values);
                }
                if let Some(epilogue) = self.epilogue {
                    values = epilogue.apply(simd, values, row_start, first_output + panel * LANES);
                }
                store_first(simd, values, outputs);
            }
        }
    }
}

/// Computes a tile of `ROWS` rows and up to `PANELS` panels in registers.
#[inline(always)]
pub(crate) fn compute_tile<S: Simd, const ROWS: usize, const PANELS: usize>(
    simd: S,
    tile: FloatTile<'_, '_>,
) {
    let Tile { activations, panels, output } = tile;
    let (inputs, _) = activations.as_chunks::<ROWS>();
    match panels {
        [panel] => output.write(simd, sums::<S, ROWS, 1>(simd, inputs, [panel])),
        _ => {
            let panels = std::array::from_fn(|index| panels[index]);
            output.write(simd, sums::<S, ROWS, PANELS>(simd, inputs, panels));
        }
    }
}

/// For each row and panel the products, those of [`CHAIN`] inputs first: a long chain of roundings in f32 shows in its sum.
#[inline(always)]
fn sums<S: Simd, const ROWS: usize, const PANELS: usize>(
    simd: S,
    inputs: &[[f32; ROWS]],
    panels: [&[Line<[f32; LANES]>]; PANELS],
) -> [[S::Floats; PANELS]; ROWS] {
    let mut sums = [[simd.splat(0.0); PANELS]; ROWS];
    for (index, inputs) in inputs.chunks(CHAIN).enumerate() {
        let panels = panels.map(|panel| &panel[index * CHAIN..]);
        let chain = chain_sums(simd, inputs, panels);
        for row in 0..ROWS {
            for panel in 0..PANELS {
                sums[row][panel] = simd.add(sums[row][panel], chain[row][panel]);
            }
        }
    }
    sums
}

#[inline(always)]
fn chain_sums<S: Simd, const ROWS: usize, const PANELS: usize>(
    simd: S,
    inputs: &[[f32; ROWS]],
    panels: [&[Line<[f32; LANES]>]; PANELS],
) -> [[S::Floats; PANELS]; ROWS] {
    let panels: [_; PANELS] = std::array::from_fn(|panel| &panels[panel][..inputs.len()]);
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
    sums
}
