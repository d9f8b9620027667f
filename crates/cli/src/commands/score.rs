//! `gpt2 score`: log-probabilities, loss and perplexity of a text, or how probable choices are behind a prompt.

use std::process::ExitCode;

use anyhow::{Context, Result};
use candle_core::Device;
use gpt2_generation::{
    Continuation, TokenAlternatives, check_continuations, check_text, score, score_continuations,
};
use gpt2_weights::{Checkpoint, Tokenizer, encode};
use serde::Serialize;

use super::generate::start_of_text_if_empty;
use crate::arguments::ScoreArguments;
use crate::hub::Network;
use crate::input::Input;
use crate::{device, input, model, output, progress};

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

/// What `--json` prints of choices.
#[derive(Serialize)]
struct ChoicesReport {
    prompt_ids: Vec<u32>,
    choices: Vec<Choice>,
    best: Best,
}

#[derive(Serialize)]
struct Choice {
    text: String,
    ids: Vec<u32>,
    logprobs: Vec<f64>,
    sum: f64,
    mean: f64,
    per_character: f64,
    is_greedy: bool,
}

/// Index of the best choice by each measure, from 0.
#[derive(Serialize)]
struct Best {
    sum: usize,
    mean: usize,
    per_character: usize,
}

pub(crate) fn run(arguments: &ScoreArguments, network: Network) -> Result<ExitCode> {
    let device = device::open(&arguments.model)?;
    let checkpoint = model::open(&arguments.model.model, network)?;
    checkpoint.check()?;
    let input = input::read(&arguments.input, &arguments.model, &checkpoint)?;
    if arguments.choice.is_empty() {
        score_text(arguments, &checkpoint, input, &device)
    } else {
        score_choices(arguments, &checkpoint, input, &device)
    }
}

fn score_text(
    arguments: &ScoreArguments,
    checkpoint: &Checkpoint,
    input: Input,
    device: &Device,
) -> Result<ExitCode> {
    let half_context = checkpoint.config().n_positions.div_ceil(2);
    let stride = arguments.stride.unwrap_or(half_context);
    check_text(&input.ids, stride, checkpoint.config())?;
    let model = model::load_with(checkpoint, device, &arguments.model)?;
    let bar = progress::items("scoring", input.ids.len() as u64, "tokens");
    let score = score(&model, &input.ids, stride, arguments.top, &|tokens| bar.inc(tokens))?;
    bar.finish_and_clear();

    let perplexity = score.perplexity();
    let tokenizer = input.tokenizer.as_ref();
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

fn score_choices(
    arguments: &ScoreArguments,
    checkpoint: &Checkpoint,
    input: Input,
    device: &Device,
) -> Result<ExitCode> {
    let tokenizer = input.tokenizer.as_ref().context("choices need a tokenizer")?;
    let prompt = input.text.unwrap_or_default();
    // A token may reach from the prompt into the choice: the whole is encoded, and what is behind the tokens that all
    // wholes and the prompt begin with is the choice's.
    let wholes = arguments.choice.iter().map(|choice| encode(tokenizer, &format!("{prompt}{choice}")));
    let mut wholes = wholes.collect::<Result<Vec<_>, _>>()?;
    let starts_with_prompt = |ids: &Vec<u32>| ids.iter().zip(&input.ids).take_while(|(a, b)| a == b).count();
    let shared = wholes.iter().map(starts_with_prompt).min().unwrap_or(0);
    let mut prompt_ids = input.ids[..shared].to_vec();
    wholes.iter_mut().for_each(|ids| *ids = ids.split_off(shared));
    prompt_ids = start_of_text_if_empty(prompt_ids, checkpoint.config());
    for ids in &wholes {
        input::check_tokenizer(ids, checkpoint.config())?;
    }
    check_continuations(&prompt_ids, &wholes, checkpoint.config())?;
    let model = model::load_with(checkpoint, device, &arguments.model)?;
    let bar = progress::items("scoring", wholes.len() as u64, "choices");
    let scored = score_continuations(&model, &prompt_ids, &wholes, &|| bar.inc(1))?;
    bar.finish_and_clear();

    let choice = |((text, ids), scored): ((&String, Vec<u32>), Continuation)| Choice {
        text: text.clone(),
        ids,
        sum: scored.sum(),
        mean: scored.mean(),
        per_character: scored.sum() / text.chars().count().max(1) as f64,
        is_greedy: scored.is_greedy,
        logprobs: scored.logprobs,
    };
    let choices: Vec<Choice> = arguments.choice.iter().zip(wholes).zip(scored).map(choice).collect();
    let best = |measure: fn(&Choice) -> f64| {
        let indexed = choices.iter().map(measure).enumerate();
        // Of equals the first.
        indexed.fold((0, f64::NEG_INFINITY), |best, next| if next.1 > best.1 { next } else { best }).0
    };
    let best = Best {
        sum: best(|choice| choice.sum),
        mean: best(|choice| choice.mean),
        per_character: best(|choice| choice.per_character),
    };
    if arguments.json {
        output::write_json(&ChoicesReport { prompt_ids, choices, best })?;
        return Ok(ExitCode::SUCCESS);
    }
    output::write_line("       sum       mean  per character")?;
    for Choice { text, sum, mean, per_character, is_greedy, .. } in &choices {
        let greedy = if *is_greedy { "  (what greedy search writes)" } else { "" };
        output::write_line(&format!("{sum:>10.4} {mean:>10.4} {per_character:>14.4}  {text:?}{greedy}"))?;
    }
    let name = |index: usize| format!("{:?}", choices[index].text);
    output::write_line(&format!(
        "best by sum {}, by mean {}, per character {}",
        name(best.sum),
        name(best.mean),
        name(best.per_character)
    ))?;
    Ok(ExitCode::SUCCESS)
}

fn token(tokenizer: Option<&Tokenizer>, id: u32) -> Option<String> {
    tokenizer.and_then(|tokenizer| tokenizer.decode(&[id], false).ok())
}
