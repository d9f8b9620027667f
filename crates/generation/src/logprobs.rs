//! The log-probability of a token, and what else the model expected in its place.

use std::ops::Range;
use std::slice::Chunks;

use candle_core::{D, DType, Device, Storage, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, LogitsFor};
use candle_gpt2_arithmetic::{log_sum_exp, map_items, relative_entropy};

use crate::probabilities::{largest, most_probable};
use crate::{GenerationConfig, GenerationError, History, LogitsProcessor};

/// The most probable tokens of a position with their log-probabilities, most probable first.
/// A [`Request`](crate::Request) and [`score`](crate::score()) may ask for them.
pub type TokenAlternatives = Vec<(u32, f64)>;

/// How probable the model finds a token: natural logarithms, in f64. A token that is among its alternatives has the same number
/// there. A [`Request`](crate::Request) may ask for them.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// That of the token; `-inf` for a probability of zero.
    pub logprob: f64,
    /// Those of the most probable tokens in its place, with the token itself if it is one of them.
    pub alternatives: TokenAlternatives,
}

/// What the model expects after a token.
#[derive(Debug)]
pub(crate) struct Expected<'a> {
    logits: &'a [f32],
    largest: f32,
    /// What is subtracted from a logit to make it a log-probability.
    normalizer: f64,
    alternatives: TokenAlternatives,
}

impl<'a> Expected<'a> {
    /// By these logits, with the `alternatives` most probable tokens; an error if they are not numbers.
    pub(crate) fn of(logits: &'a [f32], alternatives: usize) -> Result<Self, GenerationError> {
        let largest = largest(logits);
        let normalizer = log_sum_exp(logits, largest);
        if !normalizer.is_finite() {
            return Err(GenerationError::NotFinite);
        }
        let best = most_probable(logits, alternatives).into_iter();
        let alternatives = best.map(|(token, logit)| (token, f64::from(logit) - normalizer)).collect();
        Ok(Self { logits, largest, normalizer, alternatives })
    }

    /// Logarithm of the softmax at `token`; `-inf` for a token that the vocabulary does not have.
    pub(crate) fn logprob(&self, token: u32) -> f64 {
        f64::from(self.with_before(token).map_or(f32::NEG_INFINITY, |(logit, _)| *logit)) - self.normalizer
    }

    /// Whether `token` is the most probable one, of several the first: what greedy search writes.
    pub(crate) fn is_greedy(&self, token: u32) -> bool {
        let is_first = |(logit, before): (&f32, &[f32])| *logit == self.largest && !before.contains(logit);
        self.with_before(token).is_some_and(is_first)
    }

    /// The most probable token, of several the first.
    pub(crate) fn most_probable(&self) -> Option<usize> {
        self.logits.iter().position(|logit| *logit == self.largest)
    }

    /// `Σ p (ln p - ln q)` over the vocabulary, with `q` of the other one.
    pub(crate) fn relative_entropy(&self, other: &Self) -> f64 {
        relative_entropy((self.logits, self.normalizer), (other.logits, other.normalizer))
    }

    /// The logit of `token`, and those before it.
    fn with_before(&self, token: u32) -> Option<(&f32, &[f32])> {
        self.logits.get(..=usize::try_from(token).ok()?)?.split_last()
    }

    /// The log-probability of `token`, with its alternatives.
    pub(crate) fn of_token(self, token: u32) -> TokenLogprobs {
        TokenLogprobs { logprob: self.logprob(token), alternatives: self.alternatives }
    }
}

/// The logits as the user's biases change them, before anything else does.
pub(crate) fn biased(
    config: &GenerationConfig,
    history: History<'_>,
    logits: &[f32],
) -> Result<Vec<f32>, GenerationError> {
    let mut biased = logits.to_vec();
    LogitsProcessor::biases_of(config).map_or(Ok(()), |biases| biases.process(history, &mut biased))?;
    Ok(biased)
}

/// What `look` finds in the logits after each of these rows of hidden states `(1, T, C)`; on all threads, and in pieces, so that
/// the logits of a long window are never held all at once.
///
/// ```
/// use candle_gpt2_generation::{for_each_row, largest};
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let hidden = model.transformer().forward(&Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?)?;
/// let largest = for_each_row(&model, &hidden, 1..3, |_, logits| Ok(largest(logits)))?;
/// assert_eq!(largest, [0.0, 0.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Those of `look`, and when the model's head fails.
pub fn for_each_row<R: Send>(
    model: &Gpt2LMHeadModel,
    hidden: &Tensor,
    rows: Range<usize>,
    look: impl Fn(usize, &[f32]) -> Result<R, GenerationError> + Sync,
) -> Result<Vec<R>, GenerationError> {
    let mut found = Vec::with_capacity(rows.len());
    for piece in pieces(rows) {
        let of_piece = with_logits(model, hidden, piece.clone(), |logits| {
            Ok(map_items(logits.zip(piece), |(logits, row)| look(row, logits)))
        })?;
        for row in of_piece {
            found.push(row?);
        }
    }
    Ok(found)
}

/// Rows in pieces whose logits are held at once: 26 MB of GPT-2's.
pub(crate) fn pieces(rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    const PIECE_ROWS: usize = 128;
    rows.clone().step_by(PIECE_ROWS).map(move |first| first..rows.end.min(first + PIECE_ROWS))
}

/// What `look` makes of the logits after some rows of hidden states `(1, T, C)`, row by row. On a CPU they are not copied.
pub(crate) fn with_logits<R>(
    model: &Gpt2LMHeadModel,
    hidden: &Tensor,
    rows: Range<usize>,
    look: impl FnOnce(Chunks<'_, f32>) -> Result<R, GenerationError>,
) -> Result<R, GenerationError> {
    let (first, count) = (rows.start, rows.len());
    let logits = model.head(hidden, LogitsFor::Tokens { first, count })?; // (1, count, V)
    let vocab_size = logits.dim(D::Minus1)?;
    let logits = logits.to_dtype(DType::F32)?.to_device(&Device::Cpu)?.contiguous()?;
    let (storage, layout) = logits.storage_and_layout();
    let values = match &*storage {
        Storage::Cpu(storage) => storage.as_slice::<f32>()?,
        _ => &[],
    };
    let values = layout.contiguous_offsets().and_then(|(start, end)| values.get(start..end));
    look(values.unwrap_or_default().chunks(vocab_size))
}
