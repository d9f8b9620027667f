//! Resumable output of a bulk job.
//!
//! Lines are collected in `FILE.partial`, whose first line holds the settings, and `FILE` appears when all
//! lines are complete. A line counts once its line break has been written, so a resumed job neither loses nor
//! repeats lines. The partial file is locked while a job writes it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use candle_gpt2_weights::{create_file, expect_free, expect_own_file};
use serde_json::Value;

use crate::{EngineError, LineFile};

/// Predicate that checks whether a line matches the input row at an index, counted from 0.
type IsOf<'a> = &'a mut dyn FnMut(usize, &Value) -> bool;

/// Lines of an unfinished job.
pub(super) struct Partial {
    file: LineFile,
    path: PathBuf,
    output: PathBuf,
}

impl Partial {
    /// Opens the partial file for `output`; `resume` keeps the lines of an interrupted job.
    pub(super) fn open(
        output: &Path,
        resume: bool,
        settings: &Value,
        is_of: IsOf<'_>,
    ) -> Result<Self, EngineError> {
        let mut name = OsString::from(output.as_os_str());
        name.push(".partial");
        let path = PathBuf::from(name);
        if path.exists() && !resume {
            return Err(EngineError::Unfinished { path });
        }
        let file = expect_own_file(&path).and_then(|()| LineFile::open(&path));
        let file = file.map_err(|error| failed(&path, &error))?;
        let mut partial = Self { file, path, output: output.to_owned() };
        // Checked under the lock, because another job may have finished in the meantime.
        if let Err(error) = expect_free(output) {
            if partial.file.as_file().metadata().is_ok_and(|metadata| metadata.len() == 0) {
                partial.remove();
            }
            return Err(error.into());
        }
        partial.check(settings, is_of).map_err(|error| failed(&partial.path, &error))?;
        Ok(partial)
    }

    /// Checks the lines of an interrupted job and removes an incomplete last line.
    fn check(&mut self, settings: &Value, is_of: IsOf<'_>) -> io::Result<()> {
        let mut count = 0;
        let half = self.file.for_each_line(|line| {
            let value: Value = serde_json::from_slice(line).map_err(|error| {
                io::Error::other(format!(
                    "line {}: unrecognized content ({error}); remove the file",
                    count + 1
                ))
            })?;
            if count == 0 {
                check_settings(&value, settings)?;
            } else if !is_of(count - 1, &value) {
                return Err(io::Error::other(format!(
                    "line {} is for a different prompt; remove the file, or use the original prompts",
                    count + 1
                )));
            }
            count += 1;
            Ok(())
        })?;
        if count == 0 && !serde_json::to_vec(settings)?.starts_with(&half.bytes) {
            return Err(io::Error::other("line 1: unrecognized content; remove the file"));
        }
        self.file.drop_half_line(&half)?;
        if count == 0 { self.file.append(settings) } else { Ok(()) }
    }

    pub(super) fn append(&mut self, json: &str) -> Result<(), EngineError> {
        self.file.append_line(json).map_err(|error| failed(&self.path, &error))
    }

    /// Removes the file of a job that wrote no lines.
    pub(super) fn remove(&self) {
        let _ = fs::remove_file(&self.path);
    }

    /// Copies all lines but the settings to the output file and removes the partial file.
    pub(super) fn finish(self) -> Result<(), EngineError> {
        create_file(&self.output, |complete| {
            let mut reader = BufReader::new(self.file.as_file());
            reader.seek(SeekFrom::Start(0))?;
            reader.skip_until(b'\n')?;
            io::copy(&mut reader, &mut fs::File::create(complete)?)?;
            Ok(())
        })?;
        fs::remove_file(&self.path).map_err(|error| failed(&self.path, &error))
    }
}

fn failed(path: &Path, error: &io::Error) -> EngineError {
    EngineError::PartialFile { path: path.to_owned(), what: error.to_string() }
}

/// Rejects settings that differ, naming the first differing option.
fn check_settings(before: &Value, now: &Value) -> io::Result<()> {
    let options = |settings: &Value| -> BTreeMap<String, Value> {
        let outer = settings.as_object().into_iter().flatten().filter(|(name, _)| *name != "config");
        let inner = settings["config"].as_object().into_iter().flatten();
        outer.chain(inner).map(|(name, value)| (name.clone(), value.clone())).collect()
    };
    let (before, now) = (options(before), options(now));
    for (name, now) in &now {
        let before = before.get(name).unwrap_or(&Value::Null);
        if before != now {
            return Err(io::Error::other(format!(
                "the interrupted run had `{name}` {before}, but this run has {now}; use the same options, or remove the file"
            )));
        }
    }
    Ok(())
}
