//! Many queries: a prompt, or a piece of one after a cache.
//!
//! Queries go in tiles of as many as fill the registers. Keys and values are laid out once in panels of 16, as packed weights
//! are, and a tile computes its scores, their softmax and the weighted sum while they are in the nearest caches.

use std::ops::Range;
use std::slice::Chunks;

use super::element::Element;
use super::heads::{Head, Heads};
use super::softmax::{exponentials, largest};
use crate::simd::{InstructionSet, Job, LANES, Line, MAX_TILE_ROWS, Simd, TileJob, tile_height};
use crate::threads::{Part, Parts, computed_in_parts};
use crate::tile::{Apart, Sums, sum_products};

/// Queries of a part: few enough that there is work for many threads, many enough to use the keys while they are near.
const PART_QUERIES: usize = 48;
/// Panels of keys that are packed in one part.
const PACK_PANELS: usize = 8;

/// Returns `(B, T, H, Dv)`; there is at least one value, and each query sees at least one key.
pub(super) fn attention<E: Element>(
    q: &Heads<'_>,
    k: &Heads<'_, E>,
    v: &Heads<'_, E>,
    scale: f32,
    visible: &[Range<usize>],
    instructions: InstructionSet,
) -> Vec<f32> {
    let row_len = q.heads * v.head_dim;
    let (key_panels, value_panels) = (pack_keys(k, instructions), pack_values(v, instructions));
    let parts = Parts { row_len, rows: PART_QUERIES, columns: v.head_dim };
    computed_in_parts(q.rows.len() * q.tokens * row_len, parts, |part| {
        instructions.run(ManyQueries {
            q,
            key_len: k.tokens,
            value_dim: v.head_dim,
            key_panels: &key_panels,
            value_panels: &value_panels,
            scale,
            visible,
            part,
        });
    })
}

/// For each batch row and head the keys in panels of 16: input by input the 16 keys.
fn pack_keys<E: Element>(k: &Heads<'_, E>, instructions: InstructionSet) -> Vec<Line<[f32; LANES]>> {
    let panels = k.tokens.div_ceil(LANES);
    let row_len = panels * k.head_dim;
    if row_len == 0 {
        return Vec::new();
    }
    let parts = Parts { row_len, rows: 1, columns: PACK_PANELS * k.head_dim };
    computed_in_parts(k.rows.len() * k.heads * row_len, parts, |mut part| {
        let (batch, head) = (part.first_row / k.heads, part.first_row % k.heads);
        let first_panel = part.first_column / k.head_dim;
        instructions.run(PackKeys { k: k.head(batch, head), first_panel, panels: part.row(0) });
    })
}

/// For each batch row and head the values in panels of 16 columns: key by key.
fn pack_values<E: Element>(v: &Heads<'_, E>, instructions: InstructionSet) -> Vec<Line<[f32; LANES]>> {
    let row_len = v.head_dim.div_ceil(LANES) * v.tokens;
    if row_len == 0 {
        return Vec::new();
    }
    let parts = Parts { row_len, rows: 1, columns: v.tokens };
    computed_in_parts(v.rows.len() * v.heads * row_len, parts, |mut part| {
        let (batch, head) = (part.first_row / v.heads, part.first_row % v.heads);
        let column = part.first_column / v.tokens * LANES;
        instructions.run(PackValues { v: v.head(batch, head), column, panel: part.row(0) });
    })
}

/// Some panels of the keys of one head.
struct PackKeys<'a, E> {
    k: Head<'a, E>,
    first_panel: usize,
    panels: &'a mut [Line<[f32; LANES]>],
}

impl<E: Element> Job for PackKeys<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { k, first_panel, panels } = self;
        for (index, panel) in panels.chunks_mut(k.head_dim).enumerate() {
            let first_key = (first_panel + index) * LANES;
            for key in first_key..k.tokens.min(first_key + LANES) {
                for (inputs, lines) in k.row(key).chunks(LANES).zip(panel.chunks_mut(LANES)) {
                    for (input, line) in first_sixteen(simd, inputs).iter().zip(lines) {
                        line.0[key - first_key] = *input;
                    }
                }
            }
        }
    }
}

/// One panel of the values of one head, from `column` on.
struct PackValues<'a, E> {
    v: Head<'a, E>,
    column: usize,
    panel: &'a mut [Line<[f32; LANES]>],
}

impl<E: Element> Job for PackValues<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (key, line) in self.panel.iter_mut().take(self.v.tokens).enumerate() {
            line.0 = first_sixteen(simd, &self.v.row(key)[self.column..]);
        }
    }
}

/// The first sixteen values in f32, filled up with zeros where there are fewer.
#[inline(always)]
fn first_sixteen<S: Simd, E: Element>(simd: S, values: &[E]) -> [f32; LANES] {
    let mut sixteen = [0.0; LANES];
    if let Some(values) = values.first_chunk() {
        simd.store(E::load(simd, values), &mut sixteen);
    } else {
        for (value, to) in values.iter().zip(&mut sixteen) {
            *to = value.to_f32();
        }
    }
    sixteen
}

/// Attention of some queries in one head.
struct ManyQueries<'a, 'b> {
    q: &'a Heads<'a>,
    key_len: usize,
    value_dim: usize,
    key_panels: &'a [Line<[f32; LANES]>],
    value_panels: &'a [Line<[f32; LANES]>],
    scale: f32,
    visible: &'a [Range<usize>],
    part: Part<'b, f32>,
}

impl Job for ManyQueries<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let Heads { heads, tokens, head_dim, .. } = *self.q;
        let head = self.part.first_column / self.value_dim;
        let (first, rows) = (self.part.first_row, self.part.rows());
        let score_len = self.key_len.next_multiple_of(LANES);
        let mut scores = vec![0.0; S::TILE_ROWS * score_len];
        let mut row = 0;
        while row < rows {
            let (batch, token) = ((first + row) / tokens, (first + row) % tokens);
            // A tile does not reach into the next row of the batch.
            let queries = S::TILE_ROWS.min(rows - row).min(tokens - token);
            let height = tile_height(queries, S::TILE_ROWS);
            let visible = &self.visible[first + row..first + row + queries];
            let (mut first_visible, mut end_visible) = (usize::MAX, 0);
            for keys in visible {
                first_visible = first_visible.min(keys.start);
                end_visible = end_visible.max(keys.end);
            }
            let key_panels = self.key_len.div_ceil(LANES) * head_dim;
            let value_panels = self.value_dim.div_ceil(LANES) * self.key_len;
            let position = batch * heads + head;

            let of_keys = Scores {
                q: self.q.head(batch, head),
                token,
                queries,
                keys: &self.key_panels[position * key_panels..(position + 1) * key_panels],
                panels: (first_visible / LANES, end_visible.div_ceil(LANES)),
                scale: self.scale,
                scores: &mut scores,
                score_len,
            };
            simd.in_tile(height, of_keys);

            let mut inverse_sums = [0.0; MAX_TILE_ROWS];
            for (query, keys) in visible.iter().enumerate() {
                let scores = &mut scores[query * score_len..][..end_visible];
                let (seen, hidden) = scores.split_at_mut(keys.end);
                let (hidden_before, seen) = seen.split_at_mut(keys.start);
                hidden_before[first_visible..].fill(0.0);
                inverse_sums[query] = {
                    let shift = largest(simd, seen);
                    exponentials(simd, seen, shift).recip()
                };
                hidden.fill(0.0);
            }

            let values = &self.value_panels[position * value_panels..(position + 1) * value_panels];
            let of_values = Contexts {
                weights: &scores,
                score_len,
                seen: (first_visible, end_visible),
                values,
                panel_len: self.key_len,
                inverse_sums: &inverse_sums[..queries],
                part: &mut self.part,
                row,
            };
            simd.in_tile(height, of_values);
            for (query, keys) in visible.iter().enumerate() {
                let context = self.part.row(row + query);
                if context.iter().any(|value| !value.is_finite()) {
                    let scores = &scores[query * score_len..][..end_visible];
                    let panels = values.chunks(self.key_len);
                    weigh_visible(simd, scores, keys, inverse_sums[query], panels, context);
                }
            }
            row += queries;
        }
    }
}

/// The weighted sum of the values that one query sees. The products of a tile also have the values that others of its
/// queries see, with weights of zero; that is the same where those values are finite.
#[inline(always)]
fn weigh_visible<S: Simd>(
    simd: S,
    weights: &[f32],
    keys: &Range<usize>,
    inverse_sum: f32,
    panels: Chunks<'_, Line<[f32; LANES]>>,
    context: &mut [f32],
) {
    for (panel, context) in panels.zip(context.chunks_mut(LANES)) {
        let mut sums = simd.splat(0.0);
        for (weight, values) in weights[keys.clone()].iter().zip(&panel[keys.clone()]) {
            sums = simd.mul_add(simd.splat(*weight), simd.load(&values.0), sums);
        }
        simd.store_first(simd.mul(sums, simd.splat(inverse_sum)), context);
    }
}

/// The scores of a tile of queries with the keys of some panels.
struct Scores<'a, 'b> {
    q: Head<'a>,
    /// The first query, and how many there are.
    token: usize,
    queries: usize,
    /// The panels of all keys, and which of them are seen: first and end.
    keys: &'a [Line<[f32; LANES]>],
    panels: (usize, usize),
    scale: f32,
    /// For each row of the tile `score_len` scores.
    scores: &'b mut [f32],
    score_len: usize,
}

impl<S: Simd> TileJob<S> for Scores<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<const ROWS: usize, const PANELS: usize>(mut self, simd: S) {
        let (mut panel, end) = self.panels;
        while panel + PANELS <= end {
            self.panels::<S, ROWS, PANELS>(simd, panel);
            panel += PANELS;
        }
        while panel < end {
            self.panels::<S, ROWS, 1>(simd, panel);
            panel += 1;
        }
    }
}

impl Scores<'_, '_> {
    #[inline(always)]
    fn panels<S: Simd, const ROWS: usize, const PANELS: usize>(&mut self, simd: S, panel: usize) {
        let depth = self.q.head_dim;
        let mut rows: [&[f32]; ROWS] = [&[]; ROWS];
        for row in 0..ROWS {
            // The last query stands in for those after it.
            rows[row] = self.q.row(self.token + row.min(self.queries - 1));
        }
        let mut lines: [&[Line<[f32; LANES]>]; PANELS] = [&[]; PANELS];
        for index in 0..PANELS {
            lines[index] = &self.keys[(panel + index) * depth..][..depth];
        }
        let sums: Sums<S, ROWS, PANELS> = sum_products(simd, &Apart::new(rows, depth), lines);
        let scale = simd.splat(self.scale);
        for row in 0..ROWS {
            for index in 0..PANELS {
                let start = row * self.score_len + (panel + index) * LANES;
                if let Some(scores) = self.scores[start..].first_chunk_mut() {
                    simd.store(simd.mul(sums[row][index], scale), scores);
                }
            }
        }
    }
}

/// The weighted sums of the values that a tile of queries sees.
struct Contexts<'a, 'b, 'c> {
    /// For each query `score_len` weights.
    weights: &'a [f32],
    score_len: usize,
    /// The first key that one of the queries sees, and the end of them.
    seen: (usize, usize),
    /// The panels of the values, each `panel_len` long.
    values: &'a [Line<[f32; LANES]>],
    panel_len: usize,
    /// What the sums of each query are multiplied by.
    inverse_sums: &'a [f32],
    part: &'b mut Part<'c, f32>,
    /// Row of the first query in the part.
    row: usize,
}

impl<S: Simd> TileJob<S> for Contexts<'_, '_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<const ROWS: usize, const PANELS: usize>(mut self, simd: S) {
        let panels = self.values.len() / self.panel_len;
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

impl Contexts<'_, '_, '_> {
    #[inline(always)]
    fn panels<S: Simd, const ROWS: usize, const PANELS: usize>(&mut self, simd: S, panel: usize) {
        let queries = self.inverse_sums.len();
        let (first, end) = self.seen;
        let depth = end - first;
        let mut rows: [&[f32]; ROWS] = [&[]; ROWS];
        for row in 0..ROWS {
            rows[row] = &self.weights[row.min(queries - 1) * self.score_len + first..][..depth];
        }
        let mut lines: [&[Line<[f32; LANES]>]; PANELS] = [&[]; PANELS];
        for index in 0..PANELS {
            lines[index] = &self.values[(panel + index) * self.panel_len + first..][..depth];
        }
        let sums: Sums<S, ROWS, PANELS> = sum_products(simd, &Apart::new(rows, depth), lines);
        for row in 0..ROWS {
            if row < queries {
                let context = self.part.row(self.row + row);
                let inverse_sum = simd.splat(self.inverse_sums[row]);
                for index in 0..PANELS {
                    let context = &mut context[(panel + index) * LANES..];
                    simd.store_first(simd.mul(sums[row][index], inverse_sum), context);
                }
            }
        }
    }
}
