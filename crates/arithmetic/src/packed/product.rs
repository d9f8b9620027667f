//! Product `y = x Wᵀ` with packed weights and a fused epilogue: bias, GELU or residual.
//!
//! The rows of activations are laid out once, in tiles that fill the registers. A part of the output consists
//! of some rows and a few panels. Its tiles pass over the panels one after another. The first tile reads the
//! panels from memory, the others from the caches, and the rows are always read from the caches. Weights that
//! must be expanded are expanded once for many rows.
//!
//! Every sum is added in the same order in every tile: first the products within a slice of the depth, then
//! slice by slice. Results are therefore batch-invariant: a row gives the same bits alone and in any batch.

use std::marker::PhantomData;

use super::block::{Block, DEPTH, panel_of};
use crate::epilogue::Epilogue;
use crate::fetch::PrefetchPlan;
use crate::simd::Sums;
use crate::simd::{InstructionSet, Job, LANES, Simd, TileJob};
use crate::threads::{Part, Parts, computed_in_parts};
use crate::tile::TileOutput;

/// Panels per part.
const PART_PANELS: usize = 4;
/// Bytes of activations per part, unless a single tile is larger; they stay in the L2 cache.
const PART_BYTES: usize = 512 << 10;
/// Bytes per group of panels, which all tiles process before the next group: few tiles, many tiles.
///
/// With few tiles, panels mostly come from memory. With many, they mostly come from the L1 cache.
const GROUP_BYTES: [usize; 2] = [128 << 10, 32 << 10];
/// Maximum number of tiles considered few.
const FEW_TILES: usize = 4;
/// Rows per low tile.
const LOW_TILE: usize = 4;
/// Maximum number of rows in a tile that always streams weights from memory.
///
/// For such tiles, unconditional prefetches between the multiplications cost nothing.
const WALK_ROWS: usize = 2;
/// Minimum number of rows for which weights are expanded in advance rather than on the fly.
const EXPANDED_ROWS: usize = 20;

/// Product of activation rows and a matrix of any number type.
pub(super) struct Product<'a> {
    pub(super) out_features: usize,
    pub(super) in_features: usize,
    pub(super) rows: usize,
    pub(super) x: &'a [f32],
    pub(super) epilogue: Epilogue<'a>,
    pub(super) instructions: InstructionSet,
}

impl Product<'_> {
    /// Computes the product with the given blocks.
    pub(super) fn with<B: Block>(&self, blocks: &[B]) -> Vec<f32> {
        let Self { out_features, in_features, rows, epilogue, instructions, .. } = *self;
        let Chosen { full, rest, is_expanded } = instructions.run(Choose::<B>(rows, PhantomData));
        let row_bytes = (Tiles::<B>::row_len(in_features) * size_of::<B::Activation>()).max(1);
        let most = (PART_BYTES / row_bytes).max(full);
        let part_rows = rows.div_ceil(rows.div_ceil(most)).next_multiple_of(full);
        let tiles = Tiles::<B>::new(self, (full, rest), rows <= part_rows);
        let parts = Parts { row_len: out_features, rows: part_rows, columns: PART_PANELS * LANES };
        computed_in_parts(rows * out_features, parts, |part| {
            let inputs = ProductInputs { in_features, out_features, tiles: &tiles, epilogue };
            if is_expanded && part.rows() >= EXPANDED_ROWS {
                instructions.run(Expand { blocks, inputs, part });
            } else {
                instructions.run(Walk { blocks, inputs, part });
            }
        })
    }
}

/// Settings that depend on the instruction set.
struct Chosen {
    /// Rows per full tile.
    full: usize,
    /// Height of the remaining tiles, in rows.
    rest: usize,
    /// Whether weights are expanded for many rows.
    is_expanded: bool,
}

/// Job that chooses the settings for a row count.
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
            // Uses as few tiles as possible, all of the same height.
            full = B::tile_height::<S>(rows.div_ceil(rows.div_ceil(full)));
        }
        let rest = B::tile_height::<S>(rows % full).min(full);
        Chosen { full, rest, is_expanded: B::is_expanded_for_many_rows::<S>() }
    }
}

/// Activations laid out for full tiles, followed by tiles of another height, padded with zero rows.
struct Tiles<B: Block> {
    activations: Vec<B::Activation>,
    /// Rows per full tile.
    full: usize,
    /// Total number of rows in full tiles.
    full_rows: usize,
    /// Height of the remaining tiles, in rows.
    rest_height: usize,
    /// Activations per row.
    row_len: usize,
}

impl<B: Block> Tiles<B> {
    /// Returns the number of activations per row.
    fn row_len(in_features: usize) -> usize {
        in_features.div_ceil(DEPTH) * B::ACTIVATIONS
    }

    /// Lays out activations in tiles of heights `full` and `rest_height`.
    ///
    /// `is_one_part` is true if a single part contains all rows.
    fn new(product: &Product<'_>, (full, mut rest_height): (usize, usize), is_one_part: bool) -> Self {
        let Product { in_features, rows, x, instructions, .. } = *product;
        let row_len = Self::row_len(in_features);
        let (mut full_rows, mut rest) = (rows - rows % full, rows % full);
        if is_one_part && full == LOW_TILE + 2 && (1..=2).contains(&rest) && full_rows >= FEW_TILES * full {
            // Two low tiles replace a full tile and an almost empty one.
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

    /// Returns the height and the activations of the tile that begins at `row`.
    #[inline(always)]
    fn tile(&self, row: usize) -> (usize, &[B::Activation]) {
        let height = if row < self.full_rows { self.full } else { self.rest_height };
        (height, &self.activations[row * self.row_len..(row + height) * self.row_len])
    }
}

/// Job that lays out the rows of one tile.
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

/// Inputs that all parts of a product share.
struct ProductInputs<'a, B: Block> {
    in_features: usize,
    out_features: usize,
    tiles: &'a Tiles<B>,
    epilogue: Epilogue<'a>,
}

/// Job that computes a part of the output with the stored weights.
struct Walk<'a, 'b, B: Block> {
    blocks: &'a [B],
    inputs: ProductInputs<'a, B>,
    part: Part<'b, f32>,
}

impl<B: Block> Job for Walk<'_, '_, B> {
    type Output = ();
    const MULTIPLIES_BYTES: bool = B::MULTIPLIES_BYTES;
    const MULTIPLIES_F32: bool = B::MULTIPLIES_F32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { blocks, inputs, mut part } = self;
        let mut panels: [&[B]; PART_PANELS] = [&[]; PART_PANELS];
        let count = part.columns().div_ceil(LANES);
        for index in 0..count {
            panels[index] = panel_of(blocks, part.first_column / LANES + index, inputs.in_features);
        }
        simd.begin_tiles(inputs.tiles.full);
        pass(simd, &inputs, &panels[..count], true, &mut part);
        simd.end_tiles(inputs.tiles.full);
    }
}

/// Job that expands the weights first, then computes a part of the output.
struct Expand<'a, 'b, B: Block> {
    blocks: &'a [B],
    inputs: ProductInputs<'a, B>,
    part: Part<'b, f32>,
}

impl<B: Block> Job for Expand<'_, '_, B> {
    type Output = ();
    const MULTIPLIES_BYTES: bool = B::MULTIPLIES_BYTES;
    const MULTIPLIES_F32: bool = B::MULTIPLIES_F32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { blocks, inputs, mut part } = self;
        let panel_blocks = inputs.in_features.div_ceil(DEPTH);
        let mut expanded = vec![B::ForManyRows::ZERO; PART_PANELS * panel_blocks];
        let mut panels: [&[B::ForManyRows]; PART_PANELS] = [&[]; PART_PANELS];
        let count = part.columns().div_ceil(LANES);
        for index in 0..count {
            let blocks = panel_of(blocks, part.first_column / LANES + index, inputs.in_features);
            B::expand(simd, blocks, &mut expanded[index * panel_blocks..(index + 1) * panel_blocks]);
        }
        for index in 0..count {
            panels[index] = &expanded[index * panel_blocks..(index + 1) * panel_blocks];
        }
        simd.begin_tiles(inputs.tiles.full);
        pass(simd, &inputs, &panels[..count], false, &mut part);
        simd.end_tiles(inputs.tiles.full);
    }
}

/// Multiplies all tiles of a part by its panels, one group of panels at a time.
///
/// The first tile may read the panels from memory.
#[inline(always)]
fn pass<S: Simd, B: Block, P: Block<Activation = B::Activation>>(
    simd: S,
    inputs: &ProductInputs<'_, B>,
    panels: &[&[P]],
    are_in_memory: bool,
    part: &mut Part<'_, f32>,
) {
    let ProductInputs { in_features, out_features, tiles, epilogue } = *inputs;
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

/// Job that computes a group of outputs for one tile's rows.
struct Tile<'a, 'b, 'c, P: Block> {
    height: usize,
    activations: &'a [P::Activation],
    in_features: usize,
    out_features: usize,
    panels: &'a [&'a [P]],
    are_in_memory: bool,
    /// Index of the first panel within the part.
    first: usize,
    /// Index of the first row within the part.
    row: usize,
    epilogue: Epilogue<'a>,
    part: &'b mut Part<'c, f32>,
}

/// Job of its own, so that formats that expand to the same blocks share the compiled function.
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
    /// Computes all slices of `PANELS` panels, beginning with `panel`.
    #[inline(always)]
    fn panels<S: Simd, const ROWS: usize, const PANELS: usize>(&mut self, simd: S, panel: usize) {
        let panel_blocks = self.in_features.div_ceil(DEPTH);
        let mut of_panels: [&[P]; PANELS] = [&[]; PANELS];
        for index in 0..PANELS {
            of_panels[index] = &self.panels[panel + index][..panel_blocks];
        }
        let mut ahead = PrefetchPlan::NOTHING;
        if ROWS <= WALK_ROWS || self.are_in_memory {
            ahead = PrefetchPlan::of_panels(PANELS, size_of_val(of_panels[0]));
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
