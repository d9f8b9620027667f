//! Logits processors: each changes the next token's logits based on the tokens so far.
//!
//! Removed tokens have a logit of `-inf`.
//!
//! Arithmetic and order follow transformers (`src/transformers/generation/logits_process.py`, and
//! `_get_logits_processor` in `utils.py`), with probabilities and entropies in f64. Transformers lacks
//! presence and frequency penalty. They follow the repetition penalty and count generated tokens only,
//! as OpenAI's API defines them.

mod narrow;
mod penalties;
mod rules;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::logits::to_f32;
use crate::probabilities::{Probabilities, log_sum_exp};
use crate::tally::{LONGEST_COUNTED, Tally};
use crate::{GenerationConfig, GenerationError, History};

use narrow::{keep_above, keep_top_h, keep_top_k, keep_top_p, keep_typical};
use penalties::{
    add_biases, change, completing_tokens, counts, penalize_frequency, penalize_presence,
    penalize_repetition, remove, repeating_tokens,
};
pub use rules::{AllowedTokens, Constraint, LogitsFunction};
use rules::{keep_allowed, keep_conforming};

/// Logits processor that changes one row of logits.
///
/// ```
/// use candle_gpt2_generation::{History, LogitsProcessor};
///
/// let mut logits = [3.0, 1.0, 2.0, 0.0];
/// LogitsProcessor::TopK(2).process(History { ids: &[1], prompt_len: 1 }, &mut logits)?;
/// assert_eq!(logits, [3.0, f32::NEG_INFINITY, 2.0, f32::NEG_INFINITY]);
/// # Ok::<(), candle_gpt2_generation::GenerationError>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum LogitsProcessor {
    /// Biases the last token of each sequence if the tokens before it match the end of the history.
    SequenceBias(Vec<(Vec<u32>, f64)>),
    /// Multiplies positive and divides negative logits of the prompt's tokens.
    EncoderRepetitionPenalty(f64),
    /// Divides positive and multiplies negative logits of all tokens so far.
    RepetitionPenalty(f64),
    /// Subtracts a number from the logit of every token generated so far.
    PresencePenalty(f64),
    /// Subtracts a number from a token's logit for each time it was generated.
    FrequencyPenalty(f64),
    /// Removes tokens that would repeat an n-gram of this size; 0 removes nothing.
    NoRepeatNgram(usize),
    /// Removes tokens that would repeat one of the prompt's n-grams of this size; 0 removes nothing.
    EncoderNoRepeatNgram(usize),
    /// Removes end-of-text tokens until there are `min_new_tokens` new tokens.
    MinNewTokens {
        /// Minimum number of new tokens before an end-of-text token.
        min_new_tokens: usize,
        /// End-of-text tokens.
        eos_token_id: Vec<u32>,
    },
    /// Keeps the tokens that a function returns.
    AllowedTokens(AllowedTokens),
    /// Keeps the tokens that a constraint allows.
    Constraint(Arc<dyn Constraint>),
    /// Applies an arbitrary function to the logits.
    Function(LogitsFunction),
    /// Removes the last token of each sequence if the tokens before it match the end of the history.
    BadWords(Vec<Vec<u32>>),
    /// Forces this token after a one-token prompt, as transformers does.
    ForcedBosToken(u32),
    /// Removes these tokens.
    SuppressTokens(Vec<u32>),
    /// Removes these tokens from the first position of the completion.
    BeginSuppressTokens(Vec<u32>),
    /// Divides every logit by this number.
    Temperature(f64),
    /// Keeps the most probable tokens whose entropy terms add up to this fraction of the entropy.
    TopH(f64),
    /// Removes tokens whose logit is below the k-th largest.
    TopK(usize),
    /// Nucleus sampling: removes tokens if the more probable ones already add up to p.
    ///
    /// The most probable token always remains.
    TopP(f64),
    /// Removes tokens whose probability is below this fraction of the largest probability.
    MinP(f64),
    /// Keeps the tokens whose information content is closest to the entropy, up to this mass.
    TypicalP(f64),
    /// Removes tokens below this probability; the most probable token always remains.
    EpsilonCutoff(f64),
    /// Removes tokens below `min(eta, sqrt(eta) · exp(-entropy))`; the most probable token remains.
    EtaCutoff(f64),
    /// Converts logits to log-probabilities.
    Renormalize,
}

impl LogitsProcessor {
    /// Changes the logits; `logits` has one entry for each token of the vocabulary.
    ///
    /// # Errors
    /// Returns an error if the function for allowed tokens returns no token or one outside the vocabulary.
    /// Also returns the errors of a [`Constraint`] and of a [`LogitsFunction`].
    pub fn process(&self, history: History<'_>, logits: &mut [f32]) -> Result<(), GenerationError> {
        match self {
            Self::SequenceBias(biases) => add_biases(biases, history.ids, logits),
            Self::EncoderRepetitionPenalty(penalty) => {
                penalize_repetition(penalty.recip(), counts(history.prompt()), logits);
            }
            Self::RepetitionPenalty(penalty) => penalize_repetition(*penalty, counts(history.ids), logits),
            Self::PresencePenalty(penalty) => {
                penalize_presence(*penalty, counts(history.generated()), logits);
            }
            Self::FrequencyPenalty(penalty) => {
                penalize_frequency(*penalty, counts(history.generated()), logits);
            }
            Self::NoRepeatNgram(size) => {
                remove(repeating_tokens(history.ids, history.ids, *size), logits);
            }
            Self::EncoderNoRepeatNgram(size) => {
                remove(repeating_tokens(history.prompt(), history.ids, *size), logits);
            }
            Self::MinNewTokens { min_new_tokens, eos_token_id } => {
                if history.generated().len() < *min_new_tokens {
                    remove(eos_token_id.iter().copied(), logits);
                }
            }
            Self::AllowedTokens(allowed) => keep_allowed(&(allowed.0)(history), logits)?,
            Self::Constraint(constraint) => keep_conforming(&**constraint, history.generated(), logits)?,
            Self::Function(function) => (function.0)(history, logits)?,
            Self::BadWords(words) => remove(completing_tokens(words, history.ids), logits),
            Self::ForcedBosToken(id) => {
                if history.ids.len() == 1 {
                    change(logits, *id, |logit| if logit > f32::NEG_INFINITY { 0.0 } else { logit });
                    keep_allowed(&[*id], logits)?;
                }
            }
            Self::SuppressTokens(ids) => remove(ids.iter().copied(), logits),
            Self::BeginSuppressTokens(ids) => {
                if history.generated().is_empty() {
                    remove(ids.iter().copied(), logits);
                }
            }
            Self::Temperature(temperature) => {
                let divisor = to_f32(*temperature);
                logits.iter_mut().for_each(|logit| *logit /= divisor);
            }
            Self::TopH(top_h) => keep_top_h(logits, *top_h),
            Self::TopK(top_k) => keep_top_k(logits, *top_k),
            Self::TopP(top_p) => keep_top_p(logits, *top_p),
            Self::MinP(min_p) => {
                let probabilities = Probabilities::of(logits);
                let threshold = min_p * probabilities.largest();
                probabilities.keep(logits, |candidate| candidate.probability >= threshold);
            }
            Self::TypicalP(mass) => keep_typical(logits, *mass),
            Self::EpsilonCutoff(epsilon) => keep_above(logits, |_| *epsilon),
            Self::EtaCutoff(eta) => {
                keep_above(logits, |entropy| eta.min(eta.sqrt() * libm::exp(-entropy)));
            }
            Self::Renormalize => {
                let normalizer = log_sum_exp(logits);
                logits.iter_mut().for_each(|logit| *logit = to_f32(f64::from(*logit) - normalizer));
            }
        }
        Ok(())
    }

    /// Like `process`, with bit-identical results, but uses incremental counts of the history's tokens.
    ///
    /// See [`Tally::follow`].
    pub(crate) fn process_counted(
        &self,
        history: History<'_>,
        tally: &Tally,
        logits: &mut [f32],
    ) -> Result<(), GenerationError> {
        match self {
            Self::RepetitionPenalty(penalty) => penalize_repetition(*penalty, tally.all(), logits),
            Self::PresencePenalty(penalty) => penalize_presence(*penalty, tally.generated(), logits),
            Self::FrequencyPenalty(penalty) => penalize_frequency(*penalty, tally.generated(), logits),
            Self::NoRepeatNgram(size) if *size <= LONGEST_COUNTED => {
                remove(tally.repeating_tokens(*size), logits);
            }
            uncounted => return uncounted.process(history, logits),
        }
        Ok(())
    }

    /// Returns the n-gram size of [`LogitsProcessor::NoRepeatNgram`].
    pub(crate) fn ngram_size(&self) -> Option<usize> {
        if let Self::NoRepeatNgram(size) = self { Some(*size) } else { None }
    }

    /// Inserts the processor into a configuration's processors.
    ///
    /// It takes the position of transformers' function for allowed tokens, before a forced token,
    /// suppressed tokens, and the processors that narrow sampling.
    pub fn add_to(self, processors: &mut Vec<Self>) {
        let comes_before = |processor: &Self| {
            matches!(
                processor,
                Self::SequenceBias(_)
                    | Self::EncoderRepetitionPenalty(_)
                    | Self::RepetitionPenalty(_)
                    | Self::PresencePenalty(_)
                    | Self::FrequencyPenalty(_)
                    | Self::NoRepeatNgram(_)
                    | Self::EncoderNoRepeatNgram(_)
                    | Self::BadWords(_)
                    | Self::MinNewTokens { .. }
            )
        };
        let place = processors.iter().position(|processor| !comes_before(processor));
        processors.insert(place.unwrap_or(processors.len()), self);
    }

    /// Returns the biases of `config`; the last bias for a sequence overrides earlier ones.
    pub(crate) fn biases_of(config: &GenerationConfig) -> Option<Self> {
        let biases: BTreeMap<_, _> = config.sequence_bias.iter().cloned().collect();
        (!biases.is_empty()).then(|| Self::SequenceBias(biases.into_iter().collect()))
    }

    /// Returns the option that may remove all remaining tokens, named as in a configuration or request.
    fn excluding_option(&self, history: History<'_>) -> Option<&'static str> {
        let is_first = history.generated().is_empty();
        match self {
            Self::SequenceBias(biases) => {
                biases.iter().any(|(_, bias)| *bias == f64::NEG_INFINITY).then_some("logit_bias")
            }
            Self::NoRepeatNgram(_) => Some("no_repeat_ngram_size"),
            Self::EncoderNoRepeatNgram(_) => Some("encoder_no_repeat_ngram_size"),
            Self::BadWords(_) => Some("bad_words"),
            Self::MinNewTokens { min_new_tokens, .. } => {
                (history.generated().len() < *min_new_tokens).then_some("min_new_tokens")
            }
            Self::AllowedTokens(_) => Some("allowed_token_ids"),
            Self::Constraint(constraint) => Some(constraint.option()),
            Self::Function(_) => Some("logits_processor"),
            Self::ForcedBosToken(_) => (history.ids.len() == 1).then_some("forced_bos_token_id"),
            Self::SuppressTokens(_) => Some("suppress_tokens"),
            Self::BeginSuppressTokens(_) => is_first.then_some("begin_suppress_tokens"),
            _ => None,
        }
    }

    /// Returns the error for processors that together remove every token.
    pub(crate) fn no_token_left(processors: &[Self], history: History<'_>) -> GenerationError {
        let mut options: Vec<_> =
            processors.iter().filter_map(|each| each.excluding_option(history)).collect();
        options.dedup();
        GenerationError::NoTokenLeft { options }
    }

    /// Returns whether a constraint requires the completion to end now and no processor forbids this.
    pub(crate) fn is_complete(
        processors: &[Self],
        generated: impl Fn() -> Vec<u32>,
    ) -> Result<bool, GenerationError> {
        for processor in processors {
            // `min_new_tokens` still excludes the end, so the next step reports that no token is left.
            if let Self::MinNewTokens { min_new_tokens, .. } = processor
                && generated().len() < *min_new_tokens
            {
                return Ok(false);
            }
            if let Self::Constraint(constraint) = processor
                && constraint.is_complete(&generated())?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the processors for `config`, in transformers' order.
    ///
    /// Processors that would change nothing are left out.
    pub fn of_config(config: &GenerationConfig) -> Vec<Self> {
        let mut processors = Vec::new();
        let mut add = |is_wanted: bool, processor: Self| {
            if is_wanted {
                processors.push(processor);
            }
        };
        Self::biases_of(config).into_iter().for_each(|biases| add(true, biases));
        let of_prompt = config.encoder_repetition_penalty;
        add(of_prompt != 1.0, Self::EncoderRepetitionPenalty(of_prompt));
        add(config.repetition_penalty != 1.0, Self::RepetitionPenalty(config.repetition_penalty));
        add(config.presence_penalty != 0.0, Self::PresencePenalty(config.presence_penalty));
        add(config.frequency_penalty != 0.0, Self::FrequencyPenalty(config.frequency_penalty));
        add(config.no_repeat_ngram_size > 0, Self::NoRepeatNgram(config.no_repeat_ngram_size));
        let of_prompt = config.encoder_no_repeat_ngram_size;
        add(of_prompt > 0, Self::EncoderNoRepeatNgram(of_prompt));
        // Like transformers, ignore a bad word that is just an end-of-text token.
        let is_end = |ids: &&Vec<u32>| matches!(ids[..], [id] if config.eos_token_id.contains(&id));
        let bad_words: Vec<_> = config.bad_words_ids.iter().filter(|ids| !is_end(ids)).cloned().collect();
        add(!bad_words.is_empty(), Self::BadWords(bad_words));
        let (min_new_tokens, eos_token_id) = (config.min_new_tokens, config.eos_token_id.clone());
        add(min_new_tokens > 0, Self::MinNewTokens { min_new_tokens, eos_token_id });
        if let Some(id) = config.forced_bos_token_id {
            add(true, Self::ForcedBosToken(id));
        }
        add(!config.suppress_tokens.is_empty(), Self::SuppressTokens(config.suppress_tokens.clone()));
        let begin = &config.begin_suppress_tokens;
        add(!begin.is_empty(), Self::BeginSuppressTokens(begin.clone()));
        if config.do_sample {
            add(config.temperature != 1.0, Self::Temperature(config.temperature));
            add(config.top_h.is_some(), Self::TopH(config.top_h.unwrap_or(1.0)));
            add(config.top_k > 0, Self::TopK(config.top_k));
            add(config.top_p < 1.0, Self::TopP(config.top_p));
            add(config.min_p.is_some(), Self::MinP(config.min_p.unwrap_or(0.0)));
            add(config.typical_p < 1.0, Self::TypicalP(config.typical_p));
            add(config.epsilon_cutoff > 0.0, Self::EpsilonCutoff(config.epsilon_cutoff));
            add(config.eta_cutoff > 0.0, Self::EtaCutoff(config.eta_cutoff));
        }
        add(config.renormalize_logits, Self::Renormalize);
        processors
    }
}
