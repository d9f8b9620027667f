//! `y = x Wᵀ` for packed weights, with what follows a product while it is still in registers: bias, GELU, a sum.
//!
//! The rows of activations are laid out once, in tiles that fill the registers. A part of the output is some of the rows
//! and a few panels, over which one tile after the other passes: the first finds them in memory, the others in the caches, as
//! all panels find the rows. Weights that have to be expanded are so once for many rows. Every sum is added in the same order,
//! whatever the tile: the products of a slice of the depth first, slice by slice. So a row has the same bits alone and in any
//! company.

use std::marker::PhantomData;

use super::block::{Block, DEPTH};
use super::matrix::{OnBlocks, PackedMatrix, panel_of};
use crate::epilogue::Epilogue;
use crate::fetch::Ahead;
use crate::simd::Sums;
use crate::simd::{InstructionSet, Job, LANES, Simd, TileJob};
use crate::threads::{Part, Parts, computed_in_parts, of_size};
use crate::tile::TileOutput;

/// Panels of a part.
const PART_PANELS: usize = 4;
/// Bytes of activations of a part, but for one tile: they stay in the second cache.
const PART_BYTES: usize = 512 << 10;
/// Bytes of panels that all tiles pass over before the next ones: for few tiles, which the panels reach from memory, and for many,
/// which find them in the first cache.
const GROUP_BYTES: [usize; 2] = [128 << 10, 32 << 10];
/// More tiles than these are many.
const FEW_TILES: usize = 4;
/// Rows of a tile that is not the highest one.
const LOW_TILE: usize = 4;
/// Rows of a tile that is always a walk through memory: without a condition, fetches lie between the products and cost nothing.
const WALK_ROWS: usize = 2;
/// Rows from which on weights are expanded before they are multiplied, if that is not done on the way.
const EXPANDED_ROWS: usize = 20;

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
        of_size(self.bytes(), rows * out_features * in_features, || {
            self.panels.with(Product { sizes, x, epilogue, instructions })
        })
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
        let Chosen { full, rest, is_expanded } = instructions.run(Choose::<B>(rows, PhantomData));
        let row_bytes = (Tiles::<B>::row_len(in_features) * size_of::<B::Activation>()).max(1);
        let most = (PART_BYTES / row_bytes).max(full);
        let part_rows = rows.div_ceil(rows.div_ceil(most)).next_multiple_of(full);
        let tiles = Tiles::<B>::new(x, sizes, (full, rest), rows <= part_rows, instructions);
        let parts = Parts { row_len: out_features, rows: part_rows, columns: PART_PANELS * LANES };
        computed_in_parts(rows * out_features, parts, |part| {
            let given = Given { in_features, out_features, tiles: &tiles, epilogue };
            if is_expanded && part.rows() >= EXPANDED_ROWS {
                instructions.run(Expand { blocks, given, part });
            } else {
                instructions.run(Walk { blocks, given, part });
            }
        })
    }
}

/// What depends on the instructions.
struct Chosen {
    /// Rows of a full tile.
    full: usize,
    /// Rows of a tile after these.
    rest: usize,
    /// Whether weights are expanded for many rows.
    is_expanded: bool,
}

/// Chooses for so many rows.
struct Choose<B>(usize, PhantomData<B>);

impl<B: Block> Job for Choose<B> {
    type Output = Chosen;
    const MULTIPLIES_BYTES: bool = B::MULTIPLIES_BYTES;
    const MULTIPLIES_F32: bool = B::MULTIPLIES_F32;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> Chosen {
        let Self(rows, _) = self;
        let mut full = B::tile_height::<S>(rows);
        if full < rows {
            // As few tiles as possible, of one height.
            full = B::tile_height::<S>(rows.div_ceil(rows.div_ceil(full)));
        }
        let rest = B::tile_height::<S>(rows % full).min(full);
        Chosen { full, rest, is_expanded: B::is_expanded_for_many_rows::<S>() }
    }
}

/// Activations laid out for tiles: full ones, and after them others of one height. Rows that are missing are zeros.
struct Tiles<B: Block> {
    activations: Vec<B::Activation>,
    /// Rows of a full tile.
    full: usize,
    /// Rows in full tiles.
    full_rows: usize,
    /// Rows of a tile after these.
    rest_height: usize,
    /// Activations of a row.
    row_len: usize,
}

impl<B: Block> Tiles<B> {
    /// Activations of a row.
    fn row_len(in_features: usize) -> usize {
        in_features.div_ceil(DEPTH) * B::ACTIVATIONS
    }

    /// Of heights `full` and `rest`; `is_one_part` says that all rows are of one part.
    fn new(
        x: &[f32],
        sizes: Sizes,
        (full, mut rest_height): (usize, usize),
        is_one_part: bool,
        instructions: InstructionSet,
    ) -> Self {
        let Sizes { in_features, rows, .. } = sizes;
        let row_len = Self::row_len(in_features);
        let (mut full_rows, mut rest) = (rows - rows % full, rows % full);
        if is_one_part && full == LOW_TILE + 2 && (1..=2).contains(&rest) && full_rows >= FEW_TILES * full {
            // Two lower tiles in place of a full one and one that is hardly a tile.
            (full_rows, rest, rest_height) = (full_rows - full, rest + full, LOW_TILE);
        }
        let mut tiles = Self { activations: Vec::new(), full, full_rows, rest_height, row_len };
        let parts = |height: usize| Parts { row_len: height * row_len, rows: 1, columns: height * row_len };
        if row_len == 0 {
            return tiles;
        }
        let arrange = |first: usize, height: usize, tile: &mut [B::Activation]| {
            let x = &x[first * in_features..rows.min(first + height) * in_features];
            instructions.run(Arrange::<B> { x, in_features, tile, height });
        };
        tiles.activations = computed_in_parts(full_rows * row_len, parts(full), |mut part| {
            arrange(part.first_row * full, full, part.row(0));
        });
        for row in (full_rows..full_rows + rest).step_by(rest_height) {
            let first = tiles.activations.len();
            tiles.activations.resize(first + rest_height * row_len, B::Activation::default());
            arrange(row, rest_height, &mut tiles.activations[first..]);
        }
        tiles
    }

    /// Height of the tile that begins at a row, and its activations.
    #[inline(always)]
    fn tile(&self, row: usize) -> (usize, &[B::Activation]) {
        let height = if row < self.full_rows { self.full } else { self.rest_height };
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
struct Given<'a, B: Block> {
    in_features: usize,
    out_features: usize,
    tiles: &'a Tiles<B>,
    epilogue: Epilogue<'a>,
}

/// Some outputs of some rows, with the weights as they are.
struct Walk<'a, 'b, B: Block> {
    blocks: &'a [B],
    given: Given<'a, B>,
    part: Part<'b, f32>,
}

impl<B: Block> Job for Walk<'_, '_, B> {
    type Output = ();
    const MULTIPLIES_BYTES: bool = B::MULTIPLIES_BYTES;
    const MULTIPLIES_F32: bool = B::MULTIPLIES_F32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { blocks, given, mut part } = self;
        let mut panels: [&[B]; PART_PANELS] = [&[]; PART_PANELS];
        let count = part.columns().div_ceil(LANES);
        for index in 0..count {
            panels[index] = panel_of(blocks, part.first_column / LANES + index, given.in_features);
        }
        pass(simd, &given, &panels[..count], true, &mut part);
    }
}

/// The same with weights that are expanded first.
struct Expand<'a, 'b, B: Block> {
    blocks: &'a [B],
    given: Given<'a, B>,
    part: Part<'b, f32>,
}

impl<B: Block> Job for Expand<'_, '_, B> {
    type Output = ();
    const MULTIPLIES_BYTES: bool = B::MULTIPLIES_BYTES;
    const MULTIPLIES_F32: bool = B::MULTIPLIES_F32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { blocks, given, mut part } = self;
        let panel_blocks = given.in_features.div_ceil(DEPTH);
        let mut expanded = vec![B::ForManyRows::ZERO; PART_PANELS * panel_blocks];
        let mut panels: [&[B::ForManyRows]; PART_PANELS] = [&[]; PART_PANELS];
        let count = part.columns().div_ceil(LANES);
        for index in 0..count {
            let blocks = panel_of(blocks, part.first_column / LANES + index, given.in_features);
            B::expand(simd, blocks, &mut expanded[index * panel_blocks..(index + 1) * panel_blocks]);
        }
        for index in 0..count {
            panels[index] = &expanded[index * panel_blocks..(index + 1) * panel_blocks];
        }
        pass(simd, &given, &panels[..count], false, &mut part);
    }
}

/// Passes with all tiles of a part over its panels, a group of these after the other. The first tile may find them in memory.
#[inline(always)]
fn pass<S: Simd, B: Block, P: Block<Activation = B::Activation>>(
    simd: S,
    given: &Given<'_, B>,
    panels: &[&[P]],
    are_in_memory: bool,
    part: &mut Part<'_, f32>,
) {
    let Given { in_features, out_features, tiles, epilogue } = *given;
    let group_bytes = GROUP_BYTES[usize::from(part.rows() > FEW_TILES * tiles.full)];
    let fitting = group_bytes / size_of_val(panels[0]).max(1);
    let width = if fitting < S::TILE_PANELS { S::TILE_PANELS } else { fitting };
    let mut panel = 0;
    while panel < panels.len() {
        let end = if panels.len() - panel < width { panels.len() } else { panel + width };
        let mut row = 0;
        while row < part.rows() {
            let (height, activations) = tiles.tile(part.first_row + row);
            let panels = &panels[panel..end];
            simd.run(Tile {
                height,
                activations,
                in_features,
                out_features,
                panels,
                are_in_memory: are_in_memory && row == 0,
                first: panel,
                row,
                epilogue,
                part: &mut *part,
            });
            row += height;
        }
        panel = end;
    }
}

/// Some outputs of the rows of one tile.
struct Tile<'a, 'b, 'c, P: Block> {
    height: usize,
    activations: &'a [P::Activation],
    in_features: usize,
    out_features: usize,
    panels: &'a [&'a [P]],
    are_in_memory: bool,
    /// The first of the panels in the part.
    first: usize,
    /// The first of the rows in the part.
    row: usize,
    epilogue: Epilogue<'a>,
    part: &'b mut Part<'c, f32>,
}

/// A function of its own: formats that expand to the same blocks share it.
impl<P: Block> Job for Tile<'_, '_, '_, P> {
    type Output = ();
    const MULTIPLIES_BYTES: bool = P::MULTIPLIES_BYTES;
    const MULTIPLIES_F32: bool = P::MULTIPLIES_F32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        P::in_tile(simd, self.height, self);
    }
}

impl<S: Simd, P: Block> TileJob<S> for Tile<'_, '_, '_, P> {
    type Output = ();

    #[inline(always)]
    fn run<const ROWS: usize, const PANELS: usize>(mut self, simd: S) {
        let count = self.panels.len();
        let whole = count - count % PANELS;
        for panel in (0..whole).step_by(PANELS) {
            self.panels::<S, ROWS, PANELS>(simd, panel);
        }
        for panel in whole..count {
            self.panels::<S, ROWS, 1>(simd, panel);
        }
    }
}

impl<P: Block> Tile<'_, '_, '_, P> {
    /// All slices of some panels.
    #[inline(always)]
    fn panels<S: Simd, const ROWS: usize, const PANELS: usize>(&mut self, simd: S, panel: usize) {
        let panel_blocks = self.in_features.div_ceil(DEPTH);
        let mut of_panels: [&[P]; PANELS] = [&[]; PANELS];
        for index in 0..PANELS {
            of_panels[index] = &self.panels[panel + index][..panel_blocks];
        }
        let mut ahead = Ahead::NOTHING;
        if ROWS <= WALK_ROWS || self.are_in_memory {
            ahead = Ahead::of_panels(PANELS, size_of_val(of_panels[0]));
        }
        let mut sums: Sums<S, ROWS, PANELS> = [[simd.splat(0.0); PANELS]; ROWS];
        for first in (0..panel_blocks).step_by(P::SLICE_BLOCKS) {
            let end = panel_blocks.min(first + P::SLICE_BLOCKS);
            let mut slices: [&[P]; PANELS] = [&[]; PANELS];
            for index in 0..PANELS {
                slices[index] = &of_panels[index][first..end];
            }
            let block_len = P::ACTIVATIONS * ROWS;
            let slice = P::sums(
                simd,
                &self.activations[first * block_len..end * block_len],
                slices,
                ahead.after(first * size_of::<P>()),
            );
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
        let mut output = TileOutput {
            part: &mut *self.part,
            row: self.row,
            panel: self.first,
            row_len: self.out_features,
            is_first: true,
            epilogue: Some(self.epilogue),
        };
        output.write(simd, &sums, panel);
    }
}
