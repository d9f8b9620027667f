//! Output of a matrix tile: accumulates sums, applies the epilogue and stores the results.

use crate::epilogue::Epilogue;
use crate::simd::{LANES, Number, Sums, Vectors, stored};
use crate::threads::Part;

/// Destination for a tile's sums over one slice of the depth.
pub(crate) struct TileOutput<'a, 'b, T> {
    pub(crate) part: &'a mut Part<'b, T>,
    /// First row of the tile within the part.
    pub(crate) row: usize,
    /// First panel of the tile within the part.
    pub(crate) panel: usize,
    /// Row length of the whole output.
    pub(crate) row_len: usize,
    /// Whether this is the first slice.
    ///
    /// Sums of later slices are added to the values in the part.
    pub(crate) is_first: bool,
    /// Epilogue to apply after the last slice.
    pub(crate) epilogue: Option<Epilogue<'a, T>>,
}

impl<T: Number> TileOutput<'_, '_, T> {
    /// Writes the sums, starting at panel `first` of the tile.
    #[inline(always)]
    pub(crate) fn write<V: Vectors<Real = T>, const ROWS: usize, const PANELS: usize>(
        &mut self,
        v: V,
        sums: &Sums<V, ROWS, PANELS>,
        first: usize,
    ) {
        let computed = stored(v, sums);
        let first_panel = self.part.first_column / LANES + self.panel + first;
        for row in 0..ROWS.min(self.part.rows() - self.row) {
            let row_start = (self.part.first_row + self.row + row) * self.row_len;
            let outputs = &mut self.part.row(self.row + row)[(self.panel + first) * LANES..];
            for index in 0..PANELS {
                let outputs = &mut outputs[index * LANES..];
                let mut values = v.load(&computed[row][index].0);
                if !self.is_first {
                    values = v.add(v.load_first(outputs, T::ZERO), values);
                }
                if let Some(epilogue) = &self.epilogue {
                    let panel = first_panel + index;
                    values = epilogue.apply(v, values, panel, row_start + panel * LANES);
                }
                v.store_first(values, outputs);
            }
        }
    }
}
