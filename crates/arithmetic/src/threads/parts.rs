//! Parallel work on the parts of an output, using all threads of the [`pool`](super::pool).
//!
//! One thread computes each part, always in the same way, so results do not depend on the number of threads.

#![expect(unsafe_code, reason = "threads write disjoint parts of one output")]

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::pool::for_each_index;
use crate::simd::rounded_to_nearest;

/// Division of an output into parts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts {
    /// Elements per row of the output.
    pub(crate) row_len: usize,
    /// Rows per part; the last part may have fewer.
    pub(crate) rows: usize,
    /// Columns per part; the last part may have fewer.
    pub(crate) columns: usize,
}

/// Part of an output: a range of rows and a range of columns.
pub(crate) struct Part<'a, T> {
    /// Index of the first row in the output.
    pub(crate) first_row: usize,
    /// Index of the first column in the output.
    pub(crate) first_column: usize,
    rows: usize,
    columns: usize,
    row_len: usize,
    start: *mut T,
    output: PhantomData<&'a mut [T]>,
}

impl<'a, T> Part<'a, T> {
    /// Creates a single part from the first `rows` rows and `columns` columns of `output`.
    ///
    /// Consecutive rows start `row_len` elements apart.
    #[inline(always)]
    pub(crate) fn of_rows(output: &'a mut [T], row_len: usize, (rows, columns): (usize, usize)) -> Self {
        let needed = if rows == 0 { 0 } else { (rows - 1) * row_len + columns };
        assert!(
            columns <= row_len && needed <= output.len(),
            "{rows} rows and {columns} columns do not fit in the output"
        );
        Self {
            first_row: 0,
            first_column: 0,
            rows,
            columns,
            row_len,
            start: output.as_mut_ptr(),
            output: PhantomData,
        }
    }

    /// Number of rows.
    #[inline(always)]
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    #[inline(always)]
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// Returns row `row` of this part.
    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "row {row} is out of range; the part has {} rows", self.rows);
        // SAFETY: a `Cut` or `of_rows` created this part from columns of rows that all lie inside the output,
        // and no other part contains any of its elements. The output stays borrowed for 'a, and `&mut self`
        // hands out one row at a time.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.row_len), self.columns) }
    }
}

impl<T> Part<'_, T> {
    /// Returns `rows` rows as a separate part: every `step`-th row, starting at `first`.
    #[inline(always)]
    pub(crate) fn stepped(&mut self, first: usize, step: usize, rows: usize) -> Part<'_, T> {
        let fits = rows == 0 || first + (rows - 1) * step < self.rows;
        assert!(fits, "{rows} rows starting at row {first} of {}", self.rows);
        Part {
            first_row: self.first_row + first,
            first_column: self.first_column,
            rows,
            columns: self.columns,
            row_len: self.row_len * step,
            // SAFETY: the first row is in this part, or there are no rows and the pointer is not used.
            start: if rows == 0 { self.start } else { unsafe { self.start.add(first * self.row_len) } },
            output: PhantomData,
        }
    }

    /// Returns all elements of a part that consists of whole rows.
    #[inline(always)]
    pub(crate) fn all(&mut self) -> &mut [T] {
        assert!(
            self.columns == self.row_len,
            "the part has {} columns, but whole rows have {}",
            self.columns,
            self.row_len
        );
        // SAFETY: as in `row`. Whole rows are contiguous.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.rows * self.row_len) }
    }
}

impl<'a, T: Copy + Default> Part<'a, MaybeUninit<T>> {
    /// Fills the part with default values.
    ///
    /// Clearing the whole part first loads it into the caches before tiles write to scattered
    /// positions.
    #[inline(always)]
    fn cleared(mut self) -> Part<'a, T> {
        for row in 0..self.rows() {
            self.row(row).fill(MaybeUninit::new(T::default()));
        }
        // SAFETY: the loop above wrote every element.
        unsafe { self.assume_init() }
    }

    /// Marks the part's elements as initialized.
    ///
    /// # Safety
    /// Every element of the part must have been written.
    #[inline(always)]
    unsafe fn assume_init(self) -> Part<'a, T> {
        let Part { first_row, first_column, rows, columns, row_len, start, .. } = self;
        Part { first_row, first_column, rows, columns, row_len, start: start.cast(), output: PhantomData }
    }
}

/// Computes an output of `len` elements by calling `work` on each part, on all threads of the pool.
///
/// `work` receives parts filled with default values. The thread that computes a part also clears it, because
/// clearing a large output on one thread takes longer than computing an integer product.
///
/// `len` must be a multiple of `parts.row_len`. The row length and the part sizes must not be zero.
pub(crate) fn computed_in_parts<T: Copy + Default + Send>(
    len: usize,
    parts: Parts,
    work: impl Fn(Part<'_, T>) + Sync,
) -> Vec<T> {
    let mut computed = computed_together(&[(len, parts)], |parts| parts.into_iter().for_each(&work));
    computed.pop().unwrap_or_default()
}

/// Computes several outputs that have the same number of parts, like [`computed_in_parts`].
///
/// `work` receives all parts with the same index together.
pub(crate) fn computed_together<T: Copy + Default + Send>(
    outputs: &[(usize, Parts)],
    work: impl Fn(Vec<Part<'_, T>>) + Sync,
) -> Vec<Vec<T>> {
    let mut values: Vec<_> = outputs.iter().map(|(len, _)| Box::new_uninit_slice(*len)).collect();
    let cut = |(values, (_, parts)): (&mut Box<[MaybeUninit<T>]>, &(usize, Parts))| {
        Cut::new(values, *parts, 0..parts.row_len)
    };
    let cuts: Vec<Cut<MaybeUninit<T>>> = values.iter_mut().zip(outputs).map(cut).collect();
    let count = cuts.first().map_or(0, Cut::len);
    assert!(cuts.iter().all(|cut| cut.len() == count), "all outputs must have the same number of parts");
    for_each_index(count, |index| {
        // SAFETY: each index occurs once, and each output has its own cut.
        work(cuts.iter().map(|cut| unsafe { cut.part(index) }.cleared()).collect());
    });
    drop(cuts);
    // SAFETY: every element belongs to a part, and all elements of each part were written.
    values.into_iter().map(|values| unsafe { values.assume_init() }.into_vec()).collect()
}

/// Output that is computed in several passes over ranges of columns.
///
/// Passes may cover the same columns repeatedly.
pub(crate) struct Output<'a, T> {
    values: &'a mut [MaybeUninit<T>],
    row_len: usize,
    /// Number of leading columns that hold values; the others are cleared before they are computed.
    written: usize,
}

impl<'a, T: Copy + Default + Send> Output<'a, T> {
    /// Wraps rows of `row_len` values; results overwrite them if `is_fresh`, or else are added to them.
    pub(crate) fn of(values: &'a mut [T], row_len: usize, is_fresh: bool) -> Self {
        let (start, len) = (values.as_mut_ptr().cast(), values.len());
        // SAFETY: the memory is the same, it stays borrowed, and only initialized values are written to it.
        let values = unsafe { std::slice::from_raw_parts_mut(start, len) };
        Self { values, row_len, written: if is_fresh { 0 } else { row_len } }
    }

    /// Allocates `len` values in rows of `row_len` and runs `compute`, which must write all of them.
    pub(crate) fn computed(len: usize, row_len: usize, compute: impl FnOnce(&mut Output<'_, T>)) -> Vec<T> {
        let mut values = Box::new_uninit_slice(len);
        let mut output = Output { values: &mut values, row_len, written: 0 };
        compute(&mut output);
        assert!(
            len == 0 || output.written == row_len,
            "only {} of {row_len} columns were computed",
            output.written
        );
        // SAFETY: all columns hold values.
        unsafe { values.assume_init() }.into_vec()
    }

    /// Whether the output has yet to be computed, so that results overwrite it.
    pub(crate) fn is_fresh(&self) -> bool {
        self.written == 0
    }

    /// Number of values.
    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    /// Calls `work` on every part of `columns`, on all threads of the pool.
    ///
    /// Parts that already hold values keep them. Other parts are cleared by the thread that computes them.
    /// Columns must be computed in order the first time.
    pub(crate) fn for_each_part_in(
        &mut self,
        parts: Parts,
        columns: Range<usize>,
        work: impl Fn(Part<'_, T>) + Sync,
    ) {
        let is_written = columns.end <= self.written;
        assert!(
            is_written || columns.start == self.written,
            "columns {columns:?} leave a gap after {} columns",
            self.written
        );
        assert!(
            parts.row_len == self.row_len,
            "the parts expect rows of {} values, but the output has rows of {} values",
            parts.row_len,
            self.row_len
        );
        for_each_part_in(self.values, parts, columns.clone(), |part| {
            // SAFETY: columns before `written` hold values.
            work(if is_written { unsafe { part.assume_init() } } else { part.cleared() });
        });
        self.written = self.written.max(columns.end);
    }
}

/// Calls `work` on every part of `output`, on all threads of the pool.
///
/// `output` consists of whole rows of `parts.row_len` elements. The row length
/// and the part sizes must not be zero.
pub(crate) fn for_each_part<T: Send>(output: &mut [T], parts: Parts, work: impl Fn(Part<'_, T>) + Sync) {
    for_each_part_in(output, parts, 0..parts.row_len, work);
}

/// Calls `work` on every part of a range of columns, without the other columns.
fn for_each_part_in<T: Send>(
    output: &mut [T],
    parts: Parts,
    columns: Range<usize>,
    work: impl Fn(Part<'_, T>) + Sync,
) {
    let cut = Cut::new(output, parts, columns);
    // SAFETY: each index occurs once.
    for_each_index(cut.len(), |index| work(unsafe { cut.part(index) }));
}

/// Calls `work` on every item, on all threads of the pool.
pub(crate) fn for_each_item<I: Send>(items: impl IntoIterator<Item = I>, work: impl Fn(I) + Sync) {
    let items: Vec<Mutex<Option<I>>> = items.into_iter().map(|item| Mutex::new(Some(item))).collect();
    for_each_index(items.len(), |index| {
        let item = items[index].lock().unwrap_or_else(PoisonError::into_inner).take();
        item.into_iter().for_each(&work);
    });
}

/// Applies `work` to every item on all threads of the pool and returns the results in order.
///
/// ```
/// let squares = candle_gpt2_arithmetic::map_items([2, 3, 5, 7], |number| number * number);
/// assert_eq!(squares, [4, 9, 25, 49]);
/// ```
pub fn map_items<I: Send, R: Send>(
    items: impl IntoIterator<Item = I>,
    work: impl Fn(I) -> R + Sync,
) -> Vec<R> {
    let mut results: Vec<(Option<I>, Option<R>)> = items.into_iter().map(|item| (Some(item), None)).collect();
    for_each_item(&mut results, |(item, result)| {
        *result = item.take().map(|item| rounded_to_nearest(|| work(item)))
    });
    results.into_iter().filter_map(|(_, result)| result).collect()
}

/// Output divided into parts for all threads.
struct Cut<T> {
    start: *mut T,
    parts: Parts,
    rows: usize,
    columns: Range<usize>,
}

// SAFETY: the pointer only serves to create disjoint parts, so one thread uses each element. Elements may
// move to another thread because `T: Send`.
unsafe impl<T: Send> Sync for Cut<T> {}

impl<T> Cut<T> {
    /// Divides a range of columns into parts; `output` must consist of whole rows.
    ///
    /// The output must not be used in any other way while parts exist.
    fn new(output: &mut [T], parts: Parts, columns: Range<usize>) -> Self {
        assert!(
            columns.end <= parts.row_len,
            "columns {columns:?} are out of range; rows have {}",
            parts.row_len
        );
        let (len, row_len) = (output.len(), parts.row_len);
        assert!(len.is_multiple_of(row_len), "{len} values do not divide into rows of {row_len}");
        Self { start: output.as_mut_ptr(), parts, rows: len / row_len, columns }
    }

    /// Number of parts across each row.
    fn across(&self) -> usize {
        self.columns.len().div_ceil(self.parts.columns)
    }

    /// Number of parts.
    fn len(&self) -> usize {
        self.rows.div_ceil(self.parts.rows) * self.across()
    }

    /// Returns the part at `index`.
    ///
    /// # Safety
    /// Two parts with the same index must not exist at the same time, and no part may outlive the output.
    unsafe fn part<'a>(&self, index: usize) -> Part<'a, T> {
        let Parts { row_len, rows, columns } = self.parts;
        let first_row = index / self.across() * rows;
        let first_column = self.columns.start + index % self.across() * columns;
        assert!(first_row < self.rows, "part {index} is out of range; the output has {}", self.len());
        Part {
            first_row,
            first_column,
            rows: rows.min(self.rows - first_row),
            columns: columns.min(self.columns.end - first_column),
            row_len,
            // SAFETY: the first row is in the output and the first column in
            // the row, so the element is inside.
            start: unsafe { self.start.add(first_row * row_len + first_column) },
            output: PhantomData,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_belongs_to_exactly_one_part() {
        for (rows, row_len, part_rows, part_columns) in
            [(1, 1, 1, 1), (7, 5, 2, 3), (3, 16, 5, 16), (4, 9, 1, 2)]
        {
            let mut output = vec![0; rows * row_len];
            let parts = Parts { row_len, rows: part_rows, columns: part_columns };
            for_each_part(&mut output, parts, |mut part| {
                for row in 0..part.rows() {
                    let (first_row, first_column) = (part.first_row, part.first_column);
                    for (column, element) in part.row(row).iter_mut().enumerate() {
                        *element += 1 + (first_row + row) * row_len + first_column + column;
                    }
                }
            });
            assert_eq!(output, (1..=rows * row_len).collect::<Vec<_>>());
        }
        let parts = Parts { row_len: 7, rows: 2, columns: 3 };
        let computed = computed_in_parts(35, parts, |mut part: Part<'_, i32>| {
            for row in 0..part.rows() {
                part.row(row).iter_mut().for_each(|element| *element += 1);
            }
        });
        assert_eq!(computed, [1; 35]);
        assert_eq!(
            map_items(0..100, |item| item * item),
            (0..100).map(|item| item * item).collect::<Vec<_>>()
        );
        assert!(map_items(Vec::<u8>::new(), |item| item).is_empty());
        for_each_part(&mut Vec::<f32>::new(), Parts { row_len: 3, rows: 1, columns: 1 }, |_| {
            panic!("no part")
        });
    }

    /// Adds one to each value in a range of columns.
    fn add_one(output: &mut Output<'_, i32>, columns: Range<usize>) {
        output.for_each_part_in(Parts { row_len: 7, rows: 2, columns: 2 }, columns, |mut part| {
            for row in 0..part.rows() {
                part.row(row).iter_mut().for_each(|value| *value += 1);
            }
        });
    }

    #[test]
    fn columns_are_cleared_once_and_then_accumulated() {
        let expected = [2, 2, 2, 1, 1, 1, 1].repeat(3);
        let passes =
            |output: &mut Output<'_, i32>| [0..3, 0..3, 3..7].map(|columns| add_one(output, columns));
        assert_eq!(Output::computed(21, 7, |output| _ = passes(output)), expected);
        let mut values = vec![5; 21];
        passes(&mut Output::of(&mut values, 7, true));
        assert_eq!(values, expected);
        passes(&mut Output::of(&mut values, 7, false));
        assert_eq!(values, expected.iter().map(|value| 2 * value).collect::<Vec<_>>());
        assert!(Output::<i32>::computed(0, 7, |_| ()).is_empty());
    }

    #[test]
    #[should_panic(expected = "only 3 of 7 columns were computed")]
    fn incomplete_output_panics() {
        Output::computed(21, 7, |output| add_one(output, 0..3));
    }

    #[test]
    #[should_panic(expected = "columns 3..7 leave a gap after 0 columns")]
    fn skipped_columns_panic() {
        Output::computed(21, 7, |output| add_one(output, 3..7));
    }
}
