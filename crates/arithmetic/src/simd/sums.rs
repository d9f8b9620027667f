//! Floating-point matrix kernel: multiplies a tile of rows by panels of sixteen columns.
//!
//! Packed weights, attention and training all use it. They differ in the layout of rows and lines, in the
//! depth of a tile, and in the use of its sums. Each sum is one chain of additions in step order, whatever
//! the tile's height and width. A row therefore gives the same bits in every tile.

use super::vectors::{LANES, Line, Number, Vectors};

/// Rows of a tile, with one value per row at each step along the depth.
pub(crate) trait Rows<R, const ROWS: usize> {
    fn steps(&self) -> usize;

    fn value(&self, step: usize, row: usize) -> R;
}

/// Rows stored interleaved: all rows' values for one step, then the next step.
pub(crate) struct Interleaved<'a, R, const ROWS: usize>(&'a [[R; ROWS]]);

impl<'a, R, const ROWS: usize> Interleaved<'a, R, ROWS> {
    /// Wraps interleaved values, starting with the first, for `steps` steps.
    #[inline(always)]
    pub(crate) fn new(values: &'a [R], steps: usize) -> Self {
        Self(&values.as_chunks().0[..steps])
    }
}

impl<R: Copy, const ROWS: usize> Rows<R, ROWS> for Interleaved<'_, R, ROWS> {
    #[inline(always)]
    fn steps(&self) -> usize {
        self.0.len()
    }

    #[inline(always)]
    fn value(&self, step: usize, row: usize) -> R {
        self.0[step][row]
    }
}

/// Rows stored as contiguous slices.
pub(crate) struct SeparateRows<'a, R, const ROWS: usize>([&'a [R]; ROWS]);

impl<'a, R, const ROWS: usize> SeparateRows<'a, R, ROWS> {
    /// Wraps the first `steps` values of each row.
    #[inline(always)]
    pub(crate) fn new(mut rows: [&'a [R]; ROWS], steps: usize) -> Self {
        for row in &mut rows {
            *row = &row[..steps];
        }
        Self(rows)
    }
}

impl<R: Copy, const ROWS: usize> Rows<R, ROWS> for SeparateRows<'_, R, ROWS> {
    #[inline(always)]
    fn steps(&self) -> usize {
        self.0[0].len()
    }

    #[inline(always)]
    fn value(&self, step: usize, row: usize) -> R {
        self.0[row][step]
    }
}

/// Sixteen columns of a panel at one step, as stored in memory.
pub(crate) trait PanelLine<V: Vectors> {
    fn load(&self, v: V) -> V::Vector;
}

impl<V: Vectors> PanelLine<V> for Line<[V::Real; LANES]> {
    #[inline(always)]
    fn load(&self, v: V) -> V::Vector {
        v.load(&self.0)
    }
}

/// A tile's sums, by row and panel.
pub(crate) type Sums<V, const ROWS: usize, const PANELS: usize> = [[<V as Vectors>::Vector; PANELS]; ROWS];

/// Adds the products of the rows and panels, over all steps, to `sums`.
///
/// Each product is a row value times a panel line. All panels must have a line for each step.
#[inline(always)]
pub(crate) fn add_products<V, L, R, const ROWS: usize, const PANELS: usize>(
    v: V,
    mut sums: Sums<V, ROWS, PANELS>,
    rows: &R,
    mut panels: [&[L]; PANELS],
) -> Sums<V, ROWS, PANELS>
where
    V: Vectors,
    L: PanelLine<V>,
    R: Rows<V::Real, ROWS>,
{
    let steps = rows.steps();
    for panel in &mut panels {
        // With a common length, the compiler can omit the bounds checks at each step.
        *panel = &panel[..steps];
    }
    for step in 0..steps {
        let mut lines = [v.splat(V::Real::ZERO); PANELS];
        for panel in 0..PANELS {
            lines[panel] = panels[panel][step].load(v);
        }
        for row in 0..ROWS {
            let value = v.splat(rows.value(step, row));
            for panel in 0..PANELS {
                sums[row][panel] = v.mul_add(value, lines[panel], sums[row][panel]);
            }
        }
    }
    sums
}

/// Computes [`add_products`] from zero.
#[inline(always)]
pub(crate) fn sum_products<V, L, R, const ROWS: usize, const PANELS: usize>(
    v: V,
    rows: &R,
    panels: [&[L]; PANELS],
) -> Sums<V, ROWS, PANELS>
where
    V: Vectors,
    L: PanelLine<V>,
    R: Rows<V::Real, ROWS>,
{
    add_products(v, [[v.splat(V::Real::ZERO); PANELS]; ROWS], rows, panels)
}

/// Stores the sums of a tile in memory.
///
/// Registers cannot be indexed by a number that is known only at run time, but memory can.
#[inline(always)]
pub(crate) fn stored<V: Vectors, const ROWS: usize, const PANELS: usize>(
    v: V,
    sums: &Sums<V, ROWS, PANELS>,
) -> [[Line<[V::Real; LANES]>; PANELS]; ROWS] {
    let mut computed = [[Line([V::Real::ZERO; LANES]); PANELS]; ROWS];
    for row in 0..ROWS {
        for panel in 0..PANELS {
            v.store(sums[row][panel], &mut computed[row][panel].0);
        }
    }
    computed
}
