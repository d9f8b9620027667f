//! How a memory may hold keys and values: what a format has to say.
//!
//! Keys lie in panels of 16 keys: input by input, or group of inputs by group, those of all 16, as packed weights do. So a
//! score is one chain of additions in the order of the inputs, whatever the number of queries. Values lie in panels of 16
//! columns: token by token the 16 of each, so that a weighted sum is one chain in the order of the keys.

use crate::large_pages::ZeroBits;
use crate::simd::Sums;
use crate::simd::{LANES, Simd, TileJob};

/// A format of keys and values.
pub(crate) trait Format: 'static {
    /// What its memory consists of.
    type Unit: ZeroBits + Default + Send + Sync;
    /// What products take of a query: an input, or a group of them.
    type Query: Copy + Default + Send + Sync;
    /// Inputs of an element of a query: the number that a line of a panel of keys holds of each key.
    const KEY_INPUTS: usize;
    /// Units of such a line.
    const KEY_LINE: usize;
    /// Units of a line of values: 16 columns of one token.
    const VALUE_LINE: usize;
    /// Whether scores are products of bytes.
    #[allow(dead_code, reason = "only instruction sets that multiply bytes in two ways ask")]
    const MULTIPLIES_BYTES: bool = false;

    /// Brings a query into the form that products take.
    fn arrange<S: Simd>(simd: S, query: &[f32], to: &mut [Self::Query]);

    /// Writes a key, rounded, to a lane of a panel.
    fn write_key<S: Simd>(simd: S, key: &[f32], panel: &mut [Self::Unit], lane: usize);

    /// Writes up to 16 columns of a value, rounded, to a line.
    fn write_value<S: Simd>(simd: S, columns: &[f32], line: &mut [Self::Unit]);

    /// The key in a lane of a panel.
    fn read_key(panel: &[Self::Unit], lane: usize, to: &mut [f32]);

    /// The first columns of a line.
    fn read_value(line: &[Self::Unit], to: &mut [f32]);

    /// Runs a job for a tile of queries that is as high as there is a height for.
    fn in_tile<S: Simd, J: TileJob<S>>(simd: S, queries: usize, job: J) -> J::Output;

    /// Queries of the highest tile.
    fn tile_rows<S: Simd>() -> usize;

    /// The products of the queries with the keys of some panels. All slices hold whole queries and panels.
    fn scores<S: Simd, const ROWS: usize, const PANELS: usize>(
        simd: S,
        queries: [&[Self::Query]; ROWS],
        panels: [&[Self::Unit]; PANELS],
    ) -> Sums<S, ROWS, PANELS>;

    /// The sums of the lines of some panels of values, weighted for each row with as many weights as there are lines.
    fn weighted<S: Simd, const ROWS: usize, const PANELS: usize>(
        simd: S,
        weights: [&[f32]; ROWS],
        panels: [&[Self::Unit]; PANELS],
    ) -> Sums<S, ROWS, PANELS>;
}

/// Lines that the inputs of a key take.
#[inline(always)]
pub(super) const fn key_lines<F: Format>(head_dim: usize) -> usize {
    head_dim.div_ceil(F::KEY_INPUTS)
}

/// Panels of values.
#[inline(always)]
pub(super) const fn value_panels(value_dim: usize) -> usize {
    value_dim.div_ceil(LANES)
}
