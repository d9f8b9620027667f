//! Contrastive search: prefers probable tokens that differ from the preceding ones.
//!
//! Each step chooses among the `top_k` most probable tokens. The score is `(1 - α) p(v) - α max_j
//! cos(h_v, h_j)`, with the hidden states after the final norm; `α` is `penalty_alpha`. Source: "A
//! Contrastive Framework for Neural Text Generation" (arXiv:2202.06417), as in `_contrastive_search` of
//! transformers 4.49.

use std::ops::ControlFlow;

use candle_core::{D, DType, Tensor};
use candle_gpt2::{Gpt2LMHeadModel, LogitsFor, Pass};
use candle_gpt2_kernels::is_interrupted;

use crate::clock::Deadline;
use crate::generate::one_row_of;
use crate::logits::rows_of;
use crate::probabilities::{log_sum_exp, most_probable};
use crate::sampler::process;
use crate::{Clock, GenerationConfig, GenerationError, History, LogitsProcessor, SearchMode, StopReason};

/// Token axis of a `(1, T, C)` tensor.
const TOKEN_DIM: usize = 1;

/// Runs contrastive search; returns the new tokens and the stop reason.
///
/// Only [`GenerationConfig::max_time`] needs the `clock`. `progress` is called after each token and may
/// end the search.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use candle_gpt2_generation::{GenerationConfig, StopReason, contrastive_search};
/// # use candle_gpt2_weights::{Checkpoint, GivenFiles, LoadOptions, OpenOptions};
/// # let files = GivenFiles::of_bytes("stories", candle_gpt2_stories::FILES);
/// # let checkpoint = Checkpoint::open_given(files, &OpenOptions::default(), &|_| ())?;
/// # let model = checkpoint.load(&LoadOptions::default(), &|_| ())?;
///
/// let config = GenerationConfig { penalty_alpha: 0.6, top_k: 4, max_new_tokens: 5, do_sample: false, eos_token_id: vec![], ..Default::default() };
/// let (ids, reason) = contrastive_search(&model, &[1, 2], &config, &[], None, &|| ControlFlow::Continue(()))?;
/// assert_eq!((ids.len(), reason), (5, StopReason::MaxNewTokens));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Returns an error if an option is out of range or selects another search, or if the prompt is empty
/// or too long. Also returns an error if an id is outside the vocabulary, a time limit has no clock, or
/// the model's logits are not finite.
pub fn contrastive_search(
    model: &Gpt2LMHeadModel,
    prompt: &[u32],
    config: &GenerationConfig,
    processors: &[LogitsProcessor],
    clock: Option<&Clock>,
    progress: &dyn Fn() -> ControlFlow<()>,
) -> Result<(Vec<u32>, StopReason), GenerationError> {
    config.check_for(SearchMode::Contrastive, model.config())?;
    let mut ids = config.fit_prompt(prompt, model.config())?;
    let prompt_len = ids.len();
    let deadline = Deadline::new(config, clock)?;
    let wanted = config.new_tokens(prompt_len);
    // The model reads a token before the search can choose it, so every token needs a position.
    let steps = wanted.min(model.config().n_positions - prompt_len);
    let device = model.device();
    // One row for each candidate; all rows contain the sequence so far.
    let most = config.top_k.min(model.config().vocab_size);
    let mut cache = one_row_of(model, most, prompt_len + steps)?;

    let mut search = || -> Result<StopReason, GenerationError> {
        let mut best = 0;
        let pass = &mut Pass::inference();
        let tokens = Tensor::from_slice(&ids, (1, ids.len()), device)?;
        let hidden = model.transformer().forward_with(&tokens, Some(&mut cache), pass)?; // (1, T, C)
        let mut logits = rows_of(&model.head(&hidden, LogitsFor::LastToken)?)?.swap_remove(0);
        let mut context = unit_vectors(&hidden)?; // (1, T, C)
        for _ in 0..steps {
            process(processors, History { ids: &ids, prompt_len }, &mut logits)?;
            let normalizer = log_sum_exp(&logits);
            let candidates: Vec<(u32, f64)> = most_probable(&logits, config.top_k)
                .into_iter()
                .map(|(token, logit)| (token, libm::exp(f64::from(logit) - normalizer)))
                .collect();
            let rows = candidates.len();
            // The rows differ only in their last candidates.
            let shared = if cache.lengths().len() == 1 { 0 } else { ids.len() - 1 };
            cache.reorder(&vec![best; rows], |_, _| shared)?;
            let tokens: Vec<u32> = candidates.iter().map(|(token, _)| *token).collect();
            let tokens = Tensor::from_vec(tokens, (rows, 1), device)?;
            let hidden = model.transformer().forward_with(&tokens, Some(&mut cache), pass)?; // (K, 1, C)
            let directions = unit_vectors(&hidden)?.squeeze(TOKEN_DIM)?; // (K, C)
            let cosines = directions.matmul(&context.squeeze(0)?.t()?)?; // (K, T)
            let penalties = cosines.max(D::Minus1)?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            let score = |(index, (_, probability)): (usize, &(u32, f64))| {
                (1.0 - config.penalty_alpha) * probability - config.penalty_alpha * penalties[index]
            };
            let scores: Vec<f64> = candidates.iter().enumerate().map(score).collect();
            if scores.iter().any(|score| score.is_nan()) {
                return Err(GenerationError::NotFinite);
            }
            best = 0;
            for (index, score) in scores.iter().enumerate() {
                if *score > scores[best] {
                    best = index;
                }
            }
            let id = candidates[best].0;
            ids.push(id);
            let is_ended = progress().is_break();
            let is_over = deadline.is_over();
            let reason = match config.eos_token_id.contains(&id) {
                true => Some(StopReason::Eos),
                false if is_ended => Some(StopReason::Interrupted),
                false => is_over.then_some(StopReason::MaxTime),
            };
            if let Some(reason) = reason {
                return Ok(reason);
            }
            let direction = directions.narrow(0, best, 1)?.unsqueeze(0)?; // (1, 1, C)
            context = Tensor::cat(&[&context, &direction], TOKEN_DIM)?;
            logits = rows_of(&model.head(&hidden.narrow(0, best, 1)?, LogitsFor::LastToken)?)?.swap_remove(0);
        }
        Ok(if wanted > steps { StopReason::Context } else { StopReason::MaxNewTokens })
    };
    let reason = match search() {
        Err(_) if is_interrupted() => StopReason::Interrupted,
        reason => reason?,
    };
    Ok((ids.split_off(prompt_len), reason))
}

/// Returns hidden states `(B, T, C)` in f32, each divided by its norm.
fn unit_vectors(hidden: &Tensor) -> Result<Tensor, GenerationError> {
    let hidden = hidden.to_dtype(DType::F32)?;
    Ok(hidden.broadcast_div(&hidden.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?)?)
}
