//! Input and output of `gpt2 compress` and `gpt2 decompress`.
//!
//! As with zstd, a file's result is written next to it under another name. The result from standard input
//! goes to standard output.

use std::fs::{self, File, FileTimes};
use std::io::{IsTerminal, Read, Write, stdin, stdout};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use candle_gpt2_weights::{create_file, expect_free, replace_file};
use clap::Args;

use crate::exit::UsageError;
use crate::input::STANDARD_INPUT;
use crate::output;

#[derive(Debug, Args)]
pub(crate) struct InPlaceArguments {
    /// File to read; without one, or with -, standard input is read and standard output written
    #[arg(value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Remove FILE once the new file is complete
    #[arg(long, conflicts_with_all = ["keep", "stdout", "out"])]
    pub(crate) rm: bool,
    /// Keep FILE, which is the default
    #[arg(short, long, hide = true)]
    pub(crate) keep: bool,
    /// Overwrite an existing output file, and write compressed data even to a terminal
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Write to standard output
    #[arg(short = 'c', long)]
    pub(crate) stdout: bool,
    /// File to write instead of the default name
    #[arg(short, long, value_name = "OUT", conflicts_with = "stdout")]
    pub(crate) out: Option<PathBuf>,
}

/// Input to compress or decompress.
pub(crate) struct Source {
    pub(crate) reader: Box<dyn Read>,
    /// Size in bytes if the input is a regular file.
    pub(crate) length: Option<u64>,
}

/// Destination of the result.
pub(crate) enum Target {
    StandardOutput,
    File(PathBuf),
}

impl InPlaceArguments {
    /// Returns the path of the input, unless it is standard input.
    fn path(&self) -> Option<&Path> {
        self.file.as_deref().filter(|path| *path != Path::new(STANDARD_INPUT))
    }

    /// Opens the input.
    pub(crate) fn source(&self) -> Result<Source> {
        let Some(path) = self.path() else {
            if stdin().is_terminal() {
                return Err(UsageError("no input; pass FILE, or pipe data to standard input".into()).into());
            }
            return Ok(Source { reader: Box::new(stdin()), length: None });
        };
        let name = || path.display().to_string();
        // Windows cannot open a folder, so check before opening.
        if path.is_dir() {
            bail!("{}: expected a file, found a folder", path.display());
        }
        let file = File::open(path).with_context(name)?;
        let metadata = file.metadata().with_context(name)?;
        let length = metadata.is_file().then_some(metadata.len());
        Ok(Source { reader: Box::new(file), length })
    }

    /// Determines the destination; `name` derives the default path from the input's path.
    ///
    /// Rejects an existing output file before the long-running work.
    pub(crate) fn target(&self, name: impl FnOnce(&Path) -> Result<PathBuf>) -> Result<Target> {
        let path = match (&self.out, self.path()) {
            (Some(out), _) => out.clone(),
            (None, Some(path)) if !self.stdout => {
                // A link or a device must not be replaced.
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

    /// Writes the result, then removes FILE if `--rm` is set.
    ///
    /// An output file is written atomically.
    pub(crate) fn write<T>(
        &self,
        target: &Target,
        work: impl FnOnce(&mut dyn Write) -> Result<T>,
    ) -> Result<T> {
        let Target::File(path) = target else { return work(&mut output::binary()?) };
        let source = self.path().filter(|_| self.out.is_none());
        let mut done = None;
        let write = |partial: &Path| {
            let mut file = if source.is_some() { create_private(partial)? } else { File::create(partial)? };
            let result = work(&mut file);
            let is_done = result.is_ok();
            done = Some(result);
            match (is_done, source) {
                (true, Some(source)) => Ok(copy_metadata(&file, source)?),
                (true, None) => Ok(()),
                // This error is a placeholder; the actual one is in `done`.
                (false, _) => Err("failed".into()),
            }
        };
        let written = match self.force {
            true => replace_file(path, write),
            false => create_file(path, write),
        };
        let done = done.transpose()?;
        written?;
        if let Some(source) = source.filter(|_| self.rm) {
            fs::remove_file(source).with_context(|| source.display().to_string())?;
        }
        done.context("nothing was written")
    }
}

/// Creates a file that other users cannot read until it receives its source's permissions.
fn create_private(path: &Path) -> std::io::Result<File> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// Copies the permissions and the modification time of the source to a file.
fn copy_metadata(file: &File, source: &Path) -> std::io::Result<()> {
    let metadata = fs::metadata(source)?;
    file.set_permissions(metadata.permissions())?;
    match metadata.modified() {
        Ok(modified) => file.set_times(FileTimes::new().set_modified(modified)),
        // The system does not report modification times.
        Err(_) => Ok(()),
    }
}

/// Rejects compressed output to a terminal.
pub(crate) fn check_terminal(target: &Target, is_forced: bool) -> Result<()> {
    if matches!(target, Target::StandardOutput) && stdout().is_terminal() && !is_forced {
        let what = "refusing to write compressed data to a terminal; use --out FILE, or --force";
        return Err(UsageError(what.into()).into());
    }
    Ok(())
}
