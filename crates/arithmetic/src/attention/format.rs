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
    /// Element type of the memory.
    type Unit: ZeroBits + Default + Send + Sync;
    /// Element type of queries in products: an input, or a group of inputs.
    type Query: Copy + Default + Send + Sync;
    /// Inputs in an element of a query, and inputs of each key in a line of a panel.
    const KEY_INPUTS: usize;
    /// Units of a line of keys.
    const KEY_LINE: usize;
    /// Units of a line of values: 16 columns of one token.
    const VALUE_LINE: usize;
    /// Whether scores are products of bytes.
    #[allow(dead_code, reason = "unused unless an instruction set can multiply bytes in two ways")]
    const MULTIPLIES_BYTES: bool = false;

    /// Converts a query to the product format.
    fn arrange<S: Simd>(simd: S, query: &[f32], to: &mut [Self::Query]);

    /// Writes a key, rounded, to a lane of a panel.
    fn write_key<S: Simd>(simd: S, key: &[f32], panel: &mut [Self::Unit], lane: usize);

    /// Writes up to 16 columns of a value, rounded, to a line.
    fn write_value<S: Simd>(simd: S, columns: &[f32], line: &mut [Self::Unit]);

    /// Reads the key in a lane of a panel.
    fn read_key(panel: &[Self::Unit], lane: usize, to: &mut [f32]);

    /// Reads the first columns of a line.
    fn read_value(line: &[Self::Unit], to: &mut [f32]);

    /// Runs a job for a tile of queries of the best available height.
    fn in_tile<S: Simd, J: TileJob<S>>(simd: S, queries: usize, job: J) -> J::Output;

    /// Queries of the tallest tile.
    fn tile_rows<S: Simd>() -> usize;

    /// Computes the products of the queries with the keys of some panels.
    ///
    /// All slices hold whole queries and panels.
    fn scores<S: Simd, const ROWS: usize, const PANELS: usize>(
        simd: S,
        queries: [&[Self::Query]; ROWS],
        panels: [&[Self::Unit]; PANELS],
    ) -> Sums<S, ROWS, PANELS>;

    /// Computes the weighted sums of the lines of some panels of values.
    ///
    /// Each row has one weight for each line.
    fn weighted<S: Simd, const ROWS: usize, const PANELS: usize>(
        simd: S,
        weights: [&[f32]; ROWS],
        panels: [&[Self::Unit]; PANELS],
    ) -> Sums<S, ROWS, PANELS>;
}

/// Number of lines for the inputs of a key.
#[inline(always)]
pub(super) const fn key_lines<F: Format>(head_dim: usize) -> usize {
    head_dim.div_ceil(F::KEY_INPUTS)
}

/// Number of panels of values.
#[inline(always)]
pub(super) const fn value_panels(value_dim: usize) -> usize {
    value_dim.div_ceil(LANES)
}
