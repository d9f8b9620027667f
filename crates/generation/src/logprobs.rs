//! Log-probability of a token and of its most probable alternatives.

use std::ops::Range;
use std::slice::Chunks;

use candle_core::{D, DType, Device, Storage, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, LogitsFor};
use candle_gpt2_arithmetic::{log_sum_exp, map_items, relative_entropy};

use crate::probabilities::{largest, most_probable};
use crate::{GenerationConfig, GenerationError, History, LogitsProcessor};

/// Most probable tokens at a position and their log-probabilities, most probable first.
///
/// A [`Request`](crate::Request) and [`score`](crate::score()) can request them.
pub type TokenAlternatives = Vec<(u32, f64)>;

/// Log-probabilities of a token and its alternatives, as natural logarithms in f64.
///
/// If the token is among its alternatives, both values are equal. A [`Request`](crate::Request) can
/// request them.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Log-probability of the token; `-inf` if its probability is zero.
    pub logprob: f64,
    /// Most probable tokens at this position, including the token itself if it is one of them.
    pub alternatives: TokenAlternatives,
}

/// The model's prediction for the next token.
#[derive(Debug)]
pub(crate) struct Expected<'a> {
    logits: &'a [f32],
    largest: f32,
    /// Value to subtract from a logit to get a log-probability.
    normalizer: f64,
    alternatives: TokenAlternatives,
}

impl<'a> Expected<'a> {
    /// Creates a prediction from logits, with the `alternatives` most probable tokens.
    ///
    /// Returns an error if the logits are not finite.
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

    /// Returns the log-softmax at `token`; `-inf` if the token is not in the vocabulary.
    pub(crate) fn logprob(&self, token: u32) -> f64 {
        f64::from(self.with_before(token).map_or(f32::NEG_INFINITY, |(logit, _)| *logit)) - self.normalizer
    }

    /// Returns whether `token` is the most probable one, and thus the greedy choice.
    ///
    /// Ties go to the first token.
    pub(crate) fn is_greedy(&self, token: u32) -> bool {
        let is_first = |(logit, before): (&f32, &[f32])| *logit == self.largest && !before.contains(logit);
        self.with_before(token).is_some_and(is_first)
    }

    /// Returns the most probable token; ties go to the first one.
    pub(crate) fn most_probable(&self) -> Option<usize> {
        self.logits.iter().position(|logit| *logit == self.largest)
    }

    /// Computes `Σ p (ln p - ln q)` over the vocabulary, where `q` is the other prediction.
    pub(crate) fn relative_entropy(&self, other: &Self) -> f64 {
        relative_entropy((self.logits, self.normalizer), (other.logits, other.normalizer))
    }

    /// Returns the logit of `token` and the logits before it.
    fn with_before(&self, token: u32) -> Option<(&f32, &[f32])> {
        self.logits.get(..=usize::try_from(token).ok()?)?.split_last()
    }

    /// Returns the log-probability of `token` together with the alternatives.
    pub(crate) fn of_token(self, token: u32) -> TokenLogprobs {
        TokenLogprobs { logprob: self.logprob(token), alternatives: self.alternatives }
    }
}

/// Applies the configuration's biases to the logits, but no other processors.
pub(crate) fn biased(
    config: &GenerationConfig,
    history: History<'_>,
    logits: &[f32],
) -> Result<Vec<f32>, GenerationError> {
    let mut biased = logits.to_vec();
    LogitsProcessor::biases_of(config).map_or(Ok(()), |biases| biases.process(history, &mut biased))?;
    Ok(biased)
}

/// Calls `look` with the logits of each row of hidden states `(1, T, C)` and returns the results.
///
/// All threads share the work. The logits are computed in pieces, because the logits of a long
/// window would need too much memory.
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
/// Returns the errors of `look`, and an error if the model's head fails.
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

/// Splits rows into pieces small enough that their logits fit in memory: 26 MB for GPT-2.
pub(crate) fn pieces(rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    const PIECE_ROWS: usize = 128;
    rows.clone().step_by(PIECE_ROWS).map(move |first| first..rows.end.min(first + PIECE_ROWS))
}

/// Calls `look` with the logits of the given rows of hidden states `(1, T, C)`, row by row.
///
/// On a CPU, the logits are not copied.
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
