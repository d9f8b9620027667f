//! `gpt2 classify`: labels of a text, of its tokens, or of every text of a file; or which of several texts is right.

use std::process::ExitCode;

use anyhow::Result;
use candle_gpt2::HeadKind;
use candle_gpt2_engine::{
    CLASSIFIED_AT_ONCE, Classification, Classifier, EngineError, HubOptions, Label, LabelledToken, Opened,
    Question, RankedChoice, Vocabulary, WeightDType, device_name,
};
use candle_gpt2_generation::GenerationError;
use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};

use super::line_reports::{FileArguments, LineReports};
use super::prompt_lines::{Given as GivenByLine, Line, PromptLines};
use crate::exit::{self, UsageError};
use crate::input::{Given, InputArguments};
use crate::model_arguments::ModelArguments;
use crate::output;
use crate::progress::Terminal;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 classify \"What a film!\" --model DIR
  gpt2 classify --model DIR --prompts-file reviews.jsonl --output labels.jsonl
  gpt2 classify \"The sky is\" --choice \" blue\" --choice \" green\" --model DIR

The model is one of transformers' GPT2ForSequenceClassification (labels of a text), GPT2ForTokenClassification (labels \
of each token) and GPT2DoubleHeadsModel (--choice), as `gpt2 train --task classify` and transformers write them. Labels \
are named by config.json (id2label). Their scores are those of transformers' pipelines: the softmax over all labels; the \
sigmoid of each logit for problem_type multi_label_classification and for a single label; the logit for regression.

A line of a .jsonl file may have its text under `text` too, so that rows of labelled texts can be classified as they \
are; for --choice also {\"prompt\": TEXT, \"choices\": [TEXT, …]} or {\"ids\": [[ID, …], …]}.")]
pub(crate) struct ClassifyArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    /// A text that may follow the prompt, of which one is right; give it for every choice
    #[arg(long, value_name = "TEXT", conflicts_with = "ids")]
    pub(crate) choice: Vec<String>,
    /// Keep the last N tokens of a text that is longer than the context; without it such a text is refused
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) keep_last: Option<usize>,
    /// Print one JSON object: prompt_ids, and labels (label, score, logit; the best first), or tokens (id, text, start and end in characters, labels), or choices (index, text, score, logit)
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) file: FileArguments,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    prompt_ids: &'a Question,
    #[serde(flatten)]
    classification: &'a Classification,
}

pub(crate) fn run(arguments: &ClassifyArguments, hub: &HubOptions) -> Result<ExitCode> {
    arguments.file.check()?;
    if arguments.keep_last == Some(0) {
        return Err(UsageError("--keep-last: expected at least 1, found 0".into()).into());
    }
    let opened = arguments.model.open_classifier(hub)?;
    if arguments.choice.is_empty()
        && arguments.file.prompts_file.is_none()
        && opened.config().head == HeadKind::DoubleHeads
    {
        let message = "this model says which of several texts is right; give each with --choice";
        return Err(UsageError(message.into()).into());
    }
    if arguments.file.prompts_file.is_some() {
        return classify_file(arguments, opened);
    }
    let vocabulary = opened.vocabulary();
    let question = match arguments.input.read(vocabulary)? {
        Given::Ids(ids) => Question::of_ids(vocabulary, ids, arguments.keep_last)?,
        Given::Text(text) => of_text(vocabulary, &text, &arguments.choice, arguments.keep_last)?,
    };
    let classifier = opened.load_classifier(&Terminal)?;
    for classification in &classifier.classify(std::slice::from_ref(&question))? {
        match arguments.json {
            true => output::write_json(&Report { prompt_ids: &question, classification })?,
            false => print(classification)?,
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn of_text(
    vocabulary: &Vocabulary,
    text: &str,
    choices: &[String],
    keep_last: Option<usize>,
) -> Result<Question, EngineError> {
    match choices {
        [] => Question::of_text(vocabulary, text, keep_last),
        choices => Question::of_choices(vocabulary, text, choices, keep_last),
    }
}

/// Classifies every line of a file.
fn classify_file(arguments: &ClassifyArguments, opened: Opened) -> Result<ExitCode> {
    let ClassifyArguments { file, choice, keep_last, .. } = arguments;
    let Some(path) = &file.prompts_file else { return Ok(ExitCode::SUCCESS) };
    let vocabulary = opened.vocabulary().clone();
    let lines = PromptLines::read(path, |given| question_of(given, &vocabulary, choice, *keep_last))?;
    let settings = settings(arguments, &opened);
    let mut reports = LineReports::open(file, &lines, &settings, "classifying")?;
    let classified = opened
        .load_classifier(&Terminal)
        .map_err(anyhow::Error::from)
        .and_then(|classifier| classify_lines(&classifier, &lines, file.batch_size, &mut reports));
    if let Err(error) = classified {
        reports.drop_if_empty();
        return Err(error);
    }
    reports.finish(path)
}

/// The question that a line asks.
fn question_of(
    given: &mut GivenByLine,
    vocabulary: &Vocabulary,
    choices: &[String],
    keep_last: Option<usize>,
) -> Result<Question> {
    if vocabulary.config().head != HeadKind::DoubleHeads {
        return Ok(match given.ids("a list of token ids")? {
            Some(ids) => Question::of_ids(vocabulary, ids, keep_last)?,
            None => of_text(vocabulary, given.text(), choices, keep_last)?,
        });
    }
    if let Some(ids) = given.ids("a list of token ids for each choice")? {
        return Ok(Question::of_choice_ids(vocabulary, ids, keep_last)?);
    }
    given.ask_for_choices()?;
    let choices = given.choices.as_deref().unwrap_or(choices);
    Ok(Question::of_choices(vocabulary, given.text(), choices, keep_last)?)
}

/// Classifies the lines that are not written, some at once. A run that goes on computes the lines together that it would have computed
/// together without an interruption: their numbers are the same to the last bit.
fn classify_lines(
    classifier: &Classifier,
    lines: &PromptLines<'_, Question>,
    batch_size: Option<usize>,
    reports: &mut LineReports,
) -> Result<()> {
    let size = batch_size.unwrap_or(CLASSIFIED_AT_ONCE).max(1);
    for first in (0..lines.len()).step_by(size) {
        let end = lines.len().min(first.saturating_add(size));
        if end <= reports.written() {
            continue;
        }
        let batch: Vec<Line<Question>> = (first..end).map(|index| lines.line(index)).collect();
        let questions: Vec<Question> = batch.iter().filter_map(|line| line.tokens.clone().ok()).collect();
        let classified = match classifier.classify(&questions) {
            Ok(classified) => classified.into_iter().map(Ok).collect::<Vec<_>>(),
            // Which of them is at fault is seen when each is alone.
            Err(_) => {
                let alone = questions.iter().map(|question| alone(classifier, question));
                alone.collect::<Result<_, EngineError>>()?
            }
        };
        let mut classified = classified.into_iter();
        for (index, line) in (first..end).zip(&batch) {
            let answer = match &line.tokens {
                Ok(_) => classified.next().unwrap_or_else(|| Err(String::new())),
                Err(error) => Err(error.clone()),
            };
            if index >= reports.written() {
                reports.write(line, answer)?;
            }
        }
    }
    Ok(())
}

/// What one question gives, or why it gives nothing. A device that fails would fail for every other one too.
fn alone(
    classifier: &Classifier,
    question: &Question,
) -> Result<Result<Classification, String>, EngineError> {
    match classifier.classify(std::slice::from_ref(question)) {
        Err(error @ EngineError::Generation(GenerationError::Candle(_))) => Err(error),
        Err(error) => Ok(Err(exit::message(&error.into()))),
        Ok(mut classified) => Ok(classified.pop().ok_or_else(String::new)),
    }
}

/// What must be the same when a run goes on.
fn settings(arguments: &ClassifyArguments, opened: &Opened) -> Value {
    let ClassifyArguments { model, choice, keep_last, .. } = arguments;
    let model = &model.options;
    json!({
        "command": "classify",
        "model": model.model,
        "tokenizer": model.tokenizer,
        "dtype": model.dtype.map(WeightDType::name),
        "device": device_name(opened.device()),
        "tf32": model.tf32,
        "n_head": model.n_head,
        "labels": opened.config().id2label,
        "choice": choice,
        "keep_last": keep_last,
    })
}

fn print(classification: &Classification) -> Result<()> {
    match classification {
        Classification::Labels { labels } => {
            output::write_line("      score       logit  label")?;
            labels.iter().try_for_each(|label| {
                output::write_line(&format!("{}  {}", numbers(label.score, label.logit), label.label))
            })
        }
        Classification::Tokens { tokens } => {
            output::write_line("      score       logit  label of the token")?;
            tokens.iter().try_for_each(|LabelledToken { text, labels, .. }| {
                let Some(Label { label, score, logit, .. }) = labels.first() else { return Ok(()) };
                output::write_line(&format!("{}  {label:<16}  {text:?}", numbers(*score, *logit)))
            })
        }
        Classification::Choices { choices } => {
            output::write_line("      score       logit  choice")?;
            choices.iter().try_for_each(|RankedChoice { index, text, score, logit }| {
                let choice = text.as_ref().map_or(index.to_string(), |text| format!("{text:?}"));
                output::write_line(&format!("{}  {choice}", numbers(*score, *logit)))
            })
        }
    }
}

fn numbers(score: f64, logit: f32) -> String {
    format!("{score:>11.4}  {logit:>10.4}")
}
