//! Text files that an option names, or that lie in a folder that an option names.

use std::fs::File;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

use candle_gpt2_engine::RowFile;
use candle_gpt2_weights::{read_bounded_text, read_to_limit};

use crate::error::Result;
use crate::{LookError, Reader};

/// Largest text: far more than any context holds.
const MAX_TEXT_BYTES: u64 = 256 << 20;
/// Largest configuration of a dictionary, a lens or transcoders.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Reads a configuration inside a folder, which must be a regular file.
pub(crate) fn read_config(path: &Path) -> Result<String> {
    read_bounded_text(path, MAX_CONFIG_BYTES).map_err(|error| unreadable(path, error))
}

/// Reads a text file. It may be a FIFO, since an option names it.
fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    let bytes = File::open(path).and_then(|file| read_to_limit(file, MAX_TEXT_BYTES));
    bytes.map_err(|error| unreadable(path, error))
}

fn unreadable(path: &Path, error: Error) -> LookError {
    LookError::Read { path: path.to_owned(), error }
}

/// Reads a text file as UTF-8. It may be a FIFO, since an option names it.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    let not_text = |_| Error::new(ErrorKind::InvalidData, "expected text in UTF-8");
    String::from_utf8(read_bytes(path)?).map_err(not_text).map_err(|error| unreadable(path, error))
}

/// A file of texts, one in a line, or in a `.jsonl` file objects with `prompt` or `ids`.
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

    /// How many texts there are.
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether a line is white space alone.
    pub(crate) fn is_blank(&self, index: usize) -> bool {
        self.rows.is_blank(index)
    }

    /// The sequences of a line.
    pub(crate) fn sequences(&self, index: usize, reader: &Reader) -> Result<Vec<Vec<u32>>> {
        let row = self.rows.sequences(index, reader.vocabulary(), reader.bos());
        row.sequences.map_err(|error| LookError::In {
            origin: format!("{}, line {}", self.path.display(), row.line),
            error: Box::new(error.into()),
        })
    }
}
