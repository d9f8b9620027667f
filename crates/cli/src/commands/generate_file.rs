//! `gpt2 generate --prompts-file`: every prompt of a file, many at once, to one JSON object a line in their order.
//!
//! With `--output FILE` the lines are collected in `FILE.partial`, whose first line holds the options, and `FILE`
//! appears when all are there. A line counts once its line break is written, so that `--resume` loses and repeats none.
//! The file is locked while a run writes it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use candle_core::Device;
use gpt2_generation::GenerationConfig;
use gpt2_weights::{Checkpoint, Tokenizer, WeightsError, encode};
use serde::Serialize;
use serde_json::{Map, Value, json};
use tempfile::NamedTempFile;

use super::generate::{BATCH_SIZE, Texts, start_of_text_if_empty};
use crate::arguments::GenerateArguments;
use crate::loaded_model::LoadedModel;
use crate::{
    EXIT_FAILURE, UsageError, device as devices, generation_options, input, model, output, progress,
};

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

/// A line of the file that is not empty.
struct Line {
    /// From 1.
    number: usize,
    prompt: Option<String>,
    /// Its tokens, or why it cannot be continued.
    ids: Result<Vec<u32>, String>,
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
        Some(output) => Sink::file(output, arguments.resume, &settings(arguments, &config, device), &lines)?,
        None => Sink { written: 0, partial: None },
    };
    let model = model::load_with(checkpoint, device, &arguments.model)?;
    let loaded = LoadedModel { model: &model, tokenizer: tokenizer.as_ref(), config: &config };
    let bar = progress::items("generating", lines.len() as u64, "prompts");
    bar.inc(sink.written as u64);

    let rest = sink.written..lines.len();
    let indices: Vec<usize> = rest.filter(|index| lines[*index].ids.is_ok()).collect();
    let prompts: Vec<Vec<u32>> = indices.iter().filter_map(|index| lines[*index].ids.clone().ok()).collect();
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
            sink.write(&Report { line: line.number, prompt: line.prompt.as_deref(), outcome })?;
            bar.inc(1);
        }
        Ok(())
    };
    write_ready(&mut finished)?;
    let made =
        loaded.generate(&prompts, batch_size, &mut |_| Ok(ControlFlow::Continue(())), &mut |index, texts| {
            finished.insert(indices[index], texts);
            write_ready(&mut finished)
        });
    bar.finish_and_clear();
    if let Err(error) = made {
        sink.drop_if_empty();
        return Err(error);
    }
    sink.finish()?;

    let mut code = ExitCode::SUCCESS;
    for Line { number, ids, .. } in &lines {
        if let Err(error) = ids {
            output::print_error(&anyhow!("{}: line {number}: {error}", path.display()));
            code = ExitCode::from(EXIT_FAILURE);
        }
    }
    Ok(code)
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
        match json_prompt(text) {
            Err(error) => (None, Err(error)),
            Ok(JsonPrompt::Ids(ids)) => (None, Ok(ids)),
            Ok(JsonPrompt::Text(prompt)) => {
                let ids = ids_of(&prompt);
                (Some(prompt), ids)
            }
        }
    };
    let line = |(number, bytes): (usize, &[u8])| {
        let bytes = bytes.strip_suffix(b"\r").unwrap_or(bytes);
        let (prompt, ids) = match std::str::from_utf8(bytes) {
            Ok(text) => tokens(text),
            Err(error) => {
                let valid = error.valid_up_to();
                (None, Err(anyhow!("not valid UTF-8 at byte {valid} of the line; convert the text to UTF-8")))
            }
        };
        let ids = ids.and_then(|ids| {
            let ids = start_of_text_if_empty(ids, checkpoint.config());
            Ok(config.fit_prompt(&ids, checkpoint.config())?)
        });
        Line { number, prompt, ids: ids.map_err(|error| format!("{error:#}")) }
    };
    let bytes = input::read_file(path)?;
    // The mark that some editors put in front of UTF-8.
    let bytes = bytes.strip_prefix("\u{FEFF}".as_bytes()).unwrap_or(&bytes);
    let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let mut lines: Vec<(usize, &[u8])> = (1..).zip(bytes.split(|byte| *byte == b'\n')).collect();
    // An empty line is an empty prompt, and in JSONL nothing.
    lines.retain(|(_, line)| !(bytes.is_empty() || is_json && line.trim_ascii().is_empty()));
    Ok(lines.into_iter().map(line).collect())
}

/// What a line of a JSONL file asks to continue.
enum JsonPrompt {
    Text(String),
    Ids(Vec<u32>),
}

/// Reads a line of a JSONL file; other keys are not looked at.
fn json_prompt(text: &str) -> Result<JsonPrompt> {
    let mut keys: Map<String, Value> = serde_json::from_str(text)
        .map_err(|error| anyhow!("not {{\"prompt\": TEXT}} or {{\"ids\": [ID, …]}}: {error}"))?;
    match (keys.remove("prompt"), keys.remove("ids")) {
        (Some(Value::String(prompt)), None) => Ok(JsonPrompt::Text(prompt)),
        (None, Some(ids)) => {
            let ids = serde_json::from_value(ids);
            Ok(JsonPrompt::Ids(ids.map_err(|error| anyhow!("`ids`: expected a list of token ids: {error}"))?))
        }
        (Some(_), None) => bail!("`prompt`: expected a text"),
        _ => bail!("expected one of the keys `prompt` and `ids`"),
    }
}

/// What must be the same when a run goes on.
fn settings(arguments: &GenerateArguments, config: &GenerationConfig, device: &Device) -> Value {
    json!({
        "model": arguments.model.model,
        "tokenizer": arguments.model.tokenizer,
        "dtype": arguments.model.dtype.map(|dtype| dtype.name),
        "kv_dtype": arguments.model.kv_dtype.map(|dtype| dtype.as_str()),
        "device": devices::name(device),
        "tf32": arguments.model.tf32,
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
        if path.exists() && !resume {
            bail!("{shown}: it holds the lines of an interrupted run; go on with --resume, or remove it");
        }
        let file = OpenOptions::new().read(true).append(true).create(true).open(&path);
        let file = file.with_context(|| shown.to_string())?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => bail!("{shown}: another run is writing it"),
            // A file system without locks has none to wait for.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        let mut partial = Partial { file, path: path.clone(), output: output.to_owned() };
        // Looked at under the lock: another run may just have finished.
        if output.exists() {
            partial.drop_if_empty();
            bail!("{}: it exists already; remove it, or choose another name", output.display());
        }
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

    /// Removes the file of a run that failed before its first line.
    fn drop_if_empty(&self) {
        if let Some(partial) = self.partial.as_ref().filter(|_| self.written == 0) {
            let _ = fs::remove_file(&partial.path);
        }
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
            } else if !lines.get(count - 1).is_some_and(|line| is_of(&value, line)) {
                bail!(
                    "line {count} continues another prompt; remove the file, or give the prompts it began with"
                );
            }
            complete_bytes += line.len() as u64;
            count += 1;
            line.clear();
        }
        if count == 0 && !serde_json::to_vec(settings)?.starts_with(&line) {
            bail!("line 1: not one of ours; remove the file");
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

    /// Removes the file where it was made for nothing.
    fn drop_if_empty(&self) {
        if self.file.metadata().is_ok_and(|metadata| metadata.len() == 0) {
            let _ = fs::remove_file(&self.path);
        }
    }

    /// Gives the lines without the settings their name.
    fn finish(mut self) -> Result<()> {
        let mut copy = || -> Result<()> {
            self.file.seek(SeekFrom::Start(0))?;
            let mut reader = BufReader::new(&self.file);
            reader.skip_until(b'\n')?;
            let folder = self.output.parent().filter(|folder| !folder.as_os_str().is_empty());
            let mut complete = NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))?;
            io::copy(&mut reader, &mut complete)?;
            complete.as_file().sync_all()?;
            // A temporary file is its owner's alone; the result is as any other file.
            complete.as_file().set_permissions(self.file.metadata()?.permissions())?;
            complete.persist_noclobber(&self.output)?;
            Ok(())
        };
        copy().with_context(|| self.output.display().to_string())?;
        fs::remove_file(&self.path).with_context(|| self.path.display().to_string())
    }
}

/// Whether a written line is of this line of the prompts.
fn is_of(written: &Value, line: &Line) -> bool {
    let same_outcome = match &line.ids {
        Ok(ids) => written["prompt_ids"] == json!(ids),
        Err(error) => written["error"] == json!(error),
    };
    same_outcome && written["line"] == line.number && written["prompt"].as_str() == line.prompt.as_deref()
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
