//! Size-limited reads of untrusted files.
//!
//! A path in a downloaded folder may refer to a FIFO, which blocks when opened, or to an endless
//! device. The limits count bytes while reading, because the size in the metadata can be wrong.

use std::fs::{self, File, Metadata};
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

/// Opens a regular file for reading. See [`read_bounded`] for an example.
///
/// # Errors
/// If the file cannot be opened; [`InvalidInput`](ErrorKind::InvalidInput) for anything but a regular file.
pub fn open_regular(path: &Path) -> Result<File> {
    check_regular(&fs::metadata(path)?)?;
    let file = File::open(path)?;
    check_regular(&file.metadata()?)?;
    Ok(file)
}

/// Rejects anything but a regular file. See [`read_bounded`] for an example.
///
/// Callers check before opening, because opening a FIFO blocks.
///
/// # Errors
/// [`InvalidInput`](ErrorKind::InvalidInput) for anything but a regular file.
pub fn check_regular(metadata: &Metadata) -> Result<()> {
    match metadata.is_file() {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::InvalidInput, "not a regular file")),
    }
}

/// Reads a stream to its end.
///
/// ```
/// use candle_gpt2_weights::read_to_limit;
///
/// assert_eq!(read_to_limit(&b"attention"[..], 9)?, b"attention");
/// let error = read_to_limit(std::io::repeat(0), 9).unwrap_err();
/// assert_eq!(error.to_string(), "larger than 9 bytes");
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
/// If reading fails; [`FileTooLarge`](ErrorKind::FileTooLarge) above `limit` bytes.
pub fn read_to_limit(source: impl Read, limit: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(too_large(limit));
    }
    Ok(bytes)
}

pub(crate) fn too_large(limit: u64) -> Error {
    Error::new(ErrorKind::FileTooLarge, format!("larger than {limit} bytes"))
}

/// Reads a regular file.
///
/// ```
/// use candle_gpt2_weights::read_bounded;
///
/// let folder = tempfile::tempdir()?;
/// let error = read_bounded(folder.path(), 9).unwrap_err();
/// assert_eq!(error.to_string(), "not a regular file");
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
/// Fails like [`open_regular`] and [`read_to_limit`].
pub fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>> {
    read_to_limit(open_regular(path)?, limit)
}

/// Reads a regular UTF-8 text file.
///
/// # Errors
/// Fails like [`read_bounded`]; [`InvalidData`](ErrorKind::InvalidData) for other encodings.
pub fn read_bounded_text(path: &Path, limit: u64) -> Result<String> {
    String::from_utf8(read_bounded(path, limit)?)
        .map_err(|_| Error::new(ErrorKind::InvalidData, "expected UTF-8 text"))
}

#[cfg(all(test, unix))]
mod tests {
    use candle_gpt2_testing::temporary_folder;

    use super::*;

    #[test]
    fn fifos_and_devices_are_rejected_without_blocking() {
        let folder = temporary_folder();
        let fifo = folder.path().join("fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        for path in [fifo.as_path(), Path::new("/dev/zero"), folder.path()] {
            let error = read_bounded(path, 10).unwrap_err();
            assert_eq!(error.to_string(), "not a regular file", "{}", path.display());
        }
    }

    /// Checks files in `/proc`, which contain text but report a size of zero.
    #[cfg(target_os = "linux")]
    #[test]
    fn limit_applies_to_bytes_actually_read() {
        let path = Path::new("/proc/self/status");
        assert_eq!(fs::metadata(path).unwrap().len(), 0);
        assert_eq!(read_bounded(path, 10).unwrap_err().to_string(), "larger than 10 bytes");
        assert!(read_bounded_text(path, 1 << 20).unwrap().contains("VmRSS"));
    }
}
