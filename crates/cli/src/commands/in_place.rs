//! Where `gpt2 compress` and `gpt2 decompress` read and write: as gzip does, a file is replaced by one of another name, and what comes
//! from standard input goes to standard output.

use std::fs::{self, File, FileTimes};
use std::io::{IsTerminal, Read, Write, stdin, stdout};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use candle_gpt2_weights::{create_file, expect_free, replace_file};
use clap::Args;

use crate::exit::UsageError;
use crate::output;

/// The name of standard input, and of no file.
const STANDARD_INPUT: &str = "-";

#[derive(Debug, Args)]
pub(crate) struct InPlaceArguments {
    /// File to read; without one, or with -, standard input is read and standard output written
    #[arg(value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Keep FILE, which is otherwise removed once its replacement is complete
    #[arg(short, long)]
    pub(crate) keep: bool,
    /// Overwrite an existing output file, and write compressed data even to a terminal
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Write to standard output, and keep FILE
    #[arg(short = 'c', long)]
    pub(crate) stdout: bool,
    /// File to write instead of the default name; FILE is kept
    #[arg(short, long, value_name = "OUT", conflicts_with = "stdout")]
    pub(crate) out: Option<PathBuf>,
}

/// What is read.
pub(crate) struct Source {
    pub(crate) reader: Box<dyn Read>,
    /// Bytes of a file.
    pub(crate) length: Option<u64>,
}

/// Where a result goes.
pub(crate) enum Target {
    StandardOutput,
    File(PathBuf),
}

impl InPlaceArguments {
    /// The file that is read, if it is one.
    fn path(&self) -> Option<&Path> {
        self.file.as_deref().filter(|path| *path != Path::new(STANDARD_INPUT))
    }

    /// Opens what is read.
    pub(crate) fn source(&self) -> Result<Source> {
        let Some(path) = self.path() else {
            if stdin().is_terminal() {
                return Err(UsageError("no input: give a FILE, or data on standard input".into()).into());
            }
            return Ok(Source { reader: Box::new(stdin()), length: None });
        };
        let name = || path.display().to_string();
        // Windows opens no folder.
        if path.is_dir() {
            bail!("{}: a folder; name a file", path.display());
        }
        let file = File::open(path).with_context(name)?;
        let metadata = file.metadata().with_context(name)?;
        let length = metadata.is_file().then_some(metadata.len());
        Ok(Source { reader: Box::new(file), length })
    }

    /// Where the result goes; `name` makes the default from that of the file. What is there already is refused here, before the long
    /// part.
    pub(crate) fn target(&self, name: impl FnOnce(&Path) -> Result<PathBuf>) -> Result<Target> {
        let path = match (&self.out, self.path()) {
            (Some(out), _) => out.clone(),
            (None, Some(path)) if !self.stdout => {
                // A link or a device is nothing to replace.
                if !fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file()) {
                    bail!("{}: not a regular file; use --out FILE or --stdout", path.display());
                }
                name(path)?
            }
            _ => return Ok(Target::StandardOutput),
        };
        if !self.force {
            expect_free(&path)?;
        }
        Ok(Target::File(path))
    }

    /// Writes the result, which appears whole or not at all if it is a file, and then removes the file that it replaces.
    pub(crate) fn write<T>(
        &self,
        target: &Target,
        work: impl FnOnce(&mut dyn Write) -> Result<T>,
    ) -> Result<T> {
        let Target::File(path) = target else { return work(&mut output::binary()?) };
        let replaced = self.path().filter(|_| self.out.is_none());
        let mut done = None;
        let write = |partial: &Path| {
            let mut file = File::create(partial)?;
            let result = work(&mut file);
            let is_done = result.is_ok();
            done = Some(result);
            match (is_done, replaced) {
                (true, Some(replaced)) => Ok(take_after(&file, replaced)?),
                (true, None) => Ok(()),
                // The error itself is in `done`.
                (false, _) => Err("failed".into()),
            }
        };
        let written = match self.force {
            true => replace_file(path, write),
            false => create_file(path, write),
        };
        let done = done.transpose()?;
        written?;
        if let Some(replaced) = replaced.filter(|_| !self.keep) {
            fs::remove_file(replaced).with_context(|| replaced.display().to_string())?;
        }
        done.context("nothing was written")
    }
}

/// Gives a file the permissions and the time of the one that it replaces.
fn take_after(file: &File, replaced: &Path) -> std::io::Result<()> {
    let metadata = fs::metadata(replaced)?;
    file.set_permissions(metadata.permissions())?;
    match metadata.modified() {
        Ok(modified) => file.set_times(FileTimes::new().set_modified(modified)),
        // A system without times of files.
        Err(_) => Ok(()),
    }
}

/// Refuses compressed data at a terminal.
pub(crate) fn check_terminal(target: &Target, is_forced: bool) -> Result<()> {
    if matches!(target, Target::StandardOutput) && stdout().is_terminal() && !is_forced {
        let what = "compressed data are not written to a terminal; give --out FILE, or --force";
        return Err(UsageError(what.into()).into());
    }
    Ok(())
}
