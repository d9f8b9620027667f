//! What may follow a token of a text: what the model expects, and what is left of that by the settings of a text.

use candle_core::{DType, Tensor};
use candle_gpt2::{Gpt2Cache, Gpt2LMHeadModel, LogitsFor, Pass};
use candle_gpt2_arithmetic::log_sum_exp;
use candle_gpt2_generation::{GenerationConfig, GenerationError, History, LogitsProcessor, Sampler};
use serde::Serialize;

use crate::error::Result;

/// The axis of the tokens in hidden states, `(1, T, C)`.
const TOKEN_DIM: usize = 1;
/// Tokens by which the room of a [`Reading`] grows.
const ROOM_STEP: usize = 128;

/// What may follow a token.
///
/// ```
/// use candle_gpt2_generation::{GenerationConfig, History};
/// use candle_gpt2_look::{NextTokens, Reading};
/// # use candle_gpt2_engine::{ModelOptions, Silent};
///
/// # let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// let ids = model.vocabulary().encode("Good night, good")?;
/// let logits = Reading::default().logits(model.model(), &ids, ids.len() - 1)?;
/// let config = GenerationConfig { do_sample: true, top_k: 20, ..GenerationConfig::default() };
/// let text_of = |id| String::from_utf8_lossy(&model.vocabulary().token_bytes(id)).into_owned();
/// let history = History { ids: &ids, prompt_len: ids.len() };
/// let next = NextTokens::of(&logits, history, &config, &[], 5, text_of)?;
/// assert_eq!((next.tokens.len(), next.kept), (5, 20));
/// assert!(next.tokens[0].logprob >= next.tokens[1].logprob);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NextTokens {
    /// The most probable tokens, by the model's logits; of equals the lower id first.
    pub tokens: Vec<NextToken>,
    /// How many tokens of the vocabulary may be chosen.
    pub kept: usize,
}

/// A token that may follow.
///
/// Part of [`NextTokens`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NextToken {
    /// Its id.
    pub id: u32,
    /// What it writes.
    pub token: String,
    /// What the model gives it.
    pub logit: f32,
    /// The natural logarithm of its probability by the model alone.
    pub logprob: f64,
    /// Its probability by the settings: 0 for what they exclude, and 1 if there is no choice.
    pub probability: f64,
}

impl NextTokens {
    /// From the logits `(V)` after the last token of a history, for a text with this configuration and these processors besides its
    /// own; `top` tokens are listed, with what each writes by `text_of`.
    ///
    /// # Errors
    /// When a logit is no number, or the settings leave no token.
    pub fn of(
        logits: &[f32],
        history: History<'_>,
        config: &GenerationConfig,
        others: &[LogitsProcessor],
        top: usize,
        text_of: impl Fn(u32) -> String,
    ) -> std::result::Result<Self, GenerationError> {
        let mut processors = LogitsProcessor::of_config(config);
        others.iter().cloned().for_each(|other| other.add_to(&mut processors));
        let mut sampler = Sampler::new(config, processors, 0);
        let probabilities = sampler.probabilities(history, &mut logits.to_vec())?;
        let normalizer = log_sum_exp(logits, logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let mut order: Vec<(u32, f32, f64)> =
            (0..).zip(logits).zip(&probabilities).map(|((id, logit), p)| (id, *logit, *p)).collect();
        let by_logit = |a: &(u32, f32, f64), b: &(u32, f32, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if (1..order.len()).contains(&top) {
            order.select_nth_unstable_by(top - 1, by_logit);
        }
        order.truncate(top);
        order.sort_unstable_by(by_logit);
        let next_token = |(id, logit, probability)| NextToken {
            id,
            token: text_of(id),
            logit,
            logprob: f64::from(logit) - normalizer,
            probability,
        };
        Ok(Self {
            tokens: order.into_iter().map(next_token).collect(),
            kept: probabilities.iter().filter(|probability| **probability > 0.0).count(),
        })
    }
}

/// What a model has read: asking again after another token of the same text costs the output head alone, and only the new tokens
/// of a longer text are read.
///
/// ```
/// use candle_gpt2_look::Reading;
/// # use candle_gpt2_engine::{ModelOptions, Silent};
///
/// # let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// let mut reading = Reading::default();
/// let last = reading.logits(model.model(), &[5, 6, 7], 2)?;
/// let first = reading.logits(model.model(), &[5, 6, 7], 0)?; // the output head alone
/// assert_eq!((last.len(), first.len()), (2048, 2048));
/// assert_ne!(last, first);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct Reading(Option<Held>);

#[derive(Debug)]
struct Held {
    ids: Vec<u32>,
    cache: Gpt2Cache,
    /// What the output head makes logits of, `(1, T, C)`.
    hidden: Tensor,
}

impl Reading {
    /// The logits `(V)` after the token at a place of a text, of which the model may have read the beginning. It is always asked for
    /// the same model.
    ///
    /// # Errors
    /// Those of the model; when there are more tokens than its context holds, or none at the place.
    pub fn logits(&mut self, model: &Gpt2LMHeadModel, ids: &[u32], at: usize) -> Result<Vec<f32>> {
        // What fails leaves nothing half read.
        let held = match self.0.take() {
            Some(held) if held.ids.starts_with(ids) => held,
            before => Held::read(model, ids, before)?,
        };
        let logits = model.head(&held.hidden, LogitsFor::Tokens { first: at, count: 1 })?; // (1, 1, V)
        self.0 = Some(held);
        Ok(logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
    }
}

impl Held {
    /// Reads a text after the beginning that it shares with what was read before, which is not all of it.
    fn read(model: &Gpt2LMHeadModel, ids: &[u32], before: Option<Self>) -> candle_core::Result<Self> {
        let equal = |held: &Self| held.ids.iter().zip(ids).take_while(|(held, new)| held == new).count();
        let known = before.as_ref().map_or(0, equal);
        let capacity = ids.len().next_multiple_of(ROOM_STEP).min(model.config().n_positions);
        let (mut cache, hidden) = match before.filter(|_| known > 0) {
            None => (model.new_cache(1, capacity)?, None),
            Some(held) => {
                let mut cache = held.cache;
                cache.truncate(0, known)?;
                let has_room = cache.rooms().iter().all(|room| known + room >= ids.len());
                if !has_room {
                    let small = std::mem::replace(&mut cache, model.new_cache(1, capacity)?);
                    cache.copy_row(0, &small, 0, known)?;
                }
                (cache, Some(held.hidden.narrow(TOKEN_DIM, 0, known)?))
            }
        };
        let new = ids.get(known..).unwrap_or_default();
        let input = Tensor::from_slice(new, (1, new.len()), model.device())?;
        let new = model.transformer().forward_with(&input, Some(&mut cache), &mut Pass::inference())?;
        let hidden = match hidden {
            None => new,
            Some(known) => Tensor::cat(&[known, new], TOKEN_DIM)?,
        };
        Ok(Self { ids: ids.to_owned(), cache, hidden })
    }
}
