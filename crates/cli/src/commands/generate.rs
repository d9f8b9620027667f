//! `gpt2 generate`: continue a prompt, prompt after prompt, or every prompt of a file.

use std::process::ExitCode;

use anyhow::Result;
use candle_gpt2_engine::{HubOptions, ModelOptions};
use clap::Args;
use serde::Serialize;

use super::continued::{Continued, continue_prompt};
use super::generate_file;
use super::generate_interactive;
use super::generation_arguments::GenerationArguments;
use super::line_reports::FileArguments;
use super::steering;
use super::texts::Texts;
use crate::input::InputArguments;
use crate::model_arguments::{EncoderArguments, ModelArguments};
use crate::output;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  gpt2 generate \"The dog\" --model gpt2 --greedy    # downloaded once, then from the cache
  gpt2 generate --model DIR --temperature 0.8 --top-k 40 --seed 7 < prompt.txt
  gpt2 generate --model DIR --ids 464,3290 --max-new-tokens 20 --json
  gpt2 generate \"The dog\" --model DIR --num-beams 5 --num-return-sequences 3
  printf 'Q: Why?\\nA:' | gpt2 generate --model DIR --stop \"Q:\" --repetition-penalty 1.2
  gpt2 generate --model DIR --prompts-file prompts.txt --output texts.jsonl
  gpt2 generate --model DIR --interactive
  gpt2 generate \"I think you are\" --model gpt2 --steer '\" Love\"-\" Hate\"' --layer 6 --scale 5
  gpt2 generate \"A picture of\" --model DIR --encoder-states states.safetensors
  gpt2 generate \"The dog\" --model gpt2-large --assistant-model distilgpt2    # the same text, sooner
  gpt2 generate \"A person as JSON: \" --model gpt2 --json-schema person.json
  gpt2 generate \"Born on \" --model gpt2 --regex '[0-3]\\d (May|June) 19\\d\\d'

Options that are not given are taken from generation_config.json, where the checkpoint has one. Where that says nothing \
either, the next token is drawn at random: at temperature 1 from the 50 most probable tokens. The same --seed gives \
the same text again, alone and in any batch. \
An empty prompt starts from the configuration's bos_token_id. Text goes to standard output as it is made.")]
pub(crate) struct GenerateArguments {
    #[command(flatten)]
    pub(crate) input: InputArguments,
    #[command(flatten)]
    pub(crate) model: ModelArguments,
    #[command(flatten)]
    pub(crate) encoder: EncoderArguments,
    /// Print one JSON object: prompt_ids, ids (the new ones), text, stop_reason, tokens_per_s, time_to_first_token_s; where tokens were drafted, drafted and accepted; with several texts `sequences` of ids, text, stop_reason and score
    #[arg(long)]
    pub(crate) json: bool,
    /// Read prompt after prompt from the terminal, with line editing and history; Ctrl-C stops the text, Ctrl-D ends
    #[arg(long, conflicts_with_all = ["json", "input", "prompts_file"])]
    pub(crate) interactive: bool,
    #[command(flatten)]
    pub(crate) generation: GenerationArguments,
    #[command(flatten)]
    pub(crate) file: FileArguments,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    prompt_ids: Vec<u32>,
    #[serde(flatten)]
    texts: Texts,
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
        let GenerateArguments { file, model, encoder, generation, .. } = arguments;
        let of_file = generate_file::Arguments { file, model, encoder, generation };
        return generate_file::run(path, &of_file, opened);
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
