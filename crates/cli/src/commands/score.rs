//! `gpt2 score`: log-probabilities, loss and perplexity of texts, or probabilities of choices.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;
use candle_gpt2_engine::{
    Choices, HubOptions, ModelOptions, Opened, Reporter, ScoredChoice, ScoredChoices, ScoredText,
    TokenLogprob, Unit,
};
use candle_gpt2_generation::{check_text, default_stride};
use clap::Args;
use serde::Serialize;
use serde_json::json;

use super::rows::{FileArguments, settings};
use crate::exit::UsageError;
use crate::input::{Input, InputArguments};
use crate::model_arguments::{EncoderArguments, ModelArguments};
use crate::output;
use crate::progress::Terminal;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 score \"The dog was found in a field.\" --model MODEL
  gpt2 score --model MODEL --prompt-file book.txt --stride 512 --json
  gpt2 score \"The dog was found in a\" --model MODEL --top 5
  gpt2 score \"The sky is\" --model MODEL --choice \" blue\" --choice \" green\"
  gpt2 score \"A dog.\" --model MODEL --encoder-states states.safetensors
  gpt2 score --model MODEL --prompts-file texts.jsonl --output scores.jsonl

Logarithms are natural. A text longer than the context is scored in windows that start every --stride tokens; each \
token counts once, in the first window that reaches it.

Choices are compared by the sum of their log-probabilities, and by that sum per token, per character and per byte of UTF-8. \
A space at the beginning of a choice separates it from the prompt: it is scored but not counted, as in \
lm-evaluation-harness, whose acc uses the sum and whose acc_norm the value per character.")]
pub(crate) struct ScoreArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    #[command(flatten)]
    pub(crate) encoder: EncoderArguments,
    /// Distance between windows, in tokens [default: half of the context]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) stride: Option<usize>,
    /// Also print the N most probable tokens at each position
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        allow_negative_numbers = true,
        conflicts_with = "choice"
    )]
    pub(crate) top: usize,
    /// Score TEXT as a continuation of the prompt instead; repeat for each choice
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["stride", "ids", "prompts_file"])]
    pub(crate) choice: Vec<String>,
    /// Print one JSON object: ids, logprobs (null for the first), loss, perplexity, with --top also
    /// alternatives; with --choice: choices and best, each by sum, per_token (also as mean, the same
    /// number), per_character and per_byte
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) file: FileArguments,
}

/// Output of `--json` for a text.
#[derive(Serialize)]
struct Report {
    ids: Vec<u32>,
    #[serde(flatten)]
    scored: ScoredText,
}

pub(crate) fn run(arguments: &ScoreArguments, hub: &HubOptions) -> Result<ExitCode> {
    arguments.file.check()?;
    if arguments.file.batch_size.is_some() {
        return Err(UsageError("--batch-size: texts are scored one by one; remove this option".into()).into());
    }
    let encoder_states = arguments.encoder.encoder_states.clone();
    let opened = arguments.model.open_as(&ModelOptions { encoder_states, ..arguments.model.options(hub) })?;
    if let Some(path) = &arguments.file.prompts_file {
        return score_rows(path, arguments, opened);
    }
    let input = arguments.input.tokenized(opened.vocabulary())?;
    if arguments.choice.is_empty() {
        score_text(arguments, opened, input)
    } else {
        score_choices(arguments, opened, input)
    }
}

/// Scores every row of a file.
fn score_rows(path: &Path, arguments: &ScoreArguments, opened: Opened) -> Result<ExitCode> {
    let ScoreArguments { model, encoder, stride, top, file, .. } = arguments;
    let more =
        json!({"command": "score", "encoder_states": encoder.encoder_states, "stride": stride, "top": top});
    let vocabulary = opened.vocabulary().clone();
    let config = vocabulary.config();
    let shortest = stride.unwrap_or(default_stride(config));
    file.run(
        path,
        "scoring",
        &settings(model, opened.device(), more),
        &vocabulary,
        |row| {
            let ids = row.tokens(&vocabulary)?;
            check_text(&ids, shortest, config)?;
            Ok(ids)
        },
        |rows| Ok(rows.score(&opened.load(&Terminal)?, *stride, *top)?),
    )
}

fn score_text(arguments: &ScoreArguments, opened: Opened, input: Input) -> Result<ExitCode> {
    let Input { ids, .. } = input;
    let stride = arguments.stride.unwrap_or(default_stride(opened.config()));
    check_text(&ids, stride, opened.config())?;
    let loaded = opened.load(&Terminal)?;
    let bar = Terminal.start("scoring", ids.len() as u64, Unit::Items("tokens"));
    let scored = ScoredText::of(&loaded, &ids, Some(stride), arguments.top, &|tokens| bar.advance(tokens))?;
    drop(bar);
    if arguments.json {
        output::write_json(&Report { ids, scored })?;
        return Ok(ExitCode::SUCCESS);
    }
    let line = |id: u32, token: Option<String>, logprob: Option<f64>| {
        let logprob = logprob.map_or("-".to_owned(), |logprob| format!("{logprob:.4}"));
        let token = token.map_or(String::new(), |token| format!("  {token:?}"));
        format!("{id:>8} {logprob:>10}{token}")
    };
    let ScoredText { logprobs, loss, perplexity, alternatives } = scored;
    for (index, (id, logprob)) in ids.iter().zip(logprobs).enumerate() {
        let token = loaded.vocabulary().decode(&[*id], false).ok();
        output::write_line(&line(*id, token, logprob))?;
        for TokenLogprob { id, token, logprob } in alternatives.get(index).into_iter().flatten() {
            output::write_line(&format!("    {}", line(*id, token.clone(), Some(*logprob))))?;
        }
    }
    let tokens = ids.len();
    output::write_line(&format!("loss {loss:.4}  perplexity {perplexity:.4}  tokens {tokens}"))?;
    Ok(ExitCode::SUCCESS)
}

fn score_choices(arguments: &ScoreArguments, opened: Opened, input: Input) -> Result<ExitCode> {
    let prompt = input.text.unwrap_or_default();
    let choices = Choices::new(opened.vocabulary(), &prompt, &arguments.choice)?;
    choices.check(opened.config())?;
    let loaded = opened.load(&Terminal)?;
    let scored = choices.score(&loaded, &Terminal)?;
    if arguments.json {
        output::write_json(&scored)?;
        return Ok(ExitCode::SUCCESS);
    }
    let ScoredChoices { choices, best, .. } = scored;
    output::write_line("       sum  per token  per character  per byte")?;
    for ScoredChoice { text, sum, per_token, per_character, per_byte, is_greedy, .. } in &choices {
        let greedy = if *is_greedy { "  (greedy choice)" } else { "" };
        output::write_line(&format!(
            "{sum:>10.4} {per_token:>10.4} {per_character:>14.4} {per_byte:>9.4}  {text:?}{greedy}"
        ))?;
    }
    let name = |index: usize| format!("{:?}", choices[index].text);
    output::write_line(&format!(
        "best by sum {}, per token {}, per character {}, per byte {}",
        name(best.sum),
        name(best.per_token),
        name(best.per_character),
        name(best.per_byte)
    ))?;
    Ok(ExitCode::SUCCESS)
}
