//! Beam search for the most probable completions.
//!
//! Beams may form groups that avoid each other's tokens.
//!
//! Scores are sums of processed log-probabilities, divided by `length ^ length_penalty` when a
//! completion ends. Source: transformers, `_beam_search` of 5.23; with groups, "Diverse Beam Search"
//! (arXiv:1610.02424) as in `_group_beam_search` and `BeamSearchScorer` of 4.49, the last version that
//! contains them. The two differ only in [`Rules`].

use std::ops::ControlFlow;

use candle_core::Tensor;
use candle_gpt2::{Gpt2LMHeadModel, LogitsFor, Pass};
use candle_gpt2_arithmetic::map_items;
use candle_gpt2_kernels::is_interrupted;

use crate::clock::Deadline;
use crate::generate::{last_logits, one_row_of};
use crate::logits::rows_of;
use crate::probabilities::most_probable;
use crate::sampler::process;
use crate::{
    Clock, EarlyStopping, GenerationConfig, GenerationError, History, LogitsProcessor, SearchMode, StopReason,
};

/// Completion found by beam search, returned by [`beam_search`].
#[derive(Debug, Clone, PartialEq)]
pub struct Hypothesis {
    /// Tokens after the prompt, including a final end-of-text token.
    pub ids: Vec<u32>,
    /// Sum of the tokens' log-probabilities, divided by `length ^ length_penalty`.
    pub score: f64,
    /// Stop reason.
    pub stop_reason: StopReason,
}

/// Returns the best `num_return_sequences` completions, best first.
///
/// The result is empty if no tokens are requested, and shorter if the processors leave fewer
/// completions. Only [`GenerationConfig::max_time`] needs the `clock`. Each step adds a token to every
/// beam. `progress` is called after each step and may end the search.
///
/// ```
/// use std::ops::ControlFlow;
///
/// use candle_gpt2_generation::{GenerationConfig, beam_search};
/// # use candle_core::{DType, Device};
/// # use candle_gpt2::{Gpt2Config, Gpt2LMHeadModel};
/// # let sizes = Gpt2Config { vocab_size: 11, n_positions: 8, n_embd: 6, n_layer: 2, n_head: 3, ..Gpt2Config::gpt2() };
/// # let model = Gpt2LMHeadModel::load(&sizes, candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let config = GenerationConfig { num_beams: 4, num_return_sequences: 3, max_new_tokens: 5, do_sample: false, ..Default::default() };
/// let texts = beam_search(&model, &[1, 2], &config, &[], None, &|| ControlFlow::Continue(()))?;
/// assert_eq!(texts.len(), 3);
/// assert!(texts[0].score >= texts[1].score);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Returns an error if an option is out of range or selects another search, or if the prompt is empty
/// or too long. Also returns an error if an id is outside the vocabulary or a time limit has no clock.
/// Finally, returns an error if the processors leave no completion or the model's logits are not
/// finite.
#[doc(alias = "num_beams")]
pub fn beam_search(
    model: &Gpt2LMHeadModel,
    prompt: &[u32],
    config: &GenerationConfig,
    processors: &[LogitsProcessor],
    clock: Option<&Clock>,
    progress: &dyn Fn() -> ControlFlow<()>,
) -> Result<Vec<Hypothesis>, GenerationError> {
    config.check_for(SearchMode::Beams, model.config())?;
    let prompt = config.fit_prompt(prompt, model.config())?;
    let deadline = Deadline::new(config, clock)?;
    let wanted = config.new_tokens(prompt.len());
    // The last token is generated but not read.
    let max_steps = wanted.min(model.config().n_positions - prompt.len() + 1);
    if max_steps == 0 {
        return Ok(Vec::new());
    }
    let capacity = prompt.len() + max_steps - 1;
    let mut cache = one_row_of(model, config.num_beams, capacity)?;
    let mut logits = match last_logits(model, &prompt, &mut cache) {
        Err(_) if is_interrupted() => return Ok(Vec::new()),
        logits => vec![logits?],
    };
    // Tokens in each row of the cache.
    let mut held = vec![prompt.clone()];

    let search = Search { config, processors, prompt_len: prompt.len(), rules: Rules::of(config) };
    let start = Group { beams: vec![Beam { row: 0, ids: prompt, score: 0.0 }], ..Group::default() };
    let mut groups = vec![start; config.num_beam_groups];
    let mut stop_reason = if wanted > max_steps { StopReason::Context } else { StopReason::MaxNewTokens };
    let mut is_ended = false;
    for step in 1..=max_steps {
        if deadline.is_over() {
            stop_reason = StopReason::MaxTime;
        }
        if is_ended {
            stop_reason = StopReason::Interrupted;
        }
        let is_over = matches!(stop_reason, StopReason::MaxTime | StopReason::Interrupted);
        let is_last = is_over || step == max_steps;
        let mut chosen_by_others = Vec::new();
        for group in &mut groups {
            search.extend(group, &logits, step, is_last, &mut chosen_by_others)?;
        }
        is_ended = progress().is_break();
        if is_last || groups.iter().all(|group| group.is_done) {
            for group in groups.iter_mut().filter(|group| !group.is_done) {
                search.finish_open_beams(group, step, stop_reason);
            }
            break;
        }
        let mut beams: Vec<&mut Beam> =
            groups.iter_mut().filter(|group| !group.is_done).flat_map(|group| &mut group.beams).collect();
        let rows: Vec<usize> = beams.iter().map(|beam| beam.row).collect();
        let shared = |a: usize, b: usize| held[a].iter().zip(&held[b]).take_while(|(a, b)| a == b).count();
        cache.reorder(&rows, shared)?;
        beams.iter_mut().enumerate().for_each(|(row, beam)| beam.row = row);
        held = beams.iter().map(|beam| beam.ids.clone()).collect();
        let last: Vec<u32> = beams.iter().filter_map(|beam| beam.ids.last().copied()).collect();
        let ids = Tensor::from_vec(last, (rows.len(), 1), model.device())?;
        let pass = &mut Pass::inference();
        logits = match model.forward_with(&ids, LogitsFor::LastToken, Some(&mut cache), pass) {
            Err(_) if is_interrupted() => {
                for group in groups.iter_mut().filter(|group| !group.is_done) {
                    search.finish_open_beams(group, step, StopReason::Interrupted);
                }
                break;
            }
            logits => rows_of(&logits?)?,
        };
    }
    let mut found: Vec<Hypothesis> = groups.into_iter().flat_map(|group| group.finished).collect();
    if found.is_empty() {
        let ids = held.first().map(Vec::as_slice).unwrap_or_default();
        return Err(LogitsProcessor::no_token_left(
            processors,
            History { ids, prompt_len: search.prompt_len },
        ));
    }
    found.sort_by(|a, b| b.score.total_cmp(&a.score));
    found.truncate(config.num_return_sequences);
    Ok(found)
}

/// Differences between beam search with and without groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rules {
    /// The search ends when the best running beam can no longer beat the finished completions.
    ///
    /// At the last step, running beams always count as finished.
    Beams,
    /// A group ends when its best continuation can no longer beat its finished completions.
    ///
    /// The continuation may itself be finished. The rule also applies at the last step.
    Groups,
}

impl Rules {
    fn of(config: &GenerationConfig) -> Self {
        if config.num_beam_groups > 1 { Self::Groups } else { Self::Beams }
    }
}

/// A completion that is still growing.
#[derive(Debug, Clone)]
struct Beam {
    /// Row in the KV cache.
    row: usize,
    /// Prompt and new tokens.
    ids: Vec<u32>,
    /// Sum of log-probabilities.
    score: f32,
}

#[derive(Debug, Clone, Default)]
struct Group {
    /// Running beams, best first.
    beams: Vec<Beam>,
    /// Finished completions, best first, at most one for each beam.
    finished: Vec<Hypothesis>,
    is_done: bool,
}

/// A beam with one more token.
struct Extension {
    beam: usize,
    token: u32,
    score: f32,
}

struct Search<'a> {
    config: &'a GenerationConfig,
    processors: &'a [LogitsProcessor],
    prompt_len: usize,
    rules: Rules,
}

impl Search<'_> {
    /// Adds a token to every beam in the group.
    ///
    /// `chosen_by_others` contains the tokens that earlier groups chose in this step. The tokens of this
    /// group are appended.
    fn extend(
        &self,
        group: &mut Group,
        logits: &[Vec<f32>],
        step: usize,
        is_last: bool,
        chosen_by_others: &mut Vec<u32>,
    ) -> Result<(), GenerationError> {
        let group_size = self.config.num_beams / self.config.num_beam_groups;
        if group.is_done {
            // The reference pads a finished group, and the other groups also avoid the padding token.
            let padding = self.config.pad_token_id.or(self.config.eos_token_id.first().copied());
            chosen_by_others.extend(padding.into_iter().cycle().take(group_size));
            return Ok(());
        }
        let continuations = self.continuations(group, logits, chosen_by_others)?;
        let mut beams = Vec::with_capacity(group_size);
        for (rank, Extension { beam, token, score }) in continuations.iter().enumerate() {
            let mut ids = group.beams[*beam].ids.clone();
            ids.push(*token);
            if !self.config.eos_token_id.contains(token) {
                beams.push(Beam { row: group.beams[*beam].row, ids, score: *score });
            } else if rank < group_size {
                self.finish(&mut group.finished, &ids, *score, step, StopReason::Eos);
            }
            if beams.len() == group_size {
                break;
            }
        }
        group.beams = beams;
        let best = match self.rules {
            Rules::Beams => group.beams.first().map(|beam| beam.score),
            Rules::Groups => continuations.first().map(|continuation| continuation.score),
        };
        let always_counts = is_last && self.rules == Rules::Beams;
        group.is_done = group.beams.is_empty()
            || (!always_counts
                && group.finished.len() == group_size
                && best.is_none_or(|best| !self.can_be_beaten(&group.finished, best, step)));
        chosen_by_others.extend(group.beams.iter().filter_map(|beam| beam.ids.last()));
        Ok(())
    }

    /// Returns the most probable continuations of all beams in a group, best first.
    ///
    /// There are enough continuations to extend every beam, even if some of them end.
    fn continuations(
        &self,
        group: &Group,
        logits: &[Vec<f32>],
        chosen_by_others: &[u32],
    ) -> Result<Vec<Extension>, GenerationError> {
        let group_size = self.config.num_beams / self.config.num_beam_groups;
        let count = group_size * (1 + self.config.eos_token_id.len()).max(2);
        let best = map_items(&group.beams, |beam| {
            self.most_probable(beam, &logits[beam.row], chosen_by_others, count)
        });
        let mut continuations = Vec::new();
        for (index, best) in best.into_iter().enumerate() {
            let best = match best {
                // A beam that cannot continue is dropped in favor of the others.
                Err(GenerationError::NoTokenLeft { .. }) => continue,
                best => best?.into_iter(),
            };
            let sum = group.beams[index].score;
            continuations.extend(best.map(|(token, score)| Extension {
                beam: index,
                token,
                score: sum + score,
            }));
        }
        continuations.sort_by(|a, b| b.score.total_cmp(&a.score));
        continuations.truncate(count);
        Ok(continuations)
    }

    /// Returns the most probable next tokens of a beam, with their processed log-probabilities.
    fn most_probable(
        &self,
        beam: &Beam,
        logits: &[f32],
        chosen_by_others: &[u32],
        count: usize,
    ) -> Result<Vec<(u32, f32)>, GenerationError> {
        let mut scores = logits.to_vec();
        LogitsProcessor::Renormalize.process(self.history(beam), &mut scores)?;
        let avoided = LogitsProcessor::FrequencyPenalty(self.config.diversity_penalty);
        avoided.process(History { ids: chosen_by_others, prompt_len: 0 }, &mut scores)?;
        process(self.processors, self.history(beam), &mut scores)?;
        Ok(most_probable(&scores, count))
    }

    fn history<'ids>(&self, beam: &'ids Beam) -> History<'ids> {
        History { ids: &beam.ids, prompt_len: self.prompt_len }
    }

    /// Returns whether a completion with this log-probability could still beat the worst finished one.
    fn can_be_beaten(&self, finished: &[Hypothesis], best: f32, step: usize) -> bool {
        let length_penalty = self.config.length_penalty;
        let length = match self.config.early_stopping {
            EarlyStopping::Full => return false,
            EarlyStopping::Never if length_penalty > 0.0 => self.config.new_tokens(self.prompt_len),
            EarlyStopping::Never | EarlyStopping::Heuristic => step,
        };
        let attainable = f64::from(best) / libm::pow(length as f64, length_penalty);
        finished.last().is_none_or(|worst| attainable > worst.score)
    }

    fn finish_open_beams(&self, group: &mut Group, step: usize, reason: StopReason) {
        for beam in std::mem::take(&mut group.beams) {
            self.finish(&mut group.finished, &beam.ids, beam.score, step, reason);
        }
    }

    /// Adds a finished completion, and drops the worst if there are more completions than beams.
    fn finish(
        &self,
        finished: &mut Vec<Hypothesis>,
        ids: &[u32],
        sum: f32,
        length: usize,
        reason: StopReason,
    ) {
        let score = f64::from(sum) / libm::pow(length as f64, self.config.length_penalty);
        let ids = ids[self.prompt_len..].to_vec();
        finished.push(Hypothesis { ids, score, stop_reason: reason });
        finished.sort_by(|a, b| b.score.total_cmp(&a.score));
        finished.truncate(self.config.num_beams / self.config.num_beam_groups);
    }
}
