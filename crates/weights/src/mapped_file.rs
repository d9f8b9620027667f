//! Memory-mapped files: loading reads each byte once and keeps no copy.
//!
//! Without the `mmap` feature, the whole file is read into memory.

use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};

use crate::WeightsError;

/// Contents of a file as a byte slice.
///
/// ```
/// use std::io::Write;
///
/// use candle_gpt2_weights::MappedFile;
///
/// let mut file = tempfile::NamedTempFile::new()?;
/// file.write_all(b"attention")?;
/// assert_eq!(MappedFile::open(file.path())?[..3], *b"att");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    content: Content,
}

/// Read-only memory map.
#[cfg(feature = "mmap")]
type Content = memmap2::Mmap;
/// File contents in memory.
#[cfg(not(feature = "mmap"))]
type Content = Vec<u8>;

#[cfg(feature = "mmap")]
fn content(path: &Path) -> std::io::Result<Content> {
    let file = crate::open_regular(path)?;
    #[expect(unsafe_code, reason = "only a memory map reads a file without a copy")]
    // SAFETY: the mapping is private and read-only, and is only read as bytes, for which every bit pattern
    // is valid. If another process truncates the file meanwhile, a bus error can still end this process.
    // Every program that maps its input accepts this risk; the alternative would copy gigabytes.
    let map = unsafe { memmap2::Mmap::map(&file) }?;
    Ok(map)
}

#[cfg(not(feature = "mmap"))]
fn content(path: &Path) -> std::io::Result<Content> {
    crate::read_bounded(path, u64::MAX)
}

impl MappedFile {
    /// Maps the regular file at `path`.
    ///
    /// # Errors
    /// If the path is not a regular file, or cannot be mapped.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        let content = content(path).map_err(|error| WeightsError::unreadable(path, error))?;
        Ok(Self { path: path.to_owned(), content })
    }

    /// Releases the memory of bytes that have been read; later reads fetch them from the file again.
    ///
    /// Without this, loading would keep the whole file and the weights in memory at the same time.
    pub fn forget(&self, bytes: Range<usize>) {
        #[cfg(all(feature = "mmap", unix))]
        {
            #[expect(unsafe_code, reason = "the advice is part of the memory map")]
            // SAFETY: the mapping is backed by a file and never written. Dropping its pages loses nothing,
            // because the next read fetches the same bytes from the file.
            let advised = unsafe {
                self.content.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    bytes.start,
                    bytes.len(),
                )
            };
            // The system may ignore the advice and free the memory later.
            let _ = advised;
        }
        #[cfg(not(all(feature = "mmap", unix)))]
        let _ = bytes;
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.content
    }
}
