//! Winogrande: choosing the name that fills a gap, by the probability of the text after the gap.
//!
//! # Source
//! lm-evaluation-harness 0.4.13, `tasks/winogrande/preprocess_winogrande.py`.

use super::few_shot::Examples;
use super::lm_eval::{self, Pair};
use super::shared::{GPT_NEO, GPT2_CARD, PreparedItem, prepare_records, published};
use crate::detokenize::strip;
use crate::protocol::Dataset;
use crate::{DataError, EvaluationError, ExampleSource, Protocol, Record, Setting, Size};

/// Columns in files without a header row, as in llama.cpp's format.
const COLUMNS: &[&str] = &["index", "sentence", "option1", "option2", "answer"];

/// Protocol that scores the same continuation after two contexts, one for each name.
pub(super) const LM_EVAL: Protocol = Protocol {
    name: "winogrande:lm-eval",
    about: "which of two names fills a gap, by what follows it",
    source: "lm-evaluation-harness 0.4.13, task winogrande",
    dataset: Dataset {
        name: "Winogrande, validation",
        hub: Some("allenai/winogrande@refs/convert/parquet/winogrande_xl/validation/0000.parquet"),
        sha256: &[],
        license: "CC BY",
    },
    published: &[
        published(Size::Small, "acc", 0.5162, "winogrande:lm-eval", GPT2_CARD),
        published(Size::Xl, "acc", 0.5940, "winogrande:lm-eval", GPT_NEO),
    ],
    parameter: None,
    few_shot: Some(ExampleSource::TrainingWithoutQuestion),
    prepare: |data, setting| {
        let records = || data.records_with_columns(COLUMNS);
        let mut examples = Examples::of_protocol(data, setting)?;
        prepare_records(data, setting, records(), |index, record| {
            let before = examples.as_mut().map(|examples| examples.before(record, example)).transpose()?;
            make(setting, index, record, &before.unwrap_or_default())
        })
    },
    measure: |_, results| lm_eval::acc(results).into_iter().collect(),
};

/// A sentence with each name in its gap, split after the name.
struct Sentence {
    contexts: [String; 2],
    /// Text after the gap.
    rest: String,
    gold: usize,
}

fn sentence(record: &Record) -> Result<Sentence, DataError> {
    let sentence = record.filled("sentence")?;
    let Some((before, after)) = sentence.split_once('_') else {
        return Err(record.field_error("sentence", "expected text with a gap, found no `_`"));
    };
    let option = |names: [&str; 2]| record.filled(if record.has(names[1]) { names[1] } else { names[0] });
    let options = [option(["option1", "choice1"])?, option(["option2", "choice2"])?];
    let gold = record.index("answer", 1, options.len())?;
    let contexts = options.map(|option| format!("{before}{option}"));
    Ok(Sentence { contexts, rest: strip(after).to_owned(), gold })
}

fn example(record: &Record) -> Result<String, EvaluationError> {
    let Sentence { contexts, rest, gold } = sentence(record)?;
    Ok(format!("{} {rest}\n\n", contexts[gold]))
}

fn make(
    setting: &Setting<'_>,
    index: usize,
    record: &Record,
    before: &str,
) -> Result<PreparedItem, EvaluationError> {
    let Sentence { contexts, rest, gold } = sentence(record)?;
    let continuation = format!(" {rest}");
    let whole = contexts.each_ref().map(|context| format!("{before}{context}"));
    // The harness normalizes scores by the length of its choices, which are the contexts in this task.
    let pair =
        |(context, measured)| Pair { field: "sentence", context, continuation: &continuation, measured };
    let pairs: Vec<_> =
        whole.iter().map(String::as_str).zip(contexts.iter().map(String::as_str)).map(pair).collect();
    lm_eval::item(setting.vocabulary, index, record, &pairs, Some(gold))
}
