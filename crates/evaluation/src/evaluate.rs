//! Evaluation of items in batches, in data order; each result is reported immediately.
//!
//! Sequences are scored in runs of about a thousand tokens. That is enough to batch sequences of similar
//! length, and little work is lost after an interruption. The choices of an item share the computation of
//! their common prefix. Windows of text share nothing, and each is computed separately.

use std::collections::{BTreeMap, VecDeque};
use std::slice;

use candle_gpt2_engine::{Completion, Job, LoadedModel, Progress, Silent};
use candle_gpt2_generation::{
    GenerationConfig, GenerationError, Sequence, StopReason, TokenScore, score_sequences,
};

use crate::{
    Choice, ChoiceResult, EvaluationError, Item, ItemResult, Predicted, Prepared, Work, basic_tokenizer,
};

/// Number of tokens scored in one run, unless a single group has more.
///
/// This takes about a second with the small published model on two cores, and is the work lost if the
/// process is killed.
const RUN_TOKENS: usize = 1024;
/// Batch size for generation, large enough to amortize reading the weights.
const TEXTS_AT_ONCE: usize = 8;

/// Callback that receives each result.
type Keep<'a> = &'a mut dyn FnMut(&ItemResult) -> Result<(), EvaluationError>;

impl Prepared {
    /// Evaluates the model on every item after the first `done.len()`, and returns all results.
    ///
    /// `done` holds the results of an interrupted run. The last of them is computed again, to check that
    /// they come from this model. `keep` receives each further result in item order, as soon as it is
    /// available. `progress` counts the tokens of [`Prepared::tokens_to_read`].
    ///
    /// # Errors
    /// Fails if the model fails or the run is interrupted, if the recomputed result differs from `done`,
    /// or if `keep` fails.
    pub fn evaluate(
        &self,
        model: &LoadedModel,
        done: Vec<ItemResult>,
        progress: &dyn Progress,
        keep: Keep<'_>,
    ) -> Result<Vec<ItemResult>, EvaluationError> {
        let mut results = done;
        let mut known = results.pop();
        let mut rest = self.items.get(results.len()..).unwrap_or_default();
        results.reserve(rest.len());
        while let Some(first) = rest.first() {
            // Evaluate consecutive items of one kind together.
            let (stretch, others) =
                rest.split_at(rest.iter().take_while(|item| is_alike(item, first)).count());
            let mut keep = |result: ItemResult| {
                match known.take() {
                    Some(known) => results.push(known.if_like(&result)?),
                    None => {
                        keep(&result)?;
                        results.push(result);
                    }
                }
                Ok(())
            };
            match first.work {
                Work::Score { .. } => score(model, stretch, progress, &mut keep)?,
                Work::Write { tokens, .. } => self.write(model, stretch, tokens, progress, &mut keep)?,
            }
            rest = others;
        }
        match results.len() < self.items.len() {
            true => Err(EvaluationError::Interrupted),
            false => Ok(results),
        }
    }

    /// Returns the number of tokens left for the model to read after the first `done` items.
    ///
    /// The last completed item is read again. The common prefix of an item's choices counts once.
    pub fn tokens_to_read(&self, done: usize) -> u64 {
        let items = self.items.get(done.saturating_sub(1)..).unwrap_or_default();
        items.iter().map(|item| tokens_of(item) as u64).sum()
    }

    /// Generates the words for items that all need the same number of tokens.
    fn write(
        &self,
        model: &LoadedModel,
        items: &[Item],
        tokens: usize,
        progress: &dyn Progress,
        keep: &mut dyn FnMut(ItemResult) -> Result<(), EvaluationError>,
    ) -> Result<(), EvaluationError> {
        let padding = model.vocabulary().padding();
        let config = GenerationConfig {
            max_new_tokens: tokens,
            suppress_tokens: [&self.suppressed_tokens, padding].concat(),
            ..GenerationConfig::default()
        };
        config.check()?;
        config.check_model(model.config())?;
        let (finished, next) = (BTreeMap::new(), 0);
        let mut job = WordJob { items, prompts: items.iter(), finished, next, progress, keep };
        model.generate(&mut job, TEXTS_AT_ONCE, &config, &Silent)
    }
}

/// Whether both items are scored, or both generate the same number of tokens.
fn is_alike(a: &Item, b: &Item) -> bool {
    match (&a.work, &b.work) {
        (Work::Score { .. }, Work::Score { .. }) => true,
        (Work::Write { tokens: a, .. }, Work::Write { tokens: b, .. }) => a == b,
        _ => false,
    }
}

/// Number of tokens that the model reads for an item.
fn tokens_of(item: &Item) -> usize {
    match &item.work {
        Work::Score { choices, .. } => groups(choices).iter().map(|group| tokens_read(group)).sum(),
        Work::Write { prompt, tokens, .. } => prompt.len() + tokens.saturating_sub(1),
    }
}

/// Groups an item's sequences; only sequences in the same group can share a prefix.
fn groups(choices: &[Choice]) -> Vec<Vec<&Sequence>> {
    match choices {
        [text] => text.sequences.iter().map(|window| vec![window]).collect(),
        choices => vec![choices.iter().flat_map(|choice| &choice.sequences).collect()],
    }
}

/// Number of tokens that the model reads for a group; the common prefix counts once.
fn tokens_read(group: &[&Sequence]) -> usize {
    let read = |sequence: &&Sequence| sequence.ids.len().saturating_sub(1);
    let Some((first, others)) = group.split_first() else { return 0 };
    let equal = |other: &&Sequence| {
        first.ids.iter().zip(&other.ids).take_while(|(a, b)| a == b).count().min(read(other))
    };
    let shared = others.iter().map(equal).fold(read(first), usize::min);
    shared + group.iter().map(|sequence| read(sequence) - shared).sum::<usize>()
}

/// Scores items in runs of about [`RUN_TOKENS`] tokens.
fn score(
    model: &LoadedModel,
    items: &[Item],
    progress: &dyn Progress,
    keep: &mut dyn FnMut(ItemResult) -> Result<(), EvaluationError>,
) -> Result<(), EvaluationError> {
    let mut open: VecDeque<(&Item, usize)> = VecDeque::new();
    let mut scored: VecDeque<Vec<TokenScore>> = VecDeque::new();
    let (mut run, mut run_tokens) = (Vec::new(), 0);
    let mut finish_run =
        |run: &mut Vec<Vec<&Sequence>>, tokens: &mut usize, open: &mut VecDeque<(&Item, usize)>| {
            scored.extend(score_sequences(model.model(), run)?.into_iter().flatten());
            progress.advance(*tokens as u64);
            run.clear();
            *tokens = 0;
            // Report every item whose scores are complete.
            while let Some((item, count)) = open.pop_front_if(|(_, count)| *count <= scored.len()) {
                let scores: Vec<_> = scored.drain(..count).collect();
                keep(scored_item(item, &scores))?;
            }
            Ok::<(), EvaluationError>(())
        };
    for item in items {
        let Work::Score { choices, .. } = &item.work else { continue };
        open.push_back((item, choices.iter().map(|choice| choice.sequences.len()).sum()));
        for group in groups(choices) {
            let tokens = tokens_read(&group);
            if run_tokens + tokens > RUN_TOKENS && !run.is_empty() {
                // The item that this group belongs to is incomplete, so it remains in `open`.
                finish_run(&mut run, &mut run_tokens, &mut open)?;
            }
            run_tokens += tokens;
            run.push(group);
        }
    }
    finish_run(&mut run, &mut run_tokens, &mut open)
}

/// Combines the scores of an item's sequences into the item's result.
fn scored_item(item: &Item, scores: &[Vec<TokenScore>]) -> ItemResult {
    let Work::Score { choices, gold } = &item.work else { return empty_result(item) };
    let mut scores = scores.iter();
    let result =
        |choice: &Choice| scored_choice(choice, scores.by_ref().take(choice.sequences.len()).flatten());
    let choices: Vec<ChoiceResult> = choices.iter().map(result).collect();
    let predicted = (choices.len() > 1).then(|| Predicted::of(&choices));
    let is_right = |gold: usize| match (predicted, choices.first()) {
        (Some(predicted), _) => predicted.sum == gold,
        (None, only) => only.is_some_and(|only| only.is_greedy),
    };
    ItemResult { gold: *gold, predicted, correct: gold.map(is_right), choices, ..empty_result(item) }
}

fn scored_choice<'a>(choice: &Choice, scores: impl Iterator<Item = &'a TokenScore>) -> ChoiceResult {
    let Choice { characters, bytes, words, .. } = *choice;
    let nothing = ChoiceResult { characters, bytes, words, is_greedy: true, ..ChoiceResult::default() };
    scores.fold(nothing, |sum, score| ChoiceResult {
        logprob: sum.logprob + score.logprob,
        tokens: sum.tokens + 1,
        is_greedy: sum.is_greedy && score.is_greedy,
        squares: sum.squares + score.logprob * score.logprob,
        ..sum
    })
}

/// Creates a result with only the fields that do not depend on the model's output.
fn empty_result(item: &Item) -> ItemResult {
    ItemResult {
        index: item.index,
        id: item.id.clone(),
        group: item.group.clone(),
        asked: item.token_digest(),
        context_tokens: item.context_tokens,
        ..ItemResult::default()
    }
}

/// Generation job that reports its results in item order.
struct WordJob<'a> {
    items: &'a [Item],
    /// Items whose prompts have not been requested yet.
    prompts: slice::Iter<'a, Item>,
    /// Finished results that are waiting for an earlier one, by item index.
    finished: BTreeMap<usize, ItemResult>,
    /// Index of the next item to report.
    next: usize,
    progress: &'a dyn Progress,
    keep: &'a mut dyn FnMut(ItemResult) -> Result<(), EvaluationError>,
}

impl Job for WordJob<'_> {
    type Error = EvaluationError;

    fn next_prompt(&mut self) -> Result<Option<Vec<u32>>, EvaluationError> {
        let prompt = |item: &Item| match &item.work {
            Work::Write { prompt, .. } => prompt.clone(),
            Work::Score { .. } => Vec::new(),
        };
        Ok(self.prompts.next().map(prompt))
    }

    fn on_texts(
        &mut self,
        prompt: usize,
        texts: Result<Vec<Completion>, GenerationError>,
    ) -> Result<(), EvaluationError> {
        let item = &self.items[prompt];
        let text = texts?.into_iter().next();
        if text.as_ref().is_some_and(|text| text.stop_reason == StopReason::Interrupted) {
            return Err(EvaluationError::Interrupted);
        }
        let text = text.and_then(|text| text.text).unwrap_or_default();
        if let Work::Write { word, .. } = &item.work {
            let written = basic_tokenizer::words(&text).into_iter().next().unwrap_or_default();
            let correct = Some(written == *word);
            let words = Some([word.clone(), written]);
            self.finished.insert(prompt, ItemResult { words, correct, ..empty_result(item) });
        }
        self.progress.advance(tokens_of(item) as u64);
        while let Some(result) = self.finished.remove(&self.next) {
            self.next += 1;
            (self.keep)(result)?;
        }
        Ok(())
    }
}
