//! Append-only file of lines, written by one process at a time.
//!
//! A line counts only once its line break has been written. A job that resumes after an interruption
//! therefore neither loses nor repeats lines.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::Path;

use candle_gpt2_weights::create_locked;
use serde::Serialize;

/// An open file of lines, locked against other processes.
///
/// ```
/// use candle_gpt2_engine::LineFile;
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let path = folder.join("results.jsonl");
/// LineFile::open(&path)?.append(&"first")?;
/// std::fs::write(&path, "\"first\"\n\"sec")?; // the next line was interrupted
///
/// let mut lines = Vec::new();
/// let mut file = LineFile::open(&path)?;
/// let half = file.for_each_line(|line| Ok(lines.push(line.to_vec())))?;
/// assert_eq!((lines, &half.bytes), (vec![b"\"first\"\n".to_vec()], &b"\"sec".to_vec()));
/// file.drop_half_line(&half)?;
/// file.append(&"second")?;
/// drop(file);
/// assert_eq!(std::fs::read_to_string(&path)?, "\"first\"\n\"second\"\n");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct LineFile {
    file: File,
}

/// Incomplete last line of a file.
///
/// Returned by [`LineFile::for_each_line`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HalfLine {
    /// Bytes of the incomplete line.
    pub bytes: Vec<u8>,
    /// Offset of the incomplete line in the file.
    start: u64,
}

impl LineFile {
    /// Opens the file, or creates it.
    ///
    /// # Errors
    /// If the file cannot be opened for reading and writing, or another process has locked it.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true);
        // Windows cannot truncate a file opened for appending.
        let options = if cfg!(windows) { options.write(true) } else { options.append(true) };
        Ok(Self { file: create_locked(path, options)? })
    }

    /// Calls `each` with every complete line, including its line break, and returns the rest.
    ///
    /// # Errors
    /// If `each` fails, or the file cannot be read.
    pub fn for_each_line(&self, mut each: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<HalfLine> {
        let mut reader = BufReader::new(&self.file);
        reader.seek(SeekFrom::Start(0))?;
        let (mut start, mut bytes) = (0, Vec::new());
        while reader.read_until(b'\n', &mut bytes)? > 0 && bytes.ends_with(b"\n") {
            each(&bytes)?;
            start += bytes.len() as u64;
            bytes.clear();
        }
        Ok(HalfLine { bytes, start })
    }

    /// Removes the incomplete last line.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn drop_half_line(&self, half: &HalfLine) -> io::Result<()> {
        self.file.set_len(half.start)
    }

    /// Appends a value as a line of JSON.
    ///
    /// # Errors
    /// If the line cannot be written.
    pub fn append(&mut self, value: &impl Serialize) -> io::Result<()> {
        self.append_line(&serde_json::to_string(value)?)
    }

    /// Appends a line that is already JSON.
    ///
    /// # Errors
    /// If the line cannot be written.
    pub fn append_line(&mut self, json: &str) -> io::Result<()> {
        if cfg!(windows) {
            self.file.seek(SeekFrom::End(0))?;
        }
        // A single write, so that a full disk leaves at most part of this line.
        self.file.write_all(format!("{json}\n").as_bytes())
    }

    /// Returns the underlying file.
    pub fn as_file(&self) -> &File {
        &self.file
    }
}
