//! Reads text files and configurations named by options.

use std::fs::File;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

use candle_gpt2_engine::RowFile;
use candle_gpt2_weights::{read_bounded_text, read_to_limit};

use crate::error::Result;
use crate::{LookError, Reader};

/// Maximum size of a text file in bytes, far more than any context holds.
const MAX_TEXT_BYTES: u64 = 256 << 20;
/// Maximum size of the configuration of a dictionary, a lens or transcoders, in bytes.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Reads a configuration file, which must be a regular file.
pub(crate) fn read_config(path: &Path) -> Result<String> {
    read_bounded_text(path, MAX_CONFIG_BYTES).map_err(|error| unreadable(path, error))
}

/// Reads a text file named by an option; FIFOs are allowed.
fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    let bytes = File::open(path).and_then(|file| read_to_limit(file, MAX_TEXT_BYTES));
    bytes.map_err(|error| unreadable(path, error))
}

fn unreadable(path: &Path, error: Error) -> LookError {
    LookError::Read { path: path.to_owned(), error }
}

/// Reads a UTF-8 text file named by an option; FIFOs are allowed.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    let not_text = |_| Error::new(ErrorKind::InvalidData, "expected UTF-8 text");
    String::from_utf8(read_bytes(path)?).map_err(not_text).map_err(|error| unreadable(path, error))
}

/// A file with one text per line, or a `.jsonl` file of objects with `prompt` or `ids`.
#[derive(Debug)]
pub(crate) struct TextFile {
    path: PathBuf,
    rows: RowFile,
}

impl TextFile {
    pub(crate) fn read(path: &Path) -> Result<Self> {
        Ok(Self { path: path.to_owned(), rows: RowFile::new(path, read_bytes(path)?) })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Number of lines, including blank ones.
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether a line contains only whitespace.
    pub(crate) fn is_blank(&self, index: usize) -> bool {
        self.rows.is_blank(index)
    }

    /// Encodes one line, which can hold several token sequences.
    pub(crate) fn sequences(&self, index: usize, reader: &Reader) -> Result<Vec<Vec<u32>>> {
        let row = self.rows.sequences(index, reader.vocabulary(), reader.bos());
        row.sequences.map_err(|error| LookError::In {
            origin: format!("{}, line {}", self.path.display(), row.line),
            error: Box::new(error.into()),
        })
    }
}
