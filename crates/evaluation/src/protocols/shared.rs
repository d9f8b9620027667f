//! Code shared by the protocols: default fields, items from records, published results, errors.

use candle_gpt2_engine::Vocabulary;
use candle_gpt2_generation::Sequence;

use crate::{
    Choice, Data, DataError, Dataset, EvaluationError, Item, Prepared, Protocol, Published, Record, Setting,
    Size, Work,
};

/// Default values of a protocol's fields.
pub(super) const DEFAULTS: Protocol = Protocol {
    name: "",
    about: "",
    source: "",
    dataset: Dataset { name: "any UTF-8 text", hub: None, sha256: &[], license: "the text's" },
    published: &[],
    parameter: None,
    few_shot: None,
    prepare: |data, _| Err(unusable(data, "no protocol supports it")),
    measure: |_, _| Vec::new(),
};

/// Sources of published results for more than one task.
pub(super) const GPT_NEO: &str = "EleutherAI/gpt-neo, README";
pub(super) const GPT2_CARD: &str = "crumb/gpt2023, model card";
/// Source of the paper's results.
const PAPER: &str = "Radford et al. 2019, table 3";
/// Protocol name for the paper's results, whose protocol is unknown.
const NOT_PUBLISHED: &str = "not published";

/// Creates a published result for the protocol that lists it.
pub(super) const fn published(
    model: Size,
    metric: &'static str,
    value: f64,
    protocol: &'static str,
    source: &'static str,
) -> Published {
    Published { model, metric, value, source, protocol, exact: true }
}

/// Creates a result published in the paper.
pub(super) const fn paper(model: Size, metric: &'static str, value: f64) -> Published {
    Published { model, metric, value, source: PAPER, protocol: NOT_PUBLISHED, exact: false }
}

/// An item, and whether it was truncated at the beginning.
pub(super) struct PreparedItem {
    pub(super) item: Item,
    pub(super) is_cut: bool,
}

impl From<Item> for PreparedItem {
    fn from(item: Item) -> Self {
        Self { item, is_cut: false }
    }
}

/// Builds an item from each record, up to the first damaged record or the item limit.
pub(super) fn prepare_records(
    data: &Data,
    setting: &Setting<'_>,
    records: impl Iterator<Item = Result<Record, DataError>>,
    mut make: impl FnMut(usize, &Record) -> Result<PreparedItem, EvaluationError>,
) -> Result<Prepared, EvaluationError> {
    let mut prepared = Prepared::default();
    for (index, record) in records.take(limit(setting)?).enumerate() {
        if setting.reporter.is_interrupted() {
            return Err(EvaluationError::Interrupted);
        }
        match record.map_err(EvaluationError::from).and_then(|record| make(index, &record)) {
            Ok(PreparedItem { item, is_cut }) => {
                prepared.items.push(item);
                prepared.truncated_count += usize::from(is_cut);
            }
            Err(EvaluationError::Data(error)) => {
                prepared.damaged = Some(error);
                break;
            }
            Err(error) => return Err(error),
        }
    }
    if prepared.items.is_empty() && prepared.damaged.is_none() {
        return Err(unusable(data, "expected at least one entry, found none"));
    }
    Ok(prepared)
}

/// Returns the maximum number of items.
pub(crate) fn limit(setting: &Setting<'_>) -> Result<usize, EvaluationError> {
    match setting.limit {
        Some(0) => Err(wrong_setting("`limit`", "at least 1 item", "0")),
        limit => Ok(limit.unwrap_or(usize::MAX)),
    }
}

/// Builds a record's item from one choice, or from several choices with the correct index `gold`.
pub(super) fn scored(index: usize, record: &Record, choices: Vec<Choice>, gold: Option<usize>) -> Item {
    let context_tokens =
        choices.first().and_then(|choice| choice.sequences.first()).map_or(0, |sequence| sequence.first);
    Item { index, id: record.id(), group: None, context_tokens, work: Work::Score { choices, gold } }
}

/// Creates a sequence that is scored from the token at index `first` onward.
///
/// Used by protocols that read an item as a whole and reject items that exceed the context. `field` is the
/// data field that the scored tokens come from.
pub(super) fn unsplit_sequence(
    vocabulary: &Vocabulary,
    record: &Record,
    field: &str,
    ids: Vec<u32>,
    first: usize,
) -> Result<Sequence, EvaluationError> {
    let n_positions = vocabulary.config().n_positions;
    if ids.len() > n_positions {
        let what = format!(
            "expected at most {n_positions} tokens (the model's context) including the preceding text, found {}; this protocol \
             does not truncate items",
            ids.len()
        );
        return Err(record.field_error(field, &what).into());
    }
    if first == 0 || first >= ids.len() {
        let missing = if first == 0 { "before the scored text" } else { "to score" };
        return Err(record.field_error(field, &format!("expected a token {missing}, found none")).into());
    }
    Ok(Sequence { ids, first })
}

/// Error about the data as a whole.
pub(crate) fn unusable(data: &Data, what: impl Into<String>) -> EvaluationError {
    EvaluationError::Unusable { file: data.path().display().to_string(), what: what.into() }
}

pub(crate) fn wrong_setting(
    what: &str,
    expected: impl Into<String>,
    found: impl Into<String>,
) -> EvaluationError {
    EvaluationError::Setting { what: what.to_owned(), expected: expected.into(), found: found.into() }
}
