//! Exit codes and error messages.
//!
//! The program exits with 0 for success, 2 for a usage error, 1 for a failed job, and 130 after Ctrl-C.
//! Library messages contain option names in backquotes. The program prints its flags in their place, and
//! [`hint`] suggests flags that help.

use std::io;

use candle_gpt2::HeadKind;
use candle_gpt2_compression::CompressionError;
use candle_gpt2_engine::{EngineError, HubError};
use candle_gpt2_evaluation::EvaluationError;
use candle_gpt2_generation::GenerationError;
use candle_gpt2_jobs::JobError;
use candle_gpt2_kernels::{DeviceError, message_with_causes};
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

/// Returns the exit code for a failed command.
pub(crate) fn code_of(error: &anyhow::Error) -> u8 {
    let job = error.downcast_ref::<JobError>().is_some_and(JobError::is_interrupted);
    if job || error.downcast_ref().is_some_and(CompressionError::is_interrupted) {
        return EXIT_INTERRUPTED;
    }
    let engine = error.downcast_ref::<EngineError>().is_some_and(EngineError::is_usage);
    let generation = error.downcast_ref::<GenerationError>().is_some_and(GenerationError::is_usage);
    let job = error.downcast_ref::<JobError>().is_some_and(JobError::is_usage);
    let evaluation = error.downcast_ref::<EvaluationError>().is_some_and(EvaluationError::is_usage);
    let look = error.downcast_ref::<LookError>().is_some_and(LookError::is_usage);
    let compression = error.downcast_ref().is_some_and(CompressionError::is_usage);
    #[cfg(feature = "serve")]
    let server = error.downcast_ref::<ServerError>().is_some_and(ServerError::is_usage);
    #[cfg(not(feature = "serve"))]
    let server = false;
    let is_usage = error.is::<UsageError>()
        || look
        || engine
        || generation
        || job
        || evaluation
        || compression
        || server;
    if is_usage { EXIT_USAGE } else { EXIT_FAILURE }
}

/// Whether the reader closed the pipe early (`gpt2 generate … | head`).
pub(crate) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io_errors = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    io_errors.into_iter().any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// Returns the error message with its causes and the flags that help.
pub(crate) fn message(error: &anyhow::Error) -> String {
    let names_options = matches!(
        error.downcast_ref(),
        Some(EngineError::Unfinished { .. } | EngineError::Generation(GenerationError::NoTokenLeft { .. }))
    ) || matches!(error.downcast_ref(), Some(GenerationError::NoTokenLeft { .. }));
    let causes = message_with_causes(error.as_ref());
    let text = match code_of(error) == EXIT_USAGE || names_options {
        true => flags::with_flags(&causes),
        false => causes,
    };
    if text.contains("CUDA_ERROR_OUT_OF_MEMORY") {
        return format!(
            "not enough GPU memory; use a smaller batch, shorter sequences or --dtype f16: {text}"
        );
    }
    match hint(error) {
        Some(hint) => format!("{text} ({hint})"),
        None => text,
    }
}

/// Returns the flags that help with a library error.
fn hint(error: &anyhow::Error) -> Option<&'static str> {
    let engine = error.downcast_ref::<EngineError>().and_then(of_engine);
    let generation = || error.downcast_ref::<GenerationError>().and_then(of_generation);
    let job = || error.downcast_ref::<JobError>().and_then(of_job);
    let weights = || error.downcast_ref::<WeightsError>().and_then(of_weights);
    let evaluation = || error.downcast_ref::<EvaluationError>().and_then(of_evaluation);
    let look = || error.downcast_ref::<LookError>().and_then(of_look);
    let compression = || error.downcast_ref::<CompressionError>().and_then(of_compression);
    let found = engine
        .or_else(generation)
        .or_else(job)
        .or_else(weights)
        .or_else(evaluation)
        .or_else(look)
        .or_else(compression);
    #[cfg(feature = "serve")]
    let found = found.or_else(|| error.downcast_ref::<ServerError>().and_then(of_server));
    found
}

#[cfg(feature = "serve")]
fn of_server(error: &ServerError) -> Option<&'static str> {
    match error {
        ServerError::Option { option, .. } => match *option {
            "aliases" => Some("--alias"),
            "allow_hosts" => Some("--allow-host"),
            "cors_origins" => Some("--cors-origin"),
            "host" => Some("--host"),
            "keys" => Some("--api-key-file, GPT2_API_KEY"),
            "kv_tokens" => Some("--kv-tokens"),
            "max_body" => Some("--max-body"),
            "max_connections" => Some("--max-connections"),
            "name" => Some("--served-model-name"),
            "parallel" => Some("--parallel"),
            "prefill_chunk" => Some("--prefill-chunk"),
            "queue" => Some("--queue"),
            "unix_socket" => Some("--unix-socket"),
            _ => None,
        },
        ServerError::Address { .. } => Some("--host, --port"),
        ServerError::Socket { .. } => Some("--unix-socket"),
        ServerError::NoKey { .. } => Some("--api-key-file, --host, --no-auth"),
        ServerError::PortInUse { .. } => Some("--port"),
        ServerError::SocketInUse { .. } | ServerError::NotASocket { .. } => Some("--unix-socket"),
        ServerError::Engine(EngineError::NoRoom { .. }) => Some("--parallel, --kv-tokens, --kv-dtype f16"),
        ServerError::CutOff { .. } => Some("--drain-timeout"),
        _ => None,
    }
}

fn of_look(error: &LookError) -> Option<&'static str> {
    match error {
        LookError::Engine(error) => of_engine(error),
        LookError::Weights(error) => of_weights(error),
        LookError::In { error, .. } => of_look(error),
        _ => None,
    }
}

fn of_engine(error: &EngineError) -> Option<&'static str> {
    match error {
        EngineError::Generation(error) => of_generation(error),
        EngineError::Weights(error) => of_weights(error),
        EngineError::Hub(HubError::NotCached { .. } | HubError::Incomplete { .. }) => {
            Some("drop --offline or HF_HUB_OFFLINE to download it")
        }
        EngineError::Hub(HubError::Unreachable { .. }) => Some("--model built-in needs no network"),
        EngineError::Device(DeviceError::NoDriver { .. } | DeviceError::NotBuilt { .. }) => {
            Some("--device cpu")
        }
        EngineError::Device(_) => Some("--device"),
        EngineError::NoTf32 { .. } => Some("--tf32"),
        EngineError::GpuRoom { .. } => Some("--dtype f16, --dtype bf16"),
        EngineError::WeightRoom { fitting: Some(_), .. } => Some("--dtype"),
        EngineError::NoRoom { .. } => Some("--batch-size, --num-beams, --max-new-tokens, --kv-dtype f16"),
        _ => None,
    }
}

fn of_compression(error: &CompressionError) -> Option<&'static str> {
    match error {
        CompressionError::Engine(error) => of_engine(error),
        CompressionError::ModelMismatch { .. } => Some("--model"),
        _ => None,
    }
}

fn of_generation(error: &GenerationError) -> Option<&'static str> {
    match error {
        GenerationError::PromptTooLong { .. } => Some("--keep-last"),
        GenerationError::NotFinite => Some("`gpt2 verify`, `--kv-dtype f32`"),
        _ => None,
    }
}

fn of_weights(error: &WeightsError) -> Option<&'static str> {
    match error {
        WeightsError::NotOnCpu { .. } => Some("without --dtype it uses the checkpoint's dtype, bf16 as f32"),
        WeightsError::NotOnGpu { .. } => Some("a quantized --dtype needs --device cpu"),
        WeightsError::NotFound { path } => Some(of_missing(&path.to_string_lossy())),
        WeightsError::UnknownHeads { .. } | WeightsError::OtherHeads { .. } => Some("--n-head"),
        WeightsError::NoTokenizer { .. } => Some(match flags::has("ids") {
            true => "--tokenizer FILE, or --ids in place of text",
            false => "--tokenizer FILE",
        }),
        WeightsError::UnsupportedHead { found: HeadKind::LanguageModel, .. } => {
            Some("`gpt2 train --task classify`")
        }
        WeightsError::UnsupportedHead { .. } => Some("`gpt2 classify`"),
        _ => None,
    }
}

/// Returns advice for a model name that is not a file.
///
/// Other programs use addresses and tags in Hub names.
fn of_missing(name: &str) -> &'static str {
    if name.contains("hf.co/") || name.contains("huggingface.co/") {
        return "a model on the Hub is named owner/name, without the URL";
    }
    match name.rsplit_once(':') {
        // A single letter before the colon is a Windows drive.
        Some((before, tag)) if before.len() > 1 && !tag.contains(['/', '\\']) => {
            "names have no tags; use gpt2, or owner/name on the Hub"
        }
        _ => "gpt2 downloads GPT-2, built-in selects the bundled model",
    }
}

fn of_job(error: &JobError) -> Option<&'static str> {
    match error {
        JobError::Training(error) => of_training(error),
        JobError::Engine(error) => of_engine(error),
        _ => None,
    }
}

fn of_training(error: &TrainingError) -> Option<&'static str> {
    match error {
        TrainingError::Weights(error) => of_weights(error),
        TrainingError::TooFewTokens { .. } => Some("--context"),
        TrainingError::Vocabulary { .. } => Some("--tokenizer"),
        TrainingError::NotFinite { .. } => Some("--lr, --grad-clip"),
        TrainingError::OtherState { .. } => Some("--out"),
        TrainingError::Interrupted { state: Some(_) } => Some("--resume"),
        _ => None,
    }
}

fn of_evaluation(error: &EvaluationError) -> Option<&'static str> {
    match error {
        EvaluationError::Engine(EngineError::Hub(HubError::Unreachable { .. })) => Some("--data FILE"),
        EvaluationError::Engine(error) => of_engine(error),
        EvaluationError::UnknownProtocol { .. } => Some("`gpt2 eval --list`"),
        EvaluationError::Log { .. } => Some("--items, --resume, --against"),
        EvaluationError::OtherResult { .. } => Some("--items"),
        _ => None,
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
