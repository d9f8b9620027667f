//! Matrix products of training, `C = A B` and `C += A B`, with any operand transposed.
//!
//! Both operands are laid out anew for the tiles that fill the registers, a slice of the depth at a time:
//! the right one in panels of sixteen columns, those of a tile side by side, once for all threads; the left one in tiles of as many rows as the registers
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

    /// Lays out the rows of a tile, filled up with zeros to `tile_rows`: as rows of [`SLICE`] values where the matrix has
    /// rows, else for each of `depth` columns the values of all rows.
    #[inline(always)]
    fn pack_tile(self, rows: (usize, usize), depth: (usize, usize), tile_rows: usize, tile: &mut [T]) {
        let (first_row, row_count) = rows;
        let start = first_row * self.row_stride + depth.0 * self.column_stride;
        if self.has_rows() {
            for (row, values) in tile.chunks_exact_mut(SLICE).enumerate() {
                if row < row_count {
                    let start = start + row * self.row_stride;
                    values[..depth.1].copy_from_slice(&self.values[start..start + depth.1]);
                } else {
                    values.fill(T::ZERO);
                }
            }
            return;
        }
        for (index, column) in tile.chunks_exact_mut(tile_rows).take(depth.1).enumerate() {
            let values = &self.values[start + index * self.column_stride..];
            if row_count == tile_rows {
                // A length that is known, so that no function is called for a few values.
                column.copy_from_slice(&values[..tile_rows]);
            } else {
                column[..row_count].copy_from_slice(&values[..row_count]);
                column[row_count..].fill(T::ZERO);
            }
        }
    }

    /// Whether the values of a row lie side by side.
    #[inline(always)]
    fn has_rows(self) -> bool {
        self.column_stride == 1
    }

    /// Lays out the columns of a tile: for each of `depth` rows the lines of its `panels` panels, filled up with zeros.
    #[inline(always)]
    fn pack_panels(
        self,
        depth: (usize, usize),
        (first_column, column_count): (usize, usize),
        panels: usize,
        lines: &mut [Line<[T; LANES]>],
    ) {
        for panel in 0..panels {
            let first = first_column + panel * LANES;
            let count = column_count.saturating_sub(panel * LANES).min(LANES);
            let lines = lines[panel..].iter_mut().step_by(panels);
            let start = depth.0 * self.row_stride + first * self.column_stride;
            if count == LANES && self.column_stride == 1 {
                for (index, line) in lines.enumerate() {
                    let values = self.values[start + index * self.row_stride..].first_chunk();
                    line.0 = *values.unwrap_or(&[T::ZERO; LANES]);
                }
            } else if count == LANES {
                let columns: [&[T]; LANES] =
                    std::array::from_fn(|lane| &self.values[start + lane * self.column_stride..][..depth.1]);
                for (index, line) in lines.enumerate() {
                    line.0 = std::array::from_fn(|lane| columns[lane][index]);
                }
            } else {
                for (index, line) in lines.enumerate() {
                    let value = |lane: usize| {
                        self.values[start + index * self.row_stride + lane * self.column_stride]
                    };
                    line.0 = std::array::from_fn(|lane| if lane < count { value(lane) } else { T::ZERO });
                }
            }
        }
    }
}

/// One tile of a product, for one slice of its depth.
pub(crate) struct Tile<'a, 'b, T> {
    /// The tile's rows, as [`Matrix::pack_tile`] lays them out.
    left: &'a [T],
    /// Whether these are rows.
    has_rows: bool,
    /// For each step of the slice the lines of the tile's panels.
    right: &'a [Line<[T; LANES]>],
    /// Where the results go.
    output: &'a mut Part<'b, T>,
    /// First row of the tile in the output.
    row: usize,
    /// First column of the tile in the output.
    column: usize,
    /// Whether the output is overwritten; else the products are added to it.
    is_first: bool,
    /// What is added to every row of the output, filled up to whole tiles.
    bias: Option<&'a [T]>,
}

/// For each row of a tile the sums over all steps of `left(step, row)` times the step's lines.
#[inline(always)]
fn sum_products<V: Vectors, const ROWS: usize, const PANELS: usize>(
    v: V,
    right: &[[Line<[V::Real; LANES]>; PANELS]],
    left: impl Fn(usize, usize) -> V::Real,
) -> [[V::Vector; PANELS]; ROWS] {
    let mut sums = [[v.splat(V::Real::ZERO); PANELS]; ROWS];
    for (index, right) in right.iter().enumerate() {
        let mut lines = [v.splat(V::Real::ZERO); PANELS];
        for panel in 0..PANELS {
            lines[panel] = v.load(&right[panel].0);
        }
        for (row, sums) in sums.iter_mut().enumerate() {
            let value = v.splat(left(index, row));
            for panel in 0..PANELS {
                sums[panel] = v.mul_add(value, lines[panel], sums[panel]);
            }
        }
    }
    sums
}

/// Computes a tile of `ROWS` rows and `PANELS` panels in registers.
#[inline(always)]
pub(crate) fn compute_tile<V: Vectors, const ROWS: usize, const PANELS: usize>(
    v: V,
    tile: Tile<'_, '_, V::Real>,
) {
    let zero = V::Real::ZERO;
    let (right, _) = tile.right.as_chunks::<PANELS>();
    let sums: [[V::Vector; PANELS]; ROWS] = if tile.has_rows {
        let (left, _) = tile.left.as_chunks::<SLICE>();
        let Some(left) = left.first_chunk::<ROWS>() else { return };
        let right = &right[..right.len().min(SLICE)];
        sum_products(v, right, |index, row| left[row][index])
    } else {
        let (left, _) = tile.left.as_chunks::<ROWS>();
        let left = &left[..right.len()];
        sum_products(v, right, |index, row| left[index][row])
    };
    // Registers cannot be indexed by a number that is known at run time only; memory can.
    let mut computed = [[Line([zero; LANES]); PANELS]; ROWS];
    for row in 0..ROWS {
        for panel in 0..PANELS {
            v.store(sums[row][panel], &mut computed[row][panel].0);
        }
    }
    let bias = tile.bias.map(|bias| &bias[tile.output.first_column + tile.column..]);
    let rows = tile.output.rows() - tile.row;
    for (row, computed) in computed.iter().take(rows).enumerate() {
        let outputs = tile.output.row(tile.row + row)[tile.column..].chunks_mut(LANES);
        for (panel, (sums, outputs)) in computed.iter().zip(outputs).enumerate() {
            let mut values = v.load(&sums.0);
            if !tile.is_first {
                values = v.add(values, v.load_first(outputs, zero));
            }
            if let Some(bias) = bias {
                values = v.add(values, v.load_first(&bias[panel * LANES..], zero));
            }
            v.store_first(values, outputs);
        }
    }
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
            // The last tile may be wider than the output.
            bias.resize(columns + 2 * LANES, T::ZERO);
            Some(bias)
        }
        Output::Fresh | Output::Sum => None,
    };
    let (tile_rows, tile_panels) = T::tile_size();
    let mut lines = Vec::new();
    for first_column in (0..columns).step_by(BLOCK_COLUMNS) {
        let width = BLOCK_COLUMNS.min(columns - first_column);
        // One slice of nothing where there is no depth, so that the output is written.
        for first in (0..depth.max(1)).step_by(SLICE) {
            let slice = (first, SLICE.min(depth - first));
            let group_len = slice.1 * tile_panels;
            lines.resize(width.div_ceil(tile_panels * LANES) * group_len, Line([T::ZERO; LANES]));
            if group_len > 0 {
                let parts = Parts { row_len: group_len, rows: 2, columns: group_len };
                for_each_part(&mut lines, parts, |mut part| {
                    T::vectorized(PackPanels { right, slice, first_column, width, part: &mut part });
                });
            }
            let is_last = first + SLICE >= depth;
            let bias = bias.as_deref().filter(|_| is_last);
            let is_first = first == 0 && mode != Output::Sum;
            let parts = parts(rows, (columns, width), (tile_rows, tile_panels));
            for_each_part_in(output, parts, first_column..first_column + width, |mut part| {
                let group = (part.first_column - first_column) / (tile_panels * LANES);
                let lines = &lines[group * group_len..];
                let first_row = part.first_row;
                let part = &mut part;
                T::vectorized(MultiplyPart { left, first_row, slice, lines, part, is_first, bias });
            });
        }
    }
}

/// Parts of whole tiles, as many for each thread; fewer columns where there are not enough rows.
fn parts(rows: usize, (row_len, width): (usize, usize), tile: (usize, usize)) -> Parts {
    let (tile_rows, tile_panels) = tile;
    let threads = thread_count();
    let tiles = rows.div_ceil(tile_rows);
    let wanted = tiles.div_ceil(PART_ROWS / tile_rows).next_multiple_of(threads).min(tiles);
    let across = threads.div_ceil(wanted);
    let columns = width.div_ceil(across).next_multiple_of(tile_panels * LANES);
    Parts { row_len, rows: tiles.div_ceil(wanted) * tile_rows, columns }
}

struct PackPanels<'a, 'b, T> {
    right: Matrix<'a, T>,
    slice: (usize, usize),
    first_column: usize,
    width: usize,
    /// The lines of some tiles, each tile's a row.
    part: &'a mut Part<'b, Line<[T; LANES]>>,
}

impl<T: Real> Work<T> for PackPanels<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, _: V) {
        for index in 0..self.part.rows() {
            let column = (self.part.first_row + index) * V::TILE_PANELS * LANES;
            let columns = (self.first_column + column, self.width - column);
            self.right.pack_panels(self.slice, columns, V::TILE_PANELS, self.part.row(index));
        }
    }
}

struct MultiplyPart<'a, 'b, T> {
    left: Matrix<'a, T>,
    /// The part's first row in the left operand.
    first_row: usize,
    slice: (usize, usize),
    /// The lines of the part's columns and of those after.
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

/// The product of some rows of `left` with columns laid out for a depth of `laid_out`, for one slice of it.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "inlined into two callers, which name them")]
fn multiply_slice<V: Vectors>(
    v: V,
    left: Matrix<'_, V::Real>,
    first_row: usize,
    slice: (usize, usize),
    (lines, laid_out): (&[Line<[V::Real; LANES]>], usize),
    part: &mut Part<'_, V::Real>,
    is_first: bool,
    bias: Option<&[V::Real]>,
    room: &mut Vec<V::Real>,
) {
    let (tile_rows, rows, columns) = (V::TILE_ROWS, part.rows(), part.columns());
    let has_rows = left.has_rows();
    let tile_len = tile_rows * if has_rows { SLICE } else { slice.1 };
    room.resize(rows.div_ceil(tile_rows) * tile_len, V::Real::ZERO);
    for (index, tile) in room.chunks_exact_mut(tile_len.max(1)).enumerate().filter(|_| slice.1 > 0) {
        let row = index * tile_rows;
        left.pack_tile((first_row + row, tile_rows.min(rows - row)), slice, tile_rows, tile);
    }
    let tile_columns = V::TILE_PANELS * LANES;
    for column in (0..columns).step_by(tile_columns) {
        let group = &lines[column / tile_columns * laid_out * V::TILE_PANELS..];
        let right = &group[..slice.1 * V::TILE_PANELS];
        for row in (0..rows).step_by(tile_rows) {
            let left = &room[row / tile_rows * tile_len..][..tile_len];
            v.tile(Tile { left, has_rows, right, output: &mut *part, row, column, is_first, bias });
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
    pub(crate) fn pack<V: Vectors<Real = T>>(
        &mut self,
        _: V,
        right: Matrix<'_, T>,
        depth: usize,
        columns: usize,
    ) {
        let (tile_columns, group_len) = (V::TILE_PANELS * LANES, depth * V::TILE_PANELS);
        self.depth = depth;
        self.lines.resize(columns.div_ceil(tile_columns) * group_len, Line([T::ZERO; LANES]));
        for (index, lines) in self.lines.chunks_exact_mut(group_len.max(1)).enumerate() {
            let first = index * tile_columns;
            right.pack_panels((0, depth), (first, columns - first), V::TILE_PANELS, lines);
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
        let lines = (&right.lines[first * V::TILE_PANELS..], right.depth);
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
                panels.pack(simd, right, sizes.1, sizes.2);
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
