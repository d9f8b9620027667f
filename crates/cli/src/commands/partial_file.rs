//! Lines of JSON that become a file when all are there, and survive an interruption until then.
//!
//! With `--output FILE` the lines are collected in `FILE.partial`, whose first line holds the options, and `FILE`
//! appears when all are there. A line counts once its line break is written, so that `--resume` loses and repeats none.
//! The file is locked while a run writes it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use candle_gpt2_engine::LineFile;
use candle_gpt2_weights::{create_file, expect_free};
use serde::Serialize;
use serde_json::Value;

use crate::output;

/// Where the lines go.
pub(super) struct Sink {
    /// Lines that are there.
    pub(super) written: usize,
    /// Absent where they go to standard output.
    partial: Option<Partial>,
}

struct Partial {
    file: LineFile,
    path: PathBuf,
    output: PathBuf,
}

impl Sink {
    /// Lines that go to standard output.
    pub(super) fn standard_output() -> Self {
        Self { written: 0, partial: None }
    }

    /// Lines that become the file `output`; with `resume` after those of an interrupted run, of which `is_of` says whether
    /// each, by its number from 0, is what it ought to be.
    pub(super) fn file(
        output: &Path,
        resume: bool,
        settings: &Value,
        is_of: &mut dyn FnMut(usize, &Value) -> bool,
    ) -> Result<Self> {
        let mut name = OsString::from(output.as_os_str());
        name.push(".partial");
        let path = PathBuf::from(name);
        let shown = path.display();
        if path.exists() && !resume {
            bail!("{shown}: it holds the lines of an interrupted run; go on with --resume, or remove it");
        }
        let file = LineFile::open(&path).with_context(|| shown.to_string())?;
        let mut partial = Partial { file, path: path.clone(), output: output.to_owned() };
        // Looked at under the lock: another run may just have finished.
        if let Err(error) = expect_free(output) {
            partial.drop_if_empty();
            return Err(error.into());
        }
        let written = partial.complete_lines(settings, is_of).with_context(|| shown.to_string())?;
        Ok(Self { written, partial: Some(partial) })
    }

    pub(super) fn write(&mut self, report: &impl Serialize) -> Result<()> {
        match &mut self.partial {
            None => output::write_json(report)?,
            Some(partial) => partial.append(report)?,
        }
        self.written += 1;
        Ok(())
    }

    /// Removes the file of a run that failed before its first line.
    pub(super) fn drop_if_empty(&self) {
        if let Some(partial) = self.partial.as_ref().filter(|_| self.written == 0) {
            let _ = fs::remove_file(&partial.path);
        }
    }

    /// Gives the file its name.
    pub(super) fn finish(self) -> Result<()> {
        self.partial.map_or(Ok(()), Partial::finish)
    }
}

impl Partial {
    /// Checks what an interrupted run left, drops what it had not finished, and says how many lines are there.
    fn complete_lines(
        &mut self,
        settings: &Value,
        is_of: &mut dyn FnMut(usize, &Value) -> bool,
    ) -> Result<usize> {
        let mut count = 0;
        let half = self.file.for_each_line(|line| {
            let value: Value = serde_json::from_slice(line)
                .with_context(|| format!("line {}: not one of ours; remove the file", count + 1))?;
            if count == 0 {
                check_settings(&value, settings)?;
            } else if !is_of(count - 1, &value) {
                bail!(
                    "line {count} continues another prompt; remove the file, or give the prompts it began with"
                );
            }
            count += 1;
            Ok(())
        })?;
        if count == 0 && !serde_json::to_vec(settings)?.starts_with(&half.bytes) {
            bail!("line 1: not one of ours; remove the file");
        }
        self.file.drop_half_line(&half)?;
        if count == 0 {
            self.append(settings)?;
        }
        Ok(count.saturating_sub(1))
    }

    fn append(&mut self, value: &impl Serialize) -> Result<()> {
        self.file.append(value).with_context(|| self.path.display().to_string())
    }

    /// Removes the file where it was made for nothing.
    fn drop_if_empty(&self) {
        if self.file.as_file().metadata().is_ok_and(|metadata| metadata.len() == 0) {
            let _ = fs::remove_file(&self.path);
        }
    }

    /// Gives the lines without the settings their name.
    fn finish(self) -> Result<()> {
        create_file(&self.output, |complete| {
            let mut reader = BufReader::new(self.file.as_file());
            reader.seek(SeekFrom::Start(0))?;
            reader.skip_until(b'\n')?;
            io::copy(&mut reader, &mut fs::File::create(complete)?)?;
            Ok(())
        })?;
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
