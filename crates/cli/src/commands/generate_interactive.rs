//! `gpt2 generate --interactive`: completes one prompt after another, independently of each other.

use std::io::ErrorKind;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use candle_gpt2_engine::Opened;
use candle_gpt2_generation::GenerationConfig;
use candle_gpt2_kernels::interruptible;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use super::continued::continue_prompt;
use super::generation_arguments::GenerationArguments;
use super::steering;
use crate::{exit, interrupt, output};

pub(super) fn run(generation: &GenerationArguments, opened: Opened) -> Result<ExitCode> {
    opened.vocabulary().required_tokenizer()?;
    let config = generation.config(&opened)?;
    let conforming = generation.grammar.compile(&opened, &config)?;
    let loaded = steering::load(opened, &generation.steering)?;
    let mut editor = DefaultEditor::new().context("cannot start the line editor on this terminal")?;
    interrupt::end_texts()?;
    // Each prompt has its own seed, so that repeating a prompt samples a different completion.
    for turn in 0.. {
        let config = GenerationConfig { seed: config.seed.wrapping_add(turn), ..config.clone() };
        let line = match editor.readline("> ") {
            Ok(line) => line,
            // At the prompt, Ctrl-C discards the line and Ctrl-D quits.
            Err(ReadlineError::Interrupted) => continue,
            Err(ReadlineError::Eof) => return Ok(ExitCode::SUCCESS),
            Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                output::print_error("the line is not valid UTF-8");
                continue;
            }
            Err(error) => return Err(error).context("cannot read the prompt"),
        };
        if line.is_empty() {
            continue;
        }
        // A failure to add a history entry is not fatal.
        let _ = editor.add_history_entry(&line);
        let continued = || -> Result<()> {
            let vocabulary = loaded.vocabulary();
            vocabulary.lost_note(&line).iter().for_each(|note| output::print_note(note));
            let prompt = vocabulary.prompt(vocabulary.encode(&line)?, &config)?;
            interrupt::while_generating(|| {
                interruptible(Arc::new(interrupt::is_requested), || {
                    continue_prompt(&loaded, &config, conforming.as_ref(), prompt, true)
                })
            })?;
            Ok(())
        };
        match continued() {
            Err(error) if exit::is_closed_pipe(&error) => return Err(error),
            // A prompt that fails does not end the program.
            Err(error) => output::print_error(&exit::message(&error)),
            Ok(()) => {}
        }
    }
    Ok(ExitCode::SUCCESS)
}
