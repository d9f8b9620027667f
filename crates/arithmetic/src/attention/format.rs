//! Storage formats of keys and values, and the trait that each format implements.
//!
//! Keys are in panels of 16. Like packed weights, a panel stores one input (or group of inputs) of all 16
//! keys, then the next. A score is thus one chain of additions in the order of the inputs, whatever the
//! number of queries. Values are in panels of 16 columns, stored token by token. A weighted sum is thus one
//! chain in the order of the keys.

use crate::large_pages::ZeroBits;
use crate::simd::Sums;
use crate::simd::{LANES, Simd, TileJob};

/// Storage format of keys and values.
pub(crate) trait Format: 'static {
    /// Element type in memory.
    type Unit: ZeroBits + Default + Send + Sync;
    /// Element type of queries in products: one input or a group of inputs.
    type Query: Copy + Default + Send + Sync;
    /// Number of inputs per query element, and per key in each line of a panel.
    const KEY_INPUTS: usize;
    /// Units per line of keys.
    const KEY_LINE: usize;
    /// Units per line of values (16 columns of one token).
    const VALUE_LINE: usize;
    /// Whether scores are computed by multiplying bytes.
    #[allow(dead_code, reason = "unused unless an instruction set can multiply bytes in two ways")]
    const MULTIPLIES_BYTES: bool = false;

    /// Converts a query to the format used in products.
    fn arrange<S: Simd>(simd: S, query: &[f32], to: &mut [Self::Query]);

    /// Rounds a key and writes it to a lane of a panel.
    fn write_key<S: Simd>(simd: S, key: &[f32], panel: &mut [Self::Unit], lane: usize);

    /// Rounds a value's columns (at most 16) and writes them to a line.
    fn write_value<S: Simd>(simd: S, columns: &[f32], line: &mut [Self::Unit]);

    /// Reads the key in a lane of a panel.
    fn read_key(panel: &[Self::Unit], lane: usize, to: &mut [f32]);

    /// Reads as many columns of a line as fit into `to`, starting with the first.
    fn read_value(line: &[Self::Unit], to: &mut [f32]);

    /// Runs a job for a tile of queries, using the best available tile height.
    fn in_tile<S: Simd, J: TileJob<S>>(simd: S, queries: usize, job: J) -> J::Output;

    /// Number of queries in the tallest tile.
    fn tile_rows<S: Simd>() -> usize;

    /// Computes the dot product of every query and every key in `panels`.
    ///
    /// All slices hold whole queries and panels.
    fn scores<S: Simd, const ROWS: usize, const PANELS: usize>(
        simd: S,
        queries: [&[Self::Query]; ROWS],
        panels: [&[Self::Unit]; PANELS],
    ) -> Sums<S, ROWS, PANELS>;

    /// Computes weighted sums over the lines of the value `panels`.
    ///
    /// Each row has one weight for each line.
    fn weighted<S: Simd, const ROWS: usize, const PANELS: usize>(
        simd: S,
        weights: [&[f32]; ROWS],
        panels: [&[Self::Unit]; PANELS],
    ) -> Sums<S, ROWS, PANELS>;
}

/// Returns the number of lines needed for one key's inputs.
#[inline(always)]
pub(super) const fn key_lines<F: Format>(head_dim: usize) -> usize {
    head_dim.div_ceil(F::KEY_INPUTS)
}

/// Returns the number of panels needed for `value_dim` columns of values.
#[inline(always)]
pub(super) const fn value_panels(value_dim: usize) -> usize {
    value_dim.div_ceil(LANES)
}
