//! `gpt2 generate --prompts-file`: every prompt of a file, many at once, to one JSON object a line in their order.
//!
//! With `--output FILE` the lines are collected in `FILE.partial`, whose first line holds the options, and `FILE`
//! appears when all are there. A line counts once its line break is written, so that `--resume` loses and repeats none.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, BufWriter, Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use candle_core::Device;
use gpt2_generation::GenerationConfig;
use gpt2_weights::{Checkpoint, Tokenizer, WeightsError, encode};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::generate::{Texts, start_of_text_if_empty};
use crate::arguments::GenerateArguments;
use crate::session::Session;
use crate::{EXIT_FAILURE, UsageError, generation_options, input, model, output, progress};

/// Prompts that are continued at once: enough to share the reading of the weights, and memory for their keys and values
/// is there on every machine.
const BATCH_SIZE: usize = 8;

/// What is written for a line of the file.
#[derive(Serialize)]
struct Report<'a> {
    /// Number of the line, from 1.
    line: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt: Option<&'a str>,
    #[serde(flatten)]
    outcome: Outcome<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Outcome<'a> {
    Continued {
        prompt_ids: &'a [u32],
        #[serde(flatten)]
        texts: Texts,
    },
    Failed {
        error: &'a str,
    },
}

/// A line of the file.
struct Line {
    prompt: Option<String>,
    /// Its tokens, or why it cannot be continued.
    ids: Result<Vec<u32>, String>,
}

/// A line of a JSONL file; other keys are not looked at.
#[derive(Deserialize)]
struct JsonPrompt {
    prompt: Option<String>,
    ids: Option<Vec<u32>>,
}

pub(super) fn run(
    arguments: &GenerateArguments,
    path: &Path,
    checkpoint: &Checkpoint,
    device: &Device,
) -> Result<ExitCode> {
    let batch_size = arguments.batch_size.unwrap_or(BATCH_SIZE);
    if batch_size == 0 {
        return Err(UsageError("--batch-size: expected at least 1, found 0".into()).into());
    }
    let tokenizer = match checkpoint.tokenizer(arguments.model.tokenizer.as_deref()) {
        Err(WeightsError::NoTokenizer { .. }) => None,
        loaded => Some(loaded?),
    };
    let config = generation_options::read(arguments, checkpoint, tokenizer.as_ref())?;
    generation_options::notes(&config, tokenizer.as_ref()).iter().for_each(|note| output::print_note(note));
    let lines = read_lines(path, checkpoint, tokenizer.as_ref(), &config)?;
    let mut sink = match &arguments.output {
        Some(output) => Sink::file(output, arguments.resume, &settings(arguments, &config), &lines)?,
        None => Sink { written: 0, partial: None },
    };
    let model = model::load(checkpoint, device)?;
    let session = Session { model: &model, tokenizer: tokenizer.as_ref(), config: &config, device };
    let bar = progress::items("generating", lines.len() as u64, "prompts");
    bar.inc(sink.written as u64);

    let rest = sink.written..lines.len();
    let numbers: Vec<usize> = rest.filter(|number| lines[*number].ids.is_ok()).collect();
    let prompts: Vec<Vec<u32>> =
        numbers.iter().filter_map(|number| lines[*number].ids.clone().ok()).collect();
    let mut finished = BTreeMap::new();
    let mut write_ready = |finished: &mut BTreeMap<usize, Vec<_>>| -> Result<()> {
        while let Some(line) = lines.get(sink.written) {
            let outcome = match &line.ids {
                Err(error) => Outcome::Failed { error },
                Ok(prompt_ids) => match finished.remove(&sink.written) {
                    Some(texts) => Outcome::Continued { prompt_ids, texts: Texts::from(texts) },
                    None => break,
                },
            };
            sink.write(&Report { line: sink.written + 1, prompt: line.prompt.as_deref(), outcome })?;
            bar.inc(1);
        }
        Ok(())
    };
    write_ready(&mut finished)?;
    session.generate(&prompts, batch_size, &mut |_| Ok(ControlFlow::Continue(())), &mut |index, texts| {
        finished.insert(numbers[index], texts);
        write_ready(&mut finished)
    })?;
    bar.finish_and_clear();
    sink.finish()?;

    let failed: Vec<usize> =
        (1..).zip(&lines).filter(|(_, line)| line.ids.is_err()).map(|(n, _)| n).collect();
    for number in &failed {
        if let Err(error) = &lines[number - 1].ids {
            output::print_error(&anyhow::anyhow!("{}: line {number}: {error}", path.display()));
        }
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_FAILURE) })
}

/// The prompts of the file: one a line, or a JSON object a line where its name ends in `.jsonl`.
fn read_lines(
    path: &Path,
    checkpoint: &Checkpoint,
    tokenizer: Option<&Tokenizer>,
    config: &GenerationConfig,
) -> Result<Vec<Line>> {
    let is_json = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl"));
    let ids_of = |prompt: &str| -> Result<Vec<u32>> {
        let tokenizer =
            tokenizer.context("there is no tokenizer; give ids, or a tokenizer with --tokenizer")?;
        let ids = encode(tokenizer, prompt)?;
        input::check_tokenizer(&ids, checkpoint.config())?;
        Ok(ids)
    };
    let tokens = |text: &str| -> (Option<String>, Result<Vec<u32>>) {
        if !is_json {
            return (Some(text.to_owned()), ids_of(text));
        }
        match serde_json::from_str::<JsonPrompt>(text) {
            Err(error) => {
                (None, Err(anyhow::anyhow!("not {{\"prompt\": TEXT}} or {{\"ids\": [ID, …]}}: {error}")))
            }
            Ok(JsonPrompt { prompt: Some(prompt), ids: None }) => {
                let ids = ids_of(&prompt);
                (Some(prompt), ids)
            }
            Ok(JsonPrompt { prompt: None, ids: Some(ids) }) => (None, Ok(ids)),
            Ok(_) => (None, Err(anyhow::anyhow!("expected one of the keys `prompt` and `ids`"))),
        }
    };
    let line = |text: &str| {
        let (prompt, ids) = tokens(text);
        let ids = ids.and_then(|ids| {
            let ids = start_of_text_if_empty(ids, checkpoint.config());
            Ok(config.fit_prompt(&ids, checkpoint.config())?)
        });
        Line { prompt, ids: ids.map_err(|error| format!("{error:#}")) }
    };
    Ok(input::read_text_file(path)?.lines().map(line).collect())
}

/// What must be the same when a run goes on.
fn settings(arguments: &GenerateArguments, config: &GenerationConfig) -> Value {
    json!({
        "model": arguments.model.model,
        "tokenizer": arguments.model.tokenizer,
        "long_prompt": format!("{:?}", config.long_prompt),
        "when_full": format!("{:?}", config.when_full),
        "config": config,
    })
}

/// Where the lines go.
struct Sink {
    /// Lines that are there.
    written: usize,
    /// Absent where they go to standard output.
    partial: Option<Partial>,
}

struct Partial {
    file: File,
    path: PathBuf,
    output: PathBuf,
}

impl Sink {
    /// Lines that become the file `output`; with `resume` behind those of an interrupted run.
    fn file(output: &Path, resume: bool, settings: &Value, lines: &[Line]) -> Result<Self> {
        let mut name = OsString::from(output.as_os_str());
        name.push(".partial");
        let path = PathBuf::from(name);
        let shown = path.display();
        if output.exists() {
            bail!("{}: it exists already; remove it, or choose another name", output.display());
        }
        if path.exists() && !resume {
            bail!("{shown}: it holds the lines of an interrupted run; go on with --resume, or remove it");
        }
        let file = OpenOptions::new().read(true).append(true).create(true).open(&path);
        let mut partial = Partial {
            file: file.with_context(|| shown.to_string())?,
            path: path.clone(),
            output: output.to_owned(),
        };
        let written = partial.complete_lines(settings, lines).with_context(|| shown.to_string())?;
        Ok(Self { written, partial: Some(partial) })
    }

    fn write(&mut self, report: &Report<'_>) -> Result<()> {
        match &mut self.partial {
            None => output::write_json(report)?,
            Some(partial) => partial.append(report)?,
        }
        self.written += 1;
        Ok(())
    }

    fn finish(self) -> Result<()> {
        self.partial.map_or(Ok(()), Partial::finish)
    }
}

impl Partial {
    /// Checks what an interrupted run left, drops what it had not finished, and says how many lines are there.
    fn complete_lines(&mut self, settings: &Value, lines: &[Line]) -> Result<usize> {
        let mut reader = BufReader::new(&self.file);
        let mut complete_bytes = 0;
        let mut count = 0;
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line)? > 0 && line.ends_with(b"\n") {
            let value: Value = serde_json::from_slice(&line)
                .with_context(|| format!("line {}: not one of ours; remove the file", count + 1))?;
            if count == 0 {
                check_settings(&value, settings)?;
            } else {
                let expected = lines.get(count - 1).map(|line| line.prompt.as_deref());
                if expected != Some(value["prompt"].as_str()) || value["line"] != count {
                    bail!(
                        "line {count} continues another prompt; remove the file, or give the prompts it began with"
                    );
                }
            }
            complete_bytes += line.len() as u64;
            count += 1;
            line.clear();
        }
        self.file.set_len(complete_bytes)?;
        if count == 0 {
            self.append(settings)?;
        }
        Ok(count.saturating_sub(1))
    }

    fn append(&mut self, value: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(value)?;
        line.push(b'\n');
        self.file.write_all(&line).with_context(|| self.path.display().to_string())
    }

    /// Gives the lines without the settings their name.
    fn finish(mut self) -> Result<()> {
        let mut name = OsString::from(self.output.as_os_str());
        name.push(".complete");
        let complete = PathBuf::from(name);
        let mut copy = || -> Result<()> {
            self.file.seek(SeekFrom::Start(0))?;
            let mut reader = BufReader::new(&self.file);
            reader.skip_until(b'\n')?;
            let mut writer = BufWriter::new(File::create(&complete)?);
            std::io::copy(&mut reader, &mut writer)?;
            writer.into_inner().map_err(|error| error.into_error())?.sync_all()?;
            fs::rename(&complete, &self.output)?;
            Ok(())
        };
        if let Err(error) = copy() {
            let _ = fs::remove_file(&complete);
            return Err(error.context(self.output.display().to_string()));
        }
        fs::remove_file(&self.path).with_context(|| self.path.display().to_string())
    }
}

/// Names the first option that is another than in the interrupted run.
fn check_settings(before: &Value, now: &Value) -> Result<()> {
    let options = |settings: &Value| -> BTreeMap<String, Value> {
        let outer = settings.as_object().into_iter().flatten().filter(|(name, _)| *name != "config");
        let inner = settings["config"].as_object().into_iter().flatten();
        outer.chain(inner).map(|(name, value)| (name.clone(), value.clone())).collect()
    };
    let (before, now) = (options(before), options(now));
    for (name, now) in &now {
        let before = before.get(name).unwrap_or(&Value::Null);
        if before != now {
            bail!(
                "the interrupted run had `{name}` {before}, this one {now}; give the same options, or remove the file"
            );
        }
    }
    Ok(())
}
