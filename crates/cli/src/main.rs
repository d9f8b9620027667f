//! The `gpt2` program.

mod arguments;
mod closed_output;
mod commands;
mod exit;
mod flags;
mod input;
mod interrupt;
mod main_options;
mod model_arguments;
mod other_names;
mod output;
mod parse;
mod progress;
mod worker;

use std::panic;
use std::process::ExitCode;

use arguments::{Arguments, Command};
use candle_gpt2_engine::{HubOptions, Network, process};
use main_options::program;

/// Allocator for musl builds, because musl's own has a single lock for all threads.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Environment variable that adds backtraces to library errors and failed allocations.
///
/// This program shows them only if the value is `full`.
const BACKTRACE: &str = "RUST_BACKTRACE";

fn main() -> ExitCode {
    #[expect(unsafe_code, reason = "a process-wide setting, changed before a second thread exists")]
    // SAFETY: the program is still single-threaded here.
    unsafe {
        // When memory runs out, a backtrace cannot resolve any names, and it buries the actual error.
        if std::env::var_os(BACKTRACE).is_none_or(|chosen| chosen != "full") {
            std::env::set_var(BACKTRACE, "0");
        }
    }
    if worker::is_worker() {
        return worker::run();
    }
    commands::completions::answer(program);
    let Arguments { command, offline, threads } = match parse::arguments() {
        Ok(arguments) => arguments,
        Err(code) => return code,
    };
    #[expect(unsafe_code, reason = "a process-wide setting, changed before a second thread exists")]
    // SAFETY: the program is still single-threaded here.
    unsafe {
        process::set_threads(threads);
    }
    #[expect(unsafe_code, reason = "recorded steps depend on the rest of the program")]
    // SAFETY: this program uses GPUs only through models and caches, which call `using`, or from the single
    // decoding thread.
    unsafe {
        process::allow_recorded_steps();
    }
    process::keep_freed_memory();
    let mut hub = HubOptions::from_environment();
    if offline {
        hub.network = Network::Offline;
    }
    // A panic is a bug in this program or in a library. It ends like any failed job, with its message.
    process::keep_panics();
    let chosen = |variable| std::env::var(variable).ok().filter(|choice| !choice.is_empty());
    let run = || {
        chosen(process::INSTRUCTION_SET).map_or(Ok(()), |name| process::use_instruction_set(&name))?;
        chosen(process::LARGE_PAGES).map_or(Ok(()), |choice| process::use_large_pages(&choice))?;
        command.as_ref().map_or_else(commands::begin, |command| run(command, &hub))
    };
    let result = panic::catch_unwind(panic::AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let message = process::panic_message(panic.as_ref());
        Err(anyhow::anyhow!("internal error, please report it: {message}"))
    });
    match result {
        Ok(code) => code,
        // The reader closed the pipe early (`gpt2 generate … | head`).
        Err(error) if exit::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output::print_error(&exit::message(&error));
            ExitCode::from(exit::code_of(&error))
        }
    }
}

fn run(command: &Command, hub: &HubOptions) -> anyhow::Result<ExitCode> {
    match command {
        Command::Generate(arguments) => commands::generate::run(arguments, hub),
        Command::Score(arguments) => commands::score::run(arguments, hub),
        Command::Classify(arguments) => commands::classify::run(arguments, hub),
        Command::Eval(arguments) => commands::eval::run(arguments, hub),
        #[cfg(feature = "serve")]
        Command::Serve(arguments) => commands::serve::run(arguments, hub),
        Command::Look(arguments) => commands::look::run(arguments, hub),
        Command::Cache(arguments) => commands::cache::run(arguments, hub),
        Command::Tokenize(arguments) => match &arguments.out {
            Some(out) => commands::tokenize::run(arguments, out, hub),
            None => commands::text_tokens::run(arguments, hub),
        },
        Command::Train(arguments) => commands::train::run(arguments, hub),
        Command::Inspect(arguments) => commands::inspect::run(arguments, hub),
        Command::Convert(arguments) => commands::convert::run(arguments, hub),
        Command::Compress(arguments) => commands::compress::run_compress(arguments, hub),
        Command::Decompress(arguments) => commands::compress::run_decompress(arguments, hub),
        Command::Verify(arguments) => commands::verify::run(arguments, hub),
        Command::Bench(arguments) => commands::bench::run(arguments, hub),
        Command::Doctor(arguments) => commands::doctor::run(arguments, hub),
        Command::Completions(arguments) => commands::completions::run(arguments),
        Command::Man(arguments) => commands::man::run(arguments, program()),
    }
}
