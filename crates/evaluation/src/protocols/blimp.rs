//! BLiMP: choosing the grammatical sentence in each minimal pair, in 67 paradigms.
//!
//! # Source
//! lm-evaluation-harness 0.4.13, `tasks/blimp/_template_yaml` and `_blimp.yaml`, whose mean weights all
//! paradigms equally.

use std::collections::{BTreeMap, BTreeSet};

use super::lm_eval::{Question, is_right, question_item};
use super::shared::{DEFAULTS, prepare_records};
use crate::protocol::Dataset;
use crate::{
    Data, DataError, EvaluationError, ItemResult, Metric, Prepared, Protocol, Record, Setting, StderrKind,
    Totals,
};

/// Number of paradigms, each of which tests one point of grammar.
const PARADIGMS: usize = 67;

/// Mean accuracy over paradigms, identified by the field `UID` or the file names.
pub(super) const LM_EVAL: Protocol = Protocol {
    name: "blimp:lm-eval",
    about: "which of two sentences is grammatical, for 67 points of grammar; the mean over these",
    source: "lm-evaluation-harness 0.4.13, group blimp",
    dataset: Dataset {
        name: "BLiMP: a folder of its 67 files, github.com/alexwarstadt/blimp, data",
        hub: None,
        sha256: &[],
        license: "CC BY 4.0",
    },
    // In the harness, each paradigm is a task with its own examples, so `few_shot` is `None`.
    prepare,
    measure,
    ..DEFAULTS
};

fn prepare(data: &Data, setting: &Setting<'_>) -> Result<Prepared, EvaluationError> {
    let mut prepared = prepare_records(data, setting, data.records(), |index, record| {
        let mut made = question_item(setting.vocabulary, index, record, &question(record)?)?;
        made.item.group = Some(paradigm(record));
        Ok(made)
    })?;
    let measured: BTreeSet<_> = prepared.items.iter().map(|item| &item.group).collect();
    if measured.len() != PARADIGMS {
        prepared.notes.push(format!("the mean covers {} of BLiMP's {PARADIGMS} paradigms", measured.len()));
    }
    Ok(prepared)
}

fn question(record: &Record) -> Result<Question, DataError> {
    let fields = ["sentence_good", "sentence_bad"];
    let choices = fields.iter().map(|field| record.filled(field).map(str::to_owned));
    let choices = choices.collect::<Result<_, _>>()?;
    Ok(Question { context: String::new(), choices, fields: fields.map(str::to_owned).to_vec(), gold: 0 })
}

fn paradigm(record: &Record) -> String {
    record.text("UID").map_or_else(|_| record.file_stem(), str::to_owned)
}

/// Computes the mean accuracy of the paradigms, with the standard error of independent paradigms.
fn measure(_: &Totals, results: &[ItemResult]) -> Vec<Metric> {
    let mut paradigms: BTreeMap<Option<&str>, Vec<bool>> = BTreeMap::new();
    for result in results {
        paradigms
            .entry(result.group.as_deref())
            .or_default()
            .push(is_right(result, |predicted| predicted.sum));
    }
    let shares: Vec<Metric> =
        paradigms.into_values().filter_map(|answers| Metric::share("acc", answers)).collect();
    if shares.is_empty() {
        return Vec::new();
    }
    let value = shares.iter().map(|share| share.value).sum::<f64>() / shares.len() as f64;
    let variances: Option<Vec<f64>> =
        shares.iter().map(|share| share.stderr.map(|stderr| stderr.powi(2))).collect();
    let stderr = variances.map(|variances| variances.iter().sum::<f64>().sqrt() / shares.len() as f64);
    let stderr_kind = stderr.map_or(StderrKind::None, |_| StderrKind::Binomial);
    vec![Metric { name: "acc", value, stderr, stderr_kind, count: results.len() }]
}
