//! What lm-evaluation-harness does with every task: how it cuts texts into tokens, what it cuts off, and how it counts.
//!
//! # Source
//! lm-evaluation-harness 0.4.13: `api/model.py` (`_encode_pair`, `loglikelihood`), `models/huggingface.py`
//! (`_loglikelihood_tokens`), `api/task.py` (`process_results`), for a causal model.

use candle_gpt2::excerpt;
use candle_gpt2_engine::Vocabulary;
use candle_gpt2_generation::Sequence;

use super::few_shot::Examples;
use super::shared::{Made, prepare_records, scored, wrong_setting};
use crate::detokenize::is_space;
use crate::{
    Choice, Data, DataError, EvaluationError, ItemResult, Metric, Predicted, Prepared, Record, Setting,
    Totals,
};

/// A question with its choices, one of them right.
pub(super) struct Question {
    /// The text before the choice.
    pub(super) context: String,
    /// What may follow it, without the space between them.
    pub(super) choices: Vec<String>,
    /// The field of the data that holds each of them.
    pub(super) fields: Vec<String>,
    /// Index of the right one.
    pub(super) gold: usize,
}

/// A text before, one behind whose tokens are scored, and the text whose length the score is divided by.
pub(super) struct Pair<'a> {
    /// The field of the data that holds it.
    pub(super) field: &'a str,
    pub(super) context: &'a str,
    pub(super) continuation: &'a str,
    pub(super) measured: &'a str,
}

/// Items of questions, one for each entry of the data.
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

/// The paths of a list's entries.
pub(super) fn places(list: &str, count: usize) -> Vec<String> {
    (0..count).map(|index| format!("{list}[{index}]")).collect()
}

/// Checks that a list of choices leaves one to choose.
pub(super) fn at_least_two(record: &Record, choices: &[String]) -> Result<(), DataError> {
    match choices.len() {
        found @ (0 | 1) => {
            Err(record.field_error("choices", &format!("expected at least two, found {found}")))
        }
        _ => Ok(()),
    }
}

/// The item of a question: each choice behind the context and a space.
pub(super) fn question_item(
    vocabulary: &Vocabulary,
    index: usize,
    record: &Record,
    question: &Question,
) -> Result<Made, EvaluationError> {
    let Question { context, choices, fields, gold } = question;
    let continuations: Vec<String> = choices.iter().map(|choice| format!(" {choice}")).collect();
    let pairs = continuations.iter().zip(choices).zip(fields);
    let pairs: Vec<_> = pairs
        .map(|((continuation, measured), field)| Pair { field, context, continuation, measured })
        .collect();
    item(vocabulary, index, record, &pairs, Some(*gold))
}

/// The item of some pairs.
pub(super) fn item(
    vocabulary: &Vocabulary,
    index: usize,
    record: &Record,
    pairs: &[Pair<'_>],
    gold: Option<usize>,
) -> Result<Made, EvaluationError> {
    let n_positions = vocabulary.config().n_positions;
    let mut is_cut = false;
    let mut choices = Vec::with_capacity(pairs.len());
    let mut encoded: Option<(&str, Vec<u32>)> = None;
    for Pair { field, context, continuation, measured } in pairs {
        // The choices of a question have the same context.
        let (_, before) = match encoded.take().filter(|(text, _)| text == context) {
            Some(known) => encoded.insert(known),
            None => encoded.insert((context, encode_context(vocabulary, context)?)),
        };
        let scored = encode_continuation(vocabulary, context, before.len(), continuation)?;
        if before.is_empty() {
            return Err(record
                .field_error(field, "expected a token before what is scored, found none")
                .into());
        }
        if scored.is_empty() {
            let what = format!(
                "the answer `{}` after it has no token of its own; begin it with a space, or end the text before it with one",
                excerpt(continuation)
            );
            return Err(record.field_error(field, &what).into());
        }
        if scored.len() > n_positions {
            let what =
                format!("expected at most {n_positions} tokens, the model's context, found {}", scored.len());
            return Err(record.field_error(field, &what).into());
        }
        // The last token is scored and not read.
        let over = (before.len() + scored.len()).saturating_sub(n_positions + 1);
        is_cut |= over > 0;
        let ids = [&before[over..], &scored].concat();
        choices.push(Choice::of(Sequence { ids, first: before.len() - over }, measured));
    }
    Ok(Made { item: scored(index, record, choices, gold), is_cut })
}

/// The tokens of a context: without white space at its end, which belongs to what follows; of an empty one the token that begins
/// texts.
fn encode_context(vocabulary: &Vocabulary, context: &str) -> Result<Vec<u32>, EvaluationError> {
    match context.trim_end_matches(is_space) {
        "" if context.is_empty() => Ok(vec![prefix_token(vocabulary)?]),
        "" => Ok(Vec::new()),
        stripped => Ok(vocabulary.encode(stripped)?),
    }
}

/// The tokens of what follows a context: those of the whole after the number that the context has by itself.
fn encode_continuation(
    vocabulary: &Vocabulary,
    context: &str,
    context_tokens: usize,
    continuation: &str,
) -> Result<Vec<u32>, EvaluationError> {
    let mut whole = vocabulary.encode(&format!("{context}{continuation}"))?;
    // Nothing of the token that begins texts is in the whole; no continuation begins with that token, but with white space.
    let known = if context.is_empty() { 0 } else { context_tokens.min(whole.len()) };
    Ok(whole.split_off(known))
}

/// The token that is put before texts that have no context.
pub(super) fn prefix_token(vocabulary: &Vocabulary) -> Result<u32, EvaluationError> {
    let config = vocabulary.config();
    let token = config.start_token().or_else(|| config.end_tokens().first().copied());
    token.ok_or_else(|| {
        let expected = "`bos_token_id` or `eos_token_id` in its vocabulary, to put before texts";
        wrong_setting("the model's configuration", expected, "neither")
    })
}

/// `acc`: the most probable choice is right.
pub(super) fn acc(results: &[ItemResult]) -> Option<Metric> {
    share_of("acc", results, |predicted| predicted.sum)
}

/// `acc` and `acc_norm`: the most probable choice is right, and the most probable one by its characters.
pub(super) fn measure(_: &Totals, results: &[ItemResult]) -> Vec<Metric> {
    let acc_norm = share_of("acc_norm", results, |predicted| predicted.per_character);
    acc(results).into_iter().chain(acc_norm).collect()
}

/// The share of items whose best choice by a measure is the right one.
pub(super) fn share_of(
    name: &'static str,
    results: &[ItemResult],
    best: fn(&Predicted) -> usize,
) -> Option<Metric> {
    Metric::share(name, results.iter().map(|result| is_right(result, best)))
}

/// Whether an item's best choice by a measure is the right one.
pub(super) fn is_right(result: &ItemResult, best: fn(&Predicted) -> usize) -> bool {
    result.gold.is_some() && result.predicted.as_ref().map(best) == result.gold
}
