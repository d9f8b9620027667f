//! `softmax(scale · Q Kᵀ) V` where every query sees keys that lie side by side: causal, full and windowed attention, with and
//! without a cache.
//!
//! Keys and values lie in panels of a [`KvMemory`]; those that are no cache's are laid out so first. A query is computed
//! [part](on_part) by part of its keys, alone or in a tile with others: a step of decoding, some tokens after a cache and a
//! prompt are one computation with the same bits. Nothing is computed that no query sees, and what a query does not see never
//! reaches its result, not even NaN.

mod floats;
mod format;
mod heads;
mod memory;
mod on_part;
mod q8;
mod softmax;
#[cfg(test)]
mod tests;
mod texts;

use std::ops::Range;

use format::Format;
pub use heads::{Heads, KvSlot};
pub use memory::{KvFormat, KvMemory, KvSizes};
use memory::{OnUnits, Units};
use on_part::{OnPart, PART_KEYS, PartScores, Results, finish, merge, result_len, seen_of_part};
pub use texts::text_attention;

use crate::simd::{InstructionSet, Job, Simd};
use crate::threads::{Part, Parts, computed_in_parts, of_size, thread_count};

/// Queries of a piece of work: few enough that there is work for many threads, many enough to use the keys while they are near.
const PIECE_QUERIES: usize = 48;
/// At least so many pieces for each thread, else the parts of the keys are shared among threads too.
const PIECES_PER_THREAD: usize = 4;
/// Queries of a head whose parts one thread puts together: a step of one text takes one thread, which costs less than to meet others.
const MERGED_ROWS: usize = 32;

/// Attention of some queries over what a cache holds, where the rows of a batch have slots of their own.
///
/// ```
/// use candle_gpt2_arithmetic::{Heads, KvFormat, KvMemory, KvSizes, KvSlot, slot_attention};
///
/// let sizes = KvSizes { heads: 1, key_dim: 2, value_dim: 2 };
/// let mut memory = KvMemory::new(KvFormat::F32, sizes, 16).expect("room for 16 tokens");
/// let slots = KvSlot::side_by_side(1, 16);
/// let values = [1., 2., 3., 4., 5., 6.]; // three tokens of one head
/// let held = Heads::strided(&values, [1, 1, 3, 2], [6, 6, 2]);
/// memory.write(&slots, [&held, &held], &[0]);
///
/// let query = Heads::strided(&[0., 0.], [1, 1, 1, 2], [2, 2, 2]); // looks at everything evenly
/// assert_eq!(slot_attention(&query, &memory, &slots, 1.0, &[0..3]), [3., 4.]);
/// ```
///
/// # Shapes
/// `q` `(B, H, T, D)`; a slot for each of the `B` rows. `visible` has for each of the `B · T` queries the keys that it sees, at
/// least one of those that its slot has room for. Returns `(B, T, H, Dv)`. Where the rows have different lengths, it is
/// `(T_1 + … + T_B, H, Dv)` of as many queries.
///
/// # Panics
/// When the shapes are not these.
pub fn slot_attention(
    q: &Heads<'_>,
    memory: &KvMemory,
    slots: &[KvSlot],
    scale: f32,
    visible: &[Range<usize>],
) -> Vec<f32> {
    slot_attention_with(q, memory, slots, scale, visible, InstructionSet::detected())
}

/// The same with these instructions.
fn slot_attention_with(
    q: &Heads<'_>,
    memory: &KvMemory,
    slots: &[KvSlot],
    scale: f32,
    visible: &[Range<usize>],
    instructions: InstructionSet,
) -> Vec<f32> {
    let sizes = memory.sizes();
    let sees = |(query, keys): (usize, &Range<usize>)| {
        !keys.is_empty() && keys.end <= slots[q.place_of(query).0].capacity
    };
    let fits = (q.heads, q.head_dim) == (sizes.heads, sizes.key_dim)
        && slots.len() == q.rows.len()
        && slots.iter().all(|slot| slot.is_in(memory.tokens()))
        && visible.len() == q.all_tokens()
        && visible.iter().enumerate().all(sees);
    assert!(fits, "queries, keys, values and what is seen of them do not fit together");
    if visible.len() * q.heads * sizes.value_dim == 0 {
        return Vec::new();
    }
    let keys: usize = visible.iter().map(ExactSizeIterator::len).sum();
    let products = keys * sizes.heads * (sizes.key_dim + sizes.value_dim);
    // Keys and values of two bytes, as the caches have them mostly.
    of_size(2 * products, products, || {
        memory.with(Attend { q, sizes, slots, scale, visible, instructions, shares_keys: None })
    })
}

/// Attention over a memory of any format.
struct Attend<'a> {
    q: &'a Heads<'a>,
    sizes: KvSizes,
    slots: &'a [KvSlot],
    scale: f32,
    visible: &'a [Range<usize>],
    instructions: InstructionSet,
    /// Whether threads share the keys of a query; `None` for what is faster.
    shares_keys: Option<bool>,
}

impl OnUnits for Attend<'_> {
    type Output = Vec<f32>;

    fn run<F: Format>(self, units: &Units<F>) -> Vec<f32> {
        let Self { q, sizes, visible, instructions, .. } = self;
        let (tokens, heads, value_dim) = (q.tokens, q.heads, sizes.value_dim);
        let work = OnMemory { attend: &self, units };
        // A piece of work is no larger than a row of the batch.
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
        // For each row, head and part of the keys the results of the queries.
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

/// What all pieces of work take.
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
    /// Some queries of a row and head, as products take them.
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

    /// What some queries, arranged, have of a part of the keys, tile by tile. `scores` has room for those of a tile.
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

/// All keys of some queries in one head.
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
            // Queries of the next row of the batch see other keys.
            let queries = (self.part.rows() - row).min(self.work.attend.q.tokens_of(batch) - token);
            self.of_row(simd, row, (batch, token..token + queries));
            row += queries;
        }
    }
}

impl<F: Format> Piece<'_, '_, F> {
    /// Some queries of one row of the batch.
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
            let room = (&mut scores[..], &mut results[..]);
            self.work.results_of_part(simd, place, (visible, &arranged), part, room);
            for query in 0..queries {
                let total = &mut totals[query * result_len..][..result_len];
                let result = &results[query * result_len..][..result_len];
                put_together(simd, total, result, &visible[query], part);
            }
        }
        for query in 0..queries {
            let total = &totals[query * result_len..][..result_len];
            finish(simd, total, self.part.row(row + query));
        }
    }
}

/// Adds what a query has of a part, if it sees any key of it.
#[inline(always)]
fn put_together<S: Simd>(simd: S, total: &mut [f32], result: &[f32], visible: &Range<usize>, part: usize) {
    if visible.start / PART_KEYS == part {
        total.copy_from_slice(result);
    } else if !seen_of_part(visible, part).is_empty() {
        merge(simd, total, result);
    }
}

/// One part of the keys of all queries of a row and head, which are few.
struct PieceOfKeys<'a, 'b, F: Format> {
    work: OnMemory<'a, F>,
    /// Which row and head, counted row by row.
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
        let room = (&mut scores[..], self.results);
        self.work.results_of_part(simd, place, (visible, &arranged), self.key_part, room);
    }
}

/// Puts the parts of some queries and heads together, counted query by query.
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
                put_together(simd, &mut total, result, &visible[query], part);
            }
            finish(simd, &total, self.part.row(row));
        }
    }
}
