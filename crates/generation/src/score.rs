//! How probable a model finds a text: the log-probability of every token given those before it.
//!
//! A text longer than the context is scored in windows of the context's length that start every `stride` tokens;
//! each token counts in the first window that reaches it, so after the first window it sees at least
//! `context - stride` tokens before it.
//! Source: "Perplexity of fixed-length models" in the transformers documentation. The loss here is the mean over all
//! scored tokens. With a stride of the whole context, the first token of each window has nothing before it and is not
//! scored, as there.

use std::iter::{once, repeat_n};

use candle_core::Tensor;
use gpt2::{Gpt2Cache, Gpt2Config, Gpt2LMHead, Pass};

use crate::config::check_ids;
use crate::generate::last_logits;
use crate::logprobs::{Expected, for_each_row};
use crate::processors::largest;
use crate::{GenerationError, TokenAlternatives};

/// The log-probabilities of a text.
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    /// Natural logarithm of each token's probability; `None` for a token with nothing before it.
    pub logprobs: Vec<Option<f64>>,
    /// What else the model expected at each token's place; empty where nothing is before it.
    pub alternatives: Vec<TokenAlternatives>,
    /// Mean negative log-probability of the scored tokens, in nats.
    pub loss: f64,
}

impl Score {
    /// `exp(loss)`.
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

/// Scores a text, with the `top_alternatives` most probable tokens of each place; `progress` is told how many tokens
/// were scored since the last call.
///
/// # Errors
/// Those of [`check_text`], and when the model's logits are not numbers.
pub fn score(
    model: &Gpt2LMHead,
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
        let hidden = model.transformer().forward(&window, None, &mut Pass::inference())?; // (1, T, C)
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

/// How probable a continuation of a prompt is.
#[derive(Debug, Clone, PartialEq)]
pub struct Continuation {
    /// Natural logarithm of each token's probability.
    pub logprobs: Vec<f64>,
    /// Whether every token is the most probable one at its place: what greedy search would write.
    pub is_greedy: bool,
}

impl Continuation {
    /// Logarithm of the continuation's probability.
    pub fn sum(&self) -> f64 {
        self.logprobs.iter().sum()
    }

    /// Mean log-probability of its tokens.
    pub fn mean(&self) -> f64 {
        self.sum() / self.logprobs.len() as f64
    }
}

/// Scores continuations of one prompt, whose keys and values are computed once, many of them at once; `progress` is called for
/// each.
///
/// # Errors
/// When the prompt or a continuation is empty, both together are longer than the context, an id is outside the
/// vocabulary, or the model's logits are not numbers.
pub fn score_continuations(
    model: &Gpt2LMHead,
    prompt: &[u32],
    continuations: &[Vec<u32>],
    progress: &dyn Fn(),
) -> Result<Vec<Continuation>, GenerationError> {
    /// Most tokens that are read at once.
    const BATCH_TOKENS: usize = 512;
    /// Contexts that keys and values may fill.
    const BATCH_CONTEXTS: usize = 4;
    check_continuations(prompt, continuations, model.config())?;
    let mut prefix = model.new_cache(1, prompt.len())?;
    let first = last_logits(model, prompt, &mut prefix)?;
    let expected_first = Expected::of(&first, 0)?;
    // The last token is scored and not read.
    let longest = continuations.iter().map(Vec::len).max().unwrap_or(1);
    let capacity = prompt.len() + longest - 1;
    let room = BATCH_CONTEXTS * model.config().n_positions / capacity;
    let rows = (BATCH_TOKENS / longest).min(room).max(1);
    let mut scored = Vec::with_capacity(continuations.len());
    for batch in continuations.chunks(rows) {
        let longer: Vec<&Vec<u32>> = batch.iter().filter(|ids| ids.len() > 1).collect();
        let rest = after_first(model, &prefix, &longer)?;
        let mut rest = rest.into_iter();
        for continuation in batch {
            let of_first =
                (expected_first.logprob(continuation[0]), logit(&first, continuation[0]) == largest(&first));
            let tokens: Vec<(f64, bool)> =
                once(of_first).chain(rest.by_ref().take(continuation.len() - 1)).collect();
            scored.push(Continuation {
                logprobs: tokens.iter().map(|(logprob, _)| *logprob).collect(),
                is_greedy: tokens.iter().all(|(_, is_greedy)| *is_greedy),
            });
            progress();
        }
    }
    Ok(scored)
}

/// Of every token but the first of each continuation, one after the other: its log-probability, and whether it is the most
/// probable one. `prefix` holds the prompt.
fn after_first(
    model: &Gpt2LMHead,
    prefix: &Gpt2Cache,
    continuations: &[&Vec<u32>],
) -> Result<Vec<(f64, bool)>, GenerationError> {
    // The last token is scored and not read.
    let longest = continuations.iter().map(|ids| ids.len().saturating_sub(1)).max().unwrap_or(0);
    if longest == 0 {
        return Ok(Vec::new());
    }
    let rows = continuations.len();
    let prompt_len = prefix.lengths()[0];
    let mut cache = model.new_cache(rows, prompt_len + longest)?;
    (0..rows).try_for_each(|row| cache.copy_row(row, prefix, 0, prompt_len))?;
    // What comes after the end of a continuation is not looked at, and changes nothing before it.
    let padded = continuations.iter().flat_map(|ids| {
        let read = ids.split_last().map_or(&[][..], |(_, read)| read);
        read.iter().copied().chain(repeat_n(0, longest - read.len()))
    });
    let ids = Tensor::from_vec(padded.collect(), (rows, longest), model.device())?;
    let hidden = model.transformer().forward(&ids, Some(&mut cache), &mut Pass::inference())?; // (B, T, C)
    let places = continuations.iter().enumerate().flat_map(|(row, ids)| {
        ids.iter().skip(1).enumerate().map(move |(place, id)| (row * longest + place, *id))
    });
    let (places, wanted): (Vec<usize>, Vec<u32>) = places.unzip();
    let places = places.into_iter().map(u32::try_from).collect::<Result<Vec<_>, _>>();
    let places = Tensor::new(places.map_err(candle_core::Error::wrap)?, model.device())?;
    let hidden = hidden.flatten(0, 1)?.index_select(&places, 0)?.unsqueeze(0)?; // (1, tokens, C)
    for_each_row(model, &hidden, 0..wanted.len(), |row, logits| {
        let is_greedy = logit(logits, wanted[row]) == largest(logits);
        Ok((Expected::of(logits, 0)?.logprob(wanted[row]), is_greedy))
    })
}

/// Checks what can be checked of a prompt and its continuations before a model is loaded.
///
/// # Errors
/// When the prompt or a continuation is empty, both together are longer than the context, or an id is outside the
/// vocabulary.
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
        // The last token is scored and not read.
        let tokens = prompt.len() + continuation.len() - 1;
        if tokens > n_positions {
            return Err(GenerationError::ContinuationTooLong { number, tokens, n_positions });
        }
    }
    Ok(())
}

/// Checks what can be checked of a text before a model is loaded.
///
/// # Errors
/// When there are fewer than two tokens, an id is outside the vocabulary, `stride` is not from 1 to the context's length,
/// or the context has only one position.
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

fn logit(logits: &[f32], token: u32) -> f32 {
    let logit = usize::try_from(token).ok().and_then(|token| logits.get(token));
    logit.copied().unwrap_or(f32::NEG_INFINITY)
}
