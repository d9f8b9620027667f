//! How the program ends: exit code 0 for success, 2 for a wrong call or argument, 1 for a job that failed; and what an error
//! says on the way out. The libraries' messages name no flags of the program: [`hint`] adds those that help.

use std::io;

use gpt2_engine::EngineError;
use gpt2_generation::GenerationError;
use gpt2_training::TrainingError;

/// The call is wrong: an option, a value, or an input that does not fit the model.
const EXIT_USAGE: u8 = 2;
/// The call is right and the job failed.
pub(crate) const EXIT_FAILURE: u8 = 1;

/// A wrong call that the argument parser cannot see by itself.
#[derive(Debug)]
pub(crate) struct UsageError(pub(crate) String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// The exit code of a command that failed so.
pub(crate) fn code_of(error: &anyhow::Error) -> u8 {
    let engine = error.downcast_ref::<EngineError>().is_some_and(EngineError::is_usage);
    let generation = error.downcast_ref::<GenerationError>().is_some_and(GenerationError::is_usage);
    let training = error.downcast_ref::<TrainingError>().is_some_and(TrainingError::is_usage);
    let is_usage = error.is::<UsageError>() || engine || generation || training;
    if is_usage { EXIT_USAGE } else { EXIT_FAILURE }
}

/// Whether whoever read our output has seen enough (`gpt2 generate … | head`).
pub(crate) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io_errors = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    io_errors.into_iter().any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// The error with its causes, and the flags that help.
pub(crate) fn message(error: &anyhow::Error) -> String {
    let told = format!("{error:#}");
    if told.contains("CUDA_ERROR_OUT_OF_MEMORY") {
        return format!(
            "the GPU has too little memory; fewer texts at once, shorter ones or --dtype f16 take less: {told}"
        );
    }
    match hint(error) {
        Some(hint) => format!("{told} ({hint})"),
        None => told,
    }
}

/// The flags of the program that help with an error of a library.
fn hint(error: &anyhow::Error) -> Option<&'static str> {
    match error.downcast_ref::<EngineError>() {
        Some(EngineError::Generation(error)) => of_generation(error),
        Some(error) => of_engine(error),
        None => error.downcast_ref::<GenerationError>().and_then(of_generation),
    }
}

fn of_engine(error: &EngineError) -> Option<&'static str> {
    Some(match error {
        EngineError::Device(_) => "--device",
        EngineError::NotOnCpu { .. } => "--dtype, --device",
        EngineError::NotOnGpu { .. } => "--dtype, --device cpu",
        EngineError::NoTf32 { .. } => "--tf32",
        EngineError::GpuRoom { .. } => "--dtype f16, --dtype bf16",
        EngineError::NoRoom { .. } => "--batch-size, --num-beams, --max-new-tokens, --kv-dtype f16",
        _ => return None,
    })
}

fn of_generation(error: &GenerationError) -> Option<&'static str> {
    Some(match error {
        GenerationError::PromptTooLong { .. } => "--keep-last",
        GenerationError::NotFinite => "`gpt2 verify`, `--kv-dtype f32`",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn an_allocation_that_fails_says_what_to_do() {
        let told = message(&anyhow!("DriverError(CUDA_ERROR_OUT_OF_MEMORY)"));
        assert!(told.starts_with("the GPU has too little memory"));
        assert_eq!(message(&anyhow!("DriverError(CUDA_ERROR_ASSERT)")), "DriverError(CUDA_ERROR_ASSERT)");
    }

    #[test]
    fn errors_of_the_libraries_get_the_flags_that_help() {
        let long = || GenerationError::PromptTooLong { tokens: 9, n_positions: 8 };
        for error in [anyhow!(long()), anyhow!(EngineError::Generation(long()))] {
            assert!(message(&error).ends_with(" (--keep-last)"), "{}", message(&error));
            assert_eq!(code_of(&error), EXIT_USAGE);
        }
        let no_token_left = anyhow!(GenerationError::NoTokenLeft);
        assert_eq!(message(&no_token_left), GenerationError::NoTokenLeft.to_string());
        assert_eq!(code_of(&no_token_left), EXIT_FAILURE);
    }
}
