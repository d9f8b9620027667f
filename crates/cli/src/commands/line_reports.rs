//! One JSON object for each line of a file of prompts, in their order, to standard output or to a file that survives an
//! interruption: what `generate` and `classify` do with `--prompts-file`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use candle_gpt2_engine::{Progress, Reporter, Unit};
use clap::Args;
use serde::Serialize;
use serde_json::{Value, json};

use super::partial_file::Sink;
use super::prompt_lines::{Given, Line, PromptLines};
use crate::exit::{EXIT_FAILURE, UsageError};
use crate::output;
use crate::progress::Terminal;

/// The arguments for many prompts.
#[derive(Debug, Args)]
pub(crate) struct FileArguments {
    /// Take every prompt of a file: one a line, or JSONL of {"prompt": TEXT} or {"ids": [ID, …]} where it ends in .jsonl; prints a JSON object for each, in their order
    #[arg(long, value_name = "FILE", conflicts_with_all = ["input", "json"], help_heading = "Many prompts")]
    pub(crate) prompts_file: Option<PathBuf>,
    /// Write the objects to this file, which appears when it is complete
    #[arg(long, value_name = "FILE", help_heading = "Many prompts")]
    pub(crate) output: Option<PathBuf>,
    /// Go on with the --output of a run that was interrupted
    #[arg(long, requires = "output", help_heading = "Many prompts")]
    pub(crate) resume: bool,
    /// Texts that are computed at once; beams and contrastive searches of `generate` are made one by one [default: 8]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Many prompts")]
    pub(crate) batch_size: Option<usize>,
}

impl FileArguments {
    /// Checks what can be checked before a checkpoint is opened.
    pub(super) fn check(&self) -> Result<(), UsageError> {
        let refuse = |message: &str| Err(UsageError(message.into()));
        // The parser does not require an option that conflicts with a given one.
        if self.prompts_file.is_none() && (self.output.is_some() || self.resume || self.batch_size.is_some())
        {
            return refuse("--output, --resume and --batch-size are for many prompts; give --prompts-file");
        }
        if self.batch_size == Some(0) {
            return refuse("--batch-size: expected at least 1, found 0");
        }
        Ok(())
    }
}

/// The objects of the lines, as far as they are written.
pub(super) struct LineReports {
    sink: Sink,
    /// Number of each line that has no answer, and why.
    failures: Vec<(usize, String)>,
    bar: Box<dyn Progress>,
}

impl LineReports {
    /// Goes on where the --output of an interrupted run ends, with --resume. `settings` must be the same then.
    pub(super) fn open<T: Serialize>(
        arguments: &FileArguments,
        lines: &PromptLines<'_, T>,
        settings: &Value,
        what: &str,
    ) -> Result<Self> {
        let mut failures = Vec::new();
        let sink = match &arguments.output {
            None => Sink::standard_output(),
            Some(output) => {
                let mut is_of = |index: usize, written: &Value| {
                    let line = (index < lines.len()).then(|| lines.line(index));
                    failures.extend(line.iter().filter_map(|line| failure_of(written, line.number)));
                    line.is_some_and(|line| is_of(written, &line))
                };
                Sink::file(output, arguments.resume, settings, &mut is_of)?
            }
        };
        let bar = Terminal.start(what, lines.len() as u64, Unit::Items("prompts"));
        bar.advance(sink.written as u64);
        Ok(Self { sink, failures, bar })
    }

    /// How many lines are written.
    pub(super) fn written(&self) -> usize {
        self.sink.written
    }

    /// Writes what became of the next line.
    pub(super) fn write<T: Serialize>(
        &mut self,
        line: &Line<T>,
        answer: Result<impl Serialize, String>,
    ) -> Result<()> {
        let (answer, error) = match answer {
            Ok(answer) => (Some(answer), None),
            Err(error) => (None, Some(error)),
        };
        let tokens = line.tokens.as_ref().ok();
        self.sink.write(&Report {
            line: line.number,
            given: &line.given,
            prompt_ids: tokens,
            answer,
            error: error.as_deref(),
        })?;
        self.bar.advance(1);
        self.failures.extend(error.map(|error| (line.number, error)));
        Ok(())
    }

    /// Removes the file of a run that failed before its first line.
    pub(super) fn drop_if_empty(&self) {
        self.sink.drop_if_empty();
    }

    /// Gives the file its name, and tells which lines have no answer.
    pub(super) fn finish(self, prompts_file: &std::path::Path) -> Result<ExitCode> {
        let Self { sink, failures, bar } = self;
        drop(bar);
        sink.finish()?;
        for (number, error) in &failures {
            output::print_error(&format!("{}: line {number}: {error}", prompts_file.display()));
        }
        Ok(if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_FAILURE) })
    }
}

/// What is written for a line of the file.
#[derive(Serialize)]
struct Report<'a, T, A> {
    /// Number of the line, from 1.
    line: usize,
    #[serde(flatten)]
    given: &'a Given,
    /// Absent where the line holds no prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_ids: Option<&'a T>,
    #[serde(flatten)]
    answer: Option<A>,
    /// Why there is no answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

/// Whether a written line is of this line of the prompts.
fn is_of<T: Serialize>(written: &Value, line: &Line<T>) -> bool {
    let same_outcome = match &line.tokens {
        Ok(tokens) => written["prompt_ids"] == json!(tokens),
        Err(error) => written["error"] == json!(error),
    };
    // The choices of a line are in its tokens.
    same_outcome && written["line"] == line.number && written["prompt"] == json!(line.given.prompt)
}

/// What a written line says of why it has no answer.
fn failure_of(written: &Value, number: usize) -> Option<(usize, String)> {
    Some((number, written["error"].as_str()?.to_owned()))
}
