//! `gpt2 generate`: completes one prompt, prompts from the terminal, or every prompt in a file.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;
use candle_gpt2_engine::{HubOptions, ModelOptions, Opened, PromptCompletions};
use candle_gpt2_generation::{LongPrompt, WhenFull};
use clap::Args;
use serde::Serialize;
use serde_json::json;

use super::continued::{BATCH_SIZE, Continued, continue_prompt};
use super::generate_interactive;
use super::generation_arguments::GenerationArguments;
use super::rows::{FileArguments, settings};
use super::steering;
use crate::input::InputArguments;
use crate::model_arguments::{EncoderArguments, ModelArguments};
use crate::output;
use crate::progress::Terminal;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 generate \"The dog\" --model gpt2 --greedy    # downloaded once
  gpt2 generate --model MODEL --temperature 0.8 --top-k 40 --seed 7 < prompt.txt
  gpt2 generate --model MODEL --ids 464,3290 --max-new-tokens 20 --json
  gpt2 generate \"The dog\" --model MODEL --num-beams 5 --num-return-sequences 3
  printf 'Q: Why?\\nA:' | gpt2 generate --model MODEL --stop \"Q:\" --repetition-penalty 1.2
  gpt2 generate --model MODEL --prompts-file prompts.txt --output texts.jsonl
  gpt2 generate --model MODEL --interactive
  gpt2 generate \"I think you are\" --model gpt2 --steer '\" Love\"-\" Hate\"' --layer 6 --scale 5
  gpt2 generate \"A picture of\" --model MODEL --encoder-states states.safetensors
  gpt2 generate \"The dog\" --model gpt2-large --assistant-model distilgpt2    # the same text, sooner
  gpt2 generate \"A person as JSON: \" --model gpt2 --json-schema person.json
  gpt2 generate \"Born on \" --model gpt2 --regex '[0-3]\\d (May|June) 19\\d\\d'

Options that are not given are taken from generation_config.json, if the checkpoint has one. Unless that \
file says otherwise, the next token is sampled at temperature 1 from the 50 most probable tokens. The same \
--seed gives the same completion, alone or in any batch. An empty prompt starts from the configuration's \
bos_token_id. Text is streamed to standard output.")]
pub(crate) struct GenerateArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    #[command(flatten)]
    pub(crate) encoder: EncoderArguments,
    /// Print one JSON object: prompt_ids, ids (the new ones), text, stop_reason, tokens_per_s,
    /// time_to_first_token_s; with drafting also drafted and accepted; with several completions
    /// `sequences`, each with ids, text, stop_reason and score
    #[arg(long)]
    pub(crate) json: bool,
    /// Read prompt after prompt from the terminal, with line editing and history; Ctrl-C stops the
    /// completion, Ctrl-D quits
    #[arg(long, conflicts_with_all = ["json", "input", "prompts_file"])]
    pub(crate) interactive: bool,
    #[command(flatten)]
    pub(crate) generation: GenerationArguments,
    #[command(flatten)]
    pub(crate) file: FileArguments,
}

/// Output of `--json`.
#[derive(Serialize)]
struct Report {
    prompt_ids: Vec<u32>,
    #[serde(flatten)]
    texts: PromptCompletions,
    tokens_per_s: f64,
    time_to_first_token_s: Option<f64>,
}

pub(crate) fn run(arguments: &GenerateArguments, hub: &HubOptions) -> Result<ExitCode> {
    arguments.generation.check()?;
    arguments.file.check()?;
    let assistant_model = arguments.generation.assistant_model.clone();
    let encoder_states = arguments.encoder.encoder_states.clone();
    let options = ModelOptions { assistant_model, encoder_states, ..arguments.model.options(hub) };
    let opened = arguments.model.open_as(&options)?;
    if let Some(path) = &arguments.file.prompts_file {
        return generate_rows(path, arguments, opened);
    }
    if arguments.interactive {
        return generate_interactive::run(&arguments.generation, opened);
    }
    let input = arguments.input.tokenized(opened.vocabulary())?;
    let config = arguments.generation.config(&opened)?;
    let prompt_ids = opened.vocabulary().prompt(input.ids, &config)?;
    let conforming = arguments.generation.grammar.compile(&opened, &config)?;
    let loaded = steering::load(opened, &arguments.generation.steering)?;
    if let Some(prompt) = input.text.filter(|_| !arguments.json) {
        output::echo_prompt(&prompt)?;
    }
    let continued =
        continue_prompt(&loaded, &config, conforming.as_ref(), prompt_ids.clone(), !arguments.json)?;
    if arguments.json {
        let Continued { texts, tokens_per_s, time_to_first_token_s } = continued;
        let texts = texts.into();
        output::write_json(&Report { prompt_ids, texts, tokens_per_s, time_to_first_token_s })?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Completes every row of a file.
fn generate_rows(path: &Path, arguments: &GenerateArguments, opened: Opened) -> Result<ExitCode> {
    let GenerateArguments { model, encoder, generation, file, .. } = arguments;
    let config = generation.config(&opened)?;
    let conforming = Vec::from_iter(generation.grammar.compile(&opened, &config)?);
    let vocabulary = Arc::clone(opened.vocabulary());
    let steering = &generation.steering;
    let more = json!({
        "encoder_states": encoder.encoder_states,
        "long_prompt": long_prompt_name(config.long_prompt),
        "when_full": when_full_name(config.when_full),
        "steering": steering.settings(),
        "conforming": generation.grammar.settings()?,
        "config": config,
    });
    let settings = settings(model, opened.device(), more);
    file.run(
        path,
        "generating",
        &settings,
        &vocabulary,
        |row| row.prompt(&vocabulary, &config),
        |rows| {
            let loaded = steering::load(opened, steering)?;
            let batch_size = file.batch_size.unwrap_or(BATCH_SIZE);
            Ok(rows.generate(&loaded, batch_size, &config, &conforming, &Terminal)?)
        },
    )
}

/// Returns the choice's name as stored in a run's settings.
///
/// Names must never change, so that runs from earlier versions can be resumed.
fn long_prompt_name(choice: LongPrompt) -> String {
    match choice {
        LongPrompt::Keep { head, last } => format!("Keep {{ head: {head}, last: {last} }}"),
        _ => "Refuse".into(),
    }
}

/// Same as [`long_prompt_name`], for the choice that applies when the context is full.
fn when_full_name(choice: WhenFull) -> String {
    match choice {
        WhenFull::Slide { head } => format!("Slide {{ head: {head} }}"),
        _ => "Stop".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_settings_never_change() {
        let keep = LongPrompt::Keep { head: 2, last: 7 };
        assert_eq!(
            [long_prompt_name(LongPrompt::Refuse), long_prompt_name(keep)],
            ["Refuse", "Keep { head: 2, last: 7 }"]
        );
        assert_eq!(
            [when_full_name(WhenFull::Stop), when_full_name(WhenFull::Slide { head: 3 })],
            ["Stop", "Slide { head: 3 }"]
        );
    }
}
