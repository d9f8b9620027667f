//! Exit codes and error messages.
//!
//! The program exits with 0 for success, 2 for a usage error, 1 for a failed job, and 130 after Ctrl-C.
//! Library messages and hints contain option names in backquotes. The program prints its flags in their place.

use std::io;

use candle_gpt2::{Diagnose, ErrorKind};
use candle_gpt2_compression::CompressionError;
use candle_gpt2_engine::EngineError;
use candle_gpt2_evaluation::EvaluationError;
use candle_gpt2_generation::GenerationError;
use candle_gpt2_interpret::InterpretError;
use candle_gpt2_jobs::JobError;
use candle_gpt2_kernels::message_with_causes;
use candle_gpt2_look::LookError;
#[cfg(feature = "serve")]
use candle_gpt2_server::ServerError;
use candle_gpt2_training::TrainingError;
use candle_gpt2_weights::WeightsError;

use crate::flags;
use crate::interrupt::EXIT_INTERRUPTED;

/// Exit code for a usage error: an invalid option or value, or an input that does not fit the model.
pub(crate) const EXIT_USAGE: u8 = 2;
/// Exit code for a job that failed although its arguments are valid.
pub(crate) const EXIT_FAILURE: u8 = 1;

/// Usage error that the argument parser cannot detect by itself.
#[derive(Debug)]
pub(crate) struct UsageError(pub(crate) String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

impl Diagnose for UsageError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Usage
    }
}

/// Returns the library's or the program's own error at the head of a chain.
fn diagnosed(error: &anyhow::Error) -> Option<&dyn Diagnose> {
    macro_rules! first_of {
        ($($(#[$gate:meta])? $error:ty),+ $(,)?) => {
            $($(#[$gate])?
            if let Some(error) = error.downcast_ref::<$error>() {
                return Some(error);
            })+
        };
    }
    first_of!(
        UsageError,
        CompressionError,
        EngineError,
        EvaluationError,
        GenerationError,
        InterpretError,
        JobError,
        LookError,
        #[cfg(feature = "serve")]
        ServerError,
        TrainingError,
        WeightsError,
    );
    None
}

/// Returns the exit code for a failed command.
pub(crate) fn code_of(error: &anyhow::Error) -> u8 {
    match diagnosed(error).map(Diagnose::kind) {
        Some(ErrorKind::Usage) => EXIT_USAGE,
        Some(ErrorKind::Interrupted) => EXIT_INTERRUPTED,
        _ => EXIT_FAILURE,
    }
}

/// Whether the reader closed the pipe early (`gpt2 generate … | head`).
pub(crate) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io_errors = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    io_errors.into_iter().any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// Returns the error message with its causes and the flags that help.
pub(crate) fn message(error: &anyhow::Error) -> String {
    let found = diagnosed(error);
    let names_options = found.is_some_and(|error| error.kind().is_usage() || error.option().is_some());
    let causes = message_with_causes(error.as_ref());
    let text = if names_options { flags::with_flags(&causes) } else { causes };
    if text.contains("CUDA_ERROR_OUT_OF_MEMORY") {
        return format!(
            "not enough GPU memory; use a smaller batch, shorter sequences or --dtype f16: {text}"
        );
    }
    match found.and_then(Diagnose::hint).and_then(|hint| flags::hint(&hint)) {
        Some(hint) => format!("{text} ({hint})"),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn gpu_out_of_memory_is_explained() {
        let text = message(&anyhow!("DriverError(CUDA_ERROR_OUT_OF_MEMORY)"));
        assert!(text.starts_with("not enough GPU memory"));
        assert_eq!(message(&anyhow!("DriverError(CUDA_ERROR_ASSERT)")), "DriverError(CUDA_ERROR_ASSERT)");
    }

    #[test]
    fn wrapped_error_is_reported_once() {
        let error = candle_core::Error::from(candle_gpt2::ModelError::NoTokens);
        assert_eq!(message(&anyhow!(GenerationError::from(error))), "the model needs at least one token");
    }

    #[test]
    fn model_names_from_other_programs_get_hints() {
        for (name, expected) in [
            ("gpt2:124m", "(names have no tags; use gpt2, or owner/name on the Hub)"),
            ("./12:30/none", "(gpt2 downloads GPT-2, built-in selects the bundled model)"),
            ("hf.co/owner/name", "(a model on the Hub is named owner/name, without the URL)"),
            ("C:\\gpt2", "(gpt2 downloads GPT-2, built-in selects the bundled model)"),
        ] {
            let text = message(&anyhow!(WeightsError::NotFound { path: name.into() }));
            assert!(text.ends_with(expected), "{text}");
        }
    }

    #[test]
    fn library_errors_get_flag_hints_and_exit_codes() {
        let long = || GenerationError::PromptTooLong { tokens: 9, n_positions: 8 };
        for error in [anyhow!(long()), anyhow!(EngineError::Generation(long()))] {
            assert!(message(&error).ends_with(" (--keep-last)"), "{}", message(&error));
            assert_eq!(code_of(&error), EXIT_USAGE);
        }
        let no_token_left = || GenerationError::NoTokenLeft { options: vec!["suppress_tokens"] };
        assert_eq!(message(&anyhow!(no_token_left())), no_token_left().to_string());
        let no_token_left = anyhow!(no_token_left());
        assert_eq!(code_of(&no_token_left), EXIT_FAILURE);
    }
}
