//! `gpt2 generate --interactive`: prompt after prompt, each continued by itself.

use std::io::ErrorKind;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use candle_core::Device;
use gpt2_weights::{Checkpoint, encode};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use super::generate::{continue_prompt, start_of_text_if_empty};
use crate::arguments::GenerateArguments;
use crate::loaded_model::LoadedModel;
use crate::{generation_options, input, interrupt, is_closed_pipe, model, output};

pub(super) fn run(
    arguments: &GenerateArguments,
    checkpoint: &Checkpoint,
    device: &Device,
) -> Result<ExitCode> {
    let tokenizer = checkpoint.tokenizer(arguments.model.tokenizer.as_deref())?;
    let config = generation_options::read(arguments, checkpoint, Some(&tokenizer))?;
    generation_options::notes(&config, Some(&tokenizer)).iter().for_each(|note| output::print_note(note));
    let model = model::load_with(checkpoint, device, &arguments.model)?;
    let loaded = LoadedModel { model: &model, tokenizer: Some(&tokenizer), config: &config };
    let mut editor = DefaultEditor::new().context("the terminal cannot be used")?;
    interrupt::end_texts()?;
    loop {
        let line = match editor.readline("> ") {
            Ok(line) => line,
            // Ctrl-C at the prompt drops the line, Ctrl-D ends.
            Err(ReadlineError::Interrupted) => continue,
            Err(ReadlineError::Eof) => return Ok(ExitCode::SUCCESS),
            Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                output::print_error(&anyhow!("the line is not valid UTF-8"));
                continue;
            }
            Err(error) => return Err(error).context("the prompt cannot be read"),
        };
        if line.is_empty() {
            continue;
        }
        // A history that cannot be kept is no reason to stop.
        let _ = editor.add_history_entry(&line);
        let continued = || -> Result<()> {
            let ids = encode(&tokenizer, &line)?;
            input::check_tokenizer(&ids, checkpoint.config())?;
            let ids = start_of_text_if_empty(ids, checkpoint.config());
            let ids = config.fit_prompt(&ids, checkpoint.config())?;
            interrupt::while_generating(|| continue_prompt(&loaded, &ids, true))?;
            Ok(())
        };
        match continued() {
            Err(error) if is_closed_pipe(&error) => return Err(error),
            // A prompt that cannot be continued does not end the program.
            Err(error) => output::print_error(&error),
            Ok(()) => {}
        }
    }
}
