//! A file mapped into memory, so that loading reads each byte once and keeps no copy.
//!
//! Without the feature `mmap` it is read into memory as a whole.

use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};

use crate::WeightsError;

/// A whole file, to be read as bytes.
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

/// A read-only mapping.
#[cfg(feature = "mmap")]
type Content = memmap2::Mmap;
/// The bytes of the file.
#[cfg(not(feature = "mmap"))]
type Content = Vec<u8>;

#[cfg(feature = "mmap")]
fn content(path: &Path) -> std::io::Result<Content> {
    let file = crate::open_regular(path)?;
    #[expect(unsafe_code, reason = "mapping a file is the one way to read it without a copy")]
    // SAFETY: the mapping is private and read-only, and only ever read as bytes, for which every bit pattern is
    // valid. Another process that truncates the file meanwhile could still end this one with a bus error; like
    // every program that maps its input, we take that over reading gigabytes twice.
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
    /// When it is not a regular file, or cannot be mapped.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        let content = content(path).map_err(|error| WeightsError::unreadable(path, error))?;
        Ok(Self { path: path.to_owned(), content })
    }

    /// Lets go of the memory behind bytes that were read; they come from the file again if they are read again. Without
    /// this a loading program would hold the file and the weights at once.
    pub fn forget(&self, bytes: Range<usize>) {
        #[cfg(all(feature = "mmap", unix))]
        {
            #[expect(unsafe_code, reason = "the advice is part of the memory map")]
            // SAFETY: the mapping is of a file and never written, so dropping its pages loses nothing: the next read
            // takes the same bytes from the file.
            let advised = unsafe {
                self.content.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    bytes.start,
                    bytes.len(),
                )
            };
            // Advice may be declined; the memory is then freed later.
            let _ = advised;
        }
        #[cfg(not(all(feature = "mmap", unix)))]
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
        &self.content
    }
}
