//! Winogrande: which of two names stands in the gap of a sentence, by the probability of what follows the gap.
//!
//! # Source
//! lm-evaluation-harness 0.4.13, `tasks/winogrande/preprocess_winogrande.py`.

use super::lm_eval::{self, Pair};
use super::{Made, prepare_records, published};
use crate::detokenize::strip;
use crate::protocol::Dataset;
use crate::{EvaluationError, Protocol, Record, Setting, Size};

/// The columns of files without a row of names, as llama.cpp reads them.
const COLUMNS: &[&str] = &["index", "sentence", "option1", "option2", "answer"];

/// Both names, the same continuation.
pub(super) const LM_EVAL: Protocol = Protocol {
    name: "winogrande:lm-eval",
    about: "which of two names stands in a gap, by what follows it",
    source: "lm-evaluation-harness 0.4.13, task winogrande",
    dataset: Dataset {
        name: "Winogrande, validation",
        hub: Some("allenai/winogrande@refs/convert/parquet/winogrande_xl/validation/0000.parquet"),
        sha256: &[],
        licence: "CC BY",
    },
    published: &[
        published(Size::Small, "acc", 0.5162, "winogrande:lm-eval", "crumb/gpt2023, model card"),
        published(Size::Xl, "acc", 0.5940, "winogrande:lm-eval", "EleutherAI/gpt-neo, README"),
    ],
    parameter: None,
    prepare: |data, setting| {
        let records = data.records_with_columns(COLUMNS);
        prepare_records(data, setting, records, |index, record| make(setting, index, record))
    },
    measure: |_, results| lm_eval::acc(results).into_iter().collect(),
};

fn make(setting: &Setting<'_>, index: usize, record: &Record) -> Result<Made, EvaluationError> {
    let sentence = record.filled("sentence")?;
    let Some((before, after)) = sentence.split_once('_') else {
        return Err(record.field_error("sentence", "expected a text with a gap, found no `_`").into());
    };
    let option = |names: [&str; 2]| record.filled(if record.has(names[1]) { names[1] } else { names[0] });
    let options = [option(["option1", "choice1"])?, option(["option2", "choice2"])?];
    let gold = record.index("answer", 1, options.len())?;
    let continuation = format!(" {}", strip(after));
    let contexts = options.map(|option| format!("{before}{option}"));
    // What the harness would divide by are its choices, which are the contexts.
    let pairs = contexts.each_ref().map(|context| Pair {
        field: "sentence",
        context,
        continuation: &continuation,
        measured: context,
    });
    lm_eval::item(setting.vocabulary, index, record, &pairs, Some(gold))
}
