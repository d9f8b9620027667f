//! Scoring of texts: the log-probability of every token, given the tokens before it.
//!
//! A text that exceeds the context is scored in windows of the context's length that start every
//! `stride` tokens. Each token counts in the first window that reaches it. After the first window, it
//! therefore sees at least `context - stride` tokens before it.
//!
//! Source: "Perplexity of fixed-length models" in the transformers documentation. The loss here is the
//! mean over all scored tokens. If the stride equals the context, no token precedes the first one of
//! each window, and it is not scored, as in the source.

use candle_core::Tensor;
use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel, Pass};

use crate::config::check_ids;
use crate::logprobs::{Expected, for_each_row};
use crate::sequences::score_groups;
use crate::{GenerationError, Sequence, TokenAlternatives, TokenScore};

/// Log-probabilities of a text, returned by [`score`].
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    /// Natural logarithm of each token's probability; `None` if no token precedes it.
    pub logprobs: Vec<Option<f64>>,
    /// Most probable tokens at each position; empty if no token precedes the position.
    pub alternatives: Vec<TokenAlternatives>,
    /// Mean negative log-probability of the scored tokens, in nats.
    pub loss: f64,
}

impl Score {
    /// Returns `exp(loss)`.
    pub fn perplexity(&self) -> f64 {
        libm::exp(self.loss)
    }
}

/// Scores text and returns the `top_alternatives` most probable tokens at each position.
///
/// Calls `progress` with the number of tokens scored since the last call.
///
/// ```
/// use candle_gpt2_generation::score;
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let score = score(&model, &[1, 2, 3, 4, 5], 4, 0, &|_| ())?;
/// assert_eq!(score.logprobs.len(), 5);
/// assert!((score.perplexity() - 11.0).abs() < 1e-4, "with all weights zero, all 11 tokens are equally likely");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Returns the errors of [`check_text`], and an error if the model's logits are not finite.
pub fn score(
    model: &Gpt2LMHeadModel,
    ids: &[u32],
    stride: usize,
    top_alternatives: usize,
    progress: &dyn Fn(u64),
) -> Result<Score, GenerationError> {
    check_text(ids, stride, model.config())?;
    let context = model.config().n_positions;
    let mut logprobs = vec![None; ids.len()];
    let mut alternatives = vec![Vec::new(); ids.len()];
    let mut scored = 0;
    for begin in (0..ids.len()).step_by(stride) {
        let end = ids.len().min(begin + context);
        let window = Tensor::from_slice(&ids[begin..end], (1, end - begin), model.device())?;
        let hidden = model.transformer().forward_with(&window, None, &mut Pass::inference())?; // (1, T, C)
        let first = scored.max(begin + 1);
        // Row r of the hidden states predicts token begin + r + 1.
        let found = for_each_row(model, &hidden, first - begin - 1..end - begin - 1, |row, logits| {
            Ok(Expected::of(logits, top_alternatives)?.of_token(ids[begin + row + 1]))
        })?;
        for (position, found) in (first..end).zip(found) {
            logprobs[position] = Some(found.logprob);
            alternatives[position] = found.alternatives;
        }
        progress((end - scored) as u64);
        scored = end;
        if end == ids.len() {
            break;
        }
    }
    let known: Vec<f64> = logprobs.iter().flatten().copied().collect();
    let loss = -known.iter().sum::<f64>() / known.len() as f64;
    Ok(Score { logprobs, alternatives, loss })
}

/// Score of a continuation; [`score_continuations`] returns one for each continuation.
#[derive(Debug, Clone, PartialEq)]
pub struct Continuation {
    /// Natural logarithm of each token's probability.
    pub logprobs: Vec<f64>,
    /// Whether greedy decoding would choose every token; ties go to the first token.
    pub is_greedy: bool,
}

impl Continuation {
    /// Returns the logarithm of the continuation's probability.
    pub fn sum(&self) -> f64 {
        self.logprobs.iter().sum()
    }

    /// Returns the mean log-probability of the tokens.
    pub fn mean(&self) -> f64 {
        self.sum() / self.logprobs.len() as f64
    }
}

/// Scores continuations of one prompt.
///
/// The prompt's keys and values are computed once, and many continuations are scored together. Calls
/// `progress` for each of them.
///
/// ```
/// use candle_gpt2_generation::{first_best, score_continuations};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let scores = score_continuations(&model, &[1, 2, 3], &[vec![4, 5], vec![6], vec![7, 8]], &|| ())?;
/// assert!((scores[0].sum() - 2.0 * (1f64 / 11.0).ln()).abs() < 1e-4);
/// assert_eq!(first_best(scores.iter().map(|score| score.sum())), 1, "all tokens are equally likely, so the shortest wins");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Returns an error if the prompt or a continuation is empty, or if both together exceed the context.
/// Also returns an error if an id is outside the vocabulary or the model's logits are not finite.
pub fn score_continuations(
    model: &Gpt2LMHeadModel,
    prompt: &[u32],
    continuations: &[Vec<u32>],
    progress: &dyn Fn(),
) -> Result<Vec<Continuation>, GenerationError> {
    check_continuations(prompt, continuations, model.config())?;
    let sequence =
        |continuation: &Vec<u32>| Sequence { ids: [prompt, continuation].concat(), first: prompt.len() };
    let sequences: Vec<Sequence> = continuations.iter().map(sequence).collect();
    let scores = score_groups(model, &[sequences.iter().collect()], progress)?;
    let continuation = |scores: Vec<TokenScore>| Continuation {
        logprobs: scores.iter().map(|score| score.logprob).collect(),
        is_greedy: scores.iter().all(|score| score.is_greedy),
    };
    Ok(scores.into_iter().flatten().map(continuation).collect())
}

/// Returns the index of the largest number; ties go to the first one.
///
/// ```
/// use candle_gpt2_generation::first_best;
///
/// assert_eq!(first_best([-3.0, -1.5, -1.5, -2.0]), 1);
/// ```
pub fn first_best(measures: impl IntoIterator<Item = f64>) -> usize {
    let indexed = measures.into_iter().enumerate();
    indexed.fold((0, f64::NEG_INFINITY), |best, next| if next.1 > best.1 { next } else { best }).0
}

/// Performs the checks of [`score_continuations`] that do not need a loaded model.
///
/// # Errors
/// Returns an error if the prompt or a continuation is empty, if both together exceed the context, or
/// if an id is outside the vocabulary.
pub fn check_continuations(
    prompt: &[u32],
    continuations: &[Vec<u32>],
    config: &Gpt2Config,
) -> Result<(), GenerationError> {
    let n_positions = config.n_positions;
    check_ids(prompt, config)?;
    if prompt.is_empty() {
        return Err(GenerationError::EmptyPrompt);
    }
    for (index, continuation) in continuations.iter().enumerate() {
        let number = index + 1;
        if continuation.is_empty() {
            return Err(GenerationError::EmptyContinuation { number });
        }
        check_ids(continuation, config)?;
        // The last token is scored but not read.
        let tokens = prompt.len() + continuation.len() - 1;
        if tokens > n_positions {
            return Err(GenerationError::ContinuationTooLong { number, tokens, n_positions });
        }
    }
    Ok(())
}

/// Returns the default distance between the windows in [`score`]: half the context.
pub fn default_stride(config: &Gpt2Config) -> usize {
    config.n_positions.div_ceil(2)
}

/// Performs the checks of [`score`] that do not need a loaded model.
///
/// # Errors
/// Returns an error if there are fewer than two tokens or an id is outside the vocabulary. Also returns
/// an error if `stride` is 0 or exceeds the context, or if the context has only one position.
pub fn check_text(ids: &[u32], stride: usize, config: &Gpt2Config) -> Result<(), GenerationError> {
    let n_positions = config.n_positions;
    if stride == 0 || stride > n_positions {
        let expected = format!("from 1 to the model's context of {n_positions}");
        return Err(GenerationError::OptionOutOfRange {
            option: "stride",
            expected,
            found: stride.to_string(),
        });
    }
    check_ids(ids, config)?;
    if ids.len() < 2 {
        return Err(GenerationError::TooShortToScore { tokens: ids.len() });
    }
    if n_positions < 2 {
        return Err(GenerationError::ContextTooShortToScore { n_positions });
    }
    Ok(())
}
