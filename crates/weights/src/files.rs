//! Access to a checkpoint's files, either on disk or supplied by the caller.
//!
//! All file lookups and reads go through this module. A supplied file is addressed by a path in a virtual
//! folder.

use std::fs;
use std::path::{Path, PathBuf};

use crate::bounded_file::too_large;
use crate::checkpoint_file::CheckpointFile;
use crate::{GivenFiles, WeightsError, read_bounded};

/// Source of the files.
#[derive(Debug, Clone)]
pub(crate) enum Files {
    Disk,
    Given(GivenFiles),
}

impl Files {
    /// Whether the path exists.
    pub(crate) fn exists(&self, path: &Path) -> bool {
        match self {
            Self::Disk => path.exists(),
            Self::Given(files) => self.is_folder(path) || !matches!(files.find(path), Ok(None)),
        }
    }

    /// Whether the path is a folder.
    pub(crate) fn is_folder(&self, path: &Path) -> bool {
        match self {
            Self::Disk => path.is_dir(),
            Self::Given(files) => path == files.folder(),
        }
    }

    /// Returns the folder of a file.
    pub(crate) fn folder_of<'a>(&'a self, file: &'a Path) -> &'a Path {
        match (self, file.parent()) {
            (Self::Given(files), _) => files.folder(),
            (Self::Disk, Some(folder)) if !folder.as_os_str().is_empty() => folder,
            (Self::Disk, _) => Path::new("."),
        }
    }

    /// Returns the name of the supplied file, if there is exactly one.
    pub(crate) fn only(&self) -> Option<&str> {
        match self {
            Self::Disk => None,
            Self::Given(files) => files.names().next().filter(|_| files.names().count() == 1),
        }
    }

    /// Returns the folder's name for messages.
    pub(crate) fn display_name(&self, folder: &Path) -> PathBuf {
        match folder.as_os_str().is_empty() {
            true => "the supplied files".into(),
            false => folder.to_owned(),
        }
    }

    /// Whether the path is a file.
    pub(crate) fn is_file(&self, path: &Path) -> bool {
        match self {
            Self::Disk => path.is_file(),
            Self::Given(_) => !self.is_folder(path) && self.exists(path),
        }
    }

    /// Lists the names of the files in a folder.
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

    /// Opens a file for reading.
    pub(crate) fn open(&self, path: &Path) -> Result<CheckpointFile, WeightsError> {
        match self {
            Self::Disk => CheckpointFile::open(path),
            Self::Given(files) => match files.find(path)? {
                Some(contents) => Ok(CheckpointFile::given(path, contents.clone())),
                None => {
                    let error =
                        std::io::Error::new(std::io::ErrorKind::NotFound, "the file was not supplied");
                    Err(WeightsError::Read { path: path.to_owned(), error })
                }
            },
        }
    }

    /// Reads a small file, such as a configuration, tokenizer or template, of at most `limit` bytes.
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
