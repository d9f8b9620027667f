//! Evaluation data: the bytes of files, their SHA-256, and their entries in any supported format.
//!
//! Entries are parsed lazily, so an error in a later entry does not affect callers that stop before it.
//! Entries are untrusted. Every error names the file, the line and the field.

mod csv_rows;
mod json_lines;
#[cfg(feature = "parquet")]
mod parquet_rows;
mod record;

use std::borrow::Cow;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use candle_gpt2_weights::{read_bounded, read_to_limit};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::{DataError, EvaluationError};

pub use record::Record;
use record::Row;

/// Maximum size of data in memory, in bytes.
const MAX_BYTES: u64 = 4 << 30;
/// Maximum total size of the data files that a task file names, in bytes.
const MAX_BYTES_OF_TASK: u64 = 1 << 30;
/// Maximum number of bytes to read from a FIFO or a device.
const MAX_STREAM_BYTES: u64 = 256 << 20;
/// Magic bytes at the start of a Parquet file.
const PARQUET_MAGIC: &[u8] = b"PAR1";
/// Extensions of files that contain entries; any other file contains text.
const RECORD_EXTENSIONS: [&str; 4] = ["jsonl", "json", "csv", "parquet"];

/// A data file, or a folder of data files, in memory.
///
/// ```
/// use candle_gpt2_evaluation::Data;
///
/// let text = br#"{"text": "Good night", "label": 1}"#;
/// let data = Data::from_bytes("lines.jsonl".as_ref(), text.to_vec())?;
/// assert!(data.has_records());
/// let record = data.records().next().ok_or("no record")??;
/// assert_eq!((record.text("text")?, record.index("label", 0, 2)?), ("Good night", 1));
/// let message = record.text("title").err().ok_or("expected an error")?.to_string();
/// assert!(message.starts_with("lines.jsonl: line 1: "), "{message}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Data {
    /// Files, sorted by name in each folder.
    files: Vec<DataFile>,
    path: PathBuf,
    sha256: String,
}

#[derive(Debug)]
struct DataFile {
    path: PathBuf,
    bytes: Vec<u8>,
}

/// Iterator over the entries in order, up to the first unreadable entry.
///
/// Returned by [`Data::records`].
pub type Records<'a> = Box<dyn Iterator<Item = Result<Record, DataError>> + 'a>;

impl Data {
    /// Reads a file, or every data file in a folder.
    ///
    /// # Errors
    /// Fails if a file cannot be read, or is in Parquet and this build lacks Parquet support.
    pub fn read(path: &Path) -> Result<Self, EvaluationError> {
        Self::of(path, read_files(path, Streams::Accepted, &mut { MAX_BYTES })?)
    }

    /// Reads the regular files that a task file names, in order.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Data::read`], and also for FIFOs and devices.
    pub(crate) fn read_all(paths: &[PathBuf]) -> Result<Self, EvaluationError> {
        let (mut files, mut left) = (Vec::new(), MAX_BYTES_OF_TASK);
        for path in paths {
            files.extend(read_files(path, Streams::Rejected, &mut left)?);
        }
        Self::of(paths.first().map_or(Path::new(""), PathBuf::as_path), files)
    }

    /// Returns the lines of text files as entries with the field `text`.
    ///
    /// # Errors
    /// Fails if a file is not UTF-8.
    pub(crate) fn lines(&self) -> Result<Vec<Record>, EvaluationError> {
        let mut records = Vec::new();
        for file in &self.files {
            let text = utf8(file)?;
            records.extend(text.lines().enumerate().map(|(index, line)| {
                let fields = Map::from_iter([("text".to_owned(), Value::from(line))]);
                Record::new(file.path.clone(), index + 1, fields)
            }));
        }
        Ok(records)
    }

    /// Creates data from bytes in memory; `path` is the name of the file.
    ///
    /// # Errors
    /// Fails if the data is in Parquet and this build lacks Parquet support.
    pub fn from_bytes(path: &Path, bytes: Vec<u8>) -> Result<Self, EvaluationError> {
        Self::of(path, vec![DataFile { path: path.to_owned(), bytes }])
    }

    fn of(path: &Path, files: Vec<DataFile>) -> Result<Self, EvaluationError> {
        if let Some(file) = files.iter().find(|file| file.is_parquet() && cfg!(not(feature = "parquet"))) {
            let what = "the file is in Parquet, and this program was built without the feature `parquet`; build it with `--features parquet`, or \
                        convert the data to JSONL";
            return Err(EvaluationError::Unusable {
                file: file.path.display().to_string(),
                what: what.to_owned(),
            });
        }
        let mut digest = Sha256::new();
        files.iter().for_each(|file| digest.update(&file.bytes));
        Ok(Self { files, path: path.to_owned(), sha256: format!("{:x}", digest.finalize()) })
    }

    /// Returns the path that the data was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the SHA-256 in lowercase hexadecimal; for a folder, it covers the concatenated files.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Whether the data holds entries in JSONL, CSV or Parquet, judging by the file names.
    ///
    /// All other data is text.
    pub fn has_records(&self) -> bool {
        let holds = |file: &DataFile| {
            file.is_parquet() || RECORD_EXTENSIONS.iter().any(|known| has_extension(&file.path, known))
        };
        self.files.iter().any(holds)
    }

    /// Returns the text of the file.
    ///
    /// # Errors
    /// Fails if the file is empty or not UTF-8, or if there are several files.
    pub fn text(&self) -> Result<&str, EvaluationError> {
        let unusable = |what: &str| {
            Err(EvaluationError::Unusable { file: self.path.display().to_string(), what: what.to_owned() })
        };
        let [file] = self.files.as_slice() else {
            return unusable("expected a single text file, found a folder with several files");
        };
        if file.bytes.is_empty() {
            return unusable("expected text, found an empty file");
        }
        Ok(utf8(file)?)
    }

    /// Returns the data's texts: the field `text` of each entry, or the whole text file.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Data::text`], and if an entry cannot be read or lacks the field.
    pub fn texts(&self) -> Result<Vec<Cow<'_, str>>, EvaluationError> {
        if !self.has_records() {
            return Ok(vec![self.text()?.into()]);
        }
        let text = |record: Result<Record, DataError>| Ok(record?.text("text")?.to_owned().into());
        self.records().map(text).collect()
    }

    /// Iterates over JSONL, CSV or Parquet entries in order, up to the first unreadable entry.
    ///
    /// Empty lines in JSONL are skipped. The first CSV row names the fields.
    pub fn records(&self) -> Records<'_> {
        self.records_with_columns(&[])
    }

    /// Iterates like [`Data::records`], with default column names for CSV.
    ///
    /// If the first CSV row contains none of `columns`, the row is an entry itself, and `columns` names the
    /// fields.
    pub fn records_with_columns(&self, columns: &'static [&'static str]) -> Records<'_> {
        let mut has_failed = false;
        let until_failure = move |record: Result<Record, DataError>| {
            let is_wanted = !has_failed;
            has_failed |= record.is_err();
            is_wanted.then_some(record)
        };
        Box::new(self.files.iter().flat_map(move |file| file.records(columns)).map_while(until_failure))
    }
}

impl DataFile {
    fn is_parquet(&self) -> bool {
        self.bytes.starts_with(PARQUET_MAGIC) || has_extension(&self.path, "parquet")
    }

    fn records(&self, columns: &'static [&'static str]) -> Records<'_> {
        let rows: Box<dyn Iterator<Item = Row> + '_> = match () {
            #[cfg(feature = "parquet")]
            () if self.is_parquet() => parquet_rows::rows(&self.bytes),
            () if has_extension(&self.path, "csv") => csv_rows::rows(&self.bytes, columns),
            () => json_lines::rows(&self.bytes),
        };
        Box::new(rows.map(|(line, fields)| match fields {
            Ok(fields) => Ok(Record::new(self.path.clone(), line, fields)),
            Err(what) => Err(DataError { file: self.path.display().to_string(), line, what }),
        }))
    }
}

/// Policy for FIFOs and devices; only the user's own paths may refer to them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Streams {
    Accepted,
    Rejected,
}

/// Reads a file, or each data file in a folder, and subtracts the sizes from `left`.
fn read_files(path: &Path, streams: Streams, left: &mut u64) -> Result<Vec<DataFile>, EvaluationError> {
    let failed = |path: &Path, cause| EvaluationError::File { path: path.to_owned(), cause };
    let mut paths = vec![path.to_owned()];
    if path.is_dir() {
        let entries = fs::read_dir(path).map_err(|cause| failed(path, cause))?;
        let paths_in = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, _>>();
        paths = paths_in.map_err(|cause| failed(path, cause))?;
        paths.retain(|path| {
            path.is_file() && RECORD_EXTENSIONS.iter().any(|known| has_extension(path, known))
        });
        paths.sort();
        if paths.is_empty() {
            let what = "the folder contains no .jsonl, .json, .csv or .parquet file".to_owned();
            return Err(EvaluationError::Unusable { file: path.display().to_string(), what });
        }
    }
    let read = |path: PathBuf| {
        let is_stream = fs::metadata(&path).is_ok_and(|metadata| !metadata.is_file());
        let bytes = if is_stream && streams == Streams::Accepted {
            File::open(&path).and_then(|stream| read_to_limit(stream, MAX_STREAM_BYTES))
        } else {
            read_bounded(&path, *left)
        };
        let bytes = bytes.map_err(|cause| failed(&path, cause))?;
        *left = left.saturating_sub(bytes.len() as u64);
        Ok(DataFile { path, bytes })
    };
    paths.into_iter().map(read).collect()
}

/// Decodes a file as UTF-8.
fn utf8(file: &DataFile) -> Result<&str, DataError> {
    std::str::from_utf8(&file.bytes).map_err(|error| {
        let before = &file.bytes[..error.valid_up_to()];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        let what = format!("expected UTF-8, found an invalid byte after {} bytes of the file", before.len());
        DataError { file: file.path.display().to_string(), line, what }
    })
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|found| found.eq_ignore_ascii_case(extension))
}
