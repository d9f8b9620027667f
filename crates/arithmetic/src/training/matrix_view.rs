//! Views of matrices, and their layout for the tiles of a product.

use crate::simd::{LANES, Line, Number, Vectors};

/// Matrix view of a slice, with contiguous rows or contiguous columns.
///
/// [`Float`](crate::Float) has an example.
#[derive(Debug, Clone, Copy)]
pub struct MatrixView<'a, T> {
    pub(super) values: &'a [T],
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Distance between rows.
    ///
    /// The element `(row, column)` is at
    /// `row · row_stride + column · column_stride`. One of the strides is 1.
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
}

impl<'a, T> MatrixView<'a, T> {
    /// Creates a view of a row-major matrix.
    ///
    /// # Panics
    /// Panics if the number of values is not `rows · columns`.
    pub fn new(values: &'a [T], rows: usize, columns: usize) -> Self {
        assert!(
            values.len() == rows * columns,
            "{} values do not form {rows} rows of {columns}",
            values.len()
        );
        Self::strided(values, (rows, columns), columns)
    }

    /// Creates a view of a matrix whose rows begin `stride` values apart.
    #[inline(always)]
    pub(super) fn strided(values: &'a [T], (rows, columns): (usize, usize), stride: usize) -> Self {
        assert!(
            rows == 0 || (rows - 1) * stride + columns <= values.len(),
            "the matrix extends past the end of its values"
        );
        Self { values, rows, columns, row_stride: stride, column_stride: 1 }
    }

    /// Returns the transpose.
    #[inline(always)]
    #[must_use]
    pub fn transposed(self) -> Self {
        let Self { values, rows, columns, row_stride, column_stride } = self;
        Self { values, rows: columns, columns: rows, row_stride: column_stride, column_stride: row_stride }
    }

    /// Returns `count` rows starting at row `first`.
    ///
    /// # Panics
    /// Panics if the matrix has fewer rows.
    #[must_use]
    pub fn some_rows(self, first: usize, count: usize) -> Self {
        assert!(
            first + count <= self.rows,
            "{count} rows starting at row {first} are out of range; the matrix has {}",
            self.rows
        );
        Self { values: &self.values[first * self.row_stride..], rows: count, ..self }
    }

    /// Returns all values of a matrix; its rows must be stored without gaps.
    #[inline(always)]
    pub(super) fn in_rows(&self) -> &'a [T] {
        assert!(
            self.column_stride == 1 && self.row_stride == self.columns,
            "the rows of the matrix are not contiguous"
        );
        &self.values[..self.rows * self.columns]
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Whether the values of a row are contiguous.
    #[inline(always)]
    pub(super) fn has_rows(&self) -> bool {
        self.column_stride == 1
    }
}

impl<T: Number> MatrixView<'_, T> {
    /// Lays out a tile of `height` rows, padded with zeros.
    ///
    /// `depth` is the first column and the number of columns. The layout is row by row if the matrix has
    /// contiguous rows, or else column by column.
    #[inline(always)]
    pub(super) fn lay_out_rows(
        &self,
        first_row: usize,
        height: usize,
        depth: (usize, usize),
        tile: &mut [T],
    ) {
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

    /// Lays out at most sixteen columns, padded with zeros, one line per row starting at `first_row`.
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

    /// Lays out `lines.len() / depth` panels, each like [`lay_out_panel`](Self::lay_out_panel).
    ///
    /// If the matrix has contiguous rows, full panels are filled row by
    /// row, the fastest memory order.
    #[inline(always)]
    pub(super) fn lay_out_panels<V: Vectors<Real = T>>(
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

/// Copies the first `ROWS` values of each column, one column after another.
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
