//! Model predictions for stream tokens, in overlapping windows.
//!
//! Known tokens are predicted window by window. Unknown tokens are decoded one at a time, with many streams
//! in a batch.
//!
//! A window reads up to `context - 1` tokens and predicts the one after each. The next window begins `stride`
//! tokens later, and its first `context - stride` tokens are already predicted. These are the windows of
//! [`score`](candle_gpt2_generation::score()), so a stream costs as much as its score.
//!
//! Both methods compute the same bits. No value depends on how the tokens are split into passes, or on the
//! other rows of a batch.

use candle_core::{Device, Tensor};
use candle_gpt2::{Gpt2Cache, Gpt2Config, Gpt2LMHeadModel, KvSlot, Pass};
use candle_gpt2_engine::LoadedModel;
use candle_gpt2_generation::{GenerationError, default_stride, for_each_row};

use crate::CompressionError;

/// Token dimension of a `(B, T, C)` tensor.
const TOKEN_DIM: usize = 1;
/// Maximum number of tokens per pass over all streams; a new window may need several passes.
const PASS_TOKENS: usize = 512;
/// Smallest context that can predict a token.
const MIN_CONTEXT: usize = 2;

/// Window sizes for a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Windows {
    /// Number of tokens in a window.
    pub(crate) context: usize,
    /// Number of tokens between the starts of two windows, less than `context`.
    pub(crate) stride: usize,
}

impl Windows {
    /// Creates windows that overlap by half; `context` defaults to the model's number of positions.
    pub(crate) fn new(context: Option<usize>, config: &Gpt2Config) -> Result<Self, CompressionError> {
        let n_positions = config.n_positions;
        let context = context.unwrap_or(n_positions);
        let stride = default_stride(&Gpt2Config { n_positions: context, ..config.clone() });
        let windows = Self { context, stride };
        let error = CompressionError::Context { n_positions, found: context };
        if windows.fit(config) { Ok(windows) } else { Err(error) }
    }

    /// Whether the model supports these windows.
    pub(crate) fn fit(self, config: &Gpt2Config) -> bool {
        (MIN_CONTEXT..=config.n_positions).contains(&self.context) && (1..self.context).contains(&self.stride)
    }

    /// Number of tokens that a window reads.
    fn reads(self) -> usize {
        self.context - 1
    }
}

/// Returns the token that precedes each stream: the start token, or token 0 if the model has none.
pub(crate) fn start(config: &Gpt2Config) -> u32 {
    config.start_token().unwrap_or(0)
}

/// Calls `visit` with the logits for each token in `ids` except the first; returns the results.
///
/// `visit` also receives the token's index. `progress` receives the number of tokens since the last call, and
/// can stop the job with an error.
pub(crate) fn for_each_next<R: Send>(
    model: &Gpt2LMHeadModel,
    windows: Windows,
    ids: &[u32],
    mut progress: impl FnMut(usize) -> Result<(), CompressionError>,
    visit: impl Fn(usize, &[f32]) -> Result<R, GenerationError> + Sync,
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
        // The last token is predicted but not read.
        let window = Tensor::from_slice(&ids[begin..end - 1], (1, end - 1 - begin), &Device::Cpu)?;
        let hidden = read(model, &mut cache, &window)?; // (1, T, C)
        // Row `r` of the hidden states predicts token `begin + r + 1`.
        found.extend(for_each_row(model, &hidden, first - begin - 1..end - begin - 1, |row, logits| {
            visit(begin + row + 1, logits)
        })?);
        progress(end - first)?;
    }
    Ok(found)
}

/// Stream whose tokens are being decoded.
pub(crate) trait Stream: Sync {
    /// Data that accompanies each token found.
    type Found: Send;

    /// Finds the next token from the logits.
    fn find(&self, logits: &[f32]) -> Result<(u32, Self::Found), GenerationError>;

    /// Accepts the token that was found and returns whether the stream continues.
    fn take(&mut self, id: u32, found: Self::Found) -> Result<bool, CompressionError>;
}

/// Decodes the tokens of streams, in batches that fit into the available memory.
pub(crate) fn find_all<S: Stream>(
    loaded: &LoadedModel,
    windows: Windows,
    streams: &mut [S],
) -> Result<(), CompressionError> {
    let room = KvSlot::room_of(windows.reads());
    let mut batch = streams.len();
    while let Err(error) = loaded.check_kv_room(batch, batch * room) {
        if batch <= 1 {
            return Err(error.into());
        }
        batch = batch.div_ceil(2);
    }
    streams.chunks_mut(batch.max(1)).try_for_each(|streams| find(loaded.model(), windows, streams))
}

/// Decodes one batch of streams.
///
/// Streams begin together, so their windows do too. All rows of the cache always have the same length.
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
        // Iterates backward, so that the row that replaces a removed row has already been processed.
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
    /// Tokens so far, beginning with the start token.
    ids: Vec<u32>,
}

impl<'a, S> Row<'a, S> {
    fn new(stream: &'a mut S, model: &Gpt2LMHeadModel) -> Self {
        Self { stream, ids: vec![start(model.config())] }
    }
}

/// Reads the last `unread` tokens of each row and returns the last token's hidden states.
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
