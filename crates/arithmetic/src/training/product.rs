//! Matrix products for training, `C = A B` and `C += A B`; either operand may be transposed.
//!
//! Both operands are copied to the layout of the tiles that fill the registers. The right operand
//! becomes panels of sixteen columns, once for all threads. The left operand becomes tiles with enough
//! rows to fill the registers. The thread that multiplies a tile also lays it out, for each
//! part of the output. A panel stays in the nearer caches while the tiles of a part pass over it, and
//! the tiles stay in the L2 cache.
//!
//! Sums are added slice by slice along the depth. Slices, and therefore sums, are
//! the same for any number of threads.

use std::borrow::Cow;

use super::matrix_view::MatrixView;
use super::row::{MultiplyRow, SLICE};
use crate::epilogue::{Epilogue, PanelBias};
use crate::simd::{Interleaved, SeparateRows, Sums, sum_products};
use crate::simd::{LANES, Line, MAX_TILE_PANELS, Number, Real, TileJob, Vectors, Work, tile_height};
use crate::threads::{Output, Part, Parts, computed_in_parts, thread_count};
use crate::tile::TileOutput;

/// Depth of the right operand's block that is laid out at a time: four slices.
const BLOCK_DEPTH: usize = 4 * SLICE;
/// Maximum number of right-operand values that are laid out at a time: 16 MiB in f32.
const BLOCK_VALUES: usize = 1 << 22;
/// Maximum rows per part; in f32, their tiles take up to 384 KiB.
const PART_ROWS: usize = 96;
/// Maximum columns per part.
const PART_COLUMNS: usize = 256;
/// Maximum columns per part of a single row, whose sums stay in the L1 cache.
const MAX_ROW_COLUMNS: usize = 2048;

/// Computes `left · right` plus an optional bias.
pub(super) fn product<T: Real>(
    left: MatrixView<'_, T>,
    right: MatrixView<'_, T>,
    bias: Option<&[T]>,
) -> Vec<T> {
    assert!(
        bias.is_none_or(|bias| bias.len() == right.columns),
        "the bias must have one value for each column"
    );
    let bias = bias.map(PanelBias::new);
    let epilogue = Epilogue { bias: bias.as_ref(), ..Epilogue::default() };
    Output::computed(left.rows * right.columns, right.columns, |output| {
        multiply_all(left, right, output, epilogue)
    })
}

/// Writes `left · right` over the output, or adds it to the output.
pub(super) fn product_to<T: Real>(
    left: MatrixView<'_, T>,
    right: MatrixView<'_, T>,
    output: &mut [T],
    is_fresh: bool,
) {
    multiply_all(left, right, &mut Output::of(output, right.columns, is_fresh), Epilogue::default());
}

/// Computes the product and its epilogue on all threads.
fn multiply_all<T: Real>(
    left: MatrixView<'_, T>,
    right: MatrixView<'_, T>,
    output: &mut Output<'_, T>,
    epilogue: Epilogue<'_, T>,
) {
    let MatrixView { rows, columns: depth, .. } = left;
    let columns = right.columns;
    assert!(
        depth == right.rows,
        "cannot multiply a matrix with {depth} columns by a matrix with {} rows",
        right.rows
    );
    assert!(output.len() == rows * columns, "{} outputs do not form {rows} rows of {columns}", output.len());
    if output.len() == 0 {
        return;
    }
    let is_fresh = output.is_fresh();
    if rows == 1 {
        let row: Cow<'_, [T]> = match left.column_stride {
            1 => left.values[..depth].into(),
            stride => left.values.iter().step_by(stride).copied().take(depth).collect(),
        };
        let across = columns.div_ceil(2 * thread_count()).next_multiple_of(LANES);
        let parts = Parts { row_len: columns, rows, columns: across.min(MAX_ROW_COLUMNS) };
        output.for_each_part_in(parts, 0..columns, |mut part| {
            T::vectorized(MultiplyRow { row: &row, right, is_fresh, epilogue, part: &mut part });
        });
        return;
    }
    let tile = T::vectorized(TileSize);
    if rows <= tile.0 {
        // A single tile passes over each panel once, so threads need not share laid-out panels. If rows are
        // contiguous, each thread reads pieces as long as possible. Contiguous columns are read one by one.
        let across = columns.div_ceil(2 * thread_count()).next_multiple_of(MAX_TILE_PANELS * LANES);
        let most = if right.has_rows() { PART_COLUMNS } else { MAX_TILE_PANELS * LANES };
        let parts = Parts { row_len: columns, rows, columns: across.min(most) };
        output.for_each_part_in(parts, 0..columns, |mut part| {
            T::vectorized(MultiplyFew { left, right, is_fresh, epilogue, part: &mut part });
        });
        return;
    }
    let mut first = 0;
    // If the depth is 0, one empty block still writes the output.
    while first < depth.max(1) {
        let slice = (first, BLOCK_DEPTH.min(depth - first));
        let block_columns = (BLOCK_VALUES / slice.1.max(1)).next_multiple_of(PART_COLUMNS);
        for first_column in (0..columns).step_by(block_columns) {
            let width = block_columns.min(columns - first_column);
            let panels = Parts { row_len: slice.1.max(1), rows: 8, columns: slice.1.max(1) };
            let lines = computed_in_parts(width.div_ceil(LANES) * slice.1, panels, |mut part| {
                T::vectorized(LayOutPanels { right, first_row: first, first_column, part: &mut part });
            });
            let inputs = ProductInputs {
                left,
                slice,
                panels: Panels { lines: &lines, depth: slice.1, first: 0 },
                is_first: first == 0 && is_fresh,
                epilogue: (first + slice.1 >= depth).then_some(epilogue),
            };
            let parts = parts(rows, (columns, width), tile);
            output.for_each_part_in(parts, first_column..first_column + width, |mut part| {
                let first_panel = (part.first_column - first_column) / LANES;
                let (first_row, part, scratch) = (part.first_row, &mut part, &mut Vec::new());
                T::vectorized(MultiplyPart { inputs, first_row, first_panel, part, scratch });
            });
        }
        first += BLOCK_DEPTH;
    }
}

/// Work that returns the number of rows and columns in the tallest tile.
struct TileSize;

impl<T> Work<T> for TileSize {
    type Output = (usize, usize);

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, _: V) -> (usize, usize) {
        const {
            assert!(PART_ROWS.is_multiple_of(V::TILE_ROWS), "a part must consist of whole tiles");
            assert!(
                PART_COLUMNS.is_multiple_of(V::TILE_PANELS * LANES),
                "a part must consist of whole tiles"
            );
        }
        (V::TILE_ROWS, V::TILE_PANELS * LANES)
    }
}

/// Divides an output into parts of whole tiles that stay in the L2 cache.
///
/// Each thread gets several parts if the output is large enough.
fn parts(rows: usize, (row_len, width): (usize, usize), (tile_rows, tile_columns): (usize, usize)) -> Parts {
    let tiles = rows.div_ceil(tile_rows);
    let down = tiles.div_ceil(PART_ROWS / tile_rows);
    let across = width.div_ceil(PART_COLUMNS).max((2 * thread_count()).div_ceil(down));
    let columns = width.div_ceil(across).next_multiple_of(tile_columns);
    Parts { row_len, rows: tiles.div_ceil(down) * tile_rows, columns }
}

/// Work that multiplies the rows of one tile by a few panels, slice by slice.
struct MultiplyFew<'a, 'b, T> {
    left: MatrixView<'a, T>,
    right: MatrixView<'a, T>,
    is_fresh: bool,
    epilogue: Epilogue<'a, T>,
    part: &'a mut Part<'b, T>,
}

impl<T: Number> Work<T> for MultiplyFew<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        let Self { left, right, is_fresh, epilogue, part } = self;
        let panels = part.columns().div_ceil(LANES);
        let depth = left.columns;
        let mut lines = vec![Line([T::ZERO; LANES]); panels * SLICE.min(depth)];
        let mut scratch = Vec::new();
        let mut first = 0;
        // If the depth is 0, one empty slice still writes the output.
        while first < depth.max(1) {
            let slice = (first, SLICE.min(depth - first));
            right.lay_out_panels(v, first, part.first_column, &mut lines[..panels * slice.1], slice.1);
            let inputs = ProductInputs {
                left,
                slice,
                panels: Panels { lines: &lines, depth: slice.1, first: 0 },
                is_first: first == 0 && is_fresh,
                epilogue: (first + SLICE >= depth).then_some(epilogue),
            };
            v.call(MultiplyPart {
                inputs,
                first_row: 0,
                first_panel: 0,
                part: &mut *part,
                scratch: &mut scratch,
            });
            first += SLICE;
        }
    }
}

/// Work that lays out panels of the right operand, one per row of `part`.
struct LayOutPanels<'a, 'b, T> {
    right: MatrixView<'a, T>,
    first_row: usize,
    first_column: usize,
    part: &'a mut Part<'b, Line<[T; LANES]>>,
}

impl<T: Number> Work<T> for LayOutPanels<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        let Self { right, first_row, first_column, part } = self;
        let (first_column, depth) = (first_column + part.first_row * LANES, part.columns());
        right.lay_out_panels(v, first_row, first_column, part.all(), depth);
    }
}

/// Range of lines within the panels of a right operand.
#[derive(Debug, Clone, Copy)]
pub(super) struct Panels<'a, T> {
    /// Lines of all panels, `depth` per panel.
    lines: &'a [Line<[T; LANES]>],
    depth: usize,
    /// First line in use.
    first: usize,
}

impl<'a, T> Panels<'a, T> {
    /// Returns `count` lines of a panel.
    #[inline(always)]
    fn panel(&self, index: usize, count: usize) -> &'a [Line<[T; LANES]>] {
        &self.lines[index * self.depth + self.first..][..count]
    }

    /// Returns the rows of the operand starting at row `first`.
    #[inline(always)]
    pub(super) fn rows_from(self, first: usize) -> Self {
        Self { first: self.first + first, ..self }
    }

    /// Returns the columns of the operand starting at column `first`, a panel boundary.
    #[inline(always)]
    pub(super) fn columns_from(self, first: usize) -> Self {
        Self { lines: &self.lines[first / LANES * self.depth..], ..self }
    }
}

/// Inputs that the parts of a product share.
#[derive(Clone, Copy)]
struct ProductInputs<'a, T> {
    left: MatrixView<'a, T>,
    /// First column and number of columns of the left operand that are in use.
    slice: (usize, usize),
    panels: Panels<'a, T>,
    /// Whether the products overwrite the output instead of being added to it.
    is_first: bool,
    /// Epilogue after the last slice.
    epilogue: Option<Epilogue<'a, T>>,
}

/// Work that multiplies the rows of a part by its panels.
struct MultiplyPart<'a, 'b, T> {
    inputs: ProductInputs<'a, T>,
    /// First row of the part in the left operand.
    first_row: usize,
    /// Panel of the part's first column.
    first_panel: usize,
    part: &'a mut Part<'b, T>,
    /// Scratch memory.
    scratch: &'a mut Vec<T>,
}

impl<T: Number> Work<T> for MultiplyPart<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        let Self { inputs, first_row, first_panel, part, scratch } = self;
        let ProductInputs { left, slice, panels, is_first, epilogue } = inputs;
        let (rows, depth) = (part.rows(), slice.1);
        scratch.resize((rows + V::TILE_ROWS) * depth, T::ZERO);
        let mut row = 0;
        while row < rows && depth > 0 {
            let height = tile_height(rows - row, V::TILE_ROWS);
            left.lay_out_rows(
                first_row + row,
                height,
                slice,
                &mut scratch[row * depth..(row + height) * depth],
            );
            row += height;
        }
        // Whole tiles pass over panels that stay in the L1 cache. A lower tile at the end
        // passes over more panels at once.
        let whole = rows - rows % V::TILE_ROWS;
        let panel_count = part.columns().div_ceil(LANES);
        let (mut panel, mut first_tile, mut end_tile, mut width) = (0, 0, whole, V::TILE_PANELS);
        if whole == 0 {
            (end_tile, width) = (rows, MAX_TILE_PANELS);
        }
        while panel < panel_count {
            let count = width.min(panel_count - panel);
            let mut of_panels: [&[Line<[T; LANES]>]; MAX_TILE_PANELS] = [&[]; MAX_TILE_PANELS];
            for index in 0..count {
                of_panels[index] = panels.panel(first_panel + panel + index, depth);
            }
            let mut row = first_tile;
            while row < end_tile {
                let height = tile_height(rows - row, V::TILE_ROWS);
                let tile = Tile {
                    rows: &scratch[row * depth..(row + height) * depth],
                    has_rows: left.has_rows(),
                    panels: &of_panels[..count],
                    // Without a residual, the index into the whole output is not used.
                    output: TileOutput { part: &mut *part, row, panel, row_len: 0, is_first, epilogue },
                };
                v.in_tile(height, tile);
                row += V::TILE_ROWS;
            }
            panel += count;
            if panel == panel_count && end_tile < rows {
                (panel, first_tile, end_tile, width) = (0, whole, rows, MAX_TILE_PANELS);
            }
        }
    }
}

/// Product of one tile and a group of panels, added slice by slice.
struct Tile<'a, 'b, T> {
    /// Rows of the tile, laid out by [`MatrixView::lay_out_rows`].
    rows: &'a [T],
    /// Whether the layout is row by row.
    has_rows: bool,
    /// Lines of each panel.
    panels: &'a [&'a [Line<[T; LANES]>]],
    output: TileOutput<'a, 'b, T>,
}

impl<V: Vectors> TileJob<V> for Tile<'_, '_, V::Real> {
    type Output = ();

    #[inline(always)]
    fn run<const ROWS: usize, const PANELS: usize>(mut self, v: V) {
        let whole = self.panels.len() - self.panels.len() % PANELS;
        for panel in (0..whole).step_by(PANELS) {
            self.multiply::<V, ROWS, PANELS>(v, panel);
        }
        for panel in whole..self.panels.len() {
            self.multiply::<V, ROWS, 1>(v, panel);
        }
    }
}

impl<T: Number> Tile<'_, '_, T> {
    #[inline(always)]
    fn multiply<V: Vectors<Real = T>, const ROWS: usize, const PANELS: usize>(&mut self, v: V, first: usize) {
        let mut panels: [&[Line<[T; LANES]>]; PANELS] = [&[]; PANELS];
        for index in 0..PANELS {
            panels[index] = self.panels[first + index];
        }
        let depth = panels[0].len();
        let mut sums: Sums<V, ROWS, PANELS> = [[v.splat(T::ZERO); PANELS]; ROWS];
        let mut done = 0;
        while done < depth {
            let count = if depth - done < SLICE { depth - done } else { SLICE };
            let mut lines: [&[Line<[T; LANES]>]; PANELS] = [&[]; PANELS];
            for index in 0..PANELS {
                lines[index] = &panels[index][done..done + count];
            }
            let slice: Sums<V, ROWS, PANELS> = if self.has_rows {
                let mut rows: [&[T]; ROWS] = [&[]; ROWS];
                for row in 0..ROWS {
                    rows[row] = &self.rows[row * depth + done..];
                }
                sum_products(v, &SeparateRows::new(rows, count), lines)
            } else {
                sum_products(v, &Interleaved::<T, ROWS>::new(&self.rows[done * ROWS..], count), lines)
            };
            if done == 0 {
                sums = slice;
            } else {
                for row in 0..ROWS {
                    for index in 0..PANELS {
                        sums[row][index] = v.add(sums[row][index], slice[row][index]);
                    }
                }
            }
            done += SLICE;
        }
        self.output.write(v, &sums, first);
    }
}

/// Right operand that one thread lays out once for several products.
pub(super) struct LaidOut<T> {
    lines: Vec<Line<[T; LANES]>>,
    rows: usize,
}

impl<T: Number> LaidOut<T> {
    /// Creates an empty operand for [`LaidOut::fill`].
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self { lines: Vec::new(), rows: 0 }
    }

    /// Lays out a matrix.
    #[inline(always)]
    pub(super) fn fill<V: Vectors<Real = T>>(&mut self, v: V, right: MatrixView<'_, T>) {
        self.rows = right.rows;
        self.lines.resize(right.columns.div_ceil(LANES) * right.rows, Line([T::ZERO; LANES]));
        right.lay_out_panels(v, 0, 0, &mut self.lines, right.rows);
    }

    /// Returns the whole operand.
    #[inline(always)]
    pub(super) fn all(&self) -> Panels<'_, T> {
        Panels { lines: &self.lines, depth: self.rows, first: 0 }
    }
}

/// Multiplies `left` by a laid-out operand on this thread.
///
/// The product uses one row of the operand for each column of `left`, and one column for each column of the
/// output. It overwrites the output, or is added to it if `is_sum` is true. `scratch` is scratch memory.
#[inline(always)]
pub(super) fn multiply<V: Vectors>(
    v: V,
    left: MatrixView<'_, V::Real>,
    right: Panels<'_, V::Real>,
    mut output: Part<'_, V::Real>,
    is_sum: bool,
    scratch: &mut Vec<V::Real>,
) {
    let inputs =
        ProductInputs { left, slice: (0, left.columns), panels: right, is_first: !is_sum, epilogue: None };
    v.call(MultiplyPart { inputs, first_row: 0, first_panel: 0, part: &mut output, scratch });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::noise;
    use crate::simd::{F32Job, InstructionSet};

    /// Computes `A B` in f64, one addition after another.
    fn reference(a: MatrixView<'_, f32>, b: MatrixView<'_, f32>) -> Vec<f64> {
        let at = |matrix: MatrixView<'_, f32>, row: usize, column: usize| {
            f64::from(matrix.values[row * matrix.row_stride + column * matrix.column_stride])
        };
        let value = |index: usize| {
            let (row, column) = (index / b.columns, index % b.columns);
            (0..a.columns).map(|k| at(a, row, k) * at(b, k, column)).sum()
        };
        (0..a.rows * b.columns).map(value).collect()
    }

    /// Numbers of rows, inner dimensions and columns of the test products.
    ///
    /// They cover single rows and columns, and incomplete tiles, panels, slices and parts.
    const SIZES: [(usize, usize, usize); 9] = [
        (1, 1, 1),
        (2, 300, 70),
        (3, 5, 17),
        (13, 64, 33),
        (150, 257, 40),
        (29, 600, 100),
        (12, 16, 3100),
        (300, 31, 16),
        (28, 9, 50),
    ];

    /// Calls `check` with both operands in both orientations.
    fn in_every_orientation(
        (rows, depth, columns): (usize, usize, usize),
        check: impl Fn(MatrixView<'_, f32>, MatrixView<'_, f32>, Vec<f64>),
    ) {
        let (a, b) = (noise(rows * depth, 1, 0.2, 2.0), noise(depth * columns, 2, 0.1, 2.0));
        let lefts = [MatrixView::new(&a, rows, depth), MatrixView::new(&a, depth, rows).transposed()];
        let rights = [MatrixView::new(&b, depth, columns), MatrixView::new(&b, columns, depth).transposed()];
        for (left, right) in lefts.into_iter().flat_map(|left| rights.map(|right| (left, right))) {
            check(left, right, reference(left, right));
        }
    }

    #[test]
    fn products_equal_plain_sums_in_every_orientation() {
        for sizes in SIZES {
            let bias = noise(sizes.2, 3, 0.0, 2.0);
            in_every_orientation(sizes, |left, right, expected| {
                let plain = product(left, right, None);
                let biased = product(left, right, Some(&bias));
                let mut sum = plain.clone();
                product_to(left, right, &mut sum, false);
                for (index, expected) in expected.into_iter().enumerate() {
                    // Sums of up to 600 products below 1.5, rounded at each step.
                    let bound = 1e-6 * sizes.1 as f64;
                    let bias = f64::from(bias[index % sizes.2]);
                    for (found, expected) in [
                        (plain[index], expected),
                        (biased[index], expected + bias),
                        (sum[index], 2.0 * expected),
                    ] {
                        let error = (f64::from(found) - expected).abs();
                        assert!(error <= bound, "{sizes:?} at {index}: {found} vs. {expected}");
                    }
                }
                let mut written = vec![f32::NAN; plain.len()];
                product_to(left, right, &mut written, true);
                assert_eq!(written, plain);
            });
        }
    }

    #[test]
    fn one_row_has_the_bits_of_many() {
        for sizes in SIZES {
            let bias = noise(sizes.2, 3, 0.0, 2.0);
            in_every_orientation(sizes, |left, right, _| {
                let all = product(left, right, Some(&bias));
                for (row, expected) in all.chunks_exact(sizes.2).enumerate() {
                    assert_eq!(product(left.some_rows(row, 1), right, Some(&bias)), expected, "{sizes:?}");
                }
            });
        }
    }

    struct Multiply<'a>(MatrixView<'a, f32>, MatrixView<'a, f32>, &'a mut [f32]);

    impl Work<f32> for Multiply<'_> {
        type Output = ();

        #[inline(always)]
        fn run<V: Vectors<Real = f32>>(self, v: V) {
            let Self(left, right, output) = self;
            let mut panels = LaidOut::new();
            panels.fill(v, right);
            let output = Part::of_rows(output, right.columns, (left.rows, right.columns));
            multiply(v, left, panels.all(), output, false, &mut Vec::new());
        }
    }

    #[test]
    fn tiles_equal_plain_sums_on_every_instruction_set() {
        for (set, sizes) in
            InstructionSet::available().into_iter().flat_map(|set| SIZES.map(|sizes| (set, sizes)))
        {
            in_every_orientation(sizes, |left, right, expected| {
                let mut output = vec![f32::NAN; left.rows * right.columns];
                set.run(F32Job(Multiply(left, right, &mut output)));
                for (found, expected) in output.iter().zip(expected) {
                    let error = (f64::from(*found) - expected).abs();
                    assert!(error <= 1e-6 * sizes.1 as f64, "{set:?} {sizes:?}");
                }
            });
        }
    }

    #[test]
    fn row_bits_do_not_depend_on_the_batch() {
        let (depth, columns) = (300, 70);
        let (x, weight) = (noise(40 * depth, 1, 0.2, 2.0), noise(depth * columns, 2, 0.1, 2.0));
        let right = MatrixView::new(&weight, depth, columns);
        for set in InstructionSet::available() {
            let run = |first: usize, rows: usize| {
                let left = MatrixView::new(&x[first * depth..(first + rows) * depth], rows, depth);
                let mut output = vec![f32::NAN; rows * columns];
                set.run(F32Job(Multiply(left, right, &mut output)));
                output.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let alone: Vec<_> = (0..40).map(|row| run(row, 1)).collect();
            for rows in 2..=40 {
                assert_eq!(run(40 - rows, rows), alone[40 - rows..].concat(), "{set:?}: {rows} rows");
            }
        }
    }

    #[test]
    fn zero_depth_product_is_zero_or_the_bias() {
        let empty: &[f64] = &[];
        let (left, right) = (MatrixView::new(empty, 2, 0), MatrixView::new(empty, 0, 3));
        let mut output = vec![f64::NAN; 6];
        product_to(left, right, &mut output, true);
        assert_eq!(output, [0.0; 6]);
        assert_eq!(product(left, right, Some(&[1.0, 2.0, 3.0])), [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
    }
}
