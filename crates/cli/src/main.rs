//! The `gpt2` program. Here stands how a command ends: exit code 0 for success, 2 for a wrong call or argument, 1
//! for a job that failed.

mod arguments;
mod built_in;
mod commands;
mod device;
mod generation_options;
mod hints;
mod hub;
mod input;
mod interrupt;
mod loaded_model;
mod memory;
mod model;
mod output;
mod progress;
mod threads;

use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::{io, panic};

use arguments::{Arguments, Command};
use clap::Parser;
use gpt2_generation::GenerationError;
use gpt2_training::TrainingError;
use hub::Network;

/// The call is wrong: an option, a value, or an input that does not fit the model.
const EXIT_USAGE: u8 = 2;
/// The call is right and the job failed.
const EXIT_FAILURE: u8 = 1;

/// A wrong call that the argument parser cannot see by itself.
#[derive(Debug)]
struct UsageError(String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

fn main() -> ExitCode {
    memory::keep_freed();
    let Arguments { command, offline } = Arguments::parse();
    threads::set(command.threads());
    let network = Network::new(offline);
    // A panic is a mistake of ours or of a library: it ends as any failed job does, with what it said.
    let message = Arc::new(Mutex::new(String::new()));
    let kept = Arc::clone(&message);
    panic::set_hook(Box::new(move |information| {
        if let Ok(mut kept) = kept.lock() {
            *kept = information.to_string();
        }
    }));
    let result = panic::catch_unwind(|| run(&command, network)).unwrap_or_else(|_| {
        let message = message.lock().map(|message| message.clone()).unwrap_or_default();
        Err(anyhow::anyhow!("internal error, please report it: {message}"))
    });
    match result {
        Ok(code) => code,
        // Whoever read our output has seen enough (`gpt2 generate … | head`).
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let code = if is_usage(&error) { EXIT_USAGE } else { EXIT_FAILURE };
            let hint = hints::of(&error);
            output::print_error(&device::explained(error));
            hint.into_iter().for_each(output::print_note);
            ExitCode::from(code)
        }
    }
}

fn run(command: &Command, network: Network) -> anyhow::Result<ExitCode> {
    match command {
        Command::Generate(arguments) => commands::generate::run(arguments, network),
        Command::Score(arguments) => commands::score::run(arguments, network),
        Command::Train(arguments) => commands::train::run(arguments, network),
        Command::Inspect(arguments) => commands::inspect::run(arguments, network),
        Command::Convert(arguments) => commands::convert::run(arguments, network),
        Command::Verify(arguments) => commands::verify::run(arguments, network),
        Command::Bench(arguments) => commands::bench::run(arguments, network),
    }
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io_errors = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    io_errors.into_iter().any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

fn is_usage(error: &anyhow::Error) -> bool {
    let generation = error.downcast_ref::<GenerationError>();
    let training = error.downcast_ref::<TrainingError>();
    error.is::<UsageError>()
        || generation.is_some_and(GenerationError::is_usage)
        || training.is_some_and(TrainingError::is_usage)
}
