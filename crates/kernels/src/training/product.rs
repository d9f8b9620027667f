//! A small matrix product for the tiles of attention: `C += A B`.

use super::arithmetic::Real;

/// Rows of a tile, whose sums stay in registers.
const TILE_ROWS: usize = 4;
/// Columns of a tile: two vectors of AVX2 in f32.
const TILE_COLUMNS: usize = 16;

/// A matrix inside a slice; the element `(row, column)` stands at `row · row_stride + column · column_stride`.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    pub(crate) values: &'a [T],
    pub(crate) row_stride: usize,
    pub(crate) column_stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// A matrix in row-major order.
    #[inline(always)]
    pub(crate) fn rows(values: &'a [T], row_stride: usize) -> Self {
        Self { values, row_stride, column_stride: 1 }
    }

    /// The transpose of a matrix in row-major order.
    #[inline(always)]
    pub(crate) fn transposed(values: &'a [T], row_stride: usize) -> Self {
        Self { values, row_stride: 1, column_stride: row_stride }
    }
}

/// `C += A B` with `A` `(rows, depth)`, `B` `(depth, columns)` in row-major order and `C` `(rows, columns)` in row-major
/// order, each row of `C` `c_stride` and each of `B` `b_stride` behind the one before. `panel` is room for a strip of `A`.
#[inline(always)]
pub(crate) fn add_product<T: Real, const FMA: bool>(
    a: Matrix<'_, T>,
    b: &[T],
    b_stride: usize,
    c: &mut [T],
    c_stride: usize,
    (rows, depth, columns): (usize, usize, usize),
    panel: &mut Vec<[T; TILE_ROWS]>,
) {
    for first_row in (0..rows).step_by(TILE_ROWS) {
        let height = TILE_ROWS.min(rows - first_row);
        panel.clear();
        for k in 0..depth {
            let mut column = [T::zero(); TILE_ROWS];
            for (row, value) in column.iter_mut().enumerate().take(height) {
                *value = a.values[(first_row + row) * a.row_stride + k * a.column_stride];
            }
            panel.push(column);
        }
        let whole = columns / TILE_COLUMNS * TILE_COLUMNS;
        for first in (0..whole).step_by(TILE_COLUMNS) {
            let mut sums = [[T::zero(); TILE_COLUMNS]; TILE_ROWS];
            for (left, right) in panel.iter().zip(b.chunks(b_stride)) {
                if let Some(right) = right[first..].first_chunk::<TILE_COLUMNS>() {
                    for (sums, left) in sums.iter_mut().zip(left) {
                        for (sum, right) in sums.iter_mut().zip(right) {
                            *sum = left.multiply_add::<FMA>(*right, *sum);
                        }
                    }
                }
            }
            for (row, sums) in sums.iter().enumerate().take(height) {
                let start = (first_row + row) * c_stride + first;
                for (value, sum) in c[start..start + TILE_COLUMNS].iter_mut().zip(sums) {
                    *value += *sum;
                }
            }
        }
        for column in whole..columns {
            let mut sums = [T::zero(); TILE_ROWS];
            for (left, right) in panel.iter().zip(b.chunks(b_stride)) {
                for (sum, left) in sums.iter_mut().zip(left) {
                    *sum = left.multiply_add::<FMA>(right[column], *sum);
                }
            }
            for (row, sum) in sums.iter().enumerate().take(height) {
                c[(first_row + row) * c_stride + column] += *sum;
            }
        }
    }
}
