//! Matrix products of training, `C = A B` and `C += A B`, with any operand transposed.
//!
//! Both operands are laid out anew for the tiles of [`Simd::tile`](crate::simd::Simd::tile), a slice of the depth at a time:
//! the right one in panels of sixteen columns, once for all threads; the left one in tiles of as many rows as the registers
//! hold, by the thread that multiplies them. A slice of a panel stays in the first cache while the tiles of a part pass
//! over it, and those stay in the second. The slices are the same for any number of threads, and so is every sum.

use super::arithmetic::{Real, Vectors, Work};
use crate::parallel::{Part, Parts, for_each_part, for_each_part_in};
use crate::simd::{LANES, Line};
use crate::thread_count;

/// Depth of a slice: 256 values of two panels take 32 KiB.
const SLICE: usize = 256;
/// Columns of the right operand that are laid out at once; a slice of them takes 3 MiB in f32.
const BLOCK_COLUMNS: usize = 3072;
/// Rows of a part at most; a slice of them takes 144 KiB in f32.
const PART_ROWS: usize = 144;
/// Panels of the widest tile.
const MAX_TILE_PANELS: usize = 2;

/// A matrix inside a slice; the element `(row, column)` stands at `row · row_stride + column · column_stride`, and one of
/// the strides is 1.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    pub(crate) values: &'a [T],
    pub(crate) row_stride: usize,
    pub(crate) column_stride: usize,
}

impl<'a, T: Real> Matrix<'a, T> {
    /// A matrix in row-major order.
    #[inline(always)]
    pub(crate) fn rows(values: &'a [T], row_stride: usize) -> Self {
        Self { values, row_stride, column_stride: 1 }
    }

    /// The transpose.
    #[inline(always)]
    pub(crate) fn transposed(self) -> Self {
        Self { row_stride: self.column_stride, column_stride: self.row_stride, ..self }
    }

    /// Lays out some rows for a tile: for each of `depth` columns the rows, filled up with zeros to `tile_rows`.
    #[inline(always)]
    fn pack_tile(self, rows: (usize, usize), depth: (usize, usize), tile_rows: usize, tile: &mut [T]) {
        let (first_row, row_count) = rows;
        let start = first_row * self.row_stride + depth.0 * self.column_stride;
        if self.row_stride == 1 {
            for (index, column) in tile.chunks_exact_mut(tile_rows).take(depth.1).enumerate() {
                let start = start + index * self.column_stride;
                column[..row_count].copy_from_slice(&self.values[start..start + row_count]);
                column[row_count..].fill(T::ZERO);
            }
            return;
        }
        for row in 0..tile_rows {
            let values = tile[row..].iter_mut().step_by(tile_rows).take(depth.1);
            if row < row_count {
                let start = start + row * self.row_stride;
                for (value, given) in values.zip(&self.values[start..start + depth.1]) {
                    *value = *given;
                }
            } else {
                values.for_each(|value| *value = T::ZERO);
            }
        }
    }

    /// Lays out sixteen columns as a panel: for each of `depth` rows the columns, filled up with zeros.
    #[inline(always)]
    fn pack_panel(self, depth: (usize, usize), columns: (usize, usize), panel: &mut [Line<[T; LANES]>]) {
        let (first_column, column_count) = (columns.0, columns.1.min(LANES));
        let start = depth.0 * self.row_stride + first_column * self.column_stride;
        if self.column_stride == 1 {
            for (index, line) in panel.iter_mut().enumerate() {
                let values = &self.values[start + index * self.row_stride..];
                match values.first_chunk() {
                    Some(whole) if column_count == LANES => line.0 = *whole,
                    _ => {
                        line.0 = [T::ZERO; LANES];
                        line.0[..column_count].copy_from_slice(&values[..column_count]);
                    }
                }
            }
            return;
        }
        let depth = panel.len();
        let column = |lane: usize| &self.values[start + lane * self.column_stride..][..depth];
        if column_count == LANES {
            let columns: [&[T]; LANES] = std::array::from_fn(column);
            for (index, line) in panel.iter_mut().enumerate() {
                line.0 = std::array::from_fn(|lane| columns[lane][index]);
            }
            return;
        }
        panel.fill(Line([T::ZERO; LANES]));
        for lane in 0..column_count {
            for (line, value) in panel.iter_mut().zip(column(lane)) {
                line.0[lane] = *value;
            }
        }
    }
}

/// One tile of a product, for one slice of its depth.
pub(crate) struct Tile<'a, 'b, T> {
    /// For each step of the slice the values of the tile's rows.
    pub(crate) left: &'a [T],
    /// Slices of panels.
    pub(crate) panels: &'a [&'a [Line<[T; LANES]>]],
    /// Where the results go.
    pub(crate) output: &'a mut Part<'b, T>,
    /// First row of the tile in the output.
    pub(crate) row: usize,
    /// First column of the tile in the output.
    pub(crate) column: usize,
    /// Whether the output is overwritten; else the products are added to it.
    pub(crate) is_first: bool,
    /// What is added to every row of the output, filled up to whole panels.
    pub(crate) bias: Option<&'a [T]>,
}

/// What becomes of the output's values.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output<'a, T> {
    /// They are overwritten.
    Fresh,
    /// They are overwritten, and this is added to every row.
    Biased(&'a [T]),
    /// The product is added to them.
    Sum,
}

/// The product of `(rows, depth)` and `(depth, columns)`, on all threads, for an output `(rows, columns)` in row-major order.
pub(crate) fn product<T: Real>(
    left: Matrix<'_, T>,
    right: Matrix<'_, T>,
    (rows, depth, columns): (usize, usize, usize),
    output: &mut [T],
    mode: Output<'_, T>,
) {
    if output.is_empty() {
        return;
    }
    let bias = match mode {
        Output::Biased(bias) => {
            let mut bias = bias.to_vec();
            bias.resize(columns.next_multiple_of(LANES), T::ZERO);
            Some(bias)
        }
        Output::Fresh | Output::Sum => None,
    };
    let tile_rows = T::tile_rows();
    let mut panels = Vec::new();
    for first_column in (0..columns).step_by(BLOCK_COLUMNS) {
        let width = BLOCK_COLUMNS.min(columns - first_column);
        // One slice of nothing where there is no depth, so that the output is written.
        for first in (0..depth.max(1)).step_by(SLICE) {
            let slice = (first, SLICE.min(depth - first));
            panels.resize(width.div_ceil(LANES) * slice.1, Line([T::ZERO; LANES]));
            if slice.1 > 0 {
                let parts = Parts { row_len: slice.1, rows: 4, columns: slice.1 };
                for_each_part(&mut panels, parts, |mut part| {
                    T::vectorized(PackPanels { right, slice, first_column, width, part: &mut part });
                });
            }
            let is_last = first + SLICE >= depth;
            let bias = bias.as_deref().filter(|_| is_last);
            let is_first = first == 0 && mode != Output::Sum;
            let parts = parts(rows, (columns, width), tile_rows);
            for_each_part_in(output, parts, first_column..first_column + width, |mut part| {
                let lines = &panels[(part.first_column - first_column) / LANES * slice.1..];
                let first_row = part.first_row;
                let part = &mut part;
                T::vectorized(MultiplyPart { left, first_row, slice, lines, part, is_first, bias });
            });
        }
    }
}

/// Parts of whole tiles, as many for each thread; fewer columns where there are not enough rows.
fn parts(rows: usize, (row_len, width): (usize, usize), tile_rows: usize) -> Parts {
    let threads = thread_count();
    let tiles = rows.div_ceil(tile_rows);
    let wanted = tiles.div_ceil(PART_ROWS / tile_rows).next_multiple_of(threads).min(tiles);
    let across = threads.div_ceil(wanted);
    let columns = width.div_ceil(across).next_multiple_of(MAX_TILE_PANELS * LANES);
    Parts { row_len, rows: tiles.div_ceil(wanted) * tile_rows, columns }
}

struct PackPanels<'a, 'b, T> {
    right: Matrix<'a, T>,
    slice: (usize, usize),
    first_column: usize,
    width: usize,
    /// Some of the panels, each a row.
    part: &'a mut Part<'b, Line<[T; LANES]>>,
}

impl<T: Real> Work<T> for PackPanels<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, _: V) {
        for index in 0..self.part.rows() {
            let column = (self.part.first_row + index) * LANES;
            let columns = (self.first_column + column, self.width - column);
            self.right.pack_panel(self.slice, columns, self.part.row(index));
        }
    }
}

struct MultiplyPart<'a, 'b, T> {
    left: Matrix<'a, T>,
    /// The part's first row in the left operand.
    first_row: usize,
    slice: (usize, usize),
    /// The panels of the part's columns and of those behind.
    lines: &'a [Line<[T; LANES]>],
    part: &'a mut Part<'b, T>,
    is_first: bool,
    bias: Option<&'a [T]>,
}

impl<T: Real> Work<T> for MultiplyPart<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        let Self { left, first_row, slice, lines, part, is_first, bias } = self;
        let mut room = Vec::new();
        multiply_slice(v, left, first_row, slice, (lines, slice.1), part, is_first, bias, &mut room);
    }
}

/// The product of some rows of `left` with panels that are `panel_len` lines apart, for one slice of the depth.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "inlined into two callers, which name them")]
fn multiply_slice<V: Vectors>(
    v: V,
    left: Matrix<'_, V::Real>,
    first_row: usize,
    slice: (usize, usize),
    (lines, panel_len): (&[Line<[V::Real; LANES]>], usize),
    part: &mut Part<'_, V::Real>,
    is_first: bool,
    bias: Option<&[V::Real]>,
    room: &mut Vec<V::Real>,
) {
    let (tile_rows, rows, columns) = (V::TILE_ROWS, part.rows(), part.columns());
    let tile_len = tile_rows * slice.1;
    room.resize(rows.div_ceil(tile_rows) * tile_len, V::Real::ZERO);
    for (index, tile) in room.chunks_exact_mut(tile_len.max(1)).enumerate() {
        let row = index * tile_rows;
        left.pack_tile((first_row + row, tile_rows.min(rows - row)), slice, tile_rows, tile);
    }
    let panels = columns.div_ceil(LANES);
    for panel in (0..panels).step_by(V::TILE_PANELS) {
        let count = V::TILE_PANELS.min(panels - panel);
        let mut chosen: [&[Line<[V::Real; LANES]>]; MAX_TILE_PANELS] = [&[]; MAX_TILE_PANELS];
        for (index, chosen) in chosen[..count].iter_mut().enumerate() {
            *chosen = &lines[(panel + index) * panel_len..][..slice.1];
        }
        for row in (0..rows).step_by(tile_rows) {
            let left = &room[row / tile_rows * tile_len..][..tile_len];
            let (panels, column) = (&chosen[..count], panel * LANES);
            v.tile(Tile { left, panels, output: &mut *part, row, column, is_first, bias });
        }
    }
}

/// A right operand, laid out once for several products by one thread.
pub(crate) struct Panels<T> {
    lines: Vec<Line<[T; LANES]>>,
    depth: usize,
}

impl<T: Real> Panels<T> {
    /// Room that [`Panels::pack`] fills.
    pub(crate) fn new() -> Self {
        Self { lines: Vec::new(), depth: 0 }
    }

    /// Lays out a matrix `(depth, columns)`.
    #[inline(always)]
    pub(crate) fn pack(&mut self, right: Matrix<'_, T>, depth: usize, columns: usize) {
        self.depth = depth;
        self.lines.resize(columns.div_ceil(LANES) * depth, Line([T::ZERO; LANES]));
        for (index, panel) in self.lines.chunks_exact_mut(depth.max(1)).enumerate() {
            let first = index * LANES;
            right.pack_panel((0, depth), (first, columns - first), panel);
        }
    }
}

/// The product of as many rows as the output has with the first `depth` rows of a laid out matrix, whose first columns are
/// those of the output, on this thread. `room` is memory to work in.
#[inline(always)]
pub(crate) fn multiply<V: Vectors>(
    v: V,
    left: Matrix<'_, V::Real>,
    right: &Panels<V::Real>,
    depth: usize,
    mut output: Part<'_, V::Real>,
    is_sum: bool,
    room: &mut Vec<V::Real>,
) {
    for first in (0..depth).step_by(SLICE) {
        let slice = (first, SLICE.min(depth - first));
        let lines = (&right.lines[first..], right.depth);
        let is_first = first == 0 && !is_sum;
        multiply_slice(v, left, 0, slice, lines, &mut output, is_first, None, room);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::noise;
    use crate::simd::{InstructionSet, Job, Simd};

    /// `A B` in f64, added one by one.
    fn reference(a: Matrix<'_, f32>, b: Matrix<'_, f32>, sizes: (usize, usize, usize)) -> Vec<f64> {
        let (rows, depth, columns) = sizes;
        let at = |matrix: Matrix<'_, f32>, row: usize, column: usize| {
            f64::from(matrix.values[row * matrix.row_stride + column * matrix.column_stride])
        };
        let value = |index: usize| {
            let (row, column) = (index / columns, index % columns);
            (0..depth).map(|k| at(a, row, k) * at(b, k, column)).sum()
        };
        (0..rows * columns).map(value).collect()
    }

    /// One row and column, rests of tiles, panels, slices and parts, blocks of columns.
    const SIZES: [(usize, usize, usize); 7] =
        [(1, 1, 1), (3, 5, 17), (13, 64, 33), (150, 257, 40), (29, 600, 100), (12, 16, 3100), (300, 31, 16)];

    #[test]
    fn products_equal_plain_sums_in_every_orientation() {
        for sizes in SIZES {
            let (rows, depth, columns) = sizes;
            let (a, b) = (noise(rows * depth, 1, 0.2, 2.0), noise(depth * columns, 2, 0.1, 2.0));
            let lefts = [Matrix::rows(&a, depth), Matrix::rows(&a, rows).transposed()];
            let rights = [Matrix::rows(&b, columns), Matrix::rows(&b, depth).transposed()];
            let bias = noise(columns, 3, 0.0, 2.0);
            for (left, right) in lefts.into_iter().flat_map(|left| rights.map(|right| (left, right))) {
                let expected = reference(left, right, sizes);
                let mut fresh = vec![f32::NAN; rows * columns];
                product(left, right, sizes, &mut fresh, Output::Fresh);
                let mut biased = vec![f32::NAN; rows * columns];
                product(left, right, sizes, &mut biased, Output::Biased(&bias));
                let mut sum = fresh.clone();
                product(left, right, sizes, &mut sum, Output::Sum);
                for (index, expected) in expected.iter().enumerate() {
                    // Sums of up to 600 products below 1.5, rounded each time.
                    let bound = 1e-6 * depth as f64;
                    let bias = f64::from(bias[index % columns]);
                    for (found, expected) in [
                        (fresh[index], *expected),
                        (biased[index], expected + bias),
                        (sum[index], 2.0 * expected),
                    ] {
                        let error = (f64::from(found) - expected).abs();
                        assert!(error <= bound, "{sizes:?} at {index}: {found} for {expected}");
                    }
                }
            }
        }
    }

    #[test]
    fn tiles_equal_plain_sums_with_all_instructions() {
        struct Multiply<'a>(Matrix<'a, f32>, Matrix<'a, f32>, (usize, usize, usize), &'a mut [f32]);
        impl Job for Multiply<'_> {
            type Output = ();

            #[inline(always)]
            fn run<S: Simd>(self, simd: S) {
                let Self(left, right, sizes, output) = self;
                let mut panels = Panels::new();
                panels.pack(right, sizes.1, sizes.2);
                let output = Part::of_rows(output, sizes.2, (sizes.0, sizes.2));
                multiply(simd, left, &panels, sizes.1, output, false, &mut Vec::new());
            }
        }
        for (instructions, sizes) in
            InstructionSet::available().into_iter().flat_map(|set| SIZES.map(|sizes| (set, sizes)))
        {
            let (rows, depth, columns) = sizes;
            let (a, b) = (noise(rows * depth, 1, 0.2, 2.0), noise(depth * columns, 2, 0.1, 2.0));
            let (left, right) = (Matrix::rows(&a, depth), Matrix::rows(&b, depth).transposed());
            let mut output = vec![f32::NAN; rows * columns];
            instructions.run(Multiply(left, right, sizes, &mut output));
            for (found, expected) in output.iter().zip(reference(left, right, sizes)) {
                let error = (f64::from(*found) - expected).abs();
                assert!(error <= 1e-6 * depth as f64, "{instructions:?} {sizes:?}");
            }
        }
    }

    #[test]
    fn a_product_without_depth_is_zero_or_the_bias() {
        let empty = Matrix::rows(&[] as &[f64], 1);
        let mut output = vec![f64::NAN; 6];
        product(empty, empty, (2, 0, 3), &mut output, Output::Biased(&[1.0, 2.0, 3.0]));
        assert_eq!(output, [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
    }
}
