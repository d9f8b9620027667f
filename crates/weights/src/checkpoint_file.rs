//! Single file of a checkpoint, read one range at a time.
//!
//! Bytes of a mapped or in-memory file are borrowed without a copy. For all other files, only the ranges in
//! use are in memory.

use std::borrow::Cow;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
#[cfg(not(feature = "mmap"))]
use std::sync::Arc;

#[cfg(feature = "mmap")]
use crate::MappedFile;
use crate::WeightsError;
use crate::given_files::Contents;

/// File that is open for reading.
#[derive(Debug)]
pub(crate) struct CheckpointFile {
    path: PathBuf,
    /// Size when the file was opened.
    len: u64,
    content: Content,
}

#[derive(Debug)]
enum Content {
    #[cfg(feature = "mmap")]
    Mapped(MappedFile),
    Given(Contents),
}

impl CheckpointFile {
    /// Opens the regular file at `path`: memory-mapped, or read in parts without the `mmap` feature.
    pub(crate) fn open(path: &Path) -> Result<Self, WeightsError> {
        #[cfg(feature = "mmap")]
        let (len, content) = {
            let file = MappedFile::open(path)?;
            (file.len() as u64, Content::Mapped(file))
        };
        #[cfg(not(feature = "mmap"))]
        let (len, content) = {
            use crate::ReadAt;
            let file = on_disk::OpenFile::open(path)?;
            (file.len(), Content::Given(Contents::Parts(Arc::new(file))))
        };
        Ok(Self { path: path.to_owned(), len, content })
    }

    /// Wraps a supplied file; `path` names it in messages.
    pub(crate) fn given(path: &Path, contents: Contents) -> Self {
        let len = match &contents {
            Contents::Bytes(bytes) => bytes.len() as u64,
            Contents::Parts(parts) => parts.len(),
        };
        Self { path: path.to_owned(), len, content: Content::Given(contents) }
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the file size in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Returns the content of the file, if it is in memory.
    fn in_memory(&self) -> Option<&[u8]> {
        match &self.content {
            #[cfg(feature = "mmap")]
            Content::Mapped(file) => Some(file),
            Content::Given(Contents::Bytes(bytes)) => Some(bytes),
            Content::Given(Contents::Parts(_)) => None,
        }
    }

    /// Whether reads allocate memory.
    pub(crate) fn is_copied(&self) -> bool {
        self.in_memory().is_none()
    }

    /// Returns the bytes of a range, either borrowed or read into new memory.
    pub(crate) fn bytes(&self, range: Range<u64>) -> io::Result<Cow<'_, [u8]>> {
        let length = range.end.checked_sub(range.start).filter(|_| range.end <= self.len);
        let Some(length) = length else {
            let what = format!(
                "bytes {} to {} are beyond the end of the file ({} bytes)",
                range.start, range.end, self.len
            );
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
        };
        let out_of_memory =
            || io::Error::new(io::ErrorKind::OutOfMemory, format!("cannot allocate {length} bytes"));
        match &self.content {
            Content::Given(Contents::Parts(parts)) => {
                let length = usize::try_from(length).map_err(|_| out_of_memory())?;
                let mut bytes = Vec::new();
                bytes.try_reserve_exact(length).map_err(|_| out_of_memory())?;
                bytes.resize(length, 0);
                parts.read_at(range.start, &mut bytes)?;
                Ok(bytes.into())
            }
            _ => {
                let range = in_usize(range).ok_or_else(out_of_memory)?;
                let borrowed = self.in_memory().and_then(|bytes| bytes.get(range));
                borrowed.map(Cow::Borrowed).ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
            }
        }
    }

    /// Calls [`CheckpointFile::bytes`] and adds the file's path to the error.
    pub(crate) fn read(&self, range: Range<u64>) -> Result<Cow<'_, [u8]>, WeightsError> {
        self.bytes(range).map_err(|error| WeightsError::Read { path: self.path.clone(), error })
    }

    /// Returns the first bytes, at most `count`.
    pub(crate) fn first(&self, count: u64) -> Result<Cow<'_, [u8]>, WeightsError> {
        self.read(0..self.len.min(count))
    }

    /// Runs `parse` on the bytes after `start`; `parse` must itself detect the end of its data.
    ///
    /// In-memory files pass everything up to `limit` at once. Other files pass growing prefixes until
    /// `parse` succeeds or `limit` is reached.
    pub(crate) fn parse<T, E>(
        &self,
        start: u64,
        limit: u64,
        mut parse: impl FnMut(&[u8]) -> Result<T, E>,
    ) -> Result<Result<T, E>, WeightsError> {
        const FIRST: u64 = 64 << 10;
        const GROWTH: u64 = 4;
        let end = self.len.min(start.saturating_add(limit));
        let mut count = if self.is_copied() { FIRST } else { limit };
        loop {
            let stop = end.min(start.saturating_add(count));
            let parsed = parse(&self.read(start..stop)?);
            if parsed.is_ok() || stop == end {
                return Ok(parsed);
            }
            count = count.saturating_mul(GROWTH);
        }
    }

    /// Releases the memory behind borrowed bytes, if a later read can fetch them from the file again.
    ///
    /// Otherwise loading would keep the whole file and the weights in memory at the same time.
    pub(crate) fn forget(&self, range: Range<u64>) {
        #[cfg(feature = "mmap")]
        if let (Content::Mapped(file), Some(range)) = (&self.content, in_usize(range)) {
            file.forget(range);
        }
        #[cfg(not(feature = "mmap"))]
        let _ = range;
    }
}

fn in_usize(range: Range<u64>) -> Option<Range<usize>> {
    Some(usize::try_from(range.start).ok()?..usize::try_from(range.end).ok()?)
}

/// Cursor over a file's bytes.
#[cfg(feature = "pytorch")]
pub(crate) struct Reader<'a> {
    file: &'a CheckpointFile,
    position: u64,
    /// Read-ahead buffer and its position in the file.
    ahead: (u64, Cow<'a, [u8]>),
}

#[cfg(feature = "pytorch")]
impl<'a> Reader<'a> {
    /// Creates a cursor at the first byte.
    pub(crate) fn new(file: &'a CheckpointFile) -> Self {
        Self { file, position: 0, ahead: (0, Cow::Borrowed(&[])) }
    }
}

#[cfg(feature = "pytorch")]
impl io::Read for Reader<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        /// Number of bytes to read ahead, much less than the size of an archive's directory.
        const AHEAD: u64 = 16 << 10;
        let in_ahead = |ahead: &(u64, Cow<'_, [u8]>), position: u64| {
            let offset = usize::try_from(position.checked_sub(ahead.0)?).ok()?;
            (offset < ahead.1.len()).then_some(offset)
        };
        let offset = match in_ahead(&self.ahead, self.position) {
            Some(offset) => offset,
            None => {
                let end = self.file.len.min(self.position.saturating_add(AHEAD));
                if self.position >= end {
                    return Ok(0);
                }
                self.ahead = (self.position, self.file.bytes(self.position..end)?);
                0
            }
        };
        let bytes = &self.ahead.1[offset..];
        let count = bytes.len().min(to.len());
        to[..count].copy_from_slice(&bytes[..count]);
        self.position += count as u64;
        Ok(count)
    }
}

#[cfg(feature = "pytorch")]
impl io::Seek for Reader<'_> {
    fn seek(&mut self, to: io::SeekFrom) -> io::Result<u64> {
        let position = match to {
            io::SeekFrom::Start(position) => Some(position),
            io::SeekFrom::End(offset) => self.file.len.checked_add_signed(offset),
            io::SeekFrom::Current(offset) => self.position.checked_add_signed(offset),
        };
        self.position = position.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.position)
    }
}

/// Files on disk that are not memory-mapped.
#[cfg(not(feature = "mmap"))]
mod on_disk {
    use std::fs::File;
    use std::io::{self, Read, Seek, SeekFrom};
    use std::path::Path;
    use std::sync::{Mutex, PoisonError};

    use crate::{ReadAt, WeightsError, open_regular};

    #[derive(Debug)]
    pub(super) struct OpenFile {
        file: Mutex<File>,
        len: u64,
    }

    impl OpenFile {
        pub(super) fn open(path: &Path) -> Result<Self, WeightsError> {
            let failed = |error| WeightsError::unreadable(path, error);
            let file = open_regular(path).map_err(failed)?;
            let len = file.metadata().map_err(failed)?.len();
            Ok(Self { file: Mutex::new(file), len })
        }
    }

    impl ReadAt for OpenFile {
        fn len(&self) -> u64 {
            self.len
        }

        fn read_at(&self, start: u64, to: &mut [u8]) -> io::Result<()> {
            let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
            file.seek(SeekFrom::Start(start))?;
            file.read_exact(to)
        }
    }
}
