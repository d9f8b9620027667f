//! Scores of many sequences at once.
//!
//! The common beginning of a group's sequences is computed once: its keys and values are copied to a row of each sequence,
//! which reads only the rest. Beginnings of many groups are rows of one pass, and so are rests; those of similar length are
//! batched together, because shorter rows are padded on the right. Logits are computed for scored tokens only.
//!
//! How a group is split depends on nothing but the group, and rows of a pass have the same bits alone and in company (on a CPU).

use std::cmp::Reverse;
use std::iter::{self, repeat_n};
use std::ops::Range;
use std::rc::Rc;

use candle_core::Tensor;
use candle_gpt2::{Gpt2Cache, Gpt2Config, Gpt2LMHeadModel, KvPool, KvSlot, Pass};

use crate::GenerationError;
use crate::config::check_ids;
use crate::logprobs::{Expected, for_each_row};

/// Most tokens of a pass, with padding, unless a single row has more. Groups of HellaSwag's sizes take a tenth longer with 128 or
/// 512, and a quarter longer with 1024 (124M, f32, AVX-512).
const PASS_TOKENS: usize = 256;
/// Contexts that the keys and values of beginnings may fill, and those of the rests of a pass. Memory costs time too: it is cleared
/// first.
const BEGINNINGS_CONTEXTS: usize = 1;
const RESTS_CONTEXTS: usize = 4;

/// Tokens of which those from `first` on are scored. [`score_sequences`] scores them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sequence {
    /// All of them; the last one is scored and not read, so there may be one more than the context has positions.
    pub ids: Vec<u32>,
    /// Index of the first that is scored, at least 1.
    pub first: usize,
}

impl Sequence {
    /// The tokens that the model reads.
    fn read(&self) -> &[u32] {
        self.ids.split_last().map_or(&[], |(_, read)| read)
    }
}

/// How probable the model finds a token at its position. [`score_sequences`] gives them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenScore {
    /// Natural logarithm of its probability.
    pub logprob: f64,
    /// Whether it is the most probable one, of several the first.
    pub is_greedy: bool,
}

/// The scores of the scored tokens of each sequence. Sequences of a group share the computation of their common beginning, and
/// groups are computed many at once; a result does not depend on its batch (CPU only).
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
/// When a sequence has no token to score or is too long, an id is outside the vocabulary, or the model's logits are not numbers.
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

/// The same of sequences that have been checked; `progress` is called for each of them.
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

/// The groups in batches whose beginnings fit into the memory for them; those with longer ones come first.
fn batches<'a>(groups: &'a [Vec<&'a Sequence>], config: &Gpt2Config) -> Vec<Batch<'a>> {
    let indexed = groups.iter().enumerate();
    let mut groups: Vec<Group<'_>> = indexed.map(|(index, sequences)| Group::new(index, sequences)).collect();
    groups.sort_by_key(|group| Reverse(group.shared.len()));
    let memory = BEGINNINGS_CONTEXTS * KvSlot::room_of(config.n_positions);
    let (mut left, mut batches) = (&groups[..], Vec::new());
    while let Some(longest) = left.first() {
        let rows = memory / KvSlot::room_of(longest.shared.len()).max(1);
        let (some, others) = left.split_at(rows.clamp(1, left.len()));
        batches.push(Batch::new(some));
        left = others;
    }
    batches
}

/// Groups whose beginnings are held at the same time.
struct Batch<'a> {
    /// What the sequences of each group begin with, in the order of the groups; the last groups may have no such row.
    beginnings: Vec<Row<'a>>,
    /// What follows in each sequence that is longer than its group's beginning.
    rests: Vec<Row<'a>>,
    /// Sequences of all groups.
    sequences: usize,
}

impl<'a> Batch<'a> {
    fn new(groups: &[Group<'a>]) -> Self {
        let beginnings = groups.iter().enumerate().filter_map(|(place, group)| group.beginning(place));
        let mut rests: Vec<_> =
            groups.iter().enumerate().flat_map(|(place, group)| group.rests(place)).collect();
        rests.sort_by_key(|row| Reverse(row.ids.len()));
        let sequences = groups.iter().map(|group| group.sequences.len()).sum();
        Self { beginnings: beginnings.collect(), rests, sequences }
    }

    /// Tokens that there must be memory for.
    fn room(&self, config: &Gpt2Config) -> usize {
        let room = |rows: &[Row<'_>]| rows.len() * KvSlot::room_of(capacity(rows));
        let beginnings: usize = passes(&self.beginnings, config).map(room).sum();
        beginnings + passes(&self.rests, config).map(room).max().unwrap_or(0)
    }

    /// Hands on the scores of each sequence in their order, with the places of its group and of it there.
    fn score(
        &self,
        model: &Gpt2LMHeadModel,
        pool: &KvPool,
        mut keep: impl FnMut(usize, usize, TokenScore),
        progress: &dyn Fn(),
    ) -> Result<(), GenerationError> {
        // The cache of each beginning, and its row there.
        let mut held: Vec<(Rc<Gpt2Cache>, usize)> = Vec::with_capacity(self.beginnings.len());
        for rows in passes(&self.beginnings, model.config()) {
            let mut cache = empty_cache(pool, rows)?;
            read(model, rows, &mut cache, &mut keep)?;
            let cache = Rc::new(cache);
            held.extend((0..rows.len()).map(|row| (Rc::clone(&cache), row)));
        }
        (self.rests.len()..self.sequences).for_each(|_| progress());
        for rows in passes(&self.rests, model.config()) {
            let mut cache = empty_cache(pool, rows)?;
            for (place, row) in rows.iter().enumerate() {
                if let Some((beginning, beginning_row)) = held.get(row.place) {
                    cache.copy_row(place, beginning, *beginning_row, row.past)?;
                }
            }
            read(model, rows, &mut cache, &mut keep)?;
            rows.iter().for_each(|_| progress());
        }
        Ok(())
    }
}

/// Sequences that are scored together.
struct Group<'a> {
    /// Its place among all groups.
    index: usize,
    sequences: &'a [&'a Sequence],
    /// What the model reads first in all of them.
    shared: &'a [u32],
}

impl<'a> Group<'a> {
    fn new(index: usize, sequences: &'a [&'a Sequence]) -> Self {
        let equal = |a: &[u32], b: &[u32]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let first = sequences.first().map_or(&[][..], |sequence| sequence.read());
        let shared = sequences.iter().map(|sequence| equal(first, sequence.read())).min().unwrap_or(0);
        Self { index, sequences, shared: &first[..shared] }
    }

    /// The row of what all begin with; `place` is that of the group in its batch.
    fn beginning(&self, place: usize) -> Option<Row<'a>> {
        let wanted = self.wanted(0..self.sequences.len(), 0..self.shared.len());
        (!self.shared.is_empty()).then_some(Row {
            group: self.index,
            place,
            ids: self.shared,
            past: 0,
            wanted,
        })
    }

    /// A row of each sequence that is longer than the common beginning.
    fn rests(&self, place: usize) -> impl Iterator<Item = Row<'a>> {
        let past = self.shared.len();
        self.sequences.iter().enumerate().filter(move |(_, sequence)| sequence.read().len() > past).map(
            move |(number, sequence)| {
                let wanted = self.wanted(number..number + 1, past..sequence.read().len());
                Row { group: self.index, place, ids: &sequence.read()[past..], past, wanted }
            },
        )
    }

    /// What is scored of some sequences after the tokens at these positions, which they have in common.
    fn wanted(&self, sequences: Range<usize>, positions: Range<usize>) -> Vec<Wanted> {
        let target = |sequence: usize, position: usize| {
            let Sequence { ids, first } = self.sequences[sequence];
            (position + 1 >= *first).then(|| Target { sequence, id: ids[position + 1] })
        };
        let start = positions.start;
        let wanted = |position: usize| {
            let targets: Vec<_> =
                sequences.clone().filter_map(|sequence| target(sequence, position)).collect();
            (!targets.is_empty()).then_some(Wanted { place: position - start, targets })
        };
        positions.filter_map(wanted).collect()
    }
}

/// A row of a pass.
struct Row<'a> {
    /// Place of its group among all groups.
    group: usize,
    /// The same in its batch.
    place: usize,
    /// The tokens to read.
    ids: &'a [u32],
    /// Tokens before them.
    past: usize,
    wanted: Vec<Wanted>,
}

/// A token of a row after which something is scored.
struct Wanted {
    place: usize,
    targets: Vec<Target>,
}

/// A token that is scored.
struct Target {
    /// Place of its sequence in the group.
    sequence: usize,
    id: u32,
}

/// The rows of each pass, of rows of which the longer ones come first.
fn passes<'r, 'a>(mut rows: &'r [Row<'a>], config: &Gpt2Config) -> impl Iterator<Item = &'r [Row<'a>]> {
    let n_positions = config.n_positions;
    let memory = RESTS_CONTEXTS * KvSlot::room_of(n_positions);
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

/// Tokens that the rows of a pass have room for, each.
fn capacity(rows: &[Row<'_>]) -> usize {
    let most = |of: fn(&Row<'_>) -> usize| rows.iter().map(of).max().unwrap_or(0);
    most(|row| row.past) + most(|row| row.ids.len())
}

fn empty_cache(pool: &KvPool, rows: &[Row<'_>]) -> Result<Gpt2Cache, GenerationError> {
    let (needed, kv_tokens) = (rows.len() * capacity(rows), pool.tokens());
    pool.cache(rows.len(), capacity(rows)).ok_or(GenerationError::KvTokens { needed, kv_tokens })
}

/// Reads all rows in one pass, and scores what is wanted of each.
fn read(
    model: &Gpt2LMHeadModel,
    rows: &[Row<'_>],
    cache: &mut Gpt2Cache,
    mut keep: impl FnMut(usize, usize, TokenScore),
) -> Result<(), GenerationError> {
    let longest = rows.iter().map(|row| row.ids.len()).max().unwrap_or(0);
    // What comes after the end of a row is not looked at, and changes nothing before it.
    let padded =
        rows.iter().flat_map(|row| row.ids.iter().copied().chain(repeat_n(0, longest - row.ids.len())));
    let ids = Tensor::from_vec(padded.collect(), (rows.len(), longest), model.device())?;
    let hidden = model.transformer().forward_with(&ids, Some(cache), &mut Pass::inference())?; // (B, T, C)
    let numbered = rows.iter().enumerate();
    let wanted: Vec<(usize, &Row<'_>, &Wanted)> = numbered
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

/// Checks that there are tokens to score from `first` on, with something before them, and that a context takes those that are
/// read.
pub(crate) fn check_window(ids: &[u32], first: usize, n_positions: usize) -> Result<(), GenerationError> {
    let tokens = ids.len();
    if first == 0 || first >= tokens {
        return Err(GenerationError::NothingToScore { tokens, first });
    }
    // The last token is scored and not read.
    if tokens - 1 > n_positions {
        return Err(GenerationError::SequenceTooLong { tokens: tokens - 1, n_positions });
    }
    Ok(())
}
