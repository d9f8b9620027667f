//! A custom protocol: predicting which of two words ends a line.
//!
//! Run it with `cargo run -p candle-gpt2-evaluation --example own_protocol`.
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::error::Error;

use candle_gpt2_engine::{ModelOptions, Silent};
use candle_gpt2_evaluation::{
    Choice, Data, Dataset, EvaluationError, Item, ItemResult, Metric, Prepared, Protocol, Setting,
    StderrKind, Totals, Work,
};
use candle_gpt2_generation::Sequence;

const LINES: &str = r#"{"text": "Good night, good", "endings": [" night", " king"], "label": 0}
{"text": "Tom had a red ball. Mia took the red", "endings": [" potato", " ball"], "label": 1}
{"text": "I pray you, tell", "endings": [" me", " of"], "label": 0}
"#;

const ENDINGS: Protocol = Protocol {
    name: "endings:example",
    about: "which of two words ends a line: the more probable one",
    source: "this example",
    dataset: Dataset { name: "three lines", hub: None, sha256: &[], license: "MIT OR Apache-2.0" },
    published: &[],
    parameter: None,
    few_shot: None,
    prepare,
    measure,
};

/// Builds an item with two choices from each entry.
fn prepare(data: &Data, setting: &Setting<'_>) -> Result<Prepared, EvaluationError> {
    let mut items = Vec::new();
    for (index, record) in data.records().enumerate() {
        let record = record?;
        let prompt = setting.vocabulary.encode(record.text("text")?)?;
        let mut choices = Vec::new();
        for ending in record.texts("endings")? {
            let ids = [prompt.clone(), setting.vocabulary.encode(ending)?].concat();
            choices.push(Choice::of(Sequence { ids, first: prompt.len() }, ending));
        }
        let gold = Some(record.index("label", 0, choices.len())?);
        let (context_tokens, work) = (prompt.len(), Work::Score { choices, gold });
        items.push(Item { index, id: None, group: None, context_tokens, work });
    }
    let totals = Totals::default();
    Ok(Prepared {
        items,
        totals,
        suppressed_tokens: Vec::new(),
        truncated_count: 0,
        notes: Vec::new(),
        damaged: None,
    })
}

/// Computes the fraction of correct answers.
fn measure(_: &Totals, results: &[ItemResult]) -> Vec<Metric> {
    let right = results.iter().filter(|result| result.correct == Some(true)).count();
    let (value, count) = (right as f64 / results.len() as f64, results.len());
    vec![Metric { name: "acc", value, stderr: None, stderr_kind: StderrKind::None, count }]
}

fn main() -> Result<(), Box<dyn Error>> {
    let model = ModelOptions::default().open(&Silent)?.load(&Silent)?;
    let data = Data::from_bytes("lines.jsonl".as_ref(), LINES.into())?;
    let vocabulary = model.vocabulary();
    let setting = Setting::new(vocabulary, &Silent);
    let prepared = (ENDINGS.prepare)(&data, &setting)?;
    let results = prepared.evaluate(&model, Vec::new(), &Silent, &mut |result| {
        let logprobs: Vec<f64> = result.choices.iter().map(|choice| choice.logprob).collect();
        println!("line {}: {logprobs:.2?}, right: {:?}", result.index, result.correct);
        Ok(())
    })?;
    for metric in (ENDINGS.measure)(&prepared.totals, &results) {
        println!("{} {}: {:.3} of {} lines", ENDINGS.name, metric.name, metric.value, metric.count);
    }
    Ok(())
}
