//! Processing of `--prompts-file` in `generate`, `classify` and `score`.
//!
//! `candle_gpt2_engine::RowsJob` reads, orders and writes the rows and resumes interrupted jobs.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use candle_core::Device;
use candle_gpt2::KvDType;
use candle_gpt2_engine::{
    EngineError, FailedRow, Row, Rows, RowsJob, RowsOutput, Vocabulary, WeightDType, device_name,
};
use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};

use crate::exit::{self, EXIT_FAILURE, UsageError};
use crate::model_arguments::ModelArguments;
use crate::progress::Terminal;
use crate::{input, output};

/// Arguments for many prompts.
#[derive(Debug, Args)]
pub(crate) struct FileArguments {
    /// Process every prompt in a file: one per line, or, if its name ends in .jsonl, objects {"prompt":
    /// TEXT} or {"ids": [ID, …]}; prints one JSON object per prompt, in order
    #[arg(long, value_name = "FILE", conflicts_with_all = ["input", "json"], help_heading = "Many prompts")]
    pub(crate) prompts_file: Option<PathBuf>,
    /// Write the objects to this file, which appears when it is complete
    #[arg(long, value_name = "FILE", help_heading = "Many prompts")]
    pub(crate) output: Option<PathBuf>,
    /// Resume an interrupted run from its --output
    #[arg(long, requires = "output", help_heading = "Many prompts")]
    pub(crate) resume: bool,
    /// Number of sequences to process at once; `generate` runs beam and contrastive search one prompt at a
    /// time [default: 8]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Many prompts")]
    pub(crate) batch_size: Option<usize>,
}

impl FileArguments {
    /// Checks the arguments as far as possible without a checkpoint.
    pub(super) fn check(&self) -> Result<(), UsageError> {
        let refuse = |message: &str| Err(UsageError(message.into()));
        // clap does not enforce `requires` for an option that conflicts with a supplied one.
        if self.prompts_file.is_none() && (self.output.is_some() || self.resume || self.batch_size.is_some())
        {
            return refuse("--output, --resume and --batch-size need --prompts-file");
        }
        if self.batch_size == Some(0) {
            return refuse("--batch-size: expected at least 1, found 0");
        }
        Ok(())
    }

    /// Tokenizes a file's rows with `tokens`, runs `work` on them, and reports rows that failed.
    pub(super) fn run<T: Serialize + Clone>(
        &self,
        input: &Path,
        what: &str,
        settings: &Value,
        vocabulary: &Vocabulary,
        tokens: impl Fn(&Row) -> Result<T, EngineError>,
        work: impl FnOnce(&mut Rows<'_, T>) -> Result<()>,
    ) -> Result<ExitCode> {
        let output = match &self.output {
            None => RowsOutput::Lines(Box::new(|line| Ok(output::write_json_line(line)?))),
            Some(path) => RowsOutput::File { path, resume: self.resume },
        };
        let format = |error: EngineError| exit::message(&error.into());
        let content = input::read_file(input)?;
        let job =
            RowsJob { input, content, output, settings, what, format_error: &format, reporter: &Terminal };
        let is_noted = Cell::new(false);
        let noted = |row: &Row| {
            let lost = if is_noted.get() { None } else { row.lost_note(vocabulary) };
            if let Some(lost) = lost {
                output::print_note(&format!("{}: `{}`: {lost}", input.display(), row.beginning()));
                is_noted.set(true);
            }
            tokens(row)
        };
        let failed = job.run(noted, work)?;
        for FailedRow { line, error } in &failed {
            output::print_error(&format!("{}: line {line}: {error}", input.display()));
        }
        Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_FAILURE) })
    }
}

/// Returns the settings that must match when a run is resumed.
///
/// The result combines the model's settings with the object `more`.
pub(super) fn settings(model: &ModelArguments, device: &Device, more: Value) -> Value {
    let model = &model.options;
    let mut settings = json!({
        "model": model.model,
        "tokenizer": model.tokenizer,
        "dtype": model.dtype.map(WeightDType::name),
        "kv_dtype": model.kv_dtype.map(KvDType::name),
        "device": device_name(device),
        "tf32": model.tf32,
        "n_head": model.n_head,
    });
    if let (Value::Object(settings), Value::Object(more)) = (&mut settings, more) {
        settings.extend(more);
    }
    settings
}
