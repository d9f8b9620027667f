//! `gpt2 generate --prompts-file`: every prompt of a file, many at once, to one JSON object a line in their order.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use candle_core::Device;
use clap::Args;
use gpt2::KvDType;
use gpt2_engine::{Job, LoadedModel, Opened, Progress, Reporter, Text, Unit, WeightDType, device_name};
use gpt2_generation::{Clock, GenerationConfig, GenerationError, LogitsProcessor};
use serde::Serialize;
use serde_json::{Value, json};

use super::generation_arguments::GenerationArguments;
use super::partial_file::Sink;
use super::prompt_lines::{Line, PromptLines};
use super::steering;
use super::texts::{BATCH_SIZE, Texts, clock};
use crate::exit::{self, EXIT_FAILURE, UsageError};
use crate::model_arguments::ModelArguments;
use crate::output;
use crate::progress::Terminal;

/// The arguments for many prompts.
#[derive(Debug, Args)]
pub(crate) struct FileArguments {
    /// Continue every prompt of a file: one a line, or JSONL of {"prompt": TEXT} or {"ids": [ID, …]} where it ends in .jsonl; prints a JSON object for each, in their order
    #[arg(long, value_name = "FILE", conflicts_with_all = ["text", "ids", "prompt_file", "json"], help_heading = "Many prompts")]
    pub(crate) prompts_file: Option<PathBuf>,
    /// Write the objects to this file, which appears when it is complete
    #[arg(long, value_name = "FILE", help_heading = "Many prompts")]
    pub(crate) output: Option<PathBuf>,
    /// Go on with the --output of a run that was interrupted
    #[arg(long, requires = "output", help_heading = "Many prompts")]
    pub(crate) resume: bool,
    /// Texts that are made at once, where they are made token by token [default: 8]
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

pub(super) fn run(
    path: &Path,
    arguments: &FileArguments,
    generation: &GenerationArguments,
    model: &ModelArguments,
    opened: Opened,
) -> Result<ExitCode> {
    let config = generation.config(&opened)?;
    let conforming = generation.grammar.compile(&opened, &config)?;
    let lines = PromptLines::read(path, opened.vocabulary(), &config)?;
    let mut failures = Vec::new();
    let sink = match &arguments.output {
        None => Sink::standard_output(),
        Some(output) => {
            let settings = settings(model, &config, generation, opened.device())?;
            let mut is_of = |index: usize, written: &Value| {
                let line = (index < lines.len()).then(|| lines.line(index));
                failures.extend(line.iter().filter_map(|line| failure_of(written, line.number)));
                line.is_some_and(|line| is_of(written, &line))
            };
            Sink::file(output, arguments.resume, &settings, &mut is_of)?
        }
    };
    let bar = Terminal.start("generating", lines.len() as u64, Unit::Items("prompts"));
    bar.advance(sink.written as u64);
    let next = sink.written;
    let (given, pending) = (BTreeMap::new(), BTreeMap::new());
    let mut job =
        FileJob { lines: &lines, conforming, next, prompts: 0, given, pending, sink, failures, bar };
    let made = steering::load(opened, &generation.steering)
        .and_then(|loaded| make(&mut job, arguments.batch_size.unwrap_or(BATCH_SIZE), &config, loaded));
    if let Err(error) = made {
        job.sink.drop_if_empty();
        return Err(error);
    }
    let FileJob { sink, failures, bar, .. } = job;
    drop(bar);
    sink.finish()?;
    for (number, error) in &failures {
        output::print_error(&format!("{}: line {number}: {error}", path.display()));
    }
    Ok(if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_FAILURE) })
}

/// Makes the texts of all lines that are not written.
fn make(
    job: &mut FileJob<'_>,
    batch_size: usize,
    config: &GenerationConfig,
    loaded: LoadedModel,
) -> Result<()> {
    loaded.generate(job, batch_size, config, &Terminal)?;
    // Lines that cannot be continued, after the last one that can.
    job.write_ready()
}

/// Lines that become texts, written in their order.
struct FileJob<'a> {
    lines: &'a PromptLines,
    /// What all texts must conform to.
    conforming: Option<LogitsProcessor>,
    /// Index of the next line to read.
    next: usize,
    /// Prompts that were given, and the line of each whose texts are not there.
    prompts: usize,
    given: BTreeMap<usize, usize>,
    /// The lines that were read and are not written, by their index.
    pending: BTreeMap<usize, Pending>,
    sink: Sink,
    /// Number of each line that has no text, and why.
    failures: Vec<(usize, String)>,
    bar: Box<dyn Progress>,
}

/// A line that is not written: its texts, or why it has none, once that is known.
struct Pending {
    line: Line,
    made: Option<Result<Texts, String>>,
}

impl Job for FileJob<'_> {
    type Error = anyhow::Error;

    fn next_prompt(&mut self) -> Result<Option<Vec<u32>>> {
        while self.next < self.lines.len() {
            let index = self.next;
            self.next += 1;
            let line = self.lines.line(index);
            let ids = line.ids.clone();
            let made = ids.as_ref().err().map(|error| Err(error.clone()));
            self.pending.insert(index, Pending { line, made });
            if let Ok(ids) = ids {
                self.given.insert(self.prompts, index);
                self.prompts += 1;
                return Ok(Some(ids));
            }
            // It is written with the texts of others: a job that is refused writes nothing.
        }
        Ok(None)
    }

    fn on_texts(&mut self, prompt: usize, texts: Result<Vec<Text>, GenerationError>) -> Result<()> {
        let texts = texts.map(Texts::from).map_err(|error| exit::message(&error.into()));
        let index = self.given.remove(&prompt);
        if let Some(pending) = index.and_then(|index| self.pending.get_mut(&index)) {
            pending.made = Some(texts);
        }
        self.write_ready()
    }

    fn clock(&self) -> Option<Clock> {
        Some(clock())
    }

    fn processors(&self) -> Vec<LogitsProcessor> {
        self.conforming.iter().cloned().collect()
    }
}

impl FileJob<'_> {
    /// Writes every line whose turn it is.
    fn write_ready(&mut self) -> Result<()> {
        while let Some(entry) = self.pending.first_entry().filter(|entry| entry.get().made.is_some()) {
            let Pending { line, made } = entry.remove();
            let error = made.as_ref().and_then(|made| made.as_ref().err()).cloned();
            let report = Report {
                line: line.number,
                prompt: line.prompt.as_deref(),
                prompt_ids: line.ids.as_deref().ok(),
                texts: made.and_then(Result::ok),
                error: error.as_deref(),
            };
            self.sink.write(&report)?;
            self.bar.advance(1);
            self.failures.extend(error.map(|error| (line.number, error)));
        }
        Ok(())
    }
}

/// What is written for a line of the file.
#[derive(Serialize)]
struct Report<'a> {
    /// Number of the line, from 1.
    line: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<&'a str>,
    /// Absent where the line holds no prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_ids: Option<&'a [u32]>,
    #[serde(flatten)]
    texts: Option<Texts>,
    /// Why there are no texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

/// Whether a written line is of this line of the prompts.
fn is_of(written: &Value, line: &Line) -> bool {
    let same_outcome = match &line.ids {
        Ok(ids) => written["prompt_ids"] == json!(ids),
        Err(error) => written["error"] == json!(error),
    };
    same_outcome && written["line"] == line.number && written["prompt"].as_str() == line.prompt.as_deref()
}

/// What a written line says of why it has no text.
fn failure_of(written: &Value, number: usize) -> Option<(usize, String)> {
    Some((number, written["error"].as_str()?.to_owned()))
}

/// What must be the same when a run goes on.
fn settings(
    model: &ModelArguments,
    config: &GenerationConfig,
    generation: &GenerationArguments,
    device: &Device,
) -> Result<Value> {
    let steering = &generation.steering;
    Ok(json!({
        "model": model.model,
        "tokenizer": model.tokenizer,
        "dtype": model.dtype.map(WeightDType::name),
        "kv_dtype": model.kv_dtype.map(KvDType::name),
        "device": device_name(device),
        "tf32": model.tf32,
        "n_head": model.common.n_head,
        "long_prompt": format!("{:?}", config.long_prompt),
        "when_full": format!("{:?}", config.when_full),
        "steer": steering.steer.as_ref().map(|steer| json!([steer, steering.layer, steering.scale, steering.everywhere])),
        "conforming": generation.grammar.settings()?,
        "config": config,
    }))
}
