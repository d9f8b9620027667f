//! Output folder of a job, locked so that only one process at a time writes it.
//!
//! Files that a killed process left unfinished are distinguished from the user's files.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use candle_gpt2_weights::{create_locked, expect_own_file, open_locked, partials};

use crate::TrainingError;

/// Lock file, locked while a process writes the folder; a killed process leaves it behind unlocked.
const LOCK: &str = ".lock";

/// A folder that is locked against other processes until this value is dropped.
///
/// Dropping it removes the folder again if it is new and empty.
#[derive(Debug)]
pub(crate) struct JobFolder {
    path: PathBuf,
    /// Lock, held until this value is dropped.
    lock: Option<File>,
    is_new: bool,
    /// Leftovers of killed processes, found when the folder was locked.
    leftovers: Vec<PathBuf>,
}

/// Resume status of a job's folder.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resume {
    /// Whether the job resumes the folder.
    pub(crate) resumes: bool,
    /// Whether the folder could be resumed.
    pub(crate) can_resume: bool,
}

impl JobFolder {
    /// Creates the folder if necessary, and locks it.
    ///
    /// `results` are the files that the job replaces as a whole.
    ///
    /// # Errors
    /// Fails if another process is writing the folder, or if it is not writable.
    pub(crate) fn take(path: &Path, results: &[impl AsRef<Path>]) -> Result<Self, TrainingError> {
        let failed = |error| TrainingError::File { path: path.to_owned(), error };
        let is_new = !path.exists();
        fs::create_dir_all(path).map_err(failed)?;
        let name = path.join(LOCK);
        let lock = expect_own_file(&name).and_then(|()| create_locked(&name, OpenOptions::new().write(true)));
        let lock = lock.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => in_use(path),
            _ => failed(error),
        })?;
        let leftovers = leftovers(path, results)?;
        Ok(Self { path: path.to_owned(), lock: Some(lock), is_new, leftovers })
    }

    /// Checks that no other process is writing a folder, without changing anything.
    ///
    /// # Errors
    /// Fails if another process is writing it.
    pub(crate) fn expect_unused(path: &Path) -> Result<(), TrainingError> {
        let name = path.join(LOCK);
        let locked = expect_own_file(&name).and_then(|()| open_locked(&name, OpenOptions::new().write(true)));
        match locked {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(in_use(path)),
            // Other problems are reported by [`JobFolder::take`].
            _ => Ok(()),
        }
    }

    /// Whether a job may begin in a folder.
    ///
    /// The folder may be missing, or contain only leftovers of a job that failed or was killed early.
    /// The leftovers may include a file with the name `begun`.
    ///
    /// # Errors
    /// Fails if the folder cannot be listed.
    fn is_free(
        path: &Path,
        results: &[impl AsRef<Path>],
        begun: Option<&str>,
    ) -> Result<bool, TrainingError> {
        if !path.exists() {
            return Ok(true);
        }
        let failed = |error| TrainingError::File { path: path.to_owned(), error };
        let leftovers = leftovers(path, results)?;
        for entry in fs::read_dir(path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let is_own = [Some(LOCK), begun].into_iter().flatten().any(|name| entry.file_name() == name);
            if !is_own && !leftovers.contains(&entry.path()) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Rejects a folder in which a job may neither begin nor resume.
    ///
    /// `begun` is the same as in [`JobFolder::is_free`]. `resumes` is true if the job resumes the folder,
    /// and `can_resume` is true if the option `resume` would do so.
    ///
    /// # Errors
    /// Fails if the path is not a folder, or if the folder has other contents.
    pub(crate) fn check(
        path: &Path,
        results: &[impl AsRef<Path>],
        begun: Option<&str>,
        Resume { resumes, can_resume }: Resume,
    ) -> Result<(), TrainingError> {
        let what = if path.exists() && !path.is_dir() {
            "not a folder; choose another name"
        } else if resumes || Self::is_free(path, results, begun)? {
            return Ok(());
        } else if can_resume {
            "the folder is not empty; add `resume` to continue the job in it, or choose another name"
        } else {
            "the folder is not empty; choose another name"
        };
        Err(TrainingError::Call { what: format!("`out` {}: {what}", path.display()) })
    }

    /// Removes what killed processes left behind.
    pub(crate) fn remove_leftovers(&self) {
        for leftover in &self.leftovers {
            // Best effort: nothing depends on the removal.
            let _ = fs::remove_dir_all(leftover);
        }
    }
}

impl Drop for JobFolder {
    fn drop(&mut self) {
        // Best effort. `remove_dir` does not remove a non-empty folder.
        let _ = fs::remove_file(self.path.join(LOCK));
        // Some Windows file systems keep the name of a file until it is closed.
        drop(self.lock.take());
        if self.is_new {
            let _ = fs::remove_dir(&self.path);
        }
    }
}

fn leftovers(path: &Path, results: &[impl AsRef<Path>]) -> Result<Vec<PathBuf>, TrainingError> {
    let mut found = Vec::new();
    for result in results {
        let left = partials(&path.join(result.as_ref()));
        found.extend(left.map_err(|error| TrainingError::File { path: path.to_owned(), error })?);
    }
    Ok(found)
}

fn in_use(path: &Path) -> TrainingError {
    TrainingError::InUse { folder: path.to_owned() }
}
