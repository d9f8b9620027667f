//! Matrix products of training, `C = A B` and `C += A B`, with any operand transposed.
//!
//! Both operands are laid out anew for the tiles that fill the registers: the right one in panels of sixteen columns, once for
//! all threads; the left one in tiles of as many rows as the registers hold, by the thread that multiplies them, for each part
//! of the output. A panel stays in the nearer caches while the tiles of a part pass over it, and those stay in the second. Sums
//! are added slice by slice of the depth; these are the same for any number of threads, and so is every sum.

use crate::epilogue::{Epilogue, PanelBias};
use crate::simd::{Apart, Interleaved, Sums, sum_products};
use crate::simd::{LANES, Line, MAX_TILE_PANELS, Number, Real, TileJob, Vectors, Work, tile_height};
use crate::threads::{Output, Part, Parts, computed_in_parts, thread_count};
use crate::tile::TileOutput;

/// Depth of a slice.
const SLICE: usize = 256;
/// Slices of the right operand that are laid out at once.
const BLOCK_DEPTH: usize = 4 * SLICE;
/// Values of the right operand that are laid out at once: 16 MiB in f32.
const BLOCK_VALUES: usize = 1 << 22;
/// Rows of a part at most; in f32 they take up to 384 KiB.
const PART_ROWS: usize = 96;
/// Columns of a part at most.
const PART_COLUMNS: usize = 256;

/// A matrix inside a slice, of which rows or columns lie in one piece each. An example is at [`Float`](crate::Float).
#[derive(Debug, Clone, Copy)]
pub struct MatrixView<'a, T> {
    values: &'a [T],
    rows: usize,
    columns: usize,
    /// The element `(row, column)` is at `row · row_stride + column · column_stride`; one of them is 1.
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T> MatrixView<'a, T> {
    /// A matrix in row-major order.
    ///
    /// # Panics
    /// When there are not as many values as that takes.
    pub fn new(values: &'a [T], rows: usize, columns: usize) -> Self {
        assert!(values.len() == rows * columns, "{} values in {rows} rows of {columns}", values.len());
        Self::strided(values, (rows, columns), columns)
    }

    /// A matrix whose rows begin `stride` values one after the other.
    #[inline(always)]
    pub(super) fn strided(values: &'a [T], (rows, columns): (usize, usize), stride: usize) -> Self {
        assert!(rows == 0 || (rows - 1) * stride + columns <= values.len(), "a matrix beyond its values");
        Self { values, rows, columns, row_stride: stride, column_stride: 1 }
    }

    /// The transpose.
    #[inline(always)]
    #[must_use]
    pub fn transposed(self) -> Self {
        let Self { values, rows, columns, row_stride, column_stride } = self;
        Self { values, rows: columns, columns: rows, row_stride: column_stride, column_stride: row_stride }
    }

    /// `count` rows from `first` on.
    ///
    /// # Panics
    /// When there are not as many.
    #[must_use]
    pub fn some_rows(self, first: usize, count: usize) -> Self {
        assert!(first + count <= self.rows, "{count} rows from {first} on of {}", self.rows);
        Self { values: &self.values[first * self.row_stride..], rows: count, ..self }
    }

    /// The values of a matrix whose rows lie one after the other.
    #[inline(always)]
    pub(super) fn in_rows(&self) -> &'a [T] {
        assert!(
            self.column_stride == 1 && self.row_stride == self.columns,
            "a part, or the transpose, of a matrix"
        );
        &self.values[..self.rows * self.columns]
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Whether the values of a row lie side by side.
    #[inline(always)]
    fn has_rows(&self) -> bool {
        self.column_stride == 1
    }
}

impl<T: Number> MatrixView<'_, T> {
    /// Lays out the rows of a tile of `height`, filled up with zeros, for `depth.1` columns from `depth.0` on: row after row
    /// if the matrix has rows, else column after column.
    #[inline(always)]
    fn lay_out_rows(&self, first_row: usize, height: usize, depth: (usize, usize), tile: &mut [T]) {
        let count = height.min(self.rows - first_row);
        let start = first_row * self.row_stride + depth.0 * self.column_stride;
        if self.has_rows() {
            for (row, to) in tile.chunks_exact_mut(depth.1).enumerate() {
                if row < count {
                    to.copy_from_slice(&self.values[start + row * self.row_stride..][..depth.1]);
                } else {
                    to.fill(T::ZERO);
                }
            }
            return;
        }
        let values = &self.values[start..];
        match height {
            12 if count == 12 => copy_columns::<T, 12>(values, self.column_stride, tile),
            6 if count == 6 => copy_columns::<T, 6>(values, self.column_stride, tile),
            4 if count == 4 => copy_columns::<T, 4>(values, self.column_stride, tile),
            _ => {
                for (index, to) in tile.chunks_exact_mut(height).enumerate() {
                    let values = &values[index * self.column_stride..];
                    for row in 0..height {
                        to[row] = if row < count { values[row] } else { T::ZERO };
                    }
                }
            }
        }
    }

    /// Lays out sixteen columns, or what is left of them, filled up with zeros: a line for each of the rows from `first_row` on.
    #[inline(always)]
    fn lay_out_panel<V: Vectors<Real = T>>(
        &self,
        v: V,
        first_row: usize,
        first_column: usize,
        lines: &mut [Line<[T; LANES]>],
    ) {
        let count = LANES.min(self.columns - first_column);
        let start = first_row * self.row_stride + first_column * self.column_stride;
        if count == LANES && !self.has_rows() {
            let mut columns: [&[T]; LANES] = [&[]; LANES];
            for lane in 0..LANES {
                columns[lane] = &self.values[start + lane * self.column_stride..][..lines.len()];
            }
            let whole = lines.len() / LANES * LANES;
            let (blocks, rest) = lines.as_chunks_mut();
            for index in 0..blocks.len() {
                v.transpose(&columns, index * LANES, &mut blocks[index]);
            }
            for (index, line) in rest.iter_mut().enumerate() {
                for lane in 0..LANES {
                    line.0[lane] = columns[lane][whole + index];
                }
            }
        } else {
            for (index, line) in lines.iter_mut().enumerate() {
                line.0 = [T::ZERO; LANES];
                for lane in 0..count {
                    line.0[lane] = self.values[start + index * self.row_stride + lane * self.column_stride];
                }
            }
        }
    }

    /// Lays out `lines.len() / depth` panels from a column on, each as [`lay_out_panel`](Self::lay_out_panel) says; those of sixteen columns of a
    /// matrix of rows row after row, as memory is read fastest.
    #[inline(always)]
    fn lay_out_panels<V: Vectors<Real = T>>(
        &self,
        v: V,
        first_row: usize,
        first_column: usize,
        lines: &mut [Line<[T; LANES]>],
        depth: usize,
    ) {
        let panels = lines.len() / depth.max(1);
        let whole = if self.has_rows() { ((self.columns - first_column) / LANES).min(panels) } else { 0 };
        for row in 0..depth {
            let start = (first_row + row) * self.row_stride + first_column;
            let values = &self.values[start..start + whole * LANES];
            for panel in 0..whole {
                lines[panel * depth + row].0.copy_from_slice(&values[panel * LANES..][..LANES]);
            }
        }
        for panel in whole..panels {
            let lines = &mut lines[panel * depth..(panel + 1) * depth];
            self.lay_out_panel(v, first_row, first_column + panel * LANES, lines);
        }
    }
}

/// The first `ROWS` values of each column, one column after the other.
#[inline(always)]
fn copy_columns<T: Copy, const ROWS: usize>(values: &[T], stride: usize, to: &mut [T]) {
    let columns = to.as_chunks_mut::<ROWS>().0;
    for index in 0..columns.len() {
        let values = &values[index * stride..][..ROWS];
        for row in 0..ROWS {
            columns[index][row] = values[row];
        }
    }
}

/// `left · right`, and what follows it.
pub(super) fn product<T: Real>(
    left: MatrixView<'_, T>,
    right: MatrixView<'_, T>,
    bias: Option<&[T]>,
) -> Vec<T> {
    assert!(bias.is_none_or(|bias| bias.len() == right.columns), "a bias of another width");
    let bias = bias.map(PanelBias::new);
    let epilogue = Epilogue { bias: bias.as_ref(), ..Epilogue::default() };
    Output::computed(left.rows * right.columns, right.columns, |output| {
        multiply_all(left, right, output, epilogue)
    })
}

/// Writes `left · right` over the output, or adds it.
pub(super) fn product_to<T: Real>(
    left: MatrixView<'_, T>,
    right: MatrixView<'_, T>,
    output: &mut [T],
    is_fresh: bool,
) {
    multiply_all(left, right, &mut Output::of(output, right.columns, is_fresh), Epilogue::default());
}

/// The product on all threads.
fn multiply_all<T: Real>(
    left: MatrixView<'_, T>,
    right: MatrixView<'_, T>,
    output: &mut Output<'_, T>,
    epilogue: Epilogue<'_, T>,
) {
    let MatrixView { rows, columns: depth, .. } = left;
    let columns = right.columns;
    assert!(depth == right.rows, "a product of {depth} columns and {} rows", right.rows);
    assert!(output.len() == rows * columns, "{} values for {rows} rows of {columns}", output.len());
    if output.len() == 0 {
        return;
    }
    let is_fresh = output.is_fresh();
    let tile = T::vectorized(TileSize);
    if rows <= tile.0 {
        // The rows of one tile pass over each panel once, so it need not be laid out where all threads find it.
        // Rows are read in pieces as long as the threads leave them; columns, each by itself.
        let across = columns.div_ceil(2 * thread_count()).next_multiple_of(MAX_TILE_PANELS * LANES);
        let most = if right.has_rows() { PART_COLUMNS } else { MAX_TILE_PANELS * LANES };
        let parts = Parts { row_len: columns, rows, columns: across.min(most) };
        output.for_each_part_in(parts, 0..columns, |mut part| {
            T::vectorized(MultiplyFew { left, right, is_fresh, epilogue, part: &mut part });
        });
        return;
    }
    let mut first = 0;
    // One block of nothing where there is no depth, so that the output is written.
    while first < depth.max(1) {
        let slice = (first, BLOCK_DEPTH.min(depth - first));
        let block_columns = (BLOCK_VALUES / slice.1.max(1)).next_multiple_of(PART_COLUMNS);
        for first_column in (0..columns).step_by(block_columns) {
            let width = block_columns.min(columns - first_column);
            let panels = Parts { row_len: slice.1.max(1), rows: 8, columns: slice.1.max(1) };
            let lines = computed_in_parts(width.div_ceil(LANES) * slice.1, panels, |mut part| {
                T::vectorized(LayOutPanels { right, first_row: first, first_column, part: &mut part });
            });
            let given = Given {
                left,
                slice,
                panels: Panels { lines: &lines, depth: slice.1, first: 0 },
                is_first: first == 0 && is_fresh,
                epilogue: (first + slice.1 >= depth).then_some(epilogue),
            };
            let parts = parts(rows, (columns, width), tile);
            output.for_each_part_in(parts, first_column..first_column + width, |mut part| {
                let first_panel = (part.first_column - first_column) / LANES;
                let (first_row, part, room) = (part.first_row, &mut part, &mut Vec::new());
                T::vectorized(MultiplyPart { given, first_row, first_panel, part, room });
            });
        }
        first += BLOCK_DEPTH;
    }
}

/// Rows and columns of the highest tile.
struct TileSize;

impl<T> Work<T> for TileSize {
    type Output = (usize, usize);

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, _: V) -> (usize, usize) {
        const {
            assert!(PART_ROWS.is_multiple_of(V::TILE_ROWS), "a part is of whole tiles");
            assert!(PART_COLUMNS.is_multiple_of(V::TILE_PANELS * LANES), "a part is of whole tiles");
        }
        (V::TILE_ROWS, V::TILE_PANELS * LANES)
    }
}

/// Parts of whole tiles that stay in the second cache, and several for each thread if the output allows.
fn parts(rows: usize, (row_len, width): (usize, usize), (tile_rows, tile_columns): (usize, usize)) -> Parts {
    let tiles = rows.div_ceil(tile_rows);
    let down = tiles.div_ceil(PART_ROWS / tile_rows);
    let across = width.div_ceil(PART_COLUMNS).max((2 * thread_count()).div_ceil(down));
    let columns = width.div_ceil(across).next_multiple_of(tile_columns);
    Parts { row_len, rows: tiles.div_ceil(down) * tile_rows, columns }
}

/// The products of the rows of one tile with a few panels, slice by slice.
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
        let mut room = Vec::new();
        let mut first = 0;
        // One slice of nothing where there is no depth, so that the output is written.
        while first < depth.max(1) {
            let slice = (first, SLICE.min(depth - first));
            right.lay_out_panels(v, first, part.first_column, &mut lines[..panels * slice.1], slice.1);
            let given = Given {
                left,
                slice,
                panels: Panels { lines: &lines, depth: slice.1, first: 0 },
                is_first: first == 0 && is_fresh,
                epilogue: (first + SLICE >= depth).then_some(epilogue),
            };
            v.call(MultiplyPart { given, first_row: 0, first_panel: 0, part: &mut *part, room: &mut room });
            first += SLICE;
        }
    }
}

/// Lays out some panels, each a row of the part.
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

/// Some lines of some panels of a right operand.
#[derive(Debug, Clone, Copy)]
pub(super) struct Panels<'a, T> {
    /// The lines of all panels, `depth` each.
    lines: &'a [Line<[T; LANES]>],
    depth: usize,
    /// The first line that counts.
    first: usize,
}

impl<'a, T> Panels<'a, T> {
    /// So many lines of a panel.
    #[inline(always)]
    fn panel(&self, index: usize, count: usize) -> &'a [Line<[T; LANES]>] {
        &self.lines[index * self.depth + self.first..][..count]
    }

    /// The rows of the operand from one on.
    #[inline(always)]
    pub(super) fn rows_from(self, first: usize) -> Self {
        Self { first: self.first + first, ..self }
    }

    /// The columns of the operand from one on that begins a panel.
    #[inline(always)]
    pub(super) fn columns_from(self, first: usize) -> Self {
        Self { lines: &self.lines[first / LANES * self.depth..], ..self }
    }
}

/// What the parts of a product have in common.
#[derive(Clone, Copy)]
struct Given<'a, T> {
    left: MatrixView<'a, T>,
    /// First column of the left operand that counts, and how many.
    slice: (usize, usize),
    panels: Panels<'a, T>,
    /// Whether the output is overwritten; else the products are added to it.
    is_first: bool,
    /// What follows at the end.
    epilogue: Option<Epilogue<'a, T>>,
}

/// The products of a part's rows with a part's panels.
struct MultiplyPart<'a, 'b, T> {
    given: Given<'a, T>,
    /// The part's first row in the left operand.
    first_row: usize,
    /// The panel of the part's first column.
    first_panel: usize,
    part: &'a mut Part<'b, T>,
    /// Memory to work in.
    room: &'a mut Vec<T>,
}

impl<T: Number> Work<T> for MultiplyPart<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        let Self { given, first_row, first_panel, part, room } = self;
        let Given { left, slice, panels, is_first, epilogue } = given;
        let (rows, depth) = (part.rows(), slice.1);
        room.resize((rows + V::TILE_ROWS) * depth, T::ZERO);
        let mut row = 0;
        while row < rows && depth > 0 {
            let height = tile_height(rows - row, V::TILE_ROWS);
            left.lay_out_rows(first_row + row, height, slice, &mut room[row * depth..(row + height) * depth]);
            row += height;
        }
        // Whole tiles pass over panels that stay in the first cache; a lower one at the end, over more panels at once.
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
                    rows: &room[row * depth..(row + height) * depth],
                    has_rows: left.has_rows(),
                    panels: &of_panels[..count],
                    // Without a residual, the place among all values does not count.
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

/// A product for one tile and some panels, added slice by slice.
struct Tile<'a, 'b, T> {
    /// The tile's rows, as [`MatrixView::lay_out_rows`] gives them.
    rows: &'a [T],
    /// Whether these are rows.
    has_rows: bool,
    /// The lines of some panels.
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
                sum_products(v, &Apart::new(rows, count), lines)
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

/// A right operand, laid out once for several products by one thread.
pub(super) struct LaidOut<T> {
    lines: Vec<Line<[T; LANES]>>,
    rows: usize,
}

impl<T: Number> LaidOut<T> {
    /// Room that [`LaidOut::fill`] fills.
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

    /// The whole operand.
    #[inline(always)]
    pub(super) fn all(&self) -> Panels<'_, T> {
        Panels { lines: &self.lines, depth: self.rows, first: 0 }
    }
}

/// The product with as many rows of a laid out operand as `left` has columns, and as many of its columns as the output has, on
/// this thread: over the output or, for a sum, added to it. `room` is memory to work in.
#[inline(always)]
pub(super) fn multiply<V: Vectors>(
    v: V,
    left: MatrixView<'_, V::Real>,
    right: Panels<'_, V::Real>,
    mut output: Part<'_, V::Real>,
    is_sum: bool,
    room: &mut Vec<V::Real>,
) {
    let given = Given { left, slice: (0, left.columns), panels: right, is_first: !is_sum, epilogue: None };
    v.call(MultiplyPart { given, first_row: 0, first_panel: 0, part: &mut output, room });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::noise;
    use crate::simd::{InstructionSet, OfFloats};

    /// `A B` in f64, added one by one.
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

    /// Rows, depth and columns: one row and column, rests of tiles, panels, slices and parts, blocks of columns.
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

    /// Both operands in both orientations.
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
                    // Sums of up to 600 products below 1.5, rounded each time.
                    let bound = 1e-6 * sizes.1 as f64;
                    let bias = f64::from(bias[index % sizes.2]);
                    for (found, expected) in [
                        (plain[index], expected),
                        (biased[index], expected + bias),
                        (sum[index], 2.0 * expected),
                    ] {
                        let error = (f64::from(found) - expected).abs();
                        assert!(error <= bound, "{sizes:?} at {index}: {found} for {expected}");
                    }
                }
                let mut written = vec![f32::NAN; plain.len()];
                product_to(left, right, &mut written, true);
                assert_eq!(written, plain);
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
    fn tiles_equal_plain_sums_with_all_instructions() {
        for (set, sizes) in
            InstructionSet::available().into_iter().flat_map(|set| SIZES.map(|sizes| (set, sizes)))
        {
            in_every_orientation(sizes, |left, right, expected| {
                let mut output = vec![f32::NAN; left.rows * right.columns];
                set.run(OfFloats(Multiply(left, right, &mut output)));
                for (found, expected) in output.iter().zip(expected) {
                    let error = (f64::from(*found) - expected).abs();
                    assert!(error <= 1e-6 * sizes.1 as f64, "{set:?} {sizes:?}");
                }
            });
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_in_company() {
        let (depth, columns) = (300, 70);
        let (x, weight) = (noise(40 * depth, 1, 0.2, 2.0), noise(depth * columns, 2, 0.1, 2.0));
        let right = MatrixView::new(&weight, depth, columns);
        for set in InstructionSet::available() {
            let run = |first: usize, rows: usize| {
                let left = MatrixView::new(&x[first * depth..(first + rows) * depth], rows, depth);
                let mut output = vec![f32::NAN; rows * columns];
                set.run(OfFloats(Multiply(left, right, &mut output)));
                output.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let alone: Vec<_> = (0..40).map(|row| run(row, 1)).collect();
            for rows in 2..=40 {
                assert_eq!(run(40 - rows, rows), alone[40 - rows..].concat(), "{set:?}: {rows} rows");
            }
        }
    }

    #[test]
    fn a_product_without_depth_is_zero_or_the_bias() {
        let empty: &[f64] = &[];
        let (left, right) = (MatrixView::new(empty, 2, 0), MatrixView::new(empty, 0, 3));
        let mut output = vec![f64::NAN; 6];
        product_to(left, right, &mut output, true);
        assert_eq!(output, [0.0; 6]);
        assert_eq!(product(left, right, Some(&[1.0, 2.0, 3.0])), [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
    }
}
