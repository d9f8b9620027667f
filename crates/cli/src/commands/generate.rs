//! `gpt2 generate`: continue a prompt.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use gpt2::Gpt2Config;
use gpt2_generation::{GenerationConfig, Sampling, StopReason, TextStream, TokenGenerator, check_prompt};
use serde::Serialize;

use crate::arguments::GenerateArguments;
use crate::hub::Network;
use crate::{input, model, output};

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    prompt_ids: Vec<u32>,
    ids: Vec<u32>,
    text: Option<String>,
    stop_reason: &'static str,
    tokens_per_s: f64,
    time_to_first_token_s: Option<f64>,
}

pub(crate) fn run(arguments: &GenerateArguments, network: Network) -> Result<ExitCode> {
    let device = model::device(&arguments.model)?;
    let mut config = generation_config(arguments);
    config.check()?;
    let checkpoint = model::open(&arguments.model.model, network)?;
    checkpoint.check()?;
    let input = input::read(&arguments.input, &arguments.model, &checkpoint)?;
    config.eos_token_id = checkpoint.eos_token_ids()?;
    let prompt_ids = start_of_text_if_empty(input.ids, checkpoint.config());
    check_prompt(&prompt_ids, checkpoint.config())?;
    let model = model::load(&checkpoint, &device, arguments.model.dtype)?;

    let start = Instant::now();
    let mut tokens = TokenGenerator::new(&model, &prompt_ids, &config, &device)?;
    let mut stream = input.tokenizer.as_ref().map(TextStream::new);
    let (mut ids, mut text) = (Vec::new(), String::new());
    let mut time_to_first_token_s = None;
    if !arguments.json
        && let Some(prompt) = &input.text
    {
        output::echo_prompt(prompt)?;
    }
    for id in tokens.by_ref() {
        let id = id?;
        time_to_first_token_s.get_or_insert_with(|| start.elapsed().as_secs_f64());
        let piece = match &mut stream {
            Some(stream) => stream.push(id)?,
            // Without a tokenizer the ids are the output.
            None => format!("{}{id}", if ids.is_empty() { "" } else { "," }),
        };
        ids.push(id);
        if !arguments.json {
            output::write_text(&piece)?;
        }
        text.push_str(&piece);
    }
    let elapsed_s = start.elapsed().as_secs_f64();
    let has_text = stream.is_some();
    let rest = stream.map(TextStream::finish).transpose()?.unwrap_or_default();
    if !arguments.json {
        output::write_text(&format!("{rest}\n"))?;
        return Ok(ExitCode::SUCCESS);
    }
    text.push_str(&rest);
    output::write_json(&Report {
        prompt_ids,
        tokens_per_s: ids.len() as f64 / elapsed_s,
        ids,
        text: has_text.then_some(text),
        stop_reason: tokens.stop_reason().map_or("", StopReason::name),
        time_to_first_token_s,
    })?;
    Ok(ExitCode::SUCCESS)
}

fn generation_config(arguments: &GenerateArguments) -> GenerationConfig {
    let sampling = if arguments.greedy {
        Sampling::Greedy
    } else {
        Sampling::Random {
            temperature: arguments.temperature,
            top_k: Some(arguments.top_k),
            top_p: arguments.top_p,
            seed: arguments.seed,
        }
    };
    GenerationConfig { max_new_tokens: arguments.max_new_tokens, sampling, eos_token_id: Vec::new() }
}

fn start_of_text_if_empty(ids: Vec<u32>, config: &Gpt2Config) -> Vec<u32> {
    if ids.is_empty() {
        config.bos_token_id.into_iter().filter(|id| config.has_token(*id)).collect()
    } else {
        ids
    }
}
