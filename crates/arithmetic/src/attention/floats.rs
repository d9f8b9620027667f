//! Floating-point storage of keys and values.

use std::marker::PhantomData;

use super::format::Format;
use crate::element::Element;
use crate::simd::{LANES, Simd, TileJob, tile_height};
use crate::simd::{SeparateRows, Sums, sum_products};

/// Format that stores elements as f32 or as the bits of an f16.
pub(super) struct Floats<E>(PhantomData<E>);

impl<E: Element> Format for Floats<E> {
    type Unit = E;
    type Query = f32;
    const KEY_INPUTS: usize = 1;
    const KEY_LINE: usize = LANES;
    const VALUE_LINE: usize = LANES;

    #[inline(always)]
    fn arrange<S: Simd>(_: S, query: &[f32], to: &mut [f32]) {
        to.copy_from_slice(query);
    }

    #[inline(always)]
    fn write_key<S: Simd>(simd: S, key: &[f32], panel: &mut [E], lane: usize) {
        for first in (0..key.len()).step_by(LANES) {
            let inputs = rounded(simd, &key[first..]);
            for index in 0..LANES.min(key.len() - first) {
                panel[(first + index) * LANES + lane] = inputs[index];
            }
        }
    }

    #[inline(always)]
    fn write_value<S: Simd>(simd: S, columns: &[f32], line: &mut [E]) {
        line.copy_from_slice(&rounded(simd, columns));
    }

    fn read_key(panel: &[E], lane: usize, to: &mut [f32]) {
        for (line, to) in panel.chunks(LANES).zip(to) {
            *to = line[lane].to_f32();
        }
    }

    fn read_value(line: &[E], to: &mut [f32]) {
        for (value, to) in line.iter().zip(to) {
            *to = value.to_f32();
        }
    }

    #[inline(always)]
    fn in_tile<S: Simd, J: TileJob<S>>(simd: S, queries: usize, job: J) -> J::Output {
        simd.in_tile(tile_height(queries, S::TILE_ROWS), job)
    }

    #[inline(always)]
    fn tile_rows<S: Simd>() -> usize {
        S::TILE_ROWS
    }

    #[inline(always)]
    fn scores<S: Simd, const ROWS: usize, const PANELS: usize>(
        simd: S,
        queries: [&[f32]; ROWS],
        panels: [&[E]; PANELS],
    ) -> Sums<S, ROWS, PANELS> {
        sum_products(simd, &SeparateRows::new(queries, queries[0].len()), lines(panels))
    }

    #[inline(always)]
    fn weighted<S: Simd, const ROWS: usize, const PANELS: usize>(
        simd: S,
        weights: [&[f32]; ROWS],
        panels: [&[E]; PANELS],
    ) -> Sums<S, ROWS, PANELS> {
        sum_products(simd, &SeparateRows::new(weights, weights[0].len()), lines(panels))
    }
}

/// Converts the first sixteen values to storage elements, padded with zeros.
#[inline(always)]
fn rounded<S: Simd, E: Element>(simd: S, values: &[f32]) -> [E; LANES] {
    let mut sixteen = [E::default(); LANES];
    E::store(simd, simd.load_first(&values[..values.len().min(LANES)], 0.0), &mut sixteen);
    sixteen
}

/// Splits each panel into lines.
#[inline(always)]
fn lines<E: Copy, const PANELS: usize>(panels: [&[E]; PANELS]) -> [&[[E; LANES]]; PANELS] {
    let mut lines: [&[[E; LANES]]; PANELS] = [&[]; PANELS];
    for panel in 0..PANELS {
        lines[panel] = panels[panel].as_chunks().0;
    }
    lines
}
