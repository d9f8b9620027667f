//! `gpt2 score`: log-probabilities, loss and perplexity of a text, or how probable choices are after a prompt.

use std::process::ExitCode;

use anyhow::Result;
use candle_gpt2_engine::{
    Choices, HubOptions, ModelOptions, Opened, Reporter, ScoredChoice, ScoredChoices, Unit,
};
use candle_gpt2_generation::{TokenAlternatives, check_text, default_stride, score};
use candle_gpt2_weights::Tokenizer;
use clap::Args;
use serde::Serialize;

use crate::input::{Input, InputArguments};
use crate::model_arguments::{EncoderArguments, ModelArguments};
use crate::output;
use crate::progress::Terminal;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 score \"The dog was found in a field.\" --model DIR
  gpt2 score --model DIR --prompt-file book.txt --stride 512 --json
  gpt2 score \"The dog was found in a\" --model DIR --top 5
  gpt2 score \"The sky is\" --model DIR --choice \" blue\" --choice \" green\"
  gpt2 score \"A dog.\" --model DIR --encoder-states states.safetensors

Logarithms are natural. A text longer than the context is scored in windows that start every --stride tokens; each \
token counts once, in the first window that reaches it.

Choices are compared by the sum of their log-probabilities, and by that sum per token, per character and per byte of UTF-8. \
One space at the beginning of a choice stands between the prompt and it: it is scored and not counted, as in \
lm-evaluation-harness, whose acc is by the sum and whose acc_norm is per character.")]
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
    /// Also the N most probable tokens at each place
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        allow_negative_numbers = true,
        conflicts_with = "choice"
    )]
    pub(crate) top: usize,
    /// Score TEXT as a continuation of the prompt instead; give it for every choice
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["stride", "ids"])]
    pub(crate) choice: Vec<String>,
    /// Print one JSON object: ids, logprobs (null for the first), loss, perplexity, with --top also alternatives; with --choice: choices and best, each by sum, per_token (also as mean, the same number), per_character and per_byte
    #[arg(long)]
    pub(crate) json: bool,
}

/// What `--json` prints of a text.
#[derive(Serialize)]
struct Report {
    ids: Vec<u32>,
    logprobs: Vec<Option<f64>>,
    loss: f64,
    perplexity: f64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    alternatives: Vec<Vec<Alternative>>,
}

#[derive(Serialize)]
struct Alternative {
    id: u32,
    token: Option<String>,
    logprob: f64,
}

pub(crate) fn run(arguments: &ScoreArguments, hub: &HubOptions) -> Result<ExitCode> {
    let encoder_states = arguments.encoder.encoder_states.clone();
    let opened = arguments.model.open_as(&ModelOptions { encoder_states, ..arguments.model.options(hub) })?;
    let input = arguments.input.tokenized(opened.vocabulary())?;
    if arguments.choice.is_empty() {
        score_text(arguments, opened, input)
    } else {
        score_choices(arguments, opened, input)
    }
}

fn score_text(arguments: &ScoreArguments, opened: Opened, input: Input) -> Result<ExitCode> {
    let stride = arguments.stride.unwrap_or(default_stride(opened.config()));
    check_text(&input.ids, stride, opened.config())?;
    let loaded = opened.load(&Terminal)?;
    let bar = Terminal.start("scoring", input.ids.len() as u64, Unit::Items("tokens"));
    let count = |tokens| bar.advance(tokens);
    let score = score(loaded.model(), &input.ids, stride, arguments.top, &count)?;
    drop(bar);

    let perplexity = score.perplexity();
    let tokenizer = loaded.vocabulary().tokenizer().map(AsRef::as_ref);
    if arguments.json {
        let alternatives = |place: &TokenAlternatives| {
            let alternative = |(id, logprob): &(u32, f64)| Alternative {
                id: *id,
                token: token(tokenizer, *id),
                logprob: *logprob,
            };
            place.iter().map(alternative).collect()
        };
        let places = if arguments.top > 0 { &score.alternatives[..] } else { &[] };
        let alternatives = places.iter().map(alternatives).collect();
        let report =
            Report { ids: input.ids, logprobs: score.logprobs, loss: score.loss, perplexity, alternatives };
        output::write_json(&report)?;
        return Ok(ExitCode::SUCCESS);
    }
    let line = |id: u32, logprob: Option<f64>| {
        let logprob = logprob.map_or("-".to_owned(), |logprob| format!("{logprob:.4}"));
        let token = token(tokenizer, id).map_or(String::new(), |token| format!("  {token:?}"));
        format!("{id:>8} {logprob:>10}{token}")
    };
    for ((id, logprob), alternatives) in input.ids.iter().zip(&score.logprobs).zip(&score.alternatives) {
        output::write_line(&line(*id, *logprob))?;
        for (id, logprob) in alternatives {
            output::write_line(&format!("    {}", line(*id, Some(*logprob))))?;
        }
    }
    output::write_line(&format!(
        "loss {:.4}  perplexity {perplexity:.4}  tokens {}",
        score.loss,
        input.ids.len()
    ))?;
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
        let greedy = if *is_greedy { "  (what greedy search writes)" } else { "" };
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

fn token(tokenizer: Option<&Tokenizer>, id: u32) -> Option<String> {
    tokenizer.and_then(|tokenizer| tokenizer.decode(&[id], false).ok())
}
