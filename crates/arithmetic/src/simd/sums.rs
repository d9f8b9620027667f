//! The matrix kernel in floating point: the products of a tile of rows with panels of sixteen columns, in registers.
//!
//! Packed weights, attention and training all multiply with it, and differ in how they lay out rows and lines, in how deep
//! a tile is, and in what becomes of its sums. Each sum is one chain of additions in the order of the steps, whatever the
//! height and the width of the tile: so a row has the same bits in every tile.

use super::vectors::{LANES, Lanes, Line, Number, Vectors};

/// The values of a tile's rows, step by step.
pub(crate) trait Rows<R, const ROWS: usize> {
    fn steps(&self) -> usize;

    fn value(&self, step: usize, row: usize) -> R;
}

/// Rows laid out step by step.
pub(crate) struct Interleaved<'a, R, const ROWS: usize>(&'a [[R; ROWS]]);

impl<'a, R, const ROWS: usize> Interleaved<'a, R, ROWS> {
    /// Of `steps` steps.
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

/// Rows in one piece each.
pub(crate) struct Apart<'a, R, const ROWS: usize>([&'a [R]; ROWS]);

impl<'a, R, const ROWS: usize> Apart<'a, R, ROWS> {
    /// Of `steps` steps.
    #[inline(always)]
    pub(crate) fn new(mut rows: [&'a [R]; ROWS], steps: usize) -> Self {
        for row in &mut rows {
            *row = &row[..steps];
        }
        Self(rows)
    }
}

impl<R: Copy, const ROWS: usize> Rows<R, ROWS> for Apart<'_, R, ROWS> {
    #[inline(always)]
    fn steps(&self) -> usize {
        self.0[0].len()
    }

    #[inline(always)]
    fn value(&self, step: usize, row: usize) -> R {
        self.0[row][step]
    }
}

/// Sixteen columns of a panel at one step, as memory holds them.
pub(crate) trait PanelLine<V: Vectors> {
    fn load(&self, v: V) -> V::Vector;
}

impl<V: Vectors> PanelLine<V> for Line<[V::Real; LANES]> {
    #[inline(always)]
    fn load(&self, v: V) -> V::Vector {
        v.load(&self.0)
    }
}

/// The sums of a tile.
pub(crate) type Sums<V, const ROWS: usize, const PANELS: usize> = [[<V as Vectors>::Vector; PANELS]; ROWS];

/// For each row and panel the sum over all steps of the row's value times the panel's line, added to `sums`. All panels have a line
/// for each step.
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
        // One length for all, which the compiler then need not check at each step.
        *panel = &panel[..steps];
    }
    if ROWS < V::ROWS_IN_HALVES {
        return pass(v, Lanes::All, sums, rows, &panels, steps);
    }
    sums = pass(v, Lanes::FirstHalf, sums, rows, &panels, steps);
    pass(v, Lanes::SecondHalf, sums, rows, &panels, steps)
}

/// A pass over all steps, for some of the lanes.
#[inline(always)]
fn pass<V, L, R, const ROWS: usize, const PANELS: usize>(
    v: V,
    lanes: Lanes,
    mut sums: Sums<V, ROWS, PANELS>,
    rows: &R,
    panels: &[&[L]; PANELS],
    steps: usize,
) -> Sums<V, ROWS, PANELS>
where
    V: Vectors,
    L: PanelLine<V>,
    R: Rows<V::Real, ROWS>,
{
    for step in 0..steps {
        let mut lines = [v.splat(V::Real::ZERO); PANELS];
        for panel in 0..PANELS {
            lines[panel] = panels[panel][step].load(v);
        }
        for row in 0..ROWS {
            let value = v.splat(rows.value(step, row));
            for panel in 0..PANELS {
                sums[row][panel] = v.mul_add_in(lanes, value, lines[panel], sums[row][panel]);
            }
        }
    }
    sums
}

/// The same from zero.
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

/// The sums of a tile in memory: registers cannot be indexed by a number that is known at run time only.
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
