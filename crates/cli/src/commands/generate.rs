//! `gpt2 generate`: continue a prompt, prompt after prompt, or every prompt of a file.

use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use gpt2::Gpt2Config;
use serde::Serialize;

use super::{generate_file, generate_interactive};
use crate::arguments::GenerateArguments;
use crate::hub::Network;
use crate::loaded_model::{LoadedModel, Text};
use crate::{device, generation_options, input, interrupt, model, output};

/// Texts that are made at once: enough to share the reading of the weights, and memory for their keys and values is there
/// on every machine.
pub(super) const BATCH_SIZE: usize = 8;

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    prompt_ids: Vec<u32>,
    #[serde(flatten)]
    texts: Texts,
    tokens_per_s: f64,
    time_to_first_token_s: Option<f64>,
}

/// One text, or several of one prompt.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Texts {
    One(Text),
    Several { sequences: Vec<Text> },
}

impl From<Vec<Text>> for Texts {
    fn from(mut texts: Vec<Text>) -> Self {
        match (texts.len(), texts.pop()) {
            (1, Some(text)) => Self::One(text),
            (_, last) => {
                texts.extend(last);
                Self::Several { sequences: texts }
            }
        }
    }
}

pub(crate) fn run(arguments: &GenerateArguments, network: Network) -> Result<ExitCode> {
    let device = device::open(&arguments.model)?;
    generation_options::check(arguments)?;
    let checkpoint = model::open(&arguments.model.model, network)?;
    checkpoint.check()?;
    if let Some(path) = &arguments.prompts_file {
        return generate_file::run(arguments, path, &checkpoint, &device);
    }
    if arguments.interactive {
        return generate_interactive::run(arguments, &checkpoint, &device);
    }
    let input = input::read(&arguments.input, &arguments.model, &checkpoint)?;
    let tokenizer = input.tokenizer.as_ref();
    let config = generation_options::read(arguments, &checkpoint, tokenizer)?;
    generation_options::notes(&config, tokenizer).iter().for_each(|note| output::print_note(note));
    let prompt_ids = start_of_text_if_empty(input.ids, checkpoint.config());
    let prompt_ids = config.fit_prompt(&prompt_ids, checkpoint.config())?;
    let model = model::load_with(&checkpoint, &device, &arguments.model)?;
    let loaded = LoadedModel { model: &model, tokenizer, config: &config };
    if !arguments.json
        && let Some(prompt) = &input.text
    {
        output::echo_prompt(prompt)?;
    }
    let (texts, tokens_per_s, time_to_first_token_s) =
        continue_prompt(&loaded, &prompt_ids, !arguments.json)?;
    if arguments.json {
        let texts = texts.into();
        output::write_json(&Report { prompt_ids, texts, tokens_per_s, time_to_first_token_s })?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Continues one prompt; prints the text as it comes where it is one and is to be printed, several one below the other.
/// Also returns tokens per second and the seconds to the first token.
pub(super) fn continue_prompt(
    loaded: &LoadedModel<'_>,
    prompt: &[u32],
    is_printed: bool,
) -> Result<(Vec<Text>, f64, Option<f64>)> {
    let start = Instant::now();
    let is_streamed = is_printed && loaded.config.num_return_sequences == 1;
    let (mut count, mut printed) = (0, 0);
    let mut texts = Vec::new();
    let time_to_first_token = loaded.generate(
        &[prompt.to_vec()],
        BATCH_SIZE,
        &mut |token| {
            count += 1;
            if is_streamed {
                output::write_text(&piece(loaded, token.id, &token.text, printed == 0))?;
                printed += 1;
            }
            Ok(if interrupt::is_requested() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        },
        &mut |_, found| {
            texts = found;
            Ok(())
        },
    )?;
    let elapsed_s = start.elapsed().as_secs_f64();
    count = count.max(texts.iter().map(|text: &Text| text.ids.len()).sum());
    let tokens_per_s = count as f64 / elapsed_s;
    let time_to_first_token_s = time_to_first_token.map(|time| time.as_secs_f64());
    if is_printed {
        if printed == 0 {
            let whole: Vec<String> = texts.iter().map(whole_text).collect();
            output::write_text(&whole.join("\n\n"))?;
        }
        output::write_text("\n")?;
        let first = time_to_first_token_s.map_or(String::new(), |s| format!(", the first after {s:.3} s"));
        let reason = texts.first().map_or(String::new(), |text| format!(", ended by {}", text.stop_reason));
        output::print_status(&format!("{count} tokens{first}, {tokens_per_s:.1} tokens/s{reason}"));
    }
    Ok((texts, tokens_per_s, time_to_first_token_s))
}

/// What is printed for a token: the text it completes, or its id where there is no tokenizer.
fn piece(loaded: &LoadedModel<'_>, id: u32, text: &str, is_first: bool) -> String {
    match (loaded.tokenizer, is_first) {
        (Some(_), _) => text.to_owned(),
        (None, true) => id.to_string(),
        (None, false) => format!(",{id}"),
    }
}

fn whole_text(text: &Text) -> String {
    let ids = || text.ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    text.text.clone().unwrap_or_else(ids)
}

/// An empty prompt starts from the token that begins texts, where the vocabulary has it.
pub(super) fn start_of_text_if_empty(ids: Vec<u32>, config: &Gpt2Config) -> Vec<u32> {
    if ids.is_empty() {
        config.bos_token_id.into_iter().filter(|id| config.has_token(*id)).collect()
    } else {
        ids
    }
}
