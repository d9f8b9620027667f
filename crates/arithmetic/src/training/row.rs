//! Product of one row and a matrix that is read from memory once.
//!
//! Taller products lay out panels of the matrix first. For one row, that would take longer than multiplying.
//! Each output is the same sequence of additions as there, so its bits are the same.

use super::matrix_view::MatrixView;
use crate::epilogue::Epilogue;
use crate::fetch::fetch;
use crate::simd::{LANES, Line, Number, Vectors, Work};
use crate::threads::Part;
use crate::tile::TileOutput;

/// Depth per slice of a product.
pub(super) const SLICE: usize = 256;
/// Number of rows of the matrix that pass over the sums together.
const ROWS: usize = 4;

/// Work that multiplies a row by the columns of a part.
pub(super) struct MultiplyRow<'a, 'b, T> {
    pub(super) row: &'a [T],
    pub(super) right: MatrixView<'a, T>,
    pub(super) is_fresh: bool,
    pub(super) epilogue: Epilogue<'a, T>,
    pub(super) part: &'a mut Part<'b, T>,
}

impl<T: Number> Work<T> for MultiplyRow<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        if self.right.has_rows() { self.by_rows(v) } else { self.by_columns(v) }
    }
}

impl<T: Number> MultiplyRow<'_, '_, T> {
    /// Reads the matrix row by row; the sums of all columns stay in the L1 cache.
    #[inline(always)]
    fn by_rows<V: Vectors<Real = T>>(mut self, v: V) {
        let (first_column, width) = (self.part.first_column, self.part.columns());
        let mut sums = vec![Line([T::ZERO; LANES]); width.div_ceil(LANES)];
        let mut first = 0;
        // If the depth is 0, one empty slice still writes the output.
        while first < self.row.len().max(1) {
            let steps = SLICE.min(self.row.len() - first);
            sums.fill(Line([T::ZERO; LANES]));
            let row_of = |step: usize| {
                &self.right.values[(first + step) * self.right.row_stride + first_column..][..width]
            };
            let mut step = 0;
            while step + ROWS <= steps {
                let mut rows: [&[T]; ROWS] = [&[]; ROWS];
                let mut factors = [v.splat(T::ZERO); ROWS];
                for index in 0..ROWS {
                    rows[index] = row_of(step + index);
                    factors[index] = v.splat(self.row[first + step + index]);
                }
                add_rows(v, &mut sums, rows, factors);
                step += ROWS;
            }
            while step < steps {
                add_rows(v, &mut sums, [row_of(step)], [v.splat(self.row[first + step])]);
                step += 1;
            }
            for panel in 0..sums.len() {
                self.write(v, v.load(&sums[panel].0), panel, first);
            }
            first += SLICE;
        }
    }

    /// Reads sixteen columns at a time, each contiguous in memory.
    #[inline(always)]
    fn by_columns<V: Vectors<Real = T>>(mut self, v: V) {
        let (width, depth, stride) = (self.part.columns(), self.row.len(), self.right.column_stride);
        for panel in 0..width.div_ceil(LANES) {
            let first_column = self.part.first_column + panel * LANES;
            let count = LANES.min(width - panel * LANES);
            let mut columns: [&[T]; LANES] = [&[]; LANES];
            for lane in 0..count {
                columns[lane] = &self.right.values[(first_column + lane) * stride..][..depth];
            }
            let mut first = 0;
            while first < depth.max(1) {
                let end = depth.min(first + SLICE);
                let mut sum = v.splat(T::ZERO);
                let mut step = first;
                let mut lines = [Line([T::ZERO; LANES]); LANES];
                while count == LANES && step + LANES <= end {
                    for lane in 0..LANES {
                        // The same part of the next panel.
                        fetch(&columns[lane][step..step + LANES], LANES * stride * size_of::<T>());
                    }
                    v.transpose(&columns, step, &mut lines);
                    for index in 0..LANES {
                        sum = v.mul_add(v.splat(self.row[step + index]), v.load(&lines[index].0), sum);
                    }
                    step += LANES;
                }
                while step < end {
                    let mut line = [T::ZERO; LANES];
                    for lane in 0..count {
                        line[lane] = columns[lane][step];
                    }
                    sum = v.mul_add(v.splat(self.row[step]), v.load(&line), sum);
                    step += 1;
                }
                self.write(v, sum, panel, first);
                first += SLICE;
            }
        }
    }

    /// Adds one panel's sums over the slice starting at `first` to the output.
    #[inline(always)]
    fn write<V: Vectors<Real = T>>(&mut self, v: V, sums: V::Vector, panel: usize, first: usize) {
        let mut output = TileOutput {
            part: &mut *self.part,
            row: 0,
            panel,
            // Without a residual, the index into the whole output is not used.
            row_len: 0,
            is_first: first == 0 && self.is_fresh,
            epilogue: (first + SLICE >= self.row.len()).then_some(self.epilogue),
        };
        output.write(v, &[[sums]], 0);
    }
}

/// Adds `N` rows, each times its factor, to the sums.
#[inline(always)]
fn add_rows<V: Vectors, const N: usize>(
    v: V,
    sums: &mut [Line<[V::Real; LANES]>],
    rows: [&[V::Real]; N],
    factors: [V::Vector; N],
) {
    let whole = rows[0].len() / LANES;
    let mut panels: [&[[V::Real; LANES]]; N] = [&[]; N];
    for index in 0..N {
        panels[index] = &rows[index].as_chunks().0[..whole];
    }
    let (of_panels, of_rest) = sums.split_at_mut(whole);
    for panel in 0..whole {
        let mut sum = v.load(&of_panels[panel].0);
        for index in 0..N {
            sum = v.mul_add(factors[index], v.load(&panels[index][panel]), sum);
        }
        v.store(sum, &mut of_panels[panel].0);
    }
    if let [rest] = of_rest {
        let mut sum = v.load(&rest.0);
        for index in 0..N {
            let line = v.load_first(&rows[index][whole * LANES..], V::Real::ZERO);
            sum = v.mul_add(factors[index], line, sum);
        }
        v.store(sum, &mut rest.0);
    }
}
