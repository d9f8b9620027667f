//! Next-token predictions, from the raw logits and under sampling settings.

use candle_core::{DType, Tensor};
use candle_gpt2::{Gpt2Cache, Gpt2LMHeadModel, LogitsFor, Pass};
use candle_gpt2_arithmetic::log_sum_exp;
use candle_gpt2_generation::{GenerationConfig, GenerationError, History, LogitsProcessor, Sampler};
use serde::Serialize;

use crate::error::Result;

/// Token dimension of hidden states, `(1, T, C)`.
const TOKEN_DIM: usize = 1;
/// Number of tokens by which a [`PrefixCache`]'s capacity grows.
const CAPACITY_STEP: usize = 128;

/// Candidates for the next token.
///
/// ```
/// use candle_gpt2_generation::{GenerationConfig, History};
/// use candle_gpt2_look::{NextTokens, PrefixCache};
/// # use candle_gpt2_engine::{ModelOptions, Silent};
///
/// # let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// let ids = model.vocabulary().encode("Good night, good")?;
/// let logits = PrefixCache::default().logits(model.model(), &ids, ids.len() - 1)?;
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
    /// Most probable tokens by the model's logits; ties are ordered by id.
    pub tokens: Vec<NextToken>,
    /// Number of tokens in the vocabulary that can be sampled.
    pub kept: usize,
}

/// A candidate for the next token.
///
/// Part of [`NextTokens`].
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NextToken {
    /// Token id.
    pub id: u32,
    /// Text of the token.
    pub token: String,
    /// Logit from the model.
    pub logit: f32,
    /// Natural logarithm of the model's probability, before any settings.
    pub logprob: f64,
    /// Probability under the settings: 0 if excluded, 1 if it is the only candidate.
    pub probability: f64,
}

impl NextTokens {
    /// Computes the candidates from the logits `(V)` after the last token of a history.
    ///
    /// The settings are the configuration and additional logits processors in `others`. The result lists
    /// `top` tokens, with their texts from `text_of`.
    ///
    /// # Errors
    /// If a logit is not a number, or the settings exclude every token.
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

/// Hidden states and KV cache of a text, reused between requests.
///
/// A request for another token of the same text costs only the output head. A longer text costs only a pass
/// over its new tokens.
///
/// ```
/// use candle_gpt2_look::PrefixCache;
/// # use candle_gpt2_engine::{ModelOptions, Silent};
///
/// # let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
/// let mut reading = PrefixCache::default();
/// let last = reading.logits(model.model(), &[5, 6, 7], 2)?;
/// let first = reading.logits(model.model(), &[5, 6, 7], 0)?; // the output head alone
/// assert_eq!((last.len(), first.len()), (4096, 4096));
/// assert_ne!(last, first);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct PrefixCache(Option<CachedText>);

#[derive(Debug)]
struct CachedText {
    ids: Vec<u32>,
    cache: Gpt2Cache,
    /// Input of the output head, `(1, T, C)`.
    hidden: Tensor,
}

impl PrefixCache {
    /// Returns the logits `(V)` after the token at index `at` of a text.
    ///
    /// The prefix that the text shares with the previous one is reused. All calls must use the same model.
    ///
    /// # Errors
    /// If the model fails, the text is longer than the context, or `at` is outside the text.
    pub fn logits(&mut self, model: &Gpt2LMHeadModel, ids: &[u32], at: usize) -> Result<Vec<f32>> {
        // Takes the state, so that no partial state remains after an error.
        let cached = match self.0.take() {
            Some(cached) if cached.ids.starts_with(ids) => cached,
            before => CachedText::read(model, ids, before)?,
        };
        let logits = model.head(&cached.hidden, LogitsFor::Tokens { first: at, count: 1 })?; // (1, 1, V)
        self.0 = Some(cached);
        Ok(logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
    }
}

impl CachedText {
    /// Runs the model on a text, except for the prefix shared with the previous text.
    ///
    /// The shared prefix must be shorter than the text.
    fn read(model: &Gpt2LMHeadModel, ids: &[u32], before: Option<Self>) -> candle_core::Result<Self> {
        let equal =
            |cached: &Self| cached.ids.iter().zip(ids).take_while(|(cached, new)| cached == new).count();
        let known = before.as_ref().map_or(0, equal);
        let capacity = ids.len().next_multiple_of(CAPACITY_STEP).min(model.config().n_positions);
        let (mut cache, hidden) = match before.filter(|_| known > 0) {
            None => (model.new_cache(1, capacity)?, None),
            Some(cached) => {
                let mut cache = cached.cache;
                cache.truncate(0, known)?;
                let has_room = cache.free_tokens().iter().all(|room| known + room >= ids.len());
                if !has_room {
                    let small = std::mem::replace(&mut cache, model.new_cache(1, capacity)?);
                    cache.copy_row(0, &small, 0, known)?;
                }
                (cache, Some(cached.hidden.narrow(TOKEN_DIM, 0, known)?))
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
