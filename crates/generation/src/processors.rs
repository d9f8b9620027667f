//! Logits processors: each changes the logits of the next token, given the tokens so far. What is removed becomes `-inf`.
//!
//! Arithmetic and order are those of transformers (`src/transformers/generation/logits_process.py`, and
//! `_get_logits_processor` in `utils.py`), with probabilities and entropies in f64. Presence and frequency penalty,
//! which transformers lacks, stand after the repetition penalty and count generated tokens only, as OpenAI's API
//! defines them.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::logits::to_f32;
use crate::tally::{LONGEST_COUNTED, Tally};
use crate::{GenerationConfig, GenerationError};

/// The tokens so far. [`LogitsProcessor::process`] takes it.
#[derive(Debug, Clone, Copy)]
pub struct History<'ids> {
    /// Prompt and generated tokens.
    pub ids: &'ids [u32],
    /// How many of them are the prompt.
    pub prompt_len: usize,
}

impl<'ids> History<'ids> {
    /// The tokens of the prompt.
    pub fn prompt(self) -> &'ids [u32] {
        &self.ids[..self.prompt_len.min(self.ids.len())]
    }

    /// The tokens after the prompt.
    pub fn generated(self) -> &'ids [u32] {
        self.ids.get(self.prompt_len..).unwrap_or_default()
    }
}

/// A function that says which tokens may follow; at least one.
///
/// ```
/// use candle_gpt2_generation::{AllowedTokens, History, LogitsProcessor};
///
/// let even = AllowedTokens::new(|_| (0..11).step_by(2).collect());
/// let mut logits = [1.0; 11];
/// let history = History { ids: &[5, 7], prompt_len: 1 };
/// LogitsProcessor::AllowedTokens(even).process(history, &mut logits)?;
/// assert_eq!(logits[..3], [1.0, f32::NEG_INFINITY, 1.0]);
/// # Ok::<(), candle_gpt2_generation::GenerationError>(())
/// ```
#[derive(Clone)]
pub struct AllowedTokens(Arc<dyn Fn(History<'_>) -> Vec<u32> + Send + Sync>);

impl AllowedTokens {
    /// The function.
    pub fn new(allowed: impl Fn(History<'_>) -> Vec<u32> + Send + Sync + 'static) -> Self {
        Self(Arc::new(allowed))
    }
}

impl fmt::Debug for AllowedTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a function")
    }
}

/// A function that makes of logits what it likes. What it makes of the same tokens and logits must always be the same: texts ask it
/// on several threads and in any order.
///
/// ```
/// use candle_gpt2_generation::{History, LogitsFunction, LogitsProcessor};
///
/// // The longer the text, the likelier its end, token 0.
/// let ending = LogitsFunction::new(|history, logits| {
///     logits[0] += history.generated().len() as f32;
///     Ok(())
/// });
/// let mut logits = [0.5; 11];
/// LogitsProcessor::Function(ending).process(History { ids: &[5, 7, 9, 4], prompt_len: 1 }, &mut logits)?;
/// assert_eq!(logits[..2], [3.5, 0.5]);
/// # Ok::<(), candle_gpt2_generation::GenerationError>(())
/// ```
#[derive(Clone)]
pub struct LogitsFunction(Arc<ChangesLogits>);

type ChangesLogits = dyn Fn(History<'_>, &mut [f32]) -> Result<(), GenerationError> + Send + Sync;

impl LogitsFunction {
    /// The function; its error ends the text.
    pub fn new(
        function: impl Fn(History<'_>, &mut [f32]) -> Result<(), GenerationError> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(function))
    }
}

impl fmt::Debug for LogitsFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a function")
    }
}

/// What the text after a prompt must conform to, such as a grammar. What it says depends on the tokens that it is given alone:
/// texts of one request ask the same constraint, on several threads and in any order.
///
/// ```
/// use candle_gpt2_generation::{Constraint, GenerationError};
///
/// /// Ids that rise.
/// #[derive(Debug)]
/// struct Rising;
///
/// impl Constraint for Rising {
///     fn allow(&self, generated: &[u32], allowed: &mut [bool]) -> Result<(), GenerationError> {
///         let last = generated.last().map_or(0, |last| *last as usize + 1);
///         allowed.iter_mut().take(last).for_each(|is_allowed| *is_allowed = false);
///         Ok(())
///     }
///
///     fn is_complete(&self, generated: &[u32]) -> Result<bool, GenerationError> {
///         Ok(generated.len() == 3)
///     }
/// }
///
/// let mut allowed = [true; 5];
/// Rising.allow(&[0, 2], &mut allowed)?;
/// assert_eq!(allowed, [false, false, false, true, true]);
/// # Ok::<(), GenerationError>(())
/// ```
pub trait Constraint: Send + Sync + fmt::Debug {
    /// Sets the entry of every token that may come next; `allowed` has one for each row of the vocabulary, all false. End tokens
    /// may come where the text may end.
    ///
    /// # Errors
    /// When the text cannot be followed, as where it does not conform.
    fn allow(&self, generated: &[u32], allowed: &mut [bool]) -> Result<(), GenerationError>;

    /// Whether nothing may come next but the end.
    ///
    /// # Errors
    /// As [`Constraint::allow`].
    fn is_complete(&self, generated: &[u32]) -> Result<bool, GenerationError>;
}

/// A change of the logits of one row.
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
    /// Adds the number to the last token of each sequence where its other tokens come last so far.
    SequenceBias(Vec<(Vec<u32>, f64)>),
    /// Multiplies positive and divides negative logits of the prompt's tokens.
    EncoderRepetitionPenalty(f64),
    /// Divides positive and multiplies negative logits of every token so far.
    RepetitionPenalty(f64),
    /// Subtracts the number from every token generated so far.
    PresencePenalty(f64),
    /// Subtracts the number once for each time a token was generated.
    FrequencyPenalty(f64),
    /// Removes what would complete a sequence of this many tokens a second time; 0 removes nothing.
    NoRepeatNgram(usize),
    /// Removes what would complete a sequence of this many tokens that the prompt has; 0 removes nothing.
    EncoderNoRepeatNgram(usize),
    /// Removes the ends of texts before as many new tokens.
    MinNewTokens {
        /// New tokens without an end.
        min_new_tokens: usize,
        /// The ends of texts.
        eos_token_id: Vec<u32>,
    },
    /// Keeps the tokens that the function names; where they were all removed before, it wins, and they become equal.
    AllowedTokens(AllowedTokens),
    /// Keeps the tokens that the constraint allows; where they were all removed before, it wins, and they become equal.
    Constraint(Arc<dyn Constraint>),
    /// What the function makes of them.
    Function(LogitsFunction),
    /// Keeps one token as the first to generate.
    ForcedFirstToken(u32),
    /// Removes tokens.
    SuppressTokens(Vec<u32>),
    /// Removes tokens from the first place.
    BeginSuppressTokens(Vec<u32>),
    /// Divides every logit by the number.
    Temperature(f64),
    /// Removes every token whose logit is below the k-th largest.
    TopK(usize),
    /// Removes every token for which the more probable ones already add up to p; the most probable stays.
    TopP(f64),
    /// Removes tokens whose probability is below this share of the largest.
    MinP(f64),
    /// Keeps the tokens whose information is closest to the entropy, until they add up to this.
    TypicalP(f64),
    /// Removes tokens below this probability; the most probable stays.
    EpsilonCutoff(f64),
    /// Removes tokens below `min(eta, sqrt(eta) · exp(-entropy))`; the most probable stays.
    EtaCutoff(f64),
    /// Turns logits into log-probabilities.
    Renormalize,
}

impl LogitsProcessor {
    /// Applies the change; `logits` has one entry for each token of the vocabulary.
    ///
    /// # Errors
    /// When the callback for allowed tokens names none, or one outside the vocabulary, and those of a [`Constraint`] and of a
    /// [`LogitsFunction`].
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
            Self::ForcedFirstToken(id) => {
                if history.generated().is_empty() {
                    logits.fill(f32::NEG_INFINITY);
                    change(logits, *id, |_| 0.0);
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
                keep_above(logits, |entropy| eta.min(eta.sqrt() * (-entropy).exp()));
            }
            Self::Renormalize => {
                let normalizer = log_sum_exp(logits);
                logits.iter_mut().for_each(|logit| *logit = to_f32(f64::from(*logit) - normalizer));
            }
        }
        Ok(())
    }

    /// The same change, bit for bit, with what was counted of the history before: see [`Tally::follow`].
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

    /// Adds the processor to those of a configuration, where transformers has the function for allowed tokens: in front of
    /// a forced token, suppressed tokens and what narrows a draw.
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
                    | Self::MinNewTokens { .. }
            )
        };
        let place = processors.iter().position(|processor| !comes_before(processor));
        processors.insert(place.unwrap_or(processors.len()), self);
    }

    /// The biases that `config` asks for; of biases on the same sequence the last holds.
    pub(crate) fn biases_of(config: &GenerationConfig) -> Option<Self> {
        let biases: BTreeMap<_, _> = config.sequence_bias.iter().cloned().collect();
        (!biases.is_empty()).then(|| Self::SequenceBias(biases.into_iter().collect()))
    }

    /// Whether nothing may come after these tokens but the end.
    pub(crate) fn is_complete(
        processors: &[Self],
        generated: impl Fn() -> Vec<u32>,
    ) -> Result<bool, GenerationError> {
        for processor in processors {
            if let Self::Constraint(constraint) = processor
                && constraint.is_complete(&generated())?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The processors that `config` asks for, in the order of transformers; those that change nothing are left out.
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
        // The end of the text is no bad word.
        let is_end = |ids: &&Vec<u32>| matches!(ids[..], [id] if config.eos_token_id.contains(&id));
        let bad_words = config.bad_words_ids.iter().filter(|ids| !is_end(ids));
        let bad_words: Vec<_> = bad_words.map(|ids| (ids.clone(), f64::NEG_INFINITY)).collect();
        add(!bad_words.is_empty(), Self::SequenceBias(bad_words));
        let (min_new_tokens, eos_token_id) = (config.min_new_tokens, config.eos_token_id.clone());
        add(min_new_tokens > 0, Self::MinNewTokens { min_new_tokens, eos_token_id });
        if let Some(id) = config.forced_bos_token_id {
            add(true, Self::ForcedFirstToken(id));
        }
        add(!config.suppress_tokens.is_empty(), Self::SuppressTokens(config.suppress_tokens.clone()));
        let begin = &config.begin_suppress_tokens;
        add(!begin.is_empty(), Self::BeginSuppressTokens(begin.clone()));
        if config.do_sample {
            add(config.temperature != 1.0, Self::Temperature(config.temperature));
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

fn add_biases(biases: &[(Vec<u32>, f64)], ids: &[u32], logits: &mut [f32]) {
    for (sequence, bias) in biases {
        if let Some((last, before)) = sequence.split_last()
            && ids.ends_with(before)
        {
            change(logits, *last, |logit| logit + to_f32(*bias));
        }
    }
}

fn penalize_repetition(penalty: f64, counts: impl IntoIterator<Item = (u32, usize)>, logits: &mut [f32]) {
    let penalty = to_f32(penalty);
    for (id, _) in counts {
        change(logits, id, |logit| if logit < 0.0 { logit * penalty } else { logit / penalty });
    }
}

fn penalize_presence(penalty: f64, counts: impl IntoIterator<Item = (u32, usize)>, logits: &mut [f32]) {
    for (id, _) in counts {
        change(logits, id, |logit| logit - to_f32(penalty));
    }
}

fn penalize_frequency(penalty: f64, counts: impl IntoIterator<Item = (u32, usize)>, logits: &mut [f32]) {
    for (id, count) in counts {
        change(logits, id, |logit| logit - to_f32(penalty * count as f64));
    }
}

/// The tokens that came after occurrences of the last `size - 1` tokens in `earlier`.
fn repeating_tokens<'ids>(
    earlier: &'ids [u32],
    ids: &'ids [u32],
    size: usize,
) -> impl Iterator<Item = u32> + 'ids {
    let before = size.checked_sub(1).and_then(|before| ids.len().checked_sub(before));
    let before = before.map_or(&[][..], |start| &ids[start..]);
    // Too short a history has no window, and sequences of no tokens cannot repeat.
    let windows = if size == 0 { [].windows(1) } else { earlier.windows(size) };
    windows
        .filter_map(move |window| window.split_last().filter(|(_, begin)| *begin == before))
        .map(|(last, _)| *last)
}

fn keep_allowed(allowed: &[u32], logits: &mut [f32]) -> Result<(), GenerationError> {
    let vocab_size = logits.len();
    let indices: Vec<usize> = allowed
        .iter()
        .filter_map(|id| usize::try_from(*id).ok())
        .filter(|index| *index < vocab_size)
        .collect();
    if indices.is_empty() || indices.len() < allowed.len() {
        return Err(GenerationError::AllowedTokens { vocab_size, found: allowed.to_vec() });
    }
    let mut is_allowed = vec![false; vocab_size];
    indices.into_iter().for_each(|index| is_allowed[index] = true);
    keep_only(&is_allowed, logits);
    Ok(())
}

fn keep_conforming(
    constraint: &dyn Constraint,
    generated: &[u32],
    logits: &mut [f32],
) -> Result<(), GenerationError> {
    let mut allowed = vec![false; logits.len()];
    constraint.allow(generated, &mut allowed)?;
    keep_only(&allowed, logits);
    Ok(())
}

/// Removes every other token. Where the allowed ones were all removed before, they come back, and are equal.
fn keep_only(allowed: &[bool], logits: &mut [f32]) {
    let mut is_any_left = false;
    for (logit, allowed) in logits.iter_mut().zip(allowed) {
        *logit = if *allowed { *logit } else { f32::NEG_INFINITY };
        is_any_left |= *logit > f32::NEG_INFINITY;
    }
    if !is_any_left {
        let kept = logits.iter_mut().zip(allowed).filter(|(_, allowed)| **allowed);
        kept.for_each(|(logit, _)| *logit = 0.0);
    }
}

fn keep_top_k(logits: &mut [f32], top_k: usize) {
    let top_k = top_k.max(1);
    if top_k >= logits.len() {
        return;
    }
    let smallest_kept = kth_largest(logits, top_k);
    logits
        .iter_mut()
        .for_each(|logit| *logit = if *logit < smallest_kept { f32::NEG_INFINITY } else { *logit });
}

/// The k-th largest number, in one pass: most chunks hold nothing above the best k so far, and are skipped.
fn kth_largest(numbers: &[f32], k: usize) -> f32 {
    if k > numbers.len() {
        return f32::NEG_INFINITY;
    }
    let mut best: Vec<f32> = Vec::with_capacity(2 * k);
    let mut threshold = f32::NEG_INFINITY;
    let reduce = |best: &mut Vec<f32>| {
        let (_, kth, _) = best.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
        let kth = *kth;
        best.truncate(k);
        kth
    };
    for chunk in numbers.chunks(CHUNK) {
        if best.len() >= k && largest(chunk) <= threshold {
            continue;
        }
        for number in chunk {
            if best.len() < k || *number > threshold {
                best.push(*number);
            }
            if best.len() == 2 * k {
                threshold = reduce(&mut best);
            }
        }
    }
    reduce(&mut best)
}

/// The `count` most probable tokens with their logits, most probable first, of equals the smaller id; none that is
/// removed.
pub(crate) fn most_probable(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    if count == 0 {
        return Vec::new();
    }
    let threshold = kth_largest(logits, count);
    let tokens = (0..).zip(logits.iter().copied());
    let mut best: Vec<(u32, f32)> =
        tokens.filter(|(_, logit)| *logit >= threshold && *logit > f32::NEG_INFINITY).collect();
    best.sort_by(|a, b| b.1.total_cmp(&a.1));
    best.truncate(count);
    best
}

fn keep_top_p(logits: &mut [f32], top_p: f64) {
    if top_p >= 1.0 {
        return;
    }
    let mut candidates = Probabilities::of(logits).candidates;
    // Of equal tokens the one with the larger id counts as the more probable: the reference sorts upwards, keeping
    // the order of equals, and removes from the bottom.
    let more_probable =
        |a: &Candidate, b: &Candidate| b.probability.total_cmp(&a.probability).then(b.token.cmp(&a.token));
    let kept = sort_until(&mut candidates, top_p, |candidate| candidate.probability, more_probable);
    candidates[kept..].iter().for_each(|candidate| logits[candidate.token] = f32::NEG_INFINITY);
}

fn keep_typical(logits: &mut [f32], mass: f64) {
    let probabilities = Probabilities::of(logits);
    let entropy = probabilities.entropy();
    // Each with the distance of its information from the entropy: a logarithm once for each, not once a comparison.
    let with_distance = |candidate: Candidate| ((-candidate.probability.ln() - entropy).abs(), candidate);
    let mut candidates: Vec<(f64, Candidate)> =
        probabilities.candidates.into_iter().map(with_distance).collect();
    let closer =
        |a: &(f64, Candidate), b: &(f64, Candidate)| a.0.total_cmp(&b.0).then(a.1.token.cmp(&b.1.token));
    // The closest stays, whatever the mass.
    let mass = mass.max(f64::MIN_POSITIVE);
    let reached = sort_until(&mut candidates, mass, |(_, candidate)| candidate.probability, closer);
    // All that are as far as the last one stay too.
    let farthest = candidates[..reached].last().map_or(0.0, |(distance, _)| *distance);
    for (_, candidate) in candidates.iter().skip(1).filter(|(distance, _)| *distance > farthest) {
        logits[candidate.token] = f32::NEG_INFINITY;
    }
}

/// Brings to the front, in this order, as many candidates as it takes for their probabilities to add up to `mass`, and
/// says how many those are. Sorts hardly farther than that.
fn sort_until<T>(
    candidates: &mut [T],
    mass: f64,
    probability: impl Fn(&T) -> f64,
    order: impl Fn(&T, &T) -> Ordering,
) -> usize {
    let mut sum = 0.0;
    let mut sorted = 0;
    while sorted < candidates.len() && sum < mass {
        let end = candidates.len().min((sorted * 4).max(FIRST_SORTED));
        if end < candidates.len() {
            candidates[sorted..].select_nth_unstable_by(end - sorted, &order);
        }
        candidates[sorted..end].sort_unstable_by(&order);
        while sorted < end && sum < mass {
            sum += probability(&candidates[sorted]);
            sorted += 1;
        }
    }
    sorted
}

/// Keeps the tokens from the probability on that `threshold` gives for the entropy, and the most probable.
fn keep_above(logits: &mut [f32], threshold: impl Fn(f64) -> f64) {
    let probabilities = Probabilities::of(logits);
    let threshold = threshold(probabilities.entropy()).min(probabilities.largest());
    probabilities.keep(logits, |candidate| candidate.probability >= threshold);
}

/// Numbers that are compared together, as vectors.
const CHUNK: usize = 64;
/// Tokens among which enough probability is first looked for.
const FIRST_SORTED: usize = 128;

/// A token that can still be drawn.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    token: usize,
    probability: f64,
}

/// The probabilities of the tokens that can still be drawn, in the order of their ids.
#[derive(Debug)]
pub(crate) struct Probabilities {
    candidates: Vec<Candidate>,
}

impl Probabilities {
    /// The softmax of the logits, in f64.
    pub(crate) fn of(logits: &[f32]) -> Self {
        let mut candidates = Vec::new();
        let maximum = largest(logits);
        for (index, chunk) in logits.chunks(CHUNK).enumerate() {
            if largest(chunk) == f32::NEG_INFINITY {
                continue;
            }
            let remaining = chunk.iter().enumerate().filter(|(_, logit)| **logit > f32::NEG_INFINITY);
            candidates.extend(remaining.map(|(offset, logit)| Candidate {
                token: index * CHUNK + offset,
                probability: f64::from(logit - maximum).exp(),
            }));
        }
        let sum: f64 = candidates.iter().map(|candidate| candidate.probability).sum();
        candidates.iter_mut().for_each(|candidate| candidate.probability /= sum);
        Self { candidates }
    }

    /// The token in which a share `uniform` of the probability, summed in the order of the ids, ends.
    pub(crate) fn draw(&self, uniform: f64) -> Option<usize> {
        let possible = || self.candidates.iter().filter(|candidate| candidate.probability > 0.0);
        let mut sum = 0.0;
        let drawn = possible().find(|candidate| {
            sum += candidate.probability;
            uniform < sum
        });
        drawn.or_else(|| possible().next_back()).map(|candidate| candidate.token)
    }

    /// Writes each probability to the place of its token.
    pub(crate) fn fill(&self, probabilities: &mut [f64]) {
        for candidate in &self.candidates {
            probabilities[candidate.token] = candidate.probability;
        }
    }

    fn largest(&self) -> f64 {
        self.candidates.iter().map(|candidate| candidate.probability).fold(0.0, f64::max)
    }

    fn entropy(&self) -> f64 {
        let possible = self.candidates.iter().map(|candidate| candidate.probability).filter(|p| *p > 0.0);
        -possible.map(|probability| probability * probability.ln()).sum::<f64>()
    }

    fn keep(&self, logits: &mut [f32], is_kept: impl Fn(&Candidate) -> bool) {
        for candidate in self.candidates.iter().filter(|candidate| !is_kept(candidate)) {
            logits[candidate.token] = f32::NEG_INFINITY;
        }
    }
}

/// `ln Σ exp(logit)`, in f64.
pub(crate) fn log_sum_exp(logits: &[f32]) -> f64 {
    candle_gpt2_kernels::log_sum_exp(logits, largest(logits))
}

/// The largest number; NaN counts as none.
pub(crate) fn largest(numbers: &[f32]) -> f32 {
    /// Accumulators side by side, so that the comparisons become vector instructions.
    const LANES: usize = 16;
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = numbers.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, number) in lanes.iter_mut().zip(chunk) {
            *lane = if *number > *lane { *number } else { *lane };
        }
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// How often each token occurs, by id.
fn counts(ids: &[u32]) -> BTreeMap<u32, usize> {
    let mut counts = BTreeMap::new();
    ids.iter().for_each(|id| *counts.entry(*id).or_default() += 1);
    counts
}

fn remove(ids: impl Iterator<Item = u32>, logits: &mut [f32]) {
    ids.for_each(|id| change(logits, id, |_| f32::NEG_INFINITY));
}

fn change(logits: &mut [f32], id: u32, changed: impl Fn(f32) -> f32) {
    if let Some(logit) = usize::try_from(id).ok().and_then(|index| logits.get_mut(index)) {
        *logit = changed(*logit);
    }
}
