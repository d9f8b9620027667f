//! What the model expects of each token of a stream: window by window if the tokens are known, and token by token, many streams
//! side by side, if they are to be found.
//!
//! A window reads up to `context - 1` tokens and predicts one after each; the next one begins `stride` tokens later, and its first
//! `context - stride` tokens were predicted already. These are the windows of
//! [`score`](candle_gpt2_generation::score()), so a stream costs what a score says. Both ways compute the same bits: no number
//! depends on the pieces in which tokens are read, nor on the rows beside them.

use candle_core::{Device, Tensor};
use candle_gpt2::{Gpt2Cache, Gpt2Config, Gpt2LMHeadModel, KvSlot, Pass};
use candle_gpt2_engine::LoadedModel;
use candle_gpt2_generation::{GenerationError, default_stride, for_each_row};

use crate::CompressionError;

/// Axis of the tokens in a `(B, T, C)` tensor.
const TOKEN_DIM: usize = 1;
/// Most tokens of a pass over several streams: what a window begins with is read in pieces.
const PASS_TOKENS: usize = 512;
/// The fewest positions that predict anything.
const SHORTEST_CONTEXT: usize = 2;

/// The windows of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Windows {
    /// Tokens of a window.
    pub(crate) context: usize,
    /// Tokens from one window to the next: fewer than those of a window.
    pub(crate) stride: usize,
}

impl Windows {
    /// Windows of `context` tokens, by default of all positions, each over half of the one before.
    pub(crate) fn new(context: Option<usize>, config: &Gpt2Config) -> Result<Self, CompressionError> {
        let n_positions = config.n_positions;
        let context = context.unwrap_or(n_positions);
        let stride = default_stride(&Gpt2Config { n_positions: context, ..config.clone() });
        let windows = Self { context, stride };
        let error = CompressionError::Context { n_positions, found: context };
        if windows.fit(config) { Ok(windows) } else { Err(error) }
    }

    /// Whether a model has windows such as these.
    pub(crate) fn fit(self, config: &Gpt2Config) -> bool {
        (SHORTEST_CONTEXT..=config.n_positions).contains(&self.context)
            && (1..self.context).contains(&self.stride)
    }

    /// Tokens that a window reads.
    fn reads(self) -> usize {
        self.context - 1
    }
}

/// The token before the first of each stream: the one that begins texts, or just the first of the vocabulary.
pub(crate) fn start(config: &Gpt2Config) -> u32 {
    config.start_token().unwrap_or(0)
}

/// What `look` finds in the logits of each token of `ids` but the first; it is given the token's index. `progress` is called with the number
/// found since the last call, and may end it.
pub(crate) fn for_each_next<R: Send>(
    model: &Gpt2LMHeadModel,
    windows: Windows,
    ids: &[u32],
    mut progress: impl FnMut(usize) -> Result<(), CompressionError>,
    look: impl Fn(usize, &[f32]) -> Result<R, GenerationError> + Sync,
) -> Result<Vec<R>, CompressionError> {
    let Windows { context, stride } = windows;
    let mut cache = model.new_cache(1, windows.reads().min(ids.len()))?;
    let mut found = Vec::with_capacity(ids.len());
    for begin in (0..ids.len()).step_by(stride) {
        let end = ids.len().min(begin + context);
        let first = (found.len() + 1).max(begin + 1);
        if first >= end {
            break;
        }
        cache.truncate(0, 0)?;
        // The last token is predicted and not read.
        let window = Tensor::from_slice(&ids[begin..end - 1], (1, end - 1 - begin), &Device::Cpu)?;
        let hidden = read(model, &mut cache, &window)?; // (1, T, C)
        // Row r of the hidden states predicts token begin + r + 1.
        found.extend(for_each_row(model, &hidden, first - begin - 1..end - begin - 1, |row, logits| {
            look(begin + row + 1, logits)
        })?);
        progress(end - first)?;
    }
    Ok(found)
}

/// A stream whose tokens are to be found.
pub(crate) trait Stream: Sync {
    /// The next token, by the logits.
    type Found: Send;

    /// Finds the next token.
    fn find(&self, logits: &[f32]) -> Result<(u32, Self::Found), GenerationError>;

    /// Takes the token that was found; whether the stream continues after it.
    fn take(&mut self, id: u32, found: Self::Found) -> Result<bool, CompressionError>;
}

/// Finds the tokens of streams, all of them side by side as far as memory goes.
pub(crate) fn find_all<S: Stream>(
    loaded: &LoadedModel,
    windows: Windows,
    streams: &mut [S],
) -> Result<(), CompressionError> {
    let room = KvSlot::room_of(windows.reads());
    let mut at_once = streams.len();
    while let Err(error) = loaded.check_kv_room(at_once, at_once * room) {
        if at_once <= 1 {
            return Err(error.into());
        }
        at_once = at_once.div_ceil(2);
    }
    streams.chunks_mut(at_once.max(1)).try_for_each(|streams| find(loaded.model(), windows, streams))
}

/// Streams begin together, so their windows do too: all rows of the cache are always of one length.
fn find<S: Stream>(
    model: &Gpt2LMHeadModel,
    windows: Windows,
    streams: &mut [S],
) -> Result<(), CompressionError> {
    let mut rows: Vec<Row<'_, S>> = streams.iter_mut().map(|stream| Row::new(stream, model)).collect();
    let mut cache = model.new_cache(rows.len(), windows.reads())?;
    let mut unread = 1;
    while !rows.is_empty() {
        let hidden = read_last(model, &mut cache, &rows, unread)?; // (1, rows, C)
        let found = for_each_row(model, &hidden, 0..rows.len(), |row, logits| rows[row].stream.find(logits))?;
        // From the end, so that the row in a removed one's place has had its turn.
        for (row, (id, found)) in found.into_iter().enumerate().rev() {
            rows[row].ids.push(id);
            if !rows[row].stream.take(id, found)? {
                rows.swap_remove(row);
                cache.swap_remove(row)?;
            }
        }
        unread = 1;
        if cache.lengths().first().is_some_and(|read| *read == windows.reads()) {
            unread = windows.context - windows.stride;
            (0..rows.len()).try_for_each(|row| cache.truncate(row, 0))?;
        }
    }
    Ok(())
}

struct Row<'a, S> {
    stream: &'a mut S,
    /// The tokens so far.
    ids: Vec<u32>,
}

impl<'a, S> Row<'a, S> {
    fn new(stream: &'a mut S, model: &Gpt2LMHeadModel) -> Self {
        Self { stream, ids: vec![start(model.config())] }
    }
}

/// Reads the last `unread` tokens of each row; the hidden states of the last one of each.
fn read_last<S>(
    model: &Gpt2LMHeadModel,
    cache: &mut Gpt2Cache,
    rows: &[Row<'_, S>],
    unread: usize,
) -> Result<Tensor, GenerationError> {
    let mut left = unread;
    loop {
        let count = left.min((PASS_TOKENS / rows.len()).max(1));
        let piece = rows.iter().flat_map(|row| row.ids[row.ids.len() - left..][..count].iter().copied());
        let piece = Tensor::from_vec(piece.collect::<Vec<_>>(), (rows.len(), count), &Device::Cpu)?;
        let hidden = read(model, cache, &piece)?; // (B, T, C)
        left -= count;
        if left == 0 {
            let last = hidden.narrow(TOKEN_DIM, count - 1, 1)?; // (B, 1, C)
            return Ok(last.transpose(0, TOKEN_DIM)?.contiguous()?); // (1, B, C)
        }
    }
}

fn read(model: &Gpt2LMHeadModel, cache: &mut Gpt2Cache, ids: &Tensor) -> Result<Tensor, GenerationError> {
    Ok(model.transformer().forward_with(ids, Some(cache), &mut Pass::inference())?)
}
