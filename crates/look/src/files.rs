//! Files of text that an option names.

use std::fs::File;
use std::io::{Error, ErrorKind, Read};
use std::path::{Path, PathBuf};

use candle_gpt2_engine::RowFile;

use crate::error::Result;
use crate::{LookError, Reader};

/// Largest text that is read: far more than any context holds, and less than memory does.
const MAX_TEXT_BYTES: u64 = 256 << 20;

/// The bytes of a file of text.
pub(crate) fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_TEXT_BYTES + 1).read_to_end(&mut bytes));
    read.map_err(|error| LookError::Read { path: path.to_owned(), error })?;
    if bytes.len() as u64 > MAX_TEXT_BYTES {
        let error = Error::other(format!("more than {MAX_TEXT_BYTES} bytes of text; split it"));
        return Err(LookError::Read { path: path.to_owned(), error });
    }
    Ok(bytes)
}

/// The text of a file.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    let not_text = |_| Error::new(ErrorKind::InvalidData, "expected text in UTF-8");
    String::from_utf8(read_bytes(path)?)
        .map_err(not_text)
        .map_err(|error| LookError::Read { path: path.to_owned(), error })
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
