//! `gpt2 generate --prompts-file`: every prompt of a file, many at once, to one JSON object a line in their order.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, bail};
use candle_core::Device;
use candle_gpt2::KvDType;
use candle_gpt2_engine::{Job, LoadedModel, Opened, Text, WeightDType, device_name};
use candle_gpt2_generation::{Clock, GenerationConfig, GenerationError, LogitsProcessor};
use serde_json::{Value, json};

use super::generation_arguments::GenerationArguments;
use super::line_reports::{FileArguments, LineReports};
use super::prompt_lines::{Line, PromptLines};
use super::steering;
use super::texts::{BATCH_SIZE, Texts, clock};
use crate::exit;
use crate::model_arguments::{EncoderArguments, ModelArguments};
use crate::progress::Terminal;

/// What the texts are made with.
pub(super) struct Arguments<'a> {
    pub(super) file: &'a FileArguments,
    pub(super) model: &'a ModelArguments,
    pub(super) encoder: &'a EncoderArguments,
    pub(super) generation: &'a GenerationArguments,
}

pub(super) fn run(path: &Path, arguments: &Arguments, opened: Opened) -> Result<ExitCode> {
    let Arguments { file, generation, .. } = arguments;
    let config = generation.config(&opened)?;
    let conforming = generation.grammar.compile(&opened, &config)?;
    let vocabulary = Arc::clone(opened.vocabulary());
    let lines = PromptLines::read(path, |given| {
        let ids = match given.ids("a list of token ids")? {
            Some(ids) => ids,
            None if vocabulary.tokenizer().is_none() => {
                bail!("there is no tokenizer; give ids, or a tokenizer with --tokenizer")
            }
            None => vocabulary.encode(given.text())?,
        };
        Ok(vocabulary.prompt(ids, &config)?)
    })?;
    let settings = settings(arguments, &config, opened.device())?;
    let reports = LineReports::open(file, &lines, &settings, "generating")?;
    let next = reports.written();
    let (given, pending) = (BTreeMap::new(), BTreeMap::new());
    let mut job = FileJob { lines: &lines, conforming, next, prompts: 0, given, pending, reports };
    let made = steering::load(opened, &generation.steering)
        .and_then(|loaded| make(&mut job, file.batch_size.unwrap_or(BATCH_SIZE), &config, loaded));
    if let Err(error) = made {
        job.reports.drop_if_empty();
        return Err(error);
    }
    job.reports.finish(path)
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
    lines: &'a PromptLines<'a, Vec<u32>>,
    /// What all texts must conform to.
    conforming: Option<LogitsProcessor>,
    /// Index of the next line to read.
    next: usize,
    /// Prompts that were given, and the line of each whose texts are not there.
    prompts: usize,
    given: BTreeMap<usize, usize>,
    /// The lines that were read and are not written, by their index.
    pending: BTreeMap<usize, Pending>,
    reports: LineReports,
}

/// A line that is not written: its texts, or why it has none, once that is known.
struct Pending {
    line: Line<Vec<u32>>,
    made: Option<Result<Texts, String>>,
}

impl Job for FileJob<'_> {
    type Error = anyhow::Error;

    fn next_prompt(&mut self) -> Result<Option<Vec<u32>>> {
        while self.next < self.lines.len() {
            let index = self.next;
            self.next += 1;
            let line = self.lines.line(index);
            let ids = line.tokens.clone();
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
        while let Some(mut entry) = self.pending.first_entry()
            && let Some(made) = entry.get_mut().made.take()
        {
            self.reports.write(&entry.remove().line, made)?;
        }
        Ok(())
    }
}

/// What must be the same when a run goes on.
fn settings(arguments: &Arguments, config: &GenerationConfig, device: &Device) -> Result<Value> {
    let Arguments { model, generation, encoder, .. } = arguments;
    let model = &model.options;
    let steering = &generation.steering;
    Ok(json!({
        "model": model.model,
        "encoder_states": encoder.encoder_states,
        "tokenizer": model.tokenizer,
        "dtype": model.dtype.map(WeightDType::name),
        "kv_dtype": model.kv_dtype.map(KvDType::name),
        "device": device_name(device),
        "tf32": model.tf32,
        "n_head": model.n_head,
        "long_prompt": format!("{:?}", config.long_prompt),
        "when_full": format!("{:?}", config.when_full),
        "steer": steering.steer.as_ref().map(|steer| json!([steer, steering.layer, steering.scale, steering.everywhere])),
        "conforming": generation.grammar.settings()?,
        "config": config,
    }))
}
