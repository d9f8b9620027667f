//! The folder that a job writes: one process at a time, and unfinished files of a killed process are distinguished from the files
//! of users.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use candle_gpt2_weights::{create_locked, expect_own_file, open_locked, partials};

use crate::TrainingError;

/// Locked while a process writes the folder. Only a process that was killed leaves it behind, unlocked.
const LOCK: &str = ".lock";

/// A folder that no other process writes until this is dropped. It is removed again if it was made for nothing.
#[derive(Debug)]
pub(crate) struct JobFolder {
    path: PathBuf,
    /// Held until this is dropped.
    lock: Option<File>,
    is_new: bool,
    /// What killed processes left, at the time that it was locked.
    leftovers: Vec<PathBuf>,
}

/// What is in the folder of a job, and what becomes of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Resume {
    /// Whether the job resumes it.
    pub(crate) goes_on: bool,
    /// Whether a job could.
    pub(crate) can_go_on: bool,
}

impl JobFolder {
    /// Locks a folder, which is made if there is none. `results` are the files that the job replaces as a whole.
    ///
    /// # Errors
    /// When another process writes it, or it cannot be written.
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

    /// Refuses a folder that another process writes, and touches nothing.
    ///
    /// # Errors
    /// When another process writes it.
    pub(crate) fn expect_unused(path: &Path) -> Result<(), TrainingError> {
        let name = path.join(LOCK);
        let locked = expect_own_file(&name).and_then(|()| open_locked(&name, OpenOptions::new().write(true)));
        match locked {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(in_use(path)),
            // Whatever else is wrong with it is told when it is taken.
            _ => Ok(()),
        }
    }

    /// Whether a job may begin in a folder: there is none, or it has nothing but what one that failed or was killed at its
    /// beginning leaves, which may include a file called `begun`.
    ///
    /// # Errors
    /// When it cannot be listed.
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

    /// Refuses a folder in which a job may neither begin nor resume. `begun` is as for [`JobFolder::is_free`]; `goes_on` says whether
    /// the job resumes what is there, and `can_go_on` whether `resume` would do that.
    ///
    /// # Errors
    /// When it is not a folder, or has something in it.
    pub(crate) fn check(
        path: &Path,
        results: &[impl AsRef<Path>],
        begun: Option<&str>,
        Resume { goes_on, can_go_on }: Resume,
    ) -> Result<(), TrainingError> {
        let what = if path.exists() && !path.is_dir() {
            "it is not a folder; choose another name"
        } else if goes_on || Self::is_free(path, results, begun)? {
            return Ok(());
        } else if can_go_on {
            "the folder is not empty; add `resume` to continue what is in it, or choose another name"
        } else {
            "the folder is not empty; choose another name"
        };
        Err(TrainingError::Call { what: format!("`out` {}: {what}", path.display()) })
    }

    /// Removes what killed processes left.
    pub(crate) fn remove_leftovers(&self) {
        for leftover in &self.leftovers {
            // Nothing depends on it: what cannot be removed stays.
            let _ = fs::remove_dir_all(leftover);
        }
    }
}

impl Drop for JobFolder {
    fn drop(&mut self) {
        // Nothing more can be done than try. A folder with something in it is not removed.
        let _ = fs::remove_file(self.path.join(LOCK));
        // Some file systems of Windows keep the name of a file until it is closed.
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
