//! Where a checkpoint's files are: on a disk, or given. This is the one place that asks whether there is a file and reads it; a
//! given file is named by a path in an assumed folder.

use std::fs;
use std::path::{Path, PathBuf};

use crate::bounded_file::too_large;
use crate::checkpoint_file::CheckpointFile;
use crate::{GivenFiles, WeightsError, read_bounded};

/// Who has the files.
#[derive(Debug, Clone)]
pub(crate) enum Files {
    Disk,
    Given(GivenFiles),
}

impl Files {
    /// Whether there is something at the path.
    pub(crate) fn exists(&self, path: &Path) -> bool {
        match self {
            Self::Disk => path.exists(),
            Self::Given(files) => self.is_folder(path) || !matches!(files.find(path), Ok(None)),
        }
    }

    /// Whether there is a folder at the path.
    pub(crate) fn is_folder(&self, path: &Path) -> bool {
        match self {
            Self::Disk => path.is_dir(),
            Self::Given(files) => path == files.folder(),
        }
    }

    /// The folder of a file.
    pub(crate) fn folder_of<'a>(&'a self, file: &'a Path) -> &'a Path {
        match (self, file.parent()) {
            (Self::Given(files), _) => files.folder(),
            (Self::Disk, Some(folder)) if !folder.as_os_str().is_empty() => folder,
            (Self::Disk, _) => Path::new("."),
        }
    }

    /// The one file that was given, if it is one alone.
    pub(crate) fn only(&self) -> Option<&str> {
        match self {
            Self::Disk => None,
            Self::Given(files) => files.names().next().filter(|_| files.names().count() == 1),
        }
    }

    /// A folder as messages call it.
    pub(crate) fn told(&self, folder: &Path) -> PathBuf {
        match folder.as_os_str().is_empty() {
            true => "the files that were given".into(),
            false => folder.to_owned(),
        }
    }

    /// Whether there is a file at the path.
    pub(crate) fn is_file(&self, path: &Path) -> bool {
        match self {
            Self::Disk => path.is_file(),
            Self::Given(_) => !self.is_folder(path) && self.exists(path),
        }
    }

    /// The names of the files in a folder.
    pub(crate) fn names(&self, folder: &Path) -> Result<Vec<String>, WeightsError> {
        let failed = |error| WeightsError::Read { path: folder.to_owned(), error };
        match self {
            Self::Disk => {
                let entries = fs::read_dir(folder).map_err(failed)?.collect::<Result<Vec<_>, _>>();
                let mut entries = entries.map_err(failed)?;
                entries.retain(|entry| entry.path().is_file());
                Ok(entries.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
            }
            Self::Given(files) => {
                let mut names: Vec<String> = files.names().map(str::to_owned).collect();
                names.sort_unstable();
                names.dedup();
                Ok(names)
            }
        }
    }

    /// Opens a file to read from it.
    pub(crate) fn open(&self, path: &Path) -> Result<CheckpointFile, WeightsError> {
        match self {
            Self::Disk => CheckpointFile::open(path),
            Self::Given(files) => match files.find(path)? {
                Some(contents) => Ok(CheckpointFile::given(path, contents.clone())),
                None => {
                    let error = std::io::Error::new(std::io::ErrorKind::NotFound, "it was not given");
                    Err(WeightsError::Read { path: path.to_owned(), error })
                }
            },
        }
    }

    /// Reads a configuration, a tokenizer or a template of at most `limit` bytes.
    pub(crate) fn read_small(&self, path: &Path, limit: u64) -> Result<Vec<u8>, WeightsError> {
        let failed = |error| WeightsError::unreadable(path, error);
        match self {
            Self::Disk => read_bounded(path, limit).map_err(failed),
            Self::Given(_) => {
                let file = self.open(path)?;
                if file.len() > limit {
                    return Err(failed(too_large(limit)));
                }
                Ok(file.read(0..file.len())?.into_owned())
            }
        }
    }
}
