//! `gpt2 score`: log-probabilities, loss and perplexity of a text.

use std::process::ExitCode;

use anyhow::Result;
use gpt2_generation::{check_text, score};
use serde::Serialize;

use crate::arguments::ScoreArguments;
use crate::hub::Network;
use crate::{input, model, output, progress};

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    ids: Vec<u32>,
    logprobs: Vec<Option<f64>>,
    loss: f64,
    perplexity: f64,
}

pub(crate) fn run(arguments: &ScoreArguments, network: Network) -> Result<ExitCode> {
    let device = model::device(&arguments.model)?;
    let checkpoint = model::open(&arguments.model.model, network)?;
    checkpoint.check()?;
    let input = input::read(&arguments.input, &arguments.model, &checkpoint)?;
    let half_context = checkpoint.config().n_positions.div_ceil(2);
    let stride = arguments.stride.unwrap_or(half_context);
    check_text(&input.ids, stride, checkpoint.config())?;
    let model = model::load(&checkpoint, &device, arguments.model.dtype)?;
    let bar = progress::tokens("scoring", input.ids.len() as u64);
    let score = score(&model, &input.ids, stride, &device, &|tokens| bar.inc(tokens))?;
    bar.finish_and_clear();

    let perplexity = score.perplexity();
    if arguments.json {
        let report = Report { ids: input.ids, logprobs: score.logprobs, loss: score.loss, perplexity };
        output::write_json(&report)?;
        return Ok(ExitCode::SUCCESS);
    }
    for (id, logprob) in input.ids.iter().zip(&score.logprobs) {
        let logprob = logprob.map_or("-".to_owned(), |logprob| format!("{logprob:.4}"));
        let token = input.tokenizer.as_ref().and_then(|tokenizer| tokenizer.decode(&[*id], false).ok());
        let token = token.map_or(String::new(), |token| format!("  {token:?}"));
        output::write_line(&format!("{id:>8} {logprob:>10}{token}"))?;
    }
    output::write_line(&format!(
        "loss {:.4}  perplexity {perplexity:.4}  tokens {}",
        score.loss,
        input.ids.len()
    ))?;
    Ok(ExitCode::SUCCESS)
}
