//! Embedding lookup and its gradient.

use crate::simd::Real;
use crate::threads::{Parts, computed_in_parts};

/// Rows per part of the output.
const PART_ROWS: usize = 16;

/// Gathers the table rows at the indices `places`; each row has `width` values.
pub(super) fn rows<T: Real>(table: &[T], width: usize, places: &[usize]) -> Vec<T> {
    if width == 0 {
        return Vec::new();
    }
    let parts = Parts { row_len: width, rows: PART_ROWS, columns: width };
    computed_in_parts(places.len() * width, parts, |mut part| {
        for index in 0..part.rows() {
            let place = places[part.first_row + index];
            part.row(index).copy_from_slice(&table[place * width..(place + 1) * width]);
        }
    })
}

/// Adds each row of `values`, in order, to the table row at the matching index in `places`.
pub(super) fn add_rows<T: Real>(table: &mut [T], width: usize, places: &[usize], values: &[T]) {
    assert!(
        values.len() == places.len() * width,
        "{} values do not form {} rows of the table's width",
        values.len(),
        places.len()
    );
    for (place, values) in places.iter().zip(values.chunks_exact(width.max(1))) {
        let row = &mut table[place * width..(place + 1) * width];
        for (sum, value) in row.iter_mut().zip(values) {
            *sum += *value;
        }
    }
}
