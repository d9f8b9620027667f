//! Where a checkpoint's files are: on a disk, or given. This is the one place that asks whether there is a file and reads it; a
//! given file is named by a path in an assumed folder.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::checkpoint_file::CheckpointFile;
use crate::{GivenFiles, WeightsError};

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

    /// Reads the whole of a file that ought to be small, of at most `limit` bytes: a configuration, a tokenizer, a template.
    pub(crate) fn read_small(&self, path: &Path, limit: u64) -> Result<Vec<u8>, WeightsError> {
        let failed = |error| WeightsError::Read { path: path.to_owned(), error };
        let refuse = |what: String| WeightsError::NotWeights { path: path.to_owned(), what };
        let too_large = || refuse(format!("larger than {limit} bytes, which no such file needs"));
        let bytes = match self {
            Self::Disk => {
                // A pipe would block, and a device file has no end.
                if !fs::metadata(path).map_err(failed)?.is_file() {
                    return Err(refuse("not a regular file".into()));
                }
                let mut bytes = Vec::new();
                File::open(path).map_err(failed)?.take(limit + 1).read_to_end(&mut bytes).map_err(failed)?;
                bytes
            }
            Self::Given(_) => {
                let file = self.open(path)?;
                if file.len() > limit {
                    return Err(too_large());
                }
                file.read(0..file.len())?.into_owned()
            }
        };
        if bytes.len() as u64 > limit { Err(too_large()) } else { Ok(bytes) }
    }
}
