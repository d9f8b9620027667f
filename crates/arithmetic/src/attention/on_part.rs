//! Attention for one head's queries over a part of 256 keys: scores, softmax and weighted values.
//!
//! A part yields its largest score, the sum of the exponentials relative to that score, and the values
//! weighted by those exponentials. Parts are merged sequentially, as in online softmax (Milakov and
//! Gimelshein, arXiv:1805.02867). Part boundaries depend on the key index alone, and each sum is one chain.
//! A query's result is therefore bit-identical whichever queries it is computed with.

use std::ops::Range;

use super::format::{Format, value_panels};
use super::softmax::{exponentials, largest};
use super::units::KvHead;
use crate::fetch::{AHEAD, fetch};
use crate::simd::Sums;
use crate::simd::{Job, LANES, Simd, TileJob, tile_height};

/// Keys per part.
///
/// A part is small enough that its keys and values, and the scores of 48 queries, stay in the nearer caches.
/// In a long context, it also lets several threads share one head.
pub(super) const PART_KEYS: usize = 256;
/// Maximum number of queries in a tile that streams keys and values from memory with prefetching.
const FETCHED_ROWS: usize = 2;

/// Scores of one query for the keys of a part.
pub(super) type PartScores = [f32; PART_KEYS];

/// Returns the range of a part's keys that a query sees.
#[inline(always)]
pub(super) fn seen_of_part(visible: &Range<usize>, part: usize) -> Range<usize> {
    let first = (part * PART_KEYS).max(visible.start);
    first..visible.end.min((part + 1) * PART_KEYS).max(first)
}

/// Length of a partial softmax result: weighted values, largest score and sum of weights.
#[inline(always)]
pub(super) const fn result_len(value_dim: usize) -> usize {
    value_dim + 2
}

/// Queries in one tile, together with the part of the keys that they attend to.
pub(super) struct OnPart<'a, F: Format> {
    pub(super) head: KvHead<'a, F>,
    /// Contiguous queries in the product format.
    pub(super) queries: &'a [F::Query],
    /// Visible range of keys for each query.
    pub(super) visible: &'a [Range<usize>],
    pub(super) scale: f32,
    pub(super) part: usize,
}

/// Job that computes the partial results of all queries, [`result_len`] values each.
///
/// The result of a query that sees no key in the part is unspecified. The job is a separate function, shared
/// by both ways of dividing the work.
pub(super) struct Results<'a, 'b, F: Format> {
    pub(super) on: OnPart<'a, F>,
    /// Scratch memory for each query's scores.
    pub(super) scores: &'b mut [PartScores],
    pub(super) results: &'b mut [f32],
}

impl<F: Format> Job for Results<'_, '_, F> {
    type Output = ();
    const MULTIPLIES_BYTES: bool = F::MULTIPLIES_BYTES;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        self.on.run(simd, self.scores, self.results);
    }
}

impl<F: Format> OnPart<'_, F> {
    #[inline(always)]
    fn run<S: Simd>(&self, simd: S, scores: &mut [PartScores], results: &mut [f32]) {
        let first_key = self.part * PART_KEYS;
        let (mut first, mut end) = (usize::MAX, 0);
        for visible in self.visible {
            let seen = seen_of_part(visible, self.part);
            if !seen.is_empty() {
                first = first.min(seen.start);
                end = end.max(seen.end);
            }
        }
        if first >= end {
            return;
        }
        let panels = (first - first_key) / LANES..(end - first_key).div_ceil(LANES);
        F::in_tile(simd, self.visible.len(), Scores { on: self, panels, scores });

        let value_dim = self.head.value_dim;
        for query in 0..self.visible.len() {
            let seen = seen_of_part(&self.visible[query], self.part);
            let scores = &mut scores[query];
            if seen.is_empty() {
                scores[first - first_key..end - first_key].fill(0.0);
                continue;
            }
            scores[first - first_key..seen.start - first_key].fill(0.0);
            scores[seen.end - first_key..end - first_key].fill(0.0);
            let scores = &mut scores[seen.start - first_key..seen.end - first_key];
            let largest = largest(simd, scores);
            // If every score in this part is -inf, exponentials relative to -inf would be NaN, even if
            // another part has a finite score.
            let shift = if largest == f32::NEG_INFINITY { 0.0 } else { largest };
            let sum = exponentials(simd, scores, shift);
            let numbers = &mut results[query * result_len(value_dim) + value_dim..];
            numbers[0] = largest;
            numbers[1] = sum;
        }

        // Integer tiles may be taller than float tiles.
        let mut row = 0;
        while row < self.visible.len() {
            let rows = row..self.visible.len().min(row + S::TILE_ROWS);
            row = rows.end;
            simd.in_tile(
                tile_height(rows.len(), S::TILE_ROWS),
                Contexts { on: self, rows, keys: first..end, scores, results },
            );
        }
        // A tile's sums include, with a weight of zero, values that only its other queries see. That changes
        // nothing if those values are finite.
        for query in 0..self.visible.len() {
            let keys = seen_of_part(&self.visible[query], self.part);
            let mut is_finite = true;
            for index in 0..value_dim {
                is_finite &= results[query * result_len(value_dim) + index].is_finite();
            }
            if !is_finite && !keys.is_empty() && keys != (first..end) {
                simd.in_tile(1, Contexts { on: self, rows: query..query + 1, keys, scores, results });
            }
        }
    }
}

/// Job that scores a tile of queries against the keys in a range of the part's panels.
struct Scores<'a, 'b, F: Format> {
    on: &'a OnPart<'a, F>,
    panels: Range<usize>,
    scores: &'b mut [PartScores],
}

impl<S: Simd, F: Format> TileJob<S> for Scores<'_, '_, F> {
    type Output = ();

    #[inline(always)]
    fn run<const ROWS: usize, const PANELS: usize>(mut self, simd: S) {
        let mut panel = self.panels.start;
        while panel + PANELS <= self.panels.end {
            self.panels::<S, ROWS, PANELS>(simd, panel);
            panel += PANELS;
        }
        while panel < self.panels.end {
            self.panels::<S, ROWS, 1>(simd, panel);
            panel += 1;
        }
    }
}

impl<F: Format> Scores<'_, '_, F> {
    #[inline(always)]
    fn panels<S: Simd, const ROWS: usize, const PANELS: usize>(&mut self, simd: S, panel: usize) {
        let OnPart { head, queries, visible, part, .. } = self.on;
        let query_len = queries.len() / visible.len();
        let mut rows: [&[F::Query]; ROWS] = [&[]; ROWS];
        for row in 0..ROWS {
            // Tile rows past the last query repeat that query.
            rows[row] = &queries[row.min(visible.len() - 1) * query_len..][..query_len];
        }
        let first_panel = part * (PART_KEYS / LANES) + panel;
        let mut keys: [&[F::Unit]; PANELS] = [&[]; PANELS];
        for index in 0..PANELS {
            keys[index] = &head.keys[(first_panel + index) * head.key_panel_len..][..head.key_panel_len];
        }
        if ROWS <= FETCHED_ROWS {
            for index in 0..PANELS {
                fetch(keys[index], AHEAD);
                // Prefetches the same tokens' values while the keys are read.
                let line = (first_panel + index) * LANES * F::VALUE_LINE;
                for of_panel in 0..value_panels(head.value_dim) {
                    let values = &head.values[of_panel * head.value_panel_len + line..];
                    fetch(&values[..LANES * F::VALUE_LINE], 0);
                }
            }
        }
        let sums: Sums<S, ROWS, PANELS> = F::scores(simd, rows, keys);
        let scale = simd.splat(self.on.scale);
        for row in 0..ROWS.min(visible.len()) {
            for index in 0..PANELS {
                if let Some(scores) = self.scores[row][(panel + index) * LANES..].first_chunk_mut() {
                    simd.store(simd.mul(sums[row][index], scale), scores);
                }
            }
        }
    }
}

/// Job that computes weighted sums over a range of the part's values, for a range of queries.
struct Contexts<'a, 'b, F: Format> {
    on: &'a OnPart<'a, F>,
    rows: Range<usize>,
    keys: Range<usize>,
    scores: &'b [PartScores],
    results: &'b mut [f32],
}

impl<S: Simd, F: Format> TileJob<S> for Contexts<'_, '_, F> {
    type Output = ();

    #[inline(always)]
    fn run<const ROWS: usize, const PANELS: usize>(mut self, simd: S) {
        let panels = value_panels(self.on.head.value_dim);
        let mut panel = 0;
        while panel + PANELS <= panels {
            self.panels::<S, ROWS, PANELS>(simd, panel);
            panel += PANELS;
        }
        while panel < panels {
            self.panels::<S, ROWS, 1>(simd, panel);
            panel += 1;
        }
    }
}

impl<F: Format> Contexts<'_, '_, F> {
    #[inline(always)]
    fn panels<S: Simd, const ROWS: usize, const PANELS: usize>(&mut self, simd: S, panel: usize) {
        let OnPart { head, part, .. } = self.on;
        let (first, depth) = (self.keys.start - part * PART_KEYS, self.keys.end - self.keys.start);
        let mut rows: [&[f32]; ROWS] = [&[]; ROWS];
        for row in 0..ROWS {
            let query = (self.rows.start + row).min(self.rows.end - 1);
            rows[row] = &self.scores[query][first..first + depth];
        }
        let mut values: [&[F::Unit]; PANELS] = [&[]; PANELS];
        for index in 0..PANELS {
            let line = (panel + index) * head.value_panel_len + self.keys.start * F::VALUE_LINE;
            values[index] = &head.values[line..][..depth * F::VALUE_LINE];
        }
        let sums: Sums<S, ROWS, PANELS> = F::weighted(simd, rows, values);
        for row in 0..ROWS {
            if row < self.rows.end - self.rows.start {
                let start = (self.rows.start + row) * result_len(head.value_dim);
                let context = &mut self.results[start..start + head.value_dim];
                for index in 0..PANELS {
                    simd.store_first(sums[row][index], &mut context[(panel + index) * LANES..]);
                }
            }
        }
    }
}

/// Merges a query's partial result for one part into its result for the preceding parts.
#[inline(always)]
pub(super) fn merge<S: Simd>(simd: S, total: &mut [f32], part: &[f32]) {
    let value_dim = total.len() - 2;
    let (values, numbers) = total.split_at_mut(value_dim);
    let (part_values, part_numbers) = part[..value_dim + 2].split_at(value_dim);
    let highest = if numbers[0] > part_numbers[0] { numbers[0] } else { part_numbers[0] };
    // If every score so far is -inf, no key has a weight.
    let shift = if highest == f32::NEG_INFINITY { 0.0 } else { highest };
    let (before, after) =
        (simd.exp(simd.splat(numbers[0] - shift)), simd.exp(simd.splat(part_numbers[0] - shift)));
    numbers[1] = simd.largest(before) * numbers[1] + simd.largest(after) * part_numbers[1];
    numbers[0] = highest;
    for first in (0..value_dim).step_by(LANES) {
        let end = value_dim.min(first + LANES);
        let part = simd.mul(after, simd.load_first(&part_values[first..end], 0.0));
        let total = simd.load_first(&values[first..end], 0.0);
        simd.store_first(simd.mul_add(before, total, part), &mut values[first..end]);
    }
}

/// Computes a query's attention from its merged result for all parts.
#[inline(always)]
pub(super) fn finish<S: Simd>(simd: S, total: &[f32], context: &mut [f32]) {
    let inverse_sum = simd.splat(total[context.len() + 1].recip());
    for first in (0..context.len()).step_by(LANES) {
        let end = context.len().min(first + LANES);
        let values = simd.load_first(&total[first..end], 0.0);
        simd.store_first(simd.mul(values, inverse_sum), &mut context[first..end]);
    }
}
