//! Many queries: a prompt, or a piece of one after a cache.
//!
//! Queries go in tiles of as many as fill the registers. Keys and values are laid out once in panels of 16, as packed weights
//! are, and a tile computes its scores, their softmax and the weighted sum while they are in the nearest caches.

use std::ops::Range;
use std::slice::Chunks;

use super::{Element, Head, Heads, exponentials, largest};
use crate::parallel::{Part, Parts, for_each_part};
use crate::simd::{InstructionSet, Job, LANES, Line, MAX_TILE_PANELS, Simd, store_first};

/// Queries of a part: few enough that there is work for many threads, many enough to use the keys while they are near.
const PART_QUERIES: usize = 48;
/// Panels of keys that are packed in one part.
const PACK_PANELS: usize = 8;
/// Rows of the highest tile.
const MAX_TILE_ROWS: usize = 12;

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
    let mut output = vec![0.0; q.rows.len() * q.tokens * row_len];
    let (key_panels, value_panels) = (pack_keys(k, instructions), pack_values(v, instructions));
    let parts = Parts { row_len, rows: PART_QUERIES, columns: v.head_dim };
    for_each_part(&mut output, parts, |part| {
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
    });
    output
}

/// For each batch row and head the keys in panels of 16: input by input the 16 keys.
fn pack_keys<E: Element>(k: &Heads<'_, E>, instructions: InstructionSet) -> Vec<Line<[f32; LANES]>> {
    let panels = k.tokens.div_ceil(LANES);
    let row_len = panels * k.head_dim;
    let mut packed = vec![Line([0.0; LANES]); k.rows.len() * k.heads * row_len];
    if row_len > 0 {
        let parts = Parts { row_len, rows: 1, columns: PACK_PANELS * k.head_dim };
        for_each_part(&mut packed, parts, |mut part| {
            let (batch, head) = (part.first_row / k.heads, part.first_row % k.heads);
            let first_panel = part.first_column / k.head_dim;
            instructions.run(PackKeys { k: k.head(batch, head), first_panel, panels: part.row(0) });
        });
    }
    packed
}

/// For each batch row and head the values in panels of 16 columns: key by key.
fn pack_values<E: Element>(v: &Heads<'_, E>, instructions: InstructionSet) -> Vec<Line<[f32; LANES]>> {
    let row_len = v.head_dim.div_ceil(LANES) * v.tokens;
    let mut packed = vec![Line([0.0; LANES]); v.rows.len() * v.heads * row_len];
    if row_len > 0 {
        let parts = Parts { row_len, rows: 1, columns: v.tokens };
        for_each_part(&mut packed, parts, |mut part| {
            let (batch, head) = (part.first_row / v.heads, part.first_row % v.heads);
            let column = part.first_column / v.tokens * LANES;
            instructions.run(PackValues { v: v.head(batch, head), column, panel: part.row(0) });
        });
    }
    packed
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
        let score_len = self.key_len.next_multiple_of(MAX_TILE_PANELS * LANES);
        let mut scores = vec![0.0; S::TILE_ROWS * score_len];
        let mut row = 0;
        while row < rows {
            let (batch, token) = ((first + row) / tokens, (first + row) % tokens);
            // A tile does not reach into the next row of the batch.
            let queries = S::TILE_ROWS.min(rows - row).min(tokens - token);
            let visible = &self.visible[first + row..first + row + queries];
            let first_visible = visible.iter().map(|keys| keys.start).min().unwrap_or(0);
            let end_visible = visible.iter().map(|keys| keys.end).max().unwrap_or(0);
            let key_panels = self.key_len.div_ceil(LANES) * head_dim;
            let value_panels = self.value_dim.div_ceil(LANES) * self.key_len;
            let position = batch * heads + head;

            let q = self.q.head(batch, head);
            let panels = &self.key_panels[position * key_panels..(position + 1) * key_panels];
            for (index, panels) in panels.chunks(head_dim * S::TILE_PANELS).enumerate() {
                let first_key = index * S::TILE_PANELS * LANES;
                if first_key >= end_visible {
                    break;
                }
                if first_key + S::TILE_PANELS * LANES <= first_visible {
                    continue;
                }
                let output = RowTile {
                    inputs: |query: usize| q.row(token + query.min(queries - 1)),
                    panels,
                    depth: head_dim,
                    panel_len: head_dim,
                };
                simd.multiply(output, |query, panel, sums| {
                    let start = query * score_len + first_key + panel * LANES;
                    if let Some(scores) = scores[start..].first_chunk_mut() {
                        simd.store(simd.mul(sums, simd.splat(self.scale)), scores);
                    }
                });
            }

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

            let panels_of_values = &self.value_panels[position * value_panels..(position + 1) * value_panels];
            for (index, panels) in panels_of_values.chunks(self.key_len * S::TILE_PANELS).enumerate() {
                let weights = |query: usize| &scores[query.min(queries - 1) * score_len..][..end_visible];
                let input = RowTile {
                    inputs: |query: usize| &weights(query)[first_visible..],
                    panels: &panels[first_visible..],
                    depth: end_visible - first_visible,
                    panel_len: self.key_len,
                };
                simd.multiply(input, |query, panel, sums| {
                    if query < queries {
                        let column = (index * S::TILE_PANELS + panel) * LANES;
                        let context = &mut self.part.row(row + query)[column..];
                        let sums = simd.mul(sums, simd.splat(inverse_sums[query]));
                        store_first(simd, sums, context);
                    }
                });
            }
            for (query, keys) in visible.iter().enumerate() {
                let context = self.part.row(row + query);
                if context.iter().any(|value| !value.is_finite()) {
                    let scores = &scores[query * score_len..][..end_visible];
                    let panels = panels_of_values.chunks(self.key_len);
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
        store_first(simd, simd.mul(sums, simd.splat(inverse_sum)), context);
    }
}

/// A product of a tile of rows, each in one piece, with one panel or as many as the tile has.
pub(crate) struct RowTile<'a, I> {
    /// The inputs of row `index` of the tile.
    inputs: I,
    /// The panels, one after the other.
    panels: &'a [Line<[f32; LANES]>],
    /// Inputs to multiply.
    depth: usize,
    /// Lines of a panel, at least `depth`.
    panel_len: usize,
}

/// Computes a tile of `ROWS` rows and up to `PANELS` panels in registers and gives each row's and panel's sums to `store`.
#[inline(always)]
pub(crate) fn multiply_rows<'r, S, I, const ROWS: usize, const PANELS: usize>(
    simd: S,
    tile: RowTile<'_, I>,
    store: impl FnMut(usize, usize, S::Floats),
) where
    S: Simd,
    I: Fn(usize) -> &'r [f32],
{
    // A tile may begin after the first lines of its panels.
    match tile.panels.len().div_ceil(tile.panel_len) {
        1 => multiply_whole_tile::<S, I, ROWS, 1>(simd, tile, store),
        _ => multiply_whole_tile::<S, I, ROWS, PANELS>(simd, tile, store),
    }
}

#[inline(always)]
fn multiply_whole_tile<'r, S, I, const ROWS: usize, const PANELS: usize>(
    simd: S,
    tile: RowTile<'_, I>,
    mut store: impl FnMut(usize, usize, S::Floats),
) where
    S: Simd,
    I: Fn(usize) -> &'r [f32],
{
    let depth = tile.depth;
    let rows: [&[f32]; ROWS] = std::array::from_fn(|row| &(tile.inputs)(row)[..depth]);
    let panels: [_; PANELS] = std::array::from_fn(|panel| &tile.panels[panel * tile.panel_len..][..depth]);
    let mut sums = [[simd.splat(0.0); PANELS]; ROWS];
    for index in 0..depth {
        let values: [_; PANELS] = std::array::from_fn(|panel| simd.load(&panels[panel][index].0));
        for row in 0..ROWS {
            let input = simd.splat(rows[row][index]);
            for panel in 0..PANELS {
                sums[row][panel] = simd.mul_add(input, values[panel], sums[row][panel]);
            }
        }
    }
    for (row, sums) in sums.into_iter().enumerate() {
        for (panel, sums) in sums.into_iter().enumerate() {
            store(row, panel, sums);
        }
    }
}
