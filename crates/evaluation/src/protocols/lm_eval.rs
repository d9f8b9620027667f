//! lm-evaluation-harness conventions for all tasks: encoding, truncation and metrics.
//!
//! # Source
//! lm-evaluation-harness 0.4.13: `api/model.py` (`_encode_pair`, `loglikelihood`),
//! `models/huggingface.py` (`_loglikelihood_tokens`), `api/task.py` (`process_results`), for a causal
//! model.

use candle_gpt2::excerpt;
use candle_gpt2_engine::Vocabulary;
use candle_gpt2_generation::Sequence;

use super::few_shot::Examples;
use super::shared::{PreparedItem, prepare_records, scored, wrong_setting};
use crate::detokenize::is_space;
use crate::{
    Choice, Data, DataError, EvaluationError, ItemResult, Metric, Predicted, Prepared, Record, Setting,
    Totals,
};

/// A question with choices, one of them correct.
pub(super) struct Question {
    /// Text before the choice.
    pub(super) context: String,
    /// Choices, without the space before them.
    pub(super) choices: Vec<String>,
    /// Data field of each choice.
    pub(super) fields: Vec<String>,
    /// Index of the correct choice.
    pub(super) gold: usize,
}

/// A context, a continuation to score, and the text whose length normalizes the score.
pub(super) struct Pair<'a> {
    /// Data field of the text.
    pub(super) field: &'a str,
    pub(super) context: &'a str,
    pub(super) continuation: &'a str,
    pub(super) measured: &'a str,
}

/// Builds an item from the question in each data entry.
pub(super) fn prepare_questions(
    data: &Data,
    setting: &Setting<'_>,
    question: impl Fn(&Record) -> Result<Question, DataError>,
) -> Result<Prepared, EvaluationError> {
    let mut examples = Examples::of_protocol(data, setting)?;
    let example = |record: &Record| {
        let Question { context, choices, gold, .. } = question(record)?;
        Ok::<_, EvaluationError>(format!("{context} {}\n\n", choices[gold]))
    };
    prepare_records(data, setting, data.records(), |index, record| {
        let mut asked = question(record)?;
        if let Some(examples) = &mut examples {
            asked.context.insert_str(0, &examples.before(record, example)?);
        }
        question_item(setting.vocabulary, index, record, &asked)
    })
}

/// Paths of a list's elements.
pub(super) fn element_paths(list: &str, count: usize) -> Vec<String> {
    (0..count).map(|index| format!("{list}[{index}]")).collect()
}

/// Checks that a list has at least two choices.
pub(super) fn at_least_two(record: &Record, choices: &[String]) -> Result<(), DataError> {
    match choices.len() {
        found @ (0 | 1) => {
            Err(record.field_error("choices", &format!("expected at least two choices, found {found}")))
        }
        _ => Ok(()),
    }
}

/// Builds the item for a question; each choice follows the context and a space.
pub(super) fn question_item(
    vocabulary: &Vocabulary,
    index: usize,
    record: &Record,
    question: &Question,
) -> Result<PreparedItem, EvaluationError> {
    let Question { context, choices, fields, gold } = question;
    let continuations: Vec<String> = choices.iter().map(|choice| format!(" {choice}")).collect();
    let pairs = continuations.iter().zip(choices).zip(fields);
    let pairs: Vec<_> = pairs
        .map(|((continuation, measured), field)| Pair { field, context, continuation, measured })
        .collect();
    item(vocabulary, index, record, &pairs, Some(*gold))
}

/// Builds an item from pairs of context and continuation.
pub(super) fn item(
    vocabulary: &Vocabulary,
    index: usize,
    record: &Record,
    pairs: &[Pair<'_>],
    gold: Option<usize>,
) -> Result<PreparedItem, EvaluationError> {
    let n_positions = vocabulary.config().n_positions;
    let mut is_cut = false;
    let mut choices = Vec::with_capacity(pairs.len());
    let mut encoded: Option<(&str, Vec<u32>)> = None;
    for Pair { field, context, continuation, measured } in pairs {
        // All choices of a question usually have the same context.
        let (_, before) = match encoded.take().filter(|(text, _)| text == context) {
            Some(known) => encoded.insert(known),
            None => encoded.insert((context, encode_context(vocabulary, context)?)),
        };
        let scored = encode_continuation(vocabulary, context, before.len(), continuation)?;
        if before.is_empty() {
            return Err(record
                .field_error(field, "expected a token before the scored text, found none")
                .into());
        }
        if scored.is_empty() {
            let what = format!(
                "the answer `{}` has no token of its own; begin it with a space, or end the preceding text with one",
                excerpt(continuation)
            );
            return Err(record.field_error(field, &what).into());
        }
        if scored.len() > n_positions {
            let what = format!(
                "expected at most {n_positions} tokens (the model's context), found {}",
                scored.len()
            );
            return Err(record.field_error(field, &what).into());
        }
        // The last token is scored, but not read.
        let over = (before.len() + scored.len()).saturating_sub(n_positions + 1);
        is_cut |= over > 0;
        let ids = [&before[over..], &scored].concat();
        choices.push(Choice::of(Sequence { ids, first: before.len() - over }, measured));
    }
    Ok(PreparedItem { item: scored(index, record, choices, gold), is_cut })
}

/// Encodes a context without its trailing whitespace, which belongs to the continuation.
///
/// An empty context becomes the BOS token.
fn encode_context(vocabulary: &Vocabulary, context: &str) -> Result<Vec<u32>, EvaluationError> {
    match context.trim_end_matches(is_space) {
        "" if context.is_empty() => Ok(vec![prefix_token(vocabulary)?]),
        "" => Ok(Vec::new()),
        stripped => Ok(vocabulary.encode(stripped)?),
    }
}

/// Encodes the whole text and returns the tokens after the context.
fn encode_continuation(
    vocabulary: &Vocabulary,
    context: &str,
    context_tokens: usize,
    continuation: &str,
) -> Result<Vec<u32>, EvaluationError> {
    let mut whole = vocabulary.encode(&format!("{context}{continuation}"))?;
    // If the context is empty, the encoded text lacks the BOS token that replaces the context. Continuations
    // begin with whitespace, and never with the BOS token itself.
    let known = if context.is_empty() { 0 } else { context_tokens.min(whole.len()) };
    Ok(whole.split_off(known))
}

/// Returns the token before texts without context: BOS, or EOS if the model has no BOS token.
pub(super) fn prefix_token(vocabulary: &Vocabulary) -> Result<u32, EvaluationError> {
    let config = vocabulary.config();
    let token = config.start_token().or_else(|| config.end_tokens().first().copied());
    token.ok_or_else(|| {
        let expected = "a `bos_token_id` or `eos_token_id` in the vocabulary, to begin each text with";
        wrong_setting("the model's configuration", expected, "neither")
    })
}

/// `acc`: the most probable choice is correct.
pub(super) fn acc(results: &[ItemResult]) -> Option<Metric> {
    share_of("acc", results, |predicted| predicted.sum)
}

/// `acc` and `acc_norm`: the most probable choice is correct, in total or per character.
pub(super) fn measure(_: &Totals, results: &[ItemResult]) -> Vec<Metric> {
    let acc_norm = share_of("acc_norm", results, |predicted| predicted.per_character);
    acc(results).into_iter().chain(acc_norm).collect()
}

/// Fraction of items whose best choice by a measure is correct.
pub(super) fn share_of(
    name: &'static str,
    results: &[ItemResult],
    best: fn(&Predicted) -> usize,
) -> Option<Metric> {
    Metric::share(name, results.iter().map(|result| is_right(result, best)))
}

/// Whether an item's best choice by a measure is correct.
pub(super) fn is_right(result: &ItemResult, best: fn(&Predicted) -> usize) -> bool {
    result.gold.is_some() && result.predicted.as_ref().map(best) == result.gold
}
