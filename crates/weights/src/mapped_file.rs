//! A file mapped into memory, so that loading reads each byte once and keeps no copy; or bytes that the caller holds.
//!
//! Without the feature `mmap` files are read into memory as a whole.

use std::borrow::Cow;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};

use crate::WeightsError;

/// A whole file, to be read as bytes.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    content: Content,
}

#[derive(Debug)]
enum Content {
    /// A read-only mapping.
    #[cfg(feature = "mmap")]
    Mapped(memmap2::Mmap),
    /// Bytes in memory.
    Held(Cow<'static, [u8]>),
}

impl Content {
    #[cfg(feature = "mmap")]
    fn of(path: &Path) -> std::io::Result<Self> {
        let file = std::fs::File::open(path)?;
        #[expect(unsafe_code, reason = "mapping a file is the one way to read it without a copy")]
        // SAFETY: the mapping is private and read-only, and only ever read as bytes, for which every bit pattern is
        // valid. Another process that truncates the file meanwhile could still end this one with a bus error; like
        // every program that maps its input, we take that over reading gigabytes twice.
        let map = unsafe { memmap2::Mmap::map(&file) }?;
        Ok(Self::Mapped(map))
    }

    #[cfg(not(feature = "mmap"))]
    fn of(path: &Path) -> std::io::Result<Self> {
        Ok(Self::Held(std::fs::read(path)?.into()))
    }
}

impl MappedFile {
    /// Maps the regular file at `path`.
    ///
    /// # Errors
    /// When it is not a regular file, or cannot be mapped.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        let failed = |error| WeightsError::Read { path: path.to_owned(), error };
        // Asked before opening: to open a pipe would wait for its writer.
        if !std::fs::metadata(path).map_err(failed)?.is_file() {
            let what = "not a regular file; give a checkpoint folder or a weights file".to_owned();
            return Err(WeightsError::NotWeights { path: path.to_owned(), what });
        }
        Ok(Self { path: path.to_owned(), content: Content::of(path).map_err(failed)? })
    }

    /// Bytes in memory; `name` stands in for their path.
    pub(crate) fn held(name: &str, bytes: impl Into<Cow<'static, [u8]>>) -> Self {
        Self { path: name.into(), content: Content::Held(bytes.into()) }
    }

    /// Lets go of the memory behind bytes that were read; they come from the file again if they are read again. Without
    /// this a loading program would hold the file and the weights at once.
    pub(crate) fn forget(&self, bytes: Range<usize>) {
        #[cfg(all(unix, feature = "mmap"))]
        if let Content::Mapped(map) = &self.content {
            #[expect(unsafe_code, reason = "the advice is part of the memory map")]
            // SAFETY: the mapping is of a file and never written, so dropping its pages loses nothing: the next read
            // takes the same bytes from the file.
            let advised = unsafe {
                map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, bytes.start, bytes.len())
            };
            // Advice may be declined; the memory is then freed later.
            let _ = advised;
        }
        #[cfg(not(all(unix, feature = "mmap")))]
        let _ = bytes;
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.content {
            #[cfg(feature = "mmap")]
            Content::Mapped(map) => map,
            Content::Held(bytes) => bytes,
        }
    }
}
