//! `gpt2 classify`: labels texts or tokens, or picks the best of several choices.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use candle_gpt2::HeadKind;
use candle_gpt2_engine::{
    BUILT_IN, Classification, HubOptions, Label, LabeledToken, Opened, Question, RankedChoice,
};
use clap::Args;
use serde::Serialize;
use serde_json::json;

use super::rows::{FileArguments, settings};
use crate::exit::UsageError;
use crate::input::{InputArguments, RawInput};
use crate::model_arguments::ModelArguments;
use crate::output;
use crate::progress::Terminal;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 classify \"What a film!\" --model MODEL
  gpt2 classify --model MODEL --prompts-file reviews.jsonl --output labels.jsonl
  gpt2 classify \"The sky is\" --choice \" blue\" --choice \" green\" --model MODEL

The model is one of transformers' GPT2ForSequenceClassification (labels of a text), GPT2ForTokenClassification (labels \
of each token) and GPT2DoubleHeadsModel (--choice), as `gpt2 train --task classify` and transformers write them. Labels \
are named by config.json (id2label). Their scores are those of transformers' pipelines: the softmax over all labels; the \
sigmoid of each logit for problem_type multi_label_classification and for a single label; the logit for regression.

A line of a .jsonl file may have its text under `text` too, so that rows of labeled texts can be classified as they \
are; for --choice also {\"prompt\": TEXT, \"choices\": [TEXT, …]} or {\"ids\": [[ID, …], …]}.")]
pub(crate) struct ClassifyArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    /// Candidate continuation of the prompt; repeat for each choice
    #[arg(long, value_name = "TEXT", conflicts_with = "ids")]
    pub(crate) choice: Vec<String>,
    /// Keep the last N tokens of a text longer than the context; by default, such a text is rejected
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) keep_last: Option<usize>,
    /// Print one JSON object: prompt_ids, and labels (label, score, logit; the best first), or tokens (id,
    /// text, start and end in characters, labels), or choices (index, text, score, logit)
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) file: FileArguments,
}

/// Output of `--json`.
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
    let options = &arguments.model.options;
    if options.model == Path::new(BUILT_IN) && options.adapter.is_empty() {
        let message = "classify needs a model with labels; for --model, pass one from `gpt2 train --task classify` or transformers: a \
                       GPT2ForSequenceClassification, a GPT2ForTokenClassification or, for --choice, a GPT2DoubleHeadsModel; with a language \
                       model, `gpt2 score --choice` ranks texts";
        return Err(UsageError(message.into()).into());
    }
    let opened = arguments.model.open_classifier(hub)?;
    if arguments.choice.is_empty()
        && arguments.file.prompts_file.is_none()
        && opened.config().head == HeadKind::DoubleHeads
    {
        let message = "this model chooses among several texts; pass each with --choice";
        return Err(UsageError(message.into()).into());
    }
    if let Some(path) = &arguments.file.prompts_file {
        return classify_rows(path, arguments, opened);
    }
    let vocabulary = opened.vocabulary();
    let input = arguments.input.read(vocabulary)?;
    if let RawInput::Text(text) = &input {
        vocabulary.lost_note(text).iter().for_each(|note| output::print_note(note));
    }
    let question = match input {
        RawInput::Ids(ids) => Question::of_ids(vocabulary, ids, arguments.keep_last)?,
        RawInput::Text(text) if arguments.choice.is_empty() => {
            Question::of_text(vocabulary, &text, arguments.keep_last)?
        }
        RawInput::Text(text) => {
            Question::of_choices(vocabulary, &text, &arguments.choice, arguments.keep_last)?
        }
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

/// Classifies every row of a file.
fn classify_rows(path: &Path, arguments: &ClassifyArguments, opened: Opened) -> Result<ExitCode> {
    let ClassifyArguments { model, choice, keep_last, file, .. } = arguments;
    let labels = &opened.config().id2label;
    let more = json!({"command": "classify", "labels": labels, "choice": choice, "keep_last": keep_last});
    let settings = settings(model, opened.device(), more);
    let vocabulary = opened.vocabulary().clone();
    file.run(
        path,
        "classifying",
        &settings,
        &vocabulary,
        |row| row.question(&vocabulary, choice, *keep_last),
        |rows| Ok(rows.classify(&opened.load_classifier(&Terminal)?, file.batch_size)?),
    )
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
            tokens.iter().try_for_each(|LabeledToken { text, labels, .. }| {
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
