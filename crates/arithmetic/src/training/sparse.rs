//! Products with a sparse matrix, and their gradients.
//!
//! The decoder of a feature dictionary reads and updates only the rows of its active latents.
//!
//! With entries `z` `(rows, latents)` and a table `W` `(latents, width)`, the product is `y = z W`. For a
//! gradient `g` of `y`, the gradient of an entry is `g · W_latent`. The gradient of a table row is the sum of
//! `z g` over its entries. Every sum is added in a fixed order.

use super::matrix_view::MatrixView;
use crate::simd::{LANES, Number, Real, Vectors, Work};
use crate::threads::{Parts, for_each_part, map_items};

/// Number of output rows per task.
const PART_ROWS: usize = 8;

/// Nonzero values of a set of rows, each with its column; a row's entries are contiguous.
///
/// ```
/// use candle_gpt2_arithmetic::{Float, MatrixView, SparseRows};
///
/// let mut latents = SparseRows::default();
/// latents.add_row([(2, 10f32), (0, 1.0)]);
/// latents.add_row([]);
/// let decoder = [1f32, 2., 3., 4., 5., 6.];
/// let mut output = vec![0.0; 4];
/// Float::add_sparse_product(&latents, MatrixView::new(&decoder, 3, 2), &mut output);
/// assert_eq!(output, [51., 62., 0., 0.], "10 times the third row, plus the first row");
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct SparseRows<T> {
    /// Index of each row's first entry, followed by the end of the last row.
    starts: Vec<usize>,
    columns: Vec<usize>,
    values: Vec<T>,
}

impl<T> Default for SparseRows<T> {
    fn default() -> Self {
        Self { starts: vec![0], columns: Vec::new(), values: Vec::new() }
    }
}

impl<T: Copy> SparseRows<T> {
    /// Adds a row with the given entries, each a column and a value.
    pub fn add_row(&mut self, entries: impl IntoIterator<Item = (usize, T)>) {
        for (column, value) in entries {
            self.columns.push(column);
            self.values.push(value);
        }
        self.starts.push(self.columns.len());
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.starts.len() - 1
    }

    /// Returns a row's entries, each a column and a value.
    ///
    /// # Panics
    /// Panics if the row does not exist.
    pub fn row(&self, row: usize) -> impl Iterator<Item = (usize, T)> + '_ {
        let entries = self.starts[row]..self.starts[row + 1];
        self.columns[entries.clone()].iter().copied().zip(self.values[entries].iter().copied())
    }

    /// Returns the column of each entry, row after row.
    pub fn columns(&self) -> &[usize] {
        &self.columns
    }

    /// Returns the value of each entry, row after row.
    pub fn values(&self) -> &[T] {
        &self.values
    }

    /// Returns the same entries with new values.
    ///
    /// # Panics
    /// Panics if the number of values differs from the number of entries.
    pub fn with_values(&self, values: Vec<T>) -> Self {
        assert!(
            values.len() == self.values.len(),
            "expected one value for each entry, found {} values for {} entries",
            values.len(),
            self.values.len()
        );
        Self { starts: self.starts.clone(), columns: self.columns.clone(), values }
    }

    /// Groups the entries by column, as pairs of a row and an entry index.
    ///
    /// Returns the start index of each column among the pairs, and the pairs. The pairs of a column
    /// are in row order.
    fn by_column(&self, columns: usize) -> (Vec<usize>, Vec<(usize, usize)>) {
        let mut ends = vec![0; columns + 1];
        self.columns.iter().for_each(|column| ends[column + 1] += 1);
        for column in 0..columns {
            ends[column + 1] += ends[column];
        }
        let starts = ends.clone();
        let mut entries = vec![(0, 0); self.columns.len()];
        for row in 0..self.rows() {
            for place in self.starts[row]..self.starts[row + 1] {
                let column = self.columns[place];
                entries[ends[column]] = (row, place);
                ends[column] += 1;
            }
        }
        (starts, entries)
    }
}

/// Panics if an entry's column is outside the table.
fn expect_fitting<T: Copy>(entries: &SparseRows<T>, table_rows: usize) {
    let largest = entries.columns.iter().max();
    assert!(
        largest.is_none_or(|largest| *largest < table_rows),
        "column {largest:?} is out of range for a table of {table_rows} rows"
    );
}

pub(super) fn add_sparse_product<T: Real>(
    entries: &SparseRows<T>,
    table: MatrixView<'_, T>,
    output: &mut [T],
) {
    let width = table.columns();
    expect_fitting(entries, table.rows());
    assert!(
        output.len() == entries.rows() * width,
        "{} output values do not form {} rows of the table's width",
        output.len(),
        entries.rows()
    );
    if output.is_empty() {
        return;
    }
    let table = table.in_rows();
    for_each_part(output, Parts { row_len: width, rows: PART_ROWS, columns: width }, |mut part| {
        for index in 0..part.rows() {
            let row = part.first_row + index;
            let terms =
                entries.row(row).map(|(column, value)| (value, &table[column * width..(column + 1) * width]));
            add_terms(terms, part.row(index));
        }
    });
}

pub(super) fn sparse_products<T: Real>(
    entries: &SparseRows<T>,
    left: MatrixView<'_, T>,
    table: MatrixView<'_, T>,
) -> Vec<T> {
    let width = table.columns();
    expect_fitting(entries, table.rows());
    assert!(
        left.rows() == entries.rows() && left.columns() == width,
        "the left matrix, {} by {}, does not match the entries and the table",
        left.rows(),
        left.columns()
    );
    let (left, table) = (left.in_rows(), table.in_rows());
    let rows: Vec<usize> = (0..entries.rows()).collect();
    let products = map_items(rows.chunks(PART_ROWS), |rows| {
        let mut products = Vec::new();
        for row in rows {
            let left = &left[row * width..(row + 1) * width];
            let dot = |(column, _): (usize, T)| {
                T::vectorized(Dot { left, right: &table[column * width..(column + 1) * width] })
            };
            products.extend(entries.row(*row).map(dot));
        }
        products
    });
    products.concat()
}

pub(super) fn add_sparse_gradient<T: Real>(
    entries: &SparseRows<T>,
    gradient: MatrixView<'_, T>,
    table_gradient: &mut [T],
) {
    let width = gradient.columns();
    assert!(
        gradient.rows() == entries.rows(),
        "the gradient has {} rows, but there are {} rows of entries",
        gradient.rows(),
        entries.rows()
    );
    if width == 0 || table_gradient.is_empty() {
        return;
    }
    let table_rows = table_gradient.len() / width;
    expect_fitting(entries, table_rows);
    let gradient = gradient.in_rows();
    let (starts, places) = entries.by_column(table_rows);
    for_each_part(table_gradient, Parts { row_len: width, rows: PART_ROWS, columns: width }, |mut part| {
        for index in 0..part.rows() {
            let column = part.first_row + index;
            let of_column = places[starts[column]..starts[column + 1]].iter();
            let terms = of_column
                .map(|(row, place)| (entries.values[*place], &gradient[row * width..(row + 1) * width]));
            add_terms(terms, part.row(index));
        }
    });
}

/// Adds weighted rows to a sum.
fn add_terms<'t, T: Real>(terms: impl Iterator<Item = (T, &'t [T])>, sum: &mut [T]) {
    for (factor, values) in terms {
        T::vectorized(AddMultiple { factor, values, sum });
    }
}

/// Work that adds a multiple of a row to a sum.
struct AddMultiple<'a, T> {
    factor: T,
    values: &'a [T],
    sum: &'a mut [T],
}

impl<T: Number> Work<T> for AddMultiple<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) {
        let Self { factor, values, sum } = self;
        let factor = v.splat(factor);
        for first in (0..sum.len()).step_by(LANES) {
            let (sum, values) = (&mut sum[first..], &values[first..]);
            let added = v.mul_add(factor, v.load_first(values, T::ZERO), v.load_first(sum, T::ZERO));
            v.store_first(added, sum);
        }
    }
}

/// Work that computes the dot product of two rows.
struct Dot<'a, T> {
    left: &'a [T],
    right: &'a [T],
}

impl<T: Number> Work<T> for Dot<'_, T> {
    type Output = T;

    #[inline(always)]
    fn run<V: Vectors<Real = T>>(self, v: V) -> T {
        let mut sum = v.splat(T::ZERO);
        for first in (0..self.left.len()).step_by(LANES) {
            let left = v.load_first(&self.left[first..], T::ZERO);
            sum = v.mul_add(left, v.load_first(&self.right[first..], T::ZERO), sum);
        }
        v.sum(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RandomStream;
    use crate::random::noise;

    /// Returns rows with up to five entries in 23 columns.
    ///
    /// The second row is empty, and the columns of a row are not sorted.
    fn entries(rows: usize) -> SparseRows<f32> {
        let mut generator = RandomStream::new(9);
        let mut entries = SparseRows::default();
        for row in 0..rows {
            let mut columns: Vec<usize> = (0..23).collect();
            for place in 0..5 {
                let other = place + usize::try_from(generator.below(23 - place as u64)).unwrap();
                columns.swap(place, other);
            }
            let count = if row == 1 { 0 } else { 5 };
            let values = noise(5, row as u64, 0.0, 2.0);
            entries.add_row(columns.into_iter().zip(values).take(count));
        }
        entries
    }

    fn dense(entries: &SparseRows<f32>, columns: usize) -> Vec<f64> {
        let mut dense = vec![0.0; entries.rows() * columns];
        for row in 0..entries.rows() {
            entries.row(row).for_each(|(column, value)| dense[row * columns + column] = f64::from(value));
        }
        dense
    }

    fn assert_near(found: &[f32], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            // A few products of values below 2, each rounded once.
            assert!((f64::from(*found) - expected).abs() < 1e-5, "{found} vs. {expected}");
        }
    }

    #[test]
    fn products_and_gradients_equal_the_dense_matrix() {
        let (rows, columns) = (19, 23);
        let entries = entries(rows);
        let dense = dense(&entries, columns);
        for width in [1, 7, 16, 45] {
            let table = noise(columns * width, 100, 0.0, 1.0);
            let gradient = noise(rows * width, 101, 0.0, 1.0);
            let view = MatrixView::new(&table, columns, width);
            let mut output = vec![1f32; rows * width];
            add_sparse_product(&entries, view, &mut output);
            let at = |values: &[f32], row: usize, place: usize| f64::from(values[row * width + place]);
            let expected = (0..rows * width).map(|index| {
                let terms = (0..columns).map(|column| {
                    dense[index / width * columns + column] * at(&table, column, index % width)
                });
                1.0 + terms.sum::<f64>()
            });
            assert_near(&output, &expected.collect::<Vec<_>>());
            let products = sparse_products(&entries, MatrixView::new(&gradient, rows, width), view);
            let expected = (0..rows).flat_map(|row| entries.row(row).map(move |(column, _)| (row, column)));
            let expected = expected.map(|(row, column)| {
                (0..width).map(|place| at(&gradient, row, place) * at(&table, column, place)).sum::<f64>()
            });
            assert_near(&products, &expected.collect::<Vec<_>>());
            let mut table_gradient = vec![2f32; columns * width];
            add_sparse_gradient(&entries, MatrixView::new(&gradient, rows, width), &mut table_gradient);
            let expected = (0..columns * width).map(|index| {
                let terms = (0..rows)
                    .map(|row| dense[row * columns + index / width] * at(&gradient, row, index % width));
                2.0 + terms.sum::<f64>()
            });
            assert_near(&table_gradient, &expected.collect::<Vec<_>>());
        }
    }

    #[test]
    #[should_panic(expected = " of 3")]
    fn out_of_range_column_panics() {
        add_sparse_product(&entries(5), MatrixView::new(&[0f32; 3], 3, 1), &mut [0f32; 5]);
    }
}
