//! Question answering tasks from lm-evaluation-harness: PIQA, ARC, OpenBookQA, SciQ.
//!
//! # Source
//! lm-evaluation-harness 0.4.13, `tasks/{piqa,arc,openbookqa,sciq}/*.yaml`.

use super::lm_eval::{self, Question, at_least_two, element_paths, prepare_questions};
use super::shared::{DEFAULTS, GPT_NEO, GPT2_CARD, published};
use crate::detokenize::is_space;
use crate::protocol::Dataset;
use crate::{DataError, ExampleSource, Protocol, Record, Size};

/// Physical common sense: choosing which of two solutions achieves a goal.
pub(super) const PIQA: Protocol = Protocol {
    name: "piqa:lm-eval",
    about: "which of two ways reaches a goal; scored by sum and per character",
    source: "lm-evaluation-harness 0.4.13, task piqa",
    dataset: Dataset {
        name: "PIQA, validation",
        hub: Some("baber/piqa/piqa_validation.parquet"),
        sha256: &[],
        license: "AFL-3.0",
    },
    published: &[
        published(Size::Small, "acc", 0.6289, "piqa:lm-eval", GPT2_CARD),
        published(Size::Small, "acc_norm", 0.6251, "piqa:lm-eval", GPT2_CARD),
        published(Size::Xl, "acc", 0.7078, "piqa:lm-eval", GPT_NEO),
    ],
    few_shot: Some(ExampleSource::TrainingWithoutQuestion),
    prepare: |data, setting| prepare_questions(data, setting, piqa),
    ..QUESTIONS
};

/// Easy science questions at school level.
pub(super) const ARC_EASY: Protocol = Protocol {
    name: "arc-easy:lm-eval",
    about: "easy school science questions; scored by sum and per character",
    source: "lm-evaluation-harness 0.4.13, task arc_easy",
    dataset: Dataset {
        name: "ARC-Easy, test",
        hub: Some("allenai/ai2_arc@refs/convert/parquet/ARC-Easy/test/0000.parquet"),
        sha256: &[],
        license: "CC BY-SA 4.0",
    },
    prepare: |data, setting| prepare_questions(data, setting, arc),
    ..QUESTIONS
};

/// Hard science questions at school level.
pub(super) const ARC_CHALLENGE: Protocol = Protocol {
    name: "arc-challenge:lm-eval",
    about: "hard school science questions; scored by sum and per character",
    source: "lm-evaluation-harness 0.4.13, task arc_challenge",
    dataset: Dataset {
        name: "ARC-Challenge, test",
        hub: Some("allenai/ai2_arc@refs/convert/parquet/ARC-Challenge/test/0000.parquet"),
        sha256: &[],
        license: "CC BY-SA 4.0",
    },
    published: &[
        published(Size::Small, "acc", 0.1903, "arc-challenge:lm-eval", GPT2_CARD),
        published(
            Size::Small,
            "acc_norm",
            0.2270,
            "arc-challenge:lm-eval",
            "crumb/gpt2023, model card; GPTQModel's tests",
        ),
    ],
    prepare: |data, setting| prepare_questions(data, setting, arc),
    ..QUESTIONS
};

/// Science questions from an open-book exam, without the book.
pub(super) const OPENBOOKQA: Protocol = Protocol {
    name: "openbookqa:lm-eval",
    about: "science questions without the book; scored by sum and per character",
    source: "lm-evaluation-harness 0.4.13, task openbookqa",
    dataset: Dataset {
        name: "OpenBookQA, test",
        hub: Some("allenai/openbookqa@refs/convert/parquet/main/test/0000.parquet"),
        sha256: &[],
        license: "not stated",
    },
    prepare: |data, setting| prepare_questions(data, setting, openbookqa),
    ..QUESTIONS
};

/// Science questions after a supporting text.
pub(super) const SCIQ: Protocol = Protocol {
    name: "sciq:lm-eval",
    about: "science questions after a text with the answer; scored by sum and per character",
    source: "lm-evaluation-harness 0.4.13, task sciq",
    dataset: Dataset {
        name: "SciQ, test",
        hub: Some("allenai/sciq@refs/convert/parquet/default/test/0000.parquet"),
        sha256: &[],
        license: "CC BY-NC 3.0",
    },
    prepare: |data, setting| prepare_questions(data, setting, sciq),
    ..QUESTIONS
};

/// Fields that all of these protocols share.
const QUESTIONS: Protocol =
    Protocol { few_shot: Some(ExampleSource::Training), measure: lm_eval::measure, ..DEFAULTS };

fn piqa(record: &Record) -> Result<Question, DataError> {
    let (choices, fields) = named(record, &["sol1", "sol2"])?;
    let gold = record.index("label", 0, choices.len())?;
    Ok(Question { context: format!("Question: {}\nAnswer:", record.text("goal")?), choices, fields, gold })
}

/// Reads a question from the Hub's fields, or from the published files' nested `question`.
fn arc(record: &Record) -> Result<Question, DataError> {
    let upstream = record.has_fields("question").then(|| record.fields("question")).transpose()?;
    let question = match &upstream {
        Some(question) => question.text("stem")?,
        None => record.text("question")?,
    };
    answers(record, upstream.as_ref().unwrap_or(record), format!("Question: {question}\nAnswer:"))
}

fn openbookqa(record: &Record) -> Result<Question, DataError> {
    let upstream = record.has_fields("question").then(|| record.fields("question")).transpose()?;
    let context = match &upstream {
        Some(question) => question.filled("stem")?,
        None => record.filled("question_stem")?,
    };
    answers(record, upstream.as_ref().unwrap_or(record), context.to_owned())
}

/// Returns the texts of the fields, and the field names.
fn named(record: &Record, fields: &[&str]) -> Result<(Vec<String>, Vec<String>), DataError> {
    let texts = fields.iter().map(|field| record.filled(field).map(str::to_owned));
    Ok((texts.collect::<Result<_, _>>()?, fields.iter().map(|field| (*field).to_owned()).collect()))
}

/// Reads the answers in `choices`, and finds the correct one by its label in `answerKey`.
///
/// `choices` is a list of objects with `text` and `label`, or an object with two lists that have these names.
fn answers(record: &Record, holder: &Record, context: String) -> Result<Question, DataError> {
    let (choices, labels): (Vec<String>, Vec<String>) = if holder.has_fields("choices") {
        let lists = holder.fields("choices")?;
        let texts: Vec<String> = lists.texts("text")?.into_iter().map(str::to_owned).collect();
        let labels = lists.labels("label")?;
        if texts.len() != labels.len() {
            let what = format!("expected {} labels, one for each text, found {}", texts.len(), labels.len());
            return Err(lists.field_error("label", &what));
        }
        (texts, labels)
    } else {
        let pair = |choice: Record| Ok((choice.filled("text")?.to_owned(), choice.label("label")?));
        holder
            .list("choices")?
            .into_iter()
            .map(pair)
            .collect::<Result<Vec<_>, DataError>>()?
            .into_iter()
            .unzip()
    };
    at_least_two(holder, &choices)?;
    let key = record.label("answerKey")?;
    let key = key.trim_start_matches(is_space);
    let gold = labels.iter().position(|label| label == key).ok_or_else(|| {
        record.field_error("answerKey", &format!("expected one of {}, found {key:?}", labels.join(", ")))
    })?;
    Ok(Question { context, fields: element_paths("choices", choices.len()), choices, gold })
}

fn sciq(record: &Record) -> Result<Question, DataError> {
    let (choices, fields) = named(record, &["distractor1", "distractor2", "distractor3", "correct_answer"])?;
    let support = record.text("support")?.trim_start_matches(is_space);
    let context = format!("{support}\nQuestion: {}\nAnswer:", record.text("question")?);
    Ok(Question { context, gold: choices.len() - 1, choices, fields })
}
