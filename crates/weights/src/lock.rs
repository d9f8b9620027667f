//! Files that one process at a time holds.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::Path;

/// How often a file is opened again that lost its name meanwhile. Where more is needed, the file system tells files apart by
/// nothing that lasts.
const ATTEMPTS: usize = 10;

/// Opens a file and locks it against other processes until it is closed. The system closes the files of a process that is
/// killed, so no lock outlives its owner.
///
/// ```
/// use std::fs::OpenOptions;
/// use std::io::ErrorKind;
///
/// use candle_gpt2_weights::open_locked;
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join(".lock");
/// let mut options = OpenOptions::new();
/// options.write(true).create(true);
/// let held = open_locked(&path, &options)?;
/// assert_eq!(open_locked(&path, &options).unwrap_err().kind(), ErrorKind::WouldBlock);
/// drop(held);
/// open_locked(&path, &options)?;
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
/// When it cannot be opened; of the kind [`WouldBlock`](io::ErrorKind::WouldBlock) when another process holds it.
pub fn open_locked(path: &Path, options: &OpenOptions) -> io::Result<File> {
    let mut attempts = 1;
    loop {
        let file = options.open(path)?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                return Err(io::Error::new(io::ErrorKind::WouldBlock, "another run is writing it"));
            }
            // A file system without locks has none to wait for.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        if attempts == ATTEMPTS || is_at(&file, path)? {
            return Ok(file);
        }
        attempts += 1;
    }
}

/// Whether a file still has its name: its last owner may have removed it between the opening and the locking.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let opened = file.metadata()?;
    match std::fs::metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (opened.dev(), opened.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Elsewhere the standard library does not tell files apart.
#[cfg(not(unix))]
fn is_at(_file: &File, _path: &Path) -> io::Result<bool> {
    Ok(true)
}
