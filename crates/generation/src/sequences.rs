//! Batched scoring of many sequences.
//!
//! The common prefix of a group's sequences is computed once. Its keys and values are copied to a row
//! of each sequence, so only the suffixes remain to be read. Prefixes of many groups are rows of one
//! pass, and so are suffixes. Rows of similar length are batched together, because shorter rows are
//! padded on the right. Logits are computed for scored tokens only.
//!
//! The split of a group depends on the group alone. On a CPU, a row's results are bit-identical alone
//! and in a batch.

use std::cmp::Reverse;
use std::iter::{self, repeat_n};
use std::ops::Range;
use std::rc::Rc;

use candle_core::Tensor;
use candle_gpt2::{Gpt2Cache, Gpt2Config, Gpt2LMHeadModel, KvPool, KvSlot, Pass};

use crate::GenerationError;
use crate::config::check_ids;
use crate::logprobs::{Expected, for_each_row};

/// Maximum number of tokens in a pass, including padding, unless a single row has more.
///
/// With 128 or 512, groups as large as HellaSwag's take a tenth longer, and with 1024 a quarter longer
/// (124M, f32, AVX-512).
const PASS_TOKENS: usize = 256;
/// Size of the KV cache for prefixes, as a multiple of the context length.
///
/// A larger cache also costs time, because its memory is cleared first.
const PREFIX_CONTEXTS: usize = 1;
/// Size of the KV cache for a pass's suffixes, as a multiple of the context length.
const SUFFIX_CONTEXTS: usize = 4;

/// A sequence of tokens to score, starting at token `first`; see [`score_sequences`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    /// All tokens.
    ///
    /// The last one is scored but not read, so there may be one more token than the context has positions.
    pub ids: Vec<u32>,
    /// Index of the first scored token; at least 1.
    pub first: usize,
}

impl Sequence {
    /// Returns the tokens that the model reads.
    fn read(&self) -> &[u32] {
        self.ids.split_last().map_or(&[], |(_, read)| read)
    }
}

/// Score of a token; [`score_sequences`] returns one for each scored token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenScore {
    /// Natural logarithm of the token's probability.
    pub logprob: f64,
    /// Whether the token is the most probable one; ties go to the first token.
    pub is_greedy: bool,
}

/// Scores many sequences; returns a score for every token from `first` onward.
///
/// Sequences of a group share the computation of their common prefix. Many groups are computed
/// together. On a CPU, a result does not depend on its batch.
///
/// ```
/// use candle_gpt2_generation::{Sequence, score_sequences};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let (first, second) = (Sequence { ids: vec![1, 2, 3, 4], first: 2 }, Sequence { ids: vec![1, 2, 5], first: 2 });
/// let scores = score_sequences(&model, &[vec![&first, &second]])?;
/// assert_eq!((scores[0][0].len(), scores[0][1].len()), (2, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Returns an error if a sequence has no token to score or is too long, or if an id is outside the
/// vocabulary. Also returns an error if the model's logits are not finite.
pub fn score_sequences(
    model: &Gpt2LMHeadModel,
    groups: &[Vec<&Sequence>],
) -> Result<Vec<Vec<Vec<TokenScore>>>, GenerationError> {
    for (group, sequences) in (1..).zip(groups) {
        for (number, sequence) in (1..).zip(sequences) {
            check(sequence, model.config()).map_err(|error| GenerationError::Sequence {
                group,
                number,
                error: Box::new(error),
            })?;
        }
    }
    score_groups(model, groups, &|| ())
}

/// Scores sequences that passed the checks; calls `progress` after each sequence.
pub(crate) fn score_groups(
    model: &Gpt2LMHeadModel,
    groups: &[Vec<&Sequence>],
    progress: &dyn Fn(),
) -> Result<Vec<Vec<Vec<TokenScore>>>, GenerationError> {
    let mut scores: Vec<_> = groups.iter().map(|group| vec![Vec::new(); group.len()]).collect();
    let batches = batches(groups, model.config());
    let tokens = batches.iter().map(|batch| batch.room(model.config())).max().unwrap_or(0);
    if tokens == 0 {
        return Ok(scores);
    }
    let pool = model.new_pool(tokens)?;
    for batch in &batches {
        let keep = |group: usize, sequence: usize, score| scores[group][sequence].push(score);
        batch.score(model, &pool, keep, progress)?;
    }
    Ok(scores)
}

/// Splits the groups into batches whose prefixes fit into the cache, longest prefixes first.
fn batches<'a>(groups: &'a [Vec<&'a Sequence>], config: &Gpt2Config) -> Vec<Batch<'a>> {
    let indexed = groups.iter().enumerate();
    let mut groups: Vec<Group<'_>> = indexed.map(|(index, sequences)| Group::new(index, sequences)).collect();
    groups.sort_by_key(|group| Reverse(group.shared.len()));
    let memory = PREFIX_CONTEXTS * KvSlot::room_of(config.n_positions);
    let (mut left, mut batches) = (&groups[..], Vec::new());
    while let Some(longest) = left.first() {
        let rows = memory / KvSlot::room_of(longest.shared.len()).max(1);
        let (some, others) = left.split_at(rows.clamp(1, left.len()));
        batches.push(Batch::new(some));
        left = others;
    }
    batches
}

/// Groups whose prefixes are in the KV cache at the same time.
struct Batch<'a> {
    /// Common prefix of each group, in group order; the last groups may have no common prefix.
    prefixes: Vec<Row<'a>>,
    /// Suffix of each sequence that is longer than its group's prefix.
    suffixes: Vec<Row<'a>>,
    /// Number of sequences in all groups.
    sequences: usize,
}

impl<'a> Batch<'a> {
    fn new(groups: &[Group<'a>]) -> Self {
        let prefixes = groups.iter().enumerate().filter_map(|(place, group)| group.prefix(place));
        let mut suffixes: Vec<_> =
            groups.iter().enumerate().flat_map(|(place, group)| group.suffixes(place)).collect();
        suffixes.sort_by_key(|row| Reverse(row.ids.len()));
        let sequences = groups.iter().map(|group| group.sequences.len()).sum();
        Self { prefixes: prefixes.collect(), suffixes, sequences }
    }

    /// Returns the number of tokens that the KV cache needs.
    fn room(&self, config: &Gpt2Config) -> usize {
        let room = |rows: &[Row<'_>]| rows.len() * KvSlot::room_of(capacity(rows));
        let prefixes: usize = passes(&self.prefixes, config).map(room).sum();
        prefixes + passes(&self.suffixes, config).map(room).max().unwrap_or(0)
    }

    /// Scores all sequences in the batch.
    ///
    /// Calls `keep` with the index of the group, the index of the sequence in it, and a score. The scores
    /// of each sequence arrive in order.
    fn score(
        &self,
        model: &Gpt2LMHeadModel,
        pool: &KvPool,
        mut keep: impl FnMut(usize, usize, TokenScore),
        progress: &dyn Fn(),
    ) -> Result<(), GenerationError> {
        // Cache that holds each prefix, and the prefix's row in this cache.
        let mut held: Vec<(Rc<Gpt2Cache>, usize)> = Vec::with_capacity(self.prefixes.len());
        for rows in passes(&self.prefixes, model.config()) {
            let mut cache = empty_cache(pool, rows)?;
            read(model, rows, &mut cache, &mut keep)?;
            let cache = Rc::new(cache);
            held.extend((0..rows.len()).map(|row| (Rc::clone(&cache), row)));
        }
        (self.suffixes.len()..self.sequences).for_each(|_| progress());
        for rows in passes(&self.suffixes, model.config()) {
            let mut cache = empty_cache(pool, rows)?;
            for (place, row) in rows.iter().enumerate() {
                if let Some((prefix, prefix_row)) = held.get(row.place) {
                    cache.copy_row(place, prefix, *prefix_row, row.past)?;
                }
            }
            read(model, rows, &mut cache, &mut keep)?;
            rows.iter().for_each(|_| progress());
        }
        Ok(())
    }
}

/// Sequences that share a prefix.
struct Group<'a> {
    /// Index among all groups.
    index: usize,
    sequences: &'a [&'a Sequence],
    /// Common prefix of the tokens that the model reads.
    shared: &'a [u32],
}

impl<'a> Group<'a> {
    fn new(index: usize, sequences: &'a [&'a Sequence]) -> Self {
        let equal = |a: &[u32], b: &[u32]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let first = sequences.first().map_or(&[][..], |sequence| sequence.read());
        let shared = sequences.iter().map(|sequence| equal(first, sequence.read())).min().unwrap_or(0);
        Self { index, sequences, shared: &first[..shared] }
    }

    /// Returns the row of the common prefix; `place` is the index of the group in its batch.
    fn prefix(&self, place: usize) -> Option<Row<'a>> {
        let wanted = self.wanted(0..self.sequences.len(), 0..self.shared.len());
        (!self.shared.is_empty()).then_some(Row {
            group: self.index,
            place,
            ids: self.shared,
            past: 0,
            wanted,
        })
    }

    /// Returns a row for each sequence that is longer than the common prefix.
    fn suffixes(&self, place: usize) -> impl Iterator<Item = Row<'a>> {
        let past = self.shared.len();
        self.sequences.iter().enumerate().filter(move |(_, sequence)| sequence.read().len() > past).map(
            move |(number, sequence)| {
                let wanted = self.wanted(number..number + 1, past..sequence.read().len());
                Row { group: self.index, place, ids: &sequence.read()[past..], past, wanted }
            },
        )
    }

    /// Returns the tokens to score after these positions, which all of `sequences` must share.
    fn wanted(&self, sequences: Range<usize>, positions: Range<usize>) -> Vec<ScoredPosition> {
        let target = |sequence: usize, position: usize| {
            let Sequence { ids, first } = self.sequences[sequence];
            (position + 1 >= *first).then(|| Target { sequence, id: ids[position + 1] })
        };
        let start = positions.start;
        let wanted = |position: usize| {
            let targets: Vec<_> =
                sequences.clone().filter_map(|sequence| target(sequence, position)).collect();
            (!targets.is_empty()).then_some(ScoredPosition { place: position - start, targets })
        };
        positions.filter_map(wanted).collect()
    }
}

/// A row in a pass.
struct Row<'a> {
    /// Index of the group among all groups.
    group: usize,
    /// Index of the group in its batch.
    place: usize,
    /// Tokens to read.
    ids: &'a [u32],
    /// Number of tokens that precede `ids`.
    past: usize,
    wanted: Vec<ScoredPosition>,
}

/// A position in a row, and the tokens that its logits score.
struct ScoredPosition {
    place: usize,
    targets: Vec<Target>,
}

/// A token to score.
struct Target {
    /// Index of the sequence in its group.
    sequence: usize,
    id: u32,
}

/// Splits rows, sorted by descending length, into passes.
fn passes<'r, 'a>(mut rows: &'r [Row<'a>], config: &Gpt2Config) -> impl Iterator<Item = &'r [Row<'a>]> {
    let n_positions = config.n_positions;
    let memory = SUFFIX_CONTEXTS * KvSlot::room_of(n_positions);
    iter::from_fn(move || {
        let longest = rows.first()?.ids.len();
        let mut past = 0;
        let fits = |(others, row): &(usize, &Row<'_>)| {
            past = past.max(row.past);
            let capacity = past + longest;
            let count = others + 1;
            // A padded row must fit into the context too.
            capacity <= n_positions
                && count * longest <= PASS_TOKENS
                && count * KvSlot::room_of(capacity) <= memory
        };
        let count = rows.iter().enumerate().take_while(fits).count().max(1);
        let (pass, others) = rows.split_at(count);
        rows = others;
        Some(pass)
    })
}

/// Returns the capacity that each row of a pass needs, in tokens.
fn capacity(rows: &[Row<'_>]) -> usize {
    let max_of = |of: fn(&Row<'_>) -> usize| rows.iter().map(of).max().unwrap_or(0);
    max_of(|row| row.past) + max_of(|row| row.ids.len())
}

fn empty_cache(pool: &KvPool, rows: &[Row<'_>]) -> Result<Gpt2Cache, GenerationError> {
    let (needed, kv_tokens) = (rows.len() * capacity(rows), pool.tokens());
    pool.cache(rows.len(), capacity(rows)).ok_or(GenerationError::KvTokens { needed, kv_tokens })
}

/// Reads all rows in one pass and scores their targets.
fn read(
    model: &Gpt2LMHeadModel,
    rows: &[Row<'_>],
    cache: &mut Gpt2Cache,
    mut keep: impl FnMut(usize, usize, TokenScore),
) -> Result<(), GenerationError> {
    let longest = rows.iter().map(|row| row.ids.len()).max().unwrap_or(0);
    // Padding after the end of a row is ignored, and does not affect the tokens before it.
    let padded =
        rows.iter().flat_map(|row| row.ids.iter().copied().chain(repeat_n(0, longest - row.ids.len())));
    let ids = Tensor::from_vec(padded.collect(), (rows.len(), longest), model.device())?;
    let hidden = model.transformer().forward_with(&ids, Some(cache), &mut Pass::inference())?; // (B, T, C)
    let numbered = rows.iter().enumerate();
    let wanted: Vec<(usize, &Row<'_>, &ScoredPosition)> = numbered
        .flat_map(|(number, row)| row.wanted.iter().map(move |wanted| (number, row, wanted)))
        .collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let places = wanted.iter().map(|(number, _, wanted)| u32::try_from(number * longest + wanted.place));
    let places = places.collect::<Result<Vec<_>, _>>().map_err(candle_core::Error::wrap)?;
    let places = Tensor::new(places, model.device())?;
    let hidden = hidden.flatten(0, 1)?.index_select(&places, 0)?.unsqueeze(0)?; // (1, places, C)
    let scores = for_each_row(model, &hidden, 0..wanted.len(), |place, logits| {
        let expected = Expected::of(logits, 0)?;
        let score = |target: &Target| {
            let (logprob, is_greedy) = (expected.logprob(target.id), expected.is_greedy(target.id));
            (target.sequence, TokenScore { logprob, is_greedy })
        };
        let (_, row, wanted) = wanted[place];
        Ok((row.group, wanted.targets.iter().map(score).collect::<Vec<_>>()))
    })?;
    for (group, scores) in scores {
        scores.into_iter().for_each(|(sequence, score)| keep(group, sequence, score));
    }
    Ok(())
}

fn check(sequence: &Sequence, config: &Gpt2Config) -> Result<(), GenerationError> {
    check_window(&sequence.ids, sequence.first, config.n_positions)?;
    check_ids(&sequence.ids, config)
}

/// Checks that a token to score exists, that a token precedes it, and that the context suffices.
pub(crate) fn check_window(ids: &[u32], first: usize, n_positions: usize) -> Result<(), GenerationError> {
    let tokens = ids.len();
    if first == 0 || first >= tokens {
        return Err(GenerationError::NothingToScore { tokens, first });
    }
    // The last token is scored but not read.
    if tokens - 1 > n_positions {
        return Err(GenerationError::SequenceTooLong { tokens: tokens - 1, n_positions });
    }
    Ok(())
}
