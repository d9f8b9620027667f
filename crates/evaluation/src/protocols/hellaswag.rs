//! HellaSwag: choosing which of four endings continues a passage.

use serde_json::{Map, Value};

use super::llama_cpp::encode_plain;
use super::lm_eval::{self, Question, at_least_two, element_paths, share_of};
use super::shared::{DEFAULTS, GPT_NEO, PreparedItem, prepare_records, published, scored, unsplit_sequence};
use crate::detokenize::{capitalized, hellaswag};
use crate::protocol::Dataset;
use crate::{
    Choice, Data, DataError, EvaluationError, ExampleSource, Metric, Protocol, Record, Records, Setting, Size,
};

const DATASET: Dataset = Dataset {
    name: "HellaSwag, validation",
    hub: Some("Rowan/hellaswag@refs/convert/parquet/default/validation/0000.parquet"),
    sha256: &[],
    license: "MIT",
};
const STORED_LOG: &str = "a stored log of lm-evaluation-harness";
const LLM_C_SCRIPT: &str = "karpathy/llm.c, dev/data/hellaswag.py, in TF32";
/// Number of endings per item.
const ENDINGS: usize = 4;

/// Protocol that scores cleaned texts by sum and per character.
pub(super) const LM_EVAL: Protocol = Protocol {
    name: "hellaswag:lm-eval",
    about: "which ending continues a cleaned text; scored by sum and per character",
    source: "lm-evaluation-harness 0.4.13, task hellaswag",
    dataset: DATASET,
    published: &[
        published(Size::Small, "acc", 0.2892, "hellaswag:lm-eval", STORED_LOG),
        published(Size::Small, "acc_norm", 0.3114, "hellaswag:lm-eval", STORED_LOG),
        published(Size::Xl, "acc", 0.4003, "hellaswag:lm-eval", GPT_NEO),
        published(Size::Xl, "acc_norm", 0.5089, "hellaswag:lm-eval", GPT_NEO),
    ],
    parameter: None,
    few_shot: Some(ExampleSource::TrainingWithoutQuestion),
    prepare: |data, setting| lm_eval::prepare_questions(data, setting, question),
    measure: lm_eval::measure,
};

/// Protocol that scores original texts by sum and per token.
pub(super) const LLM_C: Protocol = Protocol {
    name: "hellaswag:llm.c",
    about: "which ending continues the original text; scored by sum and per token",
    source: "karpathy/llm.c, dev/data/hellaswag.py",
    dataset: DATASET,
    published: &[
        published(Size::Small, "acc", 0.2859, "hellaswag:llm.c", LLM_C_SCRIPT),
        published(Size::Small, "acc_norm", 0.2955, "hellaswag:llm.c", LLM_C_SCRIPT),
        published(Size::Medium, "acc_norm", 0.375224, "hellaswag:llm.c", "karpathy/llm.c, in bf16"),
        published(Size::Large, "acc_norm", 0.431986, "hellaswag:llm.c", "karpathy/llm.c, in bf16"),
        published(Size::Xl, "acc", 0.3842, "hellaswag:llm.c", LLM_C_SCRIPT),
        published(Size::Xl, "acc_norm", 0.4893, "hellaswag:llm.c", LLM_C_SCRIPT),
    ],
    prepare: |data, setting| {
        prepare_records(data, setting, data.records(), |index, record| as_it_is(setting, index, record))
    },
    measure: |_, results| {
        let by_tokens = share_of("acc_norm", results, |predicted| predicted.per_token);
        lm_eval::acc(results).into_iter().chain(by_tokens).collect()
    },
    ..DEFAULTS
};

/// Protocol that scores cleaned texts by the mean per token after the common prefix.
pub(super) const LLAMA_CPP: Protocol = Protocol {
    name: "hellaswag:llama.cpp",
    about: "which ending continues a cleaned text; scored per token after the common prefix",
    source: "llama.cpp, tools/perplexity/perplexity.cpp, hellaswag_score; all items in their order",
    dataset: DATASET,
    prepare: |data, setting| {
        let records = if data.has_records() { data.records() } else { six_lines(data)? };
        prepare_records(data, setting, records, |index, record| from_difference(setting, index, record))
    },
    measure: |_, results| {
        share_of("acc_norm", results, |predicted| predicted.per_token).into_iter().collect::<Vec<Metric>>()
    },
    ..DEFAULTS
};

/// Reads a question from a published entry and cleans it.
///
/// An entry with `query` and `choices` is already clean.
fn question(record: &Record) -> Result<Question, DataError> {
    if record.has("query") {
        let choices: Vec<String> = record.texts("choices")?.into_iter().map(str::to_owned).collect();
        at_least_two(record, &choices)?;
        let gold = record.index(if record.has("gold") { "gold" } else { "label" }, 0, choices.len())?;
        let fields = element_paths("choices", choices.len());
        return Ok(Question { context: record.filled("query")?.to_owned(), choices, fields, gold });
    }
    let Endings { endings, gold } = endings(record)?;
    let [label, ctx_a, ctx_b] =
        [record.text("activity_label")?, record.text("ctx_a")?, record.text("ctx_b")?];
    let context = hellaswag(&format!("{label}: {ctx_a} {}", capitalized(ctx_b)));
    let choices = endings.into_iter().map(hellaswag).collect();
    Ok(Question { context, choices, fields: element_paths("endings", ENDINGS), gold })
}

struct Endings<'a> {
    endings: Vec<&'a str>,
    gold: usize,
}

fn endings(record: &Record) -> Result<Endings<'_>, DataError> {
    let endings = record.texts("endings")?;
    if endings.len() != ENDINGS {
        let what = format!("expected {ENDINGS} texts, found {}", endings.len());
        return Err(record.field_error("endings", &what));
    }
    Ok(Endings { gold: record.index("label", 0, ENDINGS)?, endings })
}

fn as_it_is(setting: &Setting<'_>, index: usize, record: &Record) -> Result<PreparedItem, EvaluationError> {
    let Endings { endings, gold } = endings(record)?;
    let context = setting.vocabulary.encode(record.filled("ctx")?)?;
    let choice = |(ending, field): (&str, &String)| {
        let ids = [context.as_slice(), &setting.vocabulary.encode(&format!(" {ending}"))?].concat();
        Ok(Choice::of(unsplit_sequence(setting.vocabulary, record, field, ids, context.len())?, ending))
    };
    let choices = endings
        .into_iter()
        .zip(&element_paths("endings", ENDINGS))
        .map(choice)
        .collect::<Result<_, EvaluationError>>()?;
    Ok(scored(index, record, choices, Some(gold)).into())
}

fn from_difference(
    setting: &Setting<'_>,
    index: usize,
    record: &Record,
) -> Result<PreparedItem, EvaluationError> {
    let Question { context, choices, fields, gold } = question(record)?;
    let encode = |choice: &String| encode_plain(setting.vocabulary, &format!("{context} {choice}"));
    let encoded = choices.iter().map(encode).collect::<Result<Vec<_>, _>>()?;
    let in_all = |(index, id): &(usize, &u32)| encoded.iter().all(|ids| ids.get(*index) == Some(id));
    let common = encoded.first().map_or(0, |ids| ids.iter().enumerate().take_while(in_all).count());
    let choice = |(field, (ids, choice)): (&String, (Vec<u32>, &String))| {
        if ids.len() == common {
            let what = "expected a token that differs from the other endings, found none";
            return Err(record.field_error(field, what).into());
        }
        Ok(Choice::of(unsplit_sequence(setting.vocabulary, record, field, ids, common)?, choice))
    };
    let encoded = fields.iter().zip(encoded.into_iter().zip(&choices));
    let choices = encoded.map(choice).collect::<Result<_, EvaluationError>>()?;
    Ok(scored(index, record, choices, Some(gold)).into())
}

/// llama.cpp's text format: context, number of the correct ending, and four endings, one per line.
fn six_lines(data: &Data) -> Result<Records<'_>, EvaluationError> {
    const LINES: usize = 2 + ENDINGS;
    let mut lines = data.text()?.lines();
    let items = (0..).map_while(move |item: usize| {
        let lines: Vec<&str> = lines.by_ref().take(LINES).collect();
        (!lines.is_empty()).then_some((item * LINES + 1, lines))
    });
    Ok(Box::new(items.map(|(line, lines)| {
        let record = |fields| Record::new(data.path().to_owned(), line, fields);
        match lines.as_slice() {
            [context, gold, endings @ ..] if endings.len() == ENDINGS => {
                let texts = [("query", Value::from(*context)), ("gold", Value::from(*gold))];
                let fields = texts.into_iter().chain([("choices", Value::from(endings))]);
                Ok(record(fields.map(|(name, value)| (name.to_owned(), value)).collect()))
            }
            found => {
                let what = format!("expected {LINES} lines for an item, found {}", found.len());
                Err(record(Map::new()).error(what))
            }
        }
    })))
}
