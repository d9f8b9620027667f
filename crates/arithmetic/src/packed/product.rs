//! `y = x Wᵀ` for packed weights, with what follows a product while it is still in registers: bias, GELU, a sum.
//!
//! Few rows are a walk through the panels, bound by memory: up to four at once, and more over panels that are then in the
//! second cache. Many rows are tiles: the activations are laid out once in tiles
//! of as many rows as fill the registers, a slice of a panel stays in the nearer caches while all tiles of a part pass over
//! it, and weights that have to be expanded are so once for all those rows. Either way every sum is added in the same order:
//! the products of a slice first, slice by slice. So a row has the same bits alone and in any company.

use std::marker::PhantomData;

use super::block::{Block, DEPTH};
use super::matrix::{OnBlocks, PackedMatrix, panel_of};
use crate::epilogue::Epilogue;
use crate::simd::{InstructionSet, Job, LANES, MAX_TILE_PANELS, Simd, TileJob, tile_height};
use crate::threads::{Part, Parts, computed_in_parts, thread_count};
use crate::tile::{Sums, TileOutput, stored};

/// Panels of a part of a walk.
const WALK_PART_PANELS: usize = 4;
/// Rows that walk together.
const WALK_TILE_ROWS: usize = 4;
/// Most panels of a part when there are many rows.
const TILE_PART_PANELS: usize = 8;
/// Most rows of a part, but for what fills its last tile: few enough that a slice of them, 432 KiB in f32, stays in the
/// second cache.
const TILE_PART_ROWS: usize = 144;
/// At least so many parts for each thread, where there is work for them: the last one is then waited for a short time only.
const PARTS_PER_THREAD: usize = 4;

impl PackedMatrix {
    /// The product of `rows` rows of activations with the matrix, and what follows it.
    ///
    /// # Shapes
    /// `x` `(rows, in)`; a bias has `out` values, a residual is `(rows, out)`; returns `(rows, out)`.
    ///
    /// # Panics
    /// When the slices are shorter.
    pub fn product(&self, x: &[f32], rows: usize, epilogue: Epilogue<'_>) -> Vec<f32> {
        self.product_with(x, rows, epilogue, InstructionSet::detected())
    }

    /// The same with these instructions.
    pub(super) fn product_with(
        &self,
        x: &[f32],
        rows: usize,
        epilogue: Epilogue<'_>,
        instructions: InstructionSet,
    ) -> Vec<f32> {
        assert!(x.len() == rows * self.in_features, "{} values in {rows} rows", x.len());
        let (out_features, in_features) = (self.out_features, self.in_features);
        if rows * out_features == 0 {
            return Vec::new();
        }
        let sizes = Sizes { out_features, in_features, rows };
        self.panels.with(Product { sizes, x, epilogue, instructions })
    }
}

#[derive(Clone, Copy)]
struct Sizes {
    out_features: usize,
    in_features: usize,
    rows: usize,
}

struct Product<'a> {
    sizes: Sizes,
    x: &'a [f32],
    epilogue: Epilogue<'a>,
    instructions: InstructionSet,
}

impl OnBlocks for Product<'_> {
    type Output = Vec<f32>;

    fn run<B: Block>(self, blocks: &[B]) -> Vec<f32> {
        let Self { sizes, x, epilogue, instructions } = self;
        let Sizes { out_features, in_features, rows } = sizes;
        let is_walk = rows <= B::WALK_ROWS;
        let full = instructions.run(TileRows::<B>(PhantomData));
        let full = if is_walk { full.min(WALK_TILE_ROWS) } else { full };
        let tiles = Tiles::<B>::new(x, sizes, full, instructions);
        let parts = if is_walk {
            Parts { row_len: out_features, rows, columns: WALK_PART_PANELS * LANES }
        } else {
            // Every part of rows reads all weights, so there are as few of them as possible, of one size.
            let row_parts = rows.div_ceil(TILE_PART_ROWS);
            let panels = out_features.div_ceil(LANES) * row_parts / (PARTS_PER_THREAD * thread_count());
            let panels = panels.clamp(MAX_TILE_PANELS / 2, TILE_PART_PANELS).next_multiple_of(2);
            let rows = rows.div_ceil(row_parts).next_multiple_of(full);
            Parts { row_len: out_features, rows, columns: panels * LANES }
        };
        computed_in_parts(rows * out_features, parts, |part| {
            let given = Given { blocks, in_features, out_features, tiles: &tiles, epilogue };
            if is_walk {
                instructions.run(Walk { given, part });
            } else {
                instructions.run(ManyRows { given, part });
            }
        })
    }
}

/// Rows of the highest tile.
struct TileRows<B>(PhantomData<B>);

impl<B: Block> Job for TileRows<B> {
    type Output = usize;
    const MULTIPLIES_BYTES: bool = B::MULTIPLIES_BYTES;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        B::tile_rows::<S>()
    }
}

/// Activations laid out for tiles: full ones, and after them one of the height of what is left. Rows that are missing are
/// zeros.
struct Tiles<B: Block> {
    activations: Vec<B::Activation>,
    /// Rows of a full tile.
    full: usize,
    /// Rows in all.
    rows: usize,
    /// Activations of a row.
    row_len: usize,
}

impl<B: Block> Tiles<B> {
    fn new(x: &[f32], sizes: Sizes, full: usize, instructions: InstructionSet) -> Self {
        let Sizes { in_features, rows, .. } = sizes;
        let row_len = in_features.div_ceil(DEPTH) * B::ACTIVATIONS;
        let mut tiles = Self { activations: Vec::new(), full, rows, row_len };
        let (whole, left) = (rows / full, rows % full);
        let parts = |height: usize| Parts { row_len: height * row_len, rows: 1, columns: height * row_len };
        if row_len == 0 {
            return tiles;
        }
        let arrange = |first: usize, height: usize, tile: &mut [B::Activation]| {
            let x = &x[first * in_features..rows.min(first + height) * in_features];
            instructions.run(Arrange::<B> { x, in_features, tile, height });
        };
        tiles.activations = computed_in_parts(whole * full * row_len, parts(full), |mut part| {
            arrange(part.first_row * full, full, part.row(0));
        });
        if left > 0 {
            let height = tile_height(left, full);
            let first = tiles.activations.len();
            tiles.activations.resize(first + height * row_len, B::Activation::default());
            arrange(whole * full, height, &mut tiles.activations[first..]);
        }
        tiles
    }

    /// Height of the tile that begins at a row, and its activations.
    #[inline(always)]
    fn tile(&self, row: usize) -> (usize, &[B::Activation]) {
        let height = tile_height(self.rows - row, self.full);
        (height, &self.activations[row * self.row_len..(row + height) * self.row_len])
    }
}

/// Arranges the rows of one tile.
struct Arrange<'a, B: Block> {
    x: &'a [f32],
    in_features: usize,
    tile: &'a mut [B::Activation],
    height: usize,
}

impl<B: Block> Job for Arrange<'_, B> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        B::arrange(simd, self.x.chunks(self.in_features), self.tile, self.height);
    }
}

/// What all parts of a product take.
#[derive(Clone, Copy)]
struct Given<'a, B: Block> {
    blocks: &'a [B],
    in_features: usize,
    out_features: usize,
    tiles: &'a Tiles<B>,
    epilogue: Epilogue<'a>,
}

/// Some outputs of all rows.
struct Walk<'a, 'b, B: Block> {
    given: Given<'a, B>,
    part: Part<'b, f32>,
}

impl<B: Block> Job for Walk<'_, '_, B> {
    type Output = ();
    const MULTIPLIES_BYTES: bool = B::MULTIPLIES_BYTES;

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let given = self.given;
        let mut row = 0;
        while row < self.part.rows() {
            let (height, activations) = given.tiles.tile(row);
            B::in_tile(simd, height, WalkTile { given, activations, row, part: &mut self.part });
            row += height;
        }
    }
}

/// Some outputs of the rows of one tile.
struct WalkTile<'a, 'b, 'c, B: Block> {
    given: Given<'a, B>,
    activations: &'a [B::Activation],
    row: usize,
    part: &'b mut Part<'c, f32>,
}

impl<S: Simd, B: Block> TileJob<S> for WalkTile<'_, '_, '_, B> {
    type Output = ();
    const HAS_HIGH_TILES: bool = false;

    #[inline(always)]
    fn run<const ROWS: usize, const PANELS: usize>(mut self, simd: S) {
        let panels = self.part.columns().div_ceil(LANES);
        let whole = panels - panels % PANELS;
        for panel in (0..whole).step_by(PANELS) {
            self.panels::<S, ROWS, PANELS>(simd, panel);
        }
        for panel in whole..panels {
            self.panels::<S, ROWS, 1>(simd, panel);
        }
    }
}

impl<B: Block> WalkTile<'_, '_, '_, B> {
    /// All slices of some panels.
    #[inline(always)]
    fn panels<S: Simd, const ROWS: usize, const PANELS: usize>(&mut self, simd: S, panel: usize) {
        let Given { blocks, in_features, out_features, epilogue, .. } = self.given;
        let panel_blocks = in_features.div_ceil(DEPTH);
        let first_panel = self.part.first_column / LANES + panel;
        let mut of_panels: [&[B]; PANELS] = [&[]; PANELS];
        for index in 0..PANELS {
            of_panels[index] = panel_of(blocks, first_panel + index, in_features);
        }
        let mut sums: Sums<S, ROWS, PANELS> = [[simd.splat(0.0); PANELS]; ROWS];
        for first in (0..panel_blocks).step_by(B::SLICE_BLOCKS) {
            let end = panel_blocks.min(first + B::SLICE_BLOCKS);
            let mut slices: [&[B]; PANELS] = [&[]; PANELS];
            for index in 0..PANELS {
                slices[index] = &of_panels[index][first..end];
            }
            let block_len = B::ACTIVATIONS * ROWS;
            let slice = B::sums(simd, &self.activations[first * block_len..end * block_len], slices);
            if first == 0 {
                sums = slice;
                continue;
            }
            for row in 0..ROWS {
                for index in 0..PANELS {
                    sums[row][index] = simd.add(sums[row][index], slice[row][index]);
                }
            }
        }
        let computed = stored(simd, &sums);
        for row in 0..ROWS.min(self.part.rows() - self.row) {
            let outputs = &mut self.part.row(self.row + row)[panel * LANES..];
            for index in 0..PANELS {
                let first = (self.row + row) * out_features + (first_panel + index) * LANES;
                let sums = simd.load(&computed[row][index].0);
                let values = epilogue.apply(simd, sums, first_panel + index, first);
                simd.store_first(values, &mut outputs[index * LANES..]);
            }
        }
    }
}

/// Some outputs of some rows.
struct ManyRows<'a, 'b, B: Block> {
    given: Given<'a, B>,
    part: Part<'b, f32>,
}

impl<B: Block> Job for ManyRows<'_, '_, B> {
    type Output = ();
    const MULTIPLIES_BYTES: bool = B::MULTIPLIES_BYTES;

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let Given { blocks, in_features, .. } = self.given;
        let panel_blocks = in_features.div_ceil(DEPTH);
        let slice_blocks = B::SLICE_BLOCKS.min(panel_blocks);
        let mut expanded = Vec::new();
        if B::IS_EXPANDED_FOR_MANY_ROWS {
            expanded.resize(slice_blocks * S::TILE_PANELS, B::ForManyRows::ZERO);
        }
        let first_panel = self.part.first_column / LANES;
        let panels = self.part.columns().div_ceil(LANES);
        // Without inputs there is one empty slice, for the epilogue.
        for first in (0..panel_blocks.max(1)).step_by(B::SLICE_BLOCKS) {
            let slice = (first, panel_blocks.min(first + B::SLICE_BLOCKS));
            for panel in (0..panels).step_by(S::TILE_PANELS) {
                let count = S::TILE_PANELS.min(panels - panel);
                let mut of_panels: [&[B]; MAX_TILE_PANELS] = [&[]; MAX_TILE_PANELS];
                for index in 0..count {
                    let blocks = panel_of(blocks, first_panel + panel + index, in_features);
                    of_panels[index] = &blocks[slice.0..slice.1];
                }
                if B::IS_EXPANDED_FOR_MANY_ROWS {
                    let mut slices: [&[B::ForManyRows]; MAX_TILE_PANELS] = [&[]; MAX_TILE_PANELS];
                    for index in 0..count {
                        let room = &mut expanded[index * slice_blocks..(index + 1) * slice_blocks];
                        B::expand(simd, of_panels[index], room);
                    }
                    for index in 0..count {
                        slices[index] = &expanded[index * slice_blocks..][..slice.1 - slice.0];
                    }
                    self.multiply(simd, slice, panel, &slices[..count]);
                } else {
                    self.multiply(simd, slice, panel, &of_panels[..count]);
                }
            }
        }
    }
}

impl<B: Block> ManyRows<'_, '_, B> {
    /// The products of all tiles with a slice of some panels.
    #[inline(always)]
    fn multiply<S: Simd, P: Block<Activation = B::Activation>>(
        &mut self,
        simd: S,
        (first, end): (usize, usize),
        panel: usize,
        slices: &[&[P]],
    ) {
        let Given { in_features, out_features, tiles, epilogue, .. } = self.given;
        let mut row = 0;
        while row < self.part.rows() {
            let (height, activations) = tiles.tile(self.part.first_row + row);
            let block_len = B::ACTIVATIONS * height;
            let tile = Tile {
                height,
                activations: &activations[first * block_len..end * block_len],
                slices,
                output: TileOutput {
                    part: &mut self.part,
                    row,
                    panel,
                    row_len: out_features,
                    is_first: first == 0,
                    epilogue: (end == in_features.div_ceil(DEPTH)).then_some(epilogue),
                },
            };
            simd.run(tile);
            row += height;
        }
    }
}

/// A slice of a product for one tile.
struct Tile<'a, 'b, P: Block> {
    height: usize,
    /// For each input or group of inputs of the slice the activations of the tile's rows.
    activations: &'a [P::Activation],
    /// The slices of some panels.
    slices: &'a [&'a [P]],
    output: TileOutput<'a, 'b, f32>,
}

/// A function of its own: formats that expand to the same blocks share it.
impl<P: Block> Job for Tile<'_, '_, P> {
    type Output = ();
    const MULTIPLIES_BYTES: bool = P::MULTIPLIES_BYTES;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        P::in_tile(simd, self.height, self);
    }
}

impl<S: Simd, P: Block> TileJob<S> for Tile<'_, '_, P> {
    type Output = ();

    #[inline(always)]
    fn run<const ROWS: usize, const PANELS: usize>(mut self, simd: S) {
        let panels = self.slices.len();
        let whole = panels - panels % PANELS;
        for panel in (0..whole).step_by(PANELS) {
            self.panels::<S, ROWS, PANELS>(simd, panel);
        }
        for panel in whole..panels {
            self.panels::<S, ROWS, 1>(simd, panel);
        }
    }
}

impl<P: Block> Tile<'_, '_, P> {
    #[inline(always)]
    fn panels<S: Simd, const ROWS: usize, const PANELS: usize>(&mut self, simd: S, panel: usize) {
        let mut slices: [&[P]; PANELS] = [&[]; PANELS];
        for index in 0..PANELS {
            slices[index] = self.slices[panel + index];
        }
        let sums: Sums<S, ROWS, PANELS> = P::sums(simd, self.activations, slices);
        self.output.write(simd, &sums, panel);
    }
}
