//! Attention over keys and values in one storage format, using all threads.

use std::ops::Range;

use super::format::Format;
use super::heads::{Heads, KvSlot};
use super::on_part::{OnPart, PART_KEYS, PartScores, Results, finish, merge, result_len, seen_of_part};
use super::units::{KvSizes, Units};
use crate::simd::{InstructionSet, Job, Simd};
use crate::threads::{Part, Parts, computed_in_parts, thread_count};

/// Queries per work item.
///
/// This is small enough to keep many threads busy and large enough to reuse cached keys.
const PIECE_QUERIES: usize = 48;
/// Minimum work items per thread; with fewer, the threads also divide up the keys.
const PIECES_PER_THREAD: usize = 4;
/// Number of (query, head) pairs whose partial results a thread merges in one work item.
///
/// In a decoding step, one thread merges all heads of a sequence. Synchronizing several threads costs more.
const MERGED_ROWS: usize = 32;

/// Attention over a KV memory in any storage format.
pub(super) struct Attend<'a> {
    pub(super) q: &'a Heads<'a>,
    pub(super) sizes: KvSizes,
    pub(super) slots: &'a [KvSlot],
    pub(super) scale: f32,
    pub(super) visible: &'a [Range<usize>],
    pub(super) instructions: InstructionSet,
    /// Whether threads divide up a query's keys; `None` selects the faster option.
    pub(super) shares_keys: Option<bool>,
}

impl Attend<'_> {
    /// Computes attention over keys and values stored in the format `F`.
    pub(super) fn over<F: Format>(&self, units: &Units<F>) -> Vec<f32> {
        let Self { q, sizes, visible, instructions, .. } = *self;
        let (tokens, heads, value_dim) = (q.tokens, q.heads, sizes.value_dim);
        let work = OnMemory { attend: self, units };
        // A work item never has more queries than the longest batch row.
        let queries = tokens.min(PIECE_QUERIES);
        let pieces = visible.len().div_ceil(queries) * heads;
        let has_few = tokens < PIECE_QUERIES && pieces < PIECES_PER_THREAD * thread_count();
        let row_len = heads * value_dim;
        if !self.shares_keys.unwrap_or(has_few) {
            let parts = Parts { row_len, rows: queries, columns: value_dim };
            return computed_in_parts(visible.len() * row_len, parts, |part| {
                instructions.run(Piece { work, part });
            });
        }
        // One set of partial results per batch row, head and part of the keys.
        let parts = visible.iter().map(|keys| keys.end.div_ceil(PART_KEYS)).max().unwrap_or(0);
        let result_len = tokens * result_len(value_dim);
        let of_parts = Parts { row_len: result_len, rows: 1, columns: result_len };
        let results = computed_in_parts(
            q.rows.len() * heads * parts * result_len,
            of_parts,
            |mut part: Part<'_, f32>| {
                let (position, key_part) = (part.first_row / parts, part.first_row % parts);
                instructions.run(PieceOfKeys { work, position, key_part, results: part.row(0) });
            },
        );
        let merged = Parts { row_len: value_dim, rows: MERGED_ROWS, columns: value_dim };
        computed_in_parts(visible.len() * row_len, merged, |part| {
            instructions.run(Merge { work, parts, results: &results, part });
        })
    }
}

/// Inputs that all work items share.
struct OnMemory<'a, F: Format> {
    attend: &'a Attend<'a>,
    units: &'a Units<F>,
}

impl<F: Format> Clone for OnMemory<'_, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<F: Format> Copy for OnMemory<'_, F> {}

impl<F: Format> OnMemory<'_, F> {
    /// Converts the queries of one row and head to the format used in products.
    #[inline(always)]
    fn arranged<S: Simd>(
        &self,
        simd: S,
        (batch, head): (usize, usize),
        queries: Range<usize>,
    ) -> Vec<F::Query> {
        let query_len = self.attend.sizes.key_dim.div_ceil(F::KEY_INPUTS);
        let mut arranged = vec![F::Query::default(); queries.len() * query_len];
        let of_head = self.attend.q.head(batch, head);
        for query in 0..queries.len() {
            let to = &mut arranged[query * query_len..][..query_len];
            F::arrange(simd, of_head.row(queries.start + query), to);
        }
        arranged
    }

    /// Computes partial results for converted queries over one part of the keys, tile by tile.
    ///
    /// `scores` must have space for the scores of one tile.
    #[inline(always)]
    fn results_of_part<S: Simd>(
        &self,
        simd: S,
        (batch, head): (usize, usize),
        (visible, arranged): (&[Range<usize>], &[F::Query]),
        part: usize,
        (scores, results): (&mut [PartScores], &mut [f32]),
    ) {
        let Attend { sizes, slots, scale, .. } = *self.attend;
        let head = self.units.head(sizes, slots[batch], head);
        let (query_len, result_len) = (arranged.len() / visible.len(), result_len(sizes.value_dim));
        let mut query = 0;
        while query < visible.len() {
            let end = visible.len().min(query + F::tile_rows::<S>());
            let queries = &arranged[query * query_len..end * query_len];
            let on = OnPart { head, queries, visible: &visible[query..end], scale, part };
            let results = &mut results[query * result_len..end * result_len];
            simd.run(Results { on, scores: &mut *scores, results });
            query = end;
        }
    }
}

/// Job that computes attention over all keys, for a range of queries in one head.
struct Piece<'a, 'b, F: Format> {
    work: OnMemory<'a, F>,
    part: Part<'b, f32>,
}

impl<F: Format> Job for Piece<'_, '_, F> {
    type Output = ();
    const MULTIPLIES_BYTES: bool = F::MULTIPLIES_BYTES;

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let mut row = 0;
        while row < self.part.rows() {
            let (batch, token) = self.work.attend.q.place_of(self.part.first_row + row);
            // Queries in the next row of the batch see different keys.
            let queries = (self.part.rows() - row).min(self.work.attend.q.tokens_of(batch) - token);
            self.of_row(simd, row, (batch, token..token + queries));
            row += queries;
        }
    }
}

impl<F: Format> Piece<'_, '_, F> {
    /// Computes attention for a range of queries in one batch row.
    #[inline(always)]
    fn of_row<S: Simd>(&mut self, simd: S, row: usize, (batch, tokens): (usize, Range<usize>)) {
        let Attend { sizes, visible, .. } = *self.work.attend;
        let queries = tokens.len();
        let place = (batch, self.part.first_column / sizes.value_dim);
        let visible = &visible[self.part.first_row + row..][..queries];
        let arranged = self.work.arranged(simd, place, tokens);
        let result_len = result_len(sizes.value_dim);
        let mut scores: Vec<PartScores> = vec![[0.0; PART_KEYS]; F::tile_rows::<S>().min(queries)];
        let mut totals = vec![0.0; queries * result_len];
        let mut results = vec![0.0; queries * result_len];
        let (mut first_key, mut end_key) = (usize::MAX, 0);
        for keys in visible {
            first_key = first_key.min(keys.start);
            end_key = end_key.max(keys.end);
        }
        for part in first_key / PART_KEYS..end_key.div_ceil(PART_KEYS) {
            let scratch = (&mut scores[..], &mut results[..]);
            self.work.results_of_part(simd, place, (visible, &arranged), part, scratch);
            for query in 0..queries {
                let total = &mut totals[query * result_len..][..result_len];
                let result = &results[query * result_len..][..result_len];
                merge_visible(simd, total, result, &visible[query], part);
            }
        }
        for query in 0..queries {
            let total = &totals[query * result_len..][..result_len];
            finish(simd, total, self.part.row(row + query));
        }
    }
}

/// Merges a query's partial result into the total if the query sees any key in the part.
#[inline(always)]
fn merge_visible<S: Simd>(simd: S, total: &mut [f32], result: &[f32], visible: &Range<usize>, part: usize) {
    if visible.start / PART_KEYS == part {
        total.copy_from_slice(result);
    } else if !seen_of_part(visible, part).is_empty() {
        merge(simd, total, result);
    }
}

/// Job that computes partial results over one part of the keys, for one row and head.
struct PieceOfKeys<'a, 'b, F: Format> {
    work: OnMemory<'a, F>,
    /// Index of the row and head, in row-major order.
    position: usize,
    key_part: usize,
    results: &'b mut [f32],
}

impl<F: Format> Job for PieceOfKeys<'_, '_, F> {
    type Output = ();
    const MULTIPLIES_BYTES: bool = F::MULTIPLIES_BYTES;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Attend { q, visible, .. } = *self.work.attend;
        let place = (self.position / q.heads, self.position % q.heads);
        let visible = &visible[q.tokens_in(place.0)];
        let arranged = self.work.arranged(simd, place, 0..visible.len());
        let mut scores: Vec<PartScores> = vec![[0.0; PART_KEYS]; F::tile_rows::<S>().min(visible.len())];
        let scratch = (&mut scores[..], self.results);
        self.work.results_of_part(simd, place, (visible, &arranged), self.key_part, scratch);
    }
}

/// Job that merges partial results for a range of (query, head) pairs, in query-major order.
struct Merge<'a, 'b, F: Format> {
    work: OnMemory<'a, F>,
    parts: usize,
    results: &'a [f32],
    part: Part<'b, f32>,
}

impl<F: Format> Job for Merge<'_, '_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let Attend { q, sizes, visible, .. } = *self.work.attend;
        let result_len = result_len(sizes.value_dim);
        let mut total = vec![0.0; result_len];
        for row in 0..self.part.rows() {
            let (query, head) =
                ((self.part.first_row + row) / q.heads, (self.part.first_row + row) % q.heads);
            let (batch, token) = q.place_of(query);
            for part in 0..self.parts {
                let place = ((batch * q.heads + head) * self.parts + part) * q.tokens + token;
                let result = &self.results[place * result_len..][..result_len];
                merge_visible(simd, &mut total, result, &visible[query], part);
            }
            finish(simd, &total, self.part.row(row));
        }
    }
}
